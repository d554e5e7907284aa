"""For the API page: examples in docstrings become code blocks, not quotations."""

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Puts a fence around every run of lines that begins with ``>>>``, up to the next empty
    line.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that has been read."""
        if obj.docstring:
            fenced = r"```pycon\n\1\n```"
            obj.docstring.value = re.sub(
                r"^(>>> (?:.+\n?)+)", fenced, obj.docstring.value, flags=re.MULTILINE
            )
