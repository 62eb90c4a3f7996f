"""Arguments that several commands share."""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

from dsx.settings import Implied, Settings, load_settings

SECRET_VARIABLE = "DSX_SECRET_FILE"
"""Names the run secret's file where no `--secret-file` does."""

PICTURES = (".svg", ".pdf", ".png")
"""How a picture's name may end: that says in which format it is drawn."""


def count(text: str) -> int:
    """An argument's value as a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text}; give a whole number from 1")
    return int(text)


def seconds(text: str) -> float:
    """An argument's value as a time above 0."""
    return _above_zero(text, "a number of seconds")


def price(text: str) -> float:
    """An argument's value as a price above 0."""
    return _above_zero(text, "a price")


def _above_zero(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"is {text}; give {what} above 0")
    return value


def cluster_name(text: str) -> str:
    """An argument's value as a cluster's name, which is part of file names in the run folder."""
    if not text or "/" in text or text.startswith(".") or text == "shared":
        raise argparse.ArgumentTypeError(
            f"is {text!r}; give a name without a slash that does not begin with a dot and is not "
            "'shared', which the run folder has for something else"
        )
    return text


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a path")
    return Path(text)


def existing_folder(text: str) -> Path:
    """An argument's value as a folder that is there."""
    path = _path(text)
    if not path.is_dir():
        what = "is a file" if path.exists() else f"is not there, seen from {Path.cwd()}"
        raise argparse.ArgumentTypeError(f"is {text}, which {what}; give a folder")
    return path


def output_file(text: str) -> Path:
    """An argument's value as a file to write. Folders that it lies in are made with it."""
    path = _path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(
            f"is {text}, which is a folder; give the name of a file, in it or elsewhere"
        )
    _require_place(path)
    return path


def picture_file(text: str) -> Path:
    """An argument's value as a picture to write, which else is as `output_file`."""
    path = output_file(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(
            f"is {text}, which does not say in what format; give a name that ends in "
            f"{', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        )
    return path


def output_folder(text: str) -> Path:
    """An argument's value as a folder to write. Folders that it lies in are made with it."""
    path = _path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"is {text}, which is a file; give a folder")
    _require_place(path)
    return path


def _require_place(path: Path) -> None:
    """Before the work is done of which it is to keep the result."""
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise argparse.ArgumentTypeError(
            f"is {path}, but {above} is a file, in which nothing can lie; choose another path"
        )


def add_settings_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """`--deepspeed_config FILE` and `--set KEY=VALUE`, to be read by `settings_from`."""
    parser.add_argument(
        "--deepspeed_config",
        required=required,
        metavar="FILE",
        help="the settings: DeepSpeed's JSON with a `dsx` block (see docs/configuration.md)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="override settings, as in dsx.outer.local_steps=10",
    )


def add_runs_argument(parser: argparse.ArgumentParser, several: str) -> None:
    """`--run DIR [DIR ...]`, which are `runs` in the arguments: `run` is the command itself.

    Args:
        several: what comes of more than one.
    """
    parser.add_argument(
        "--run",
        dest="runs",
        metavar="DIR",
        type=existing_folder,
        action="extend",
        nargs="+",
        required=True,
        help=f"the run's folder (`dsx.run_dir`); {several}",
    )


def add_secret_argument(parser: argparse.ArgumentParser) -> None:
    """`--secret-file PATH`, to be read by `secret_file`."""
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="the run secret that `dsx secret new FILE` has made, the same for all clusters and "
        f"the coordinator (default: the file that {SECRET_VARIABLE} names; without any there is no "
        "secret, which only loopback addresses allow)",
    )


def secret_file(arguments: argparse.Namespace) -> str | None:
    """Where the run secret is; None without one."""
    return arguments.secret_file or os.environ.get(SECRET_VARIABLE) or None


def settings_from(arguments: argparse.Namespace, implied: Sequence[Implied] = ()) -> Settings:
    """The checked settings that the arguments name. Raises `SettingsError`.

    Args:
        implied: overrides that follow from other arguments; those of `--set` win.
    """
    return load_settings(arguments.deepspeed_config, [*implied, *arguments.overrides])


def settings_arguments(arguments: argparse.Namespace, implied: Sequence[Implied] = ()) -> list[str]:
    """The arguments of a process that is started with the settings of `settings_from`."""
    given = [*(one.override for one in implied), *arguments.overrides]
    overrides = [word for override in given for word in ("--set", override)]
    return ["--deepspeed_config", arguments.deepspeed_config, *overrides]
