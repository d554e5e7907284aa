"""The command line: ``driftfilter`` or ``python -m driftfilter.app.cli``.

Torch is imported only by the commands that need it, so that help is immediate.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from driftfilter.app.arguments import parse, parser
from driftfilter.app.terminal import Output


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``driftfilter``."""
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("driftfilter: interrupted", file=sys.stderr)
        return 130


def _run(arguments: Sequence[str]) -> int:
    parsed = parse(arguments)
    if parsed.version:
        from driftfilter import __version__

        print(f"driftfilter {__version__}")
        return 0
    if parsed.command is None:
        parser().print_help()
        return 2
    from driftfilter.app.commands import COMMANDS

    output = Output(parsed.quiet, parsed.json)
    with (
        redirect_stdout(sys.stderr) if output.json else nullcontext()
    ):  # a user's own model may print
        status, document = COMMANDS[parsed.command](parsed, arguments, output)
    if document is not None:
        output.document(document)
    return status


if __name__ == "__main__":
    sys.exit(main())
