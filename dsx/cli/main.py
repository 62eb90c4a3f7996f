"""The console entry `dsx`: finds the command, imports only that one, and reports errors.

A command is a module `dsx.cli.NAME` with `HELP` (one line), `add_arguments(parser)` and
`run(arguments) -> int`, the exit code. One with commands of its own sets `parser` to that of each.
"""

import argparse
import difflib
import errno
import importlib
import sys
from collections.abc import Sequence

from dsx import __version__
from dsx.errors import DsxError, SettingsError

COMMANDS = {
    "prepare": "Turn text into a tokenizer and packed token shards.",
    "tokenizer": "Train a tokenizer.",
    "local": "Start several clusters on this machine.",
    "coordinator": "Run the meeting point of the clusters until Ctrl-C or SIGTERM.",
    "doctor": "Check this machine and a run's set-up.",
    "secret": "Make the secret that the clusters of a run know each other by.",
    "mesh": "Write WireGuard configurations that join the machines of a run.",
    "export": "Write a run's weights as a Hugging Face checkpoint.",
    "report": "Write a self-contained HTML page about one or more runs.",
    "plan": "Say what a run needs and how fast it will be, before a GPU is rented.",
    "audit": "Account for every token that a run has trained.",
    "simulate": "Try settings out: many clusters in one process, on a modelled link.",
    "bench": "Measure this machine and this installation.",
}
"""Name -> the command's `HELP`, repeated here so that `dsx --help` imports no command."""

_EPILOG = """\
first steps, from the folder of the clone:
  dsx prepare --deepspeed_config configs/quickstart.json
  dsx local   --deepspeed_config configs/quickstart.json --clusters 2
  dsx report  --run runs/quickstart

one cluster alone, or one of several sites (docs/launching.md):
  deepspeed --num_gpus 2 --module dsx.train --deepspeed_config configs/quickstart.json

`dsx COMMAND --help` tells a command's arguments, docs/configuration.md all settings.
"""
_FILE_ERRORS = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
}
"""What the file system may say about a path that a user has chosen."""

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dsx` with `argv` (the process's own arguments by default); returns the exit code.

    2: wrong usage or settings. 1: another error that a user can act on, told without a traceback.
    130: interrupted. Faults of dsx itself keep their traceback. As usual with argparse, `--help`,
    `--version` and wrong arguments raise SystemExit.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # The command comes first; `dsx` itself has no option that takes a value.
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"dsx: unknown command {name}; {advice}", file=sys.stderr)
        return EXIT_USAGE
    try:
        parser = _parser(name)
        arguments, unknown = parser.parse_known_args(words)
        if unknown:
            arguments.parser.error(_explain_unknown(unknown[0], arguments.parser))
        if arguments.command is None:
            parser.print_help(sys.stderr)
            return EXIT_USAGE
        return int(arguments.run(arguments))
    except SettingsError as error:
        return _fail(error, EXIT_USAGE)
    except DsxError as error:
        return _fail(error, EXIT_FAILED)
    except OSError as error:
        told = explain_file_error(error)
        if told is None:
            raise
        print(f"dsx: {told}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("dsx: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def explain_file_error(error: OSError) -> str | None:
    """What a user can act on: a path that they chose is unreadable, full, or no folder.

    None for other errors, which are faults of dsx.
    """
    # Of two paths the second is where a draft was to go; the user knows nothing of the draft.
    path = error.filename if error.filename2 is None else error.filename2
    if path is None or error.errno not in _FILE_ERRORS:
        return None
    return f"{path}: {error.strerror}; choose another path, or make this one usable"


def _explain_unknown(word: str, parser: argparse.ArgumentParser) -> str:
    options = [option for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(word.partition("=")[0], options, n=1)
    return f"there is no argument {word}" + (f"; did you mean {near[0]}?" if near else "")


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsx",
        description="Pretrain large language models on several clusters joined by slow links.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="version", version=f"dsx {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == chosen:
            module = importlib.import_module(f"dsx.cli.{name}")
            command.set_defaults(run=module.run, parser=command)
            module.add_arguments(command)
    return parser


def _fail(error: DsxError, code: int) -> int:
    print(f"dsx: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
