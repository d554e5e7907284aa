"""The command line: ``driftfilter`` or ``python -m driftfilter.app.cli``.

Torch is imported only by the commands that need it, so that help is immediate.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from driftfilter.app.arguments import build_parser, parse
from driftfilter.app.commands import COMMANDS


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
    command, options, output = parse(arguments, COMMANDS)
    if command is None:
        build_parser(COMMANDS).print_help()
        return 2
    # A user's own model may print.
    with redirect_stdout(sys.stderr) if output.json else nullcontext():
        status, document = command.run(options, output, arguments)
    if document is not None:
        output.document(document)
    return status


if __name__ == "__main__":
    sys.exit(main())
