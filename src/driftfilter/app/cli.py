"""The command line: ``driftfilter`` or ``python -m driftfilter.app.cli``.

Torch is imported only by the commands that need it, so that help is immediate.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from driftfilter.app.arguments import build_parser, parse
from driftfilter.app.commands import COMMANDS, fail
from driftfilter.app.terminal import Stream, keep_streams


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``driftfilter``."""
    with keep_streams() as stdout:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments, stdout)
        except KeyboardInterrupt:
            print("driftfilter: interrupted", file=sys.stderr)
            return 130


def _run(arguments: Sequence[str], stdout: Stream) -> int:
    command, options, output = parse(arguments, COMMANDS)
    if command is None:
        build_parser(COMMANDS).print_help()
        return 2
    # A user's own model may print, and its code may end the process.
    try:
        with redirect_stdout(sys.stderr) if output.json else nullcontext():
            status, document = command.run(options, output, arguments)
    except SystemExit as error:
        status, document = fail(
            arguments[0], f"the code of the model raised SystemExit: {error.code}", 1
        )
    if document is not None:
        output.document(document)
    stdout.flush()
    # Who reads text may have seen enough of it; a part of a document is none.
    if stdout.error is None or (stdout.is_closed() and not output.json):
        return status
    print(f"driftfilter: error: stdout was not written: {stdout.error.strerror}", file=sys.stderr)
    return status or 1


if __name__ == "__main__":
    sys.exit(main())
