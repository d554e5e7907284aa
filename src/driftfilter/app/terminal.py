"""What a command prints: text for people, one JSON document for programs, or nothing."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class Output:
    """``quiet``: only warnings and errors. ``json``: nothing on stdout but the document."""

    quiet: bool = False
    json: bool = False

    @property
    def plain(self) -> bool:
        """Whether text goes to stdout."""
        return not (self.quiet or self.json)

    def say(self, text: str = "") -> None:
        """On stdout, as text."""
        if self.plain:
            print(text, flush=True)

    def note(self, text: str) -> None:
        """On stderr: what is neither the result nor an error."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def document(self, document: Any) -> None:
        """On stdout, as JSON."""
        if self.json:
            print(json.dumps(finite(document), indent=1, ensure_ascii=False))


def finite(value: Any) -> Any:
    """The same with None for NaN and infinities, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, (list, tuple)) else value
