"""The documentation says what is there: commands, links, settings keys and scripts."""

import argparse
import contextlib
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsx import train
from dsx.cli import main
from dsx.errors import SettingsError
from dsx.settings import Settings, check_layout, load_settings
from dsx.settings.tree import refusals, walk

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("*/*.md")])
MANUAL = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
END_TO_END = REPOSITORY / "tests" / "test_end_to_end.py"

RUN_IN_END_TO_END = {"./launch/quickstart.sh": '"./launch/quickstart.sh"'}
"""Documented command -> what shows in tests/test_end_to_end.py that it is run there."""
RUN_BY_CI = {"./launch/test.sh"}
"""Commands that `.ci/run` is."""

KEY = re.compile(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)+)(?:(?:=|: )[^`]*)?`")
FILE_SUFFIXES = {"json", "jsonl", "md", "py", "sh", "txt", "html", "toml", "log", "svg", "bin"}


@dataclass(frozen=True)
class Command:
    """One command line of a fenced ```bash block."""

    page: Path
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.name}: {shlex.join(self.words)[:60]}"


def shown(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def bash_commands(page: Path, text: str) -> Iterator[Command]:
    """Every command in the page's bash blocks, continued lines joined, comments left out."""
    for block in re.findall(r"^ *```(?:bash|sh|shell|console)\n(.*?)^ *```", text, re.M | re.S):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield Command(page, tuple(words))


COMMANDS = [
    command for page in MANUAL for command in bash_commands(page, page.read_text(encoding="utf-8"))
]


class Refused(Exception):
    """A documented command line that can't work as it is written."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    try:
        yield
    except SystemExit as end:
        raise Refused(f"the parser exits with {end.code}") from end


def check(command: Command) -> None:
    """Raises when nothing proves that the command works as it is written."""
    words = list(command.words)
    while words and re.fullmatch(r"(export)|([A-Z][A-Z0-9_]*=\S*)", words[0]):
        words.pop(0)
    if not words:
        return  # Variables alone.
    if shlex.join(words) in {*RUN_IN_END_TO_END, *RUN_BY_CI}:
        return
    checks: dict[str, Callable[[list[str]], None]] = {"dsx": check_dsx, "deepspeed": check_launch}
    if words[0] not in checks:
        raise Refused("it is neither parsed by a test nor run by one")
    checks[words[0]](words[1:])


def check_dsx(words: list[str]) -> None:
    with refusing():
        arguments = main._parser(words[0]).parse_args(words)
    check_settings(arguments)


def check_launch(words: list[str]) -> None:
    from deepspeed.launcher.runner import parse_args

    with refusing():
        launch = parse_args(words)
    if launch.user_script != ("dsx.train" if launch.module else "dsx/train.py"):
        raise Refused(f"it starts {launch.user_script}")
    with refusing():
        arguments = train.parse(launch.user_args)
    settings = check_settings(arguments)
    if launch.num_gpus > 0 and settings is not None:
        check_layout(settings, launch.num_gpus)


def test_the_launcher_hands_every_argument_of_a_rank_on() -> None:
    from deepspeed.launcher.runner import parse_args

    options = [action for action in train.make_parser()._actions if action.dest != "help"]
    assert len(options) > 6
    for action in options:
        words = [action.option_strings[0], *([] if action.nargs == 0 else ["value"])]
        with refusing():
            launch = parse_args(["--num_gpus", "2", "--module", "dsx.train", *words])
        assert launch.user_args == words


def check_settings(arguments: argparse.Namespace) -> Settings | None:
    if not hasattr(arguments, "deepspeed_config"):
        return None
    return load_settings(REPOSITORY / arguments.deepspeed_config, arguments.overrides)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_documented_command_is_parsed_or_run_by_a_test(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for word in command.words:
        if word.startswith("runs/"):
            (tmp_path / word).mkdir(parents=True, exist_ok=True)  # What earlier commands leave.
    check(command)


@pytest.mark.parametrize(
    "line",
    [
        "make everything",
        "./launch/nothing.sh",
        "dsx trane --clusters 2",
        "dsx local --clusters 2",
        "dsx local --deepspeed_config configs/quickstart.json --cluster_count 2",
        "dsx local --deepspeed_config configs/quickstart.json --set dsx.outer.localsteps=3",
        "dsx local --deepspeed_config configs/nothing.json",
        "deepspeed --num_gpus 2 --module dsx.trane --deepspeed_config configs/quickstart.json",
        "deepspeed --gpus 2 --module dsx.train --deepspeed_config configs/quickstart.json",
        "deepspeed --num_gpus 3 --module dsx.train --deepspeed_config configs/quickstart.json",
        "deepspeed --num_gpus 2 --module dsx.train --config configs/quickstart.json",
    ],
)
def test_a_wrong_command_in_the_documentation_would_be_found(line: str) -> None:
    (command,) = bash_commands(REPOSITORY / "README.md", f"```bash\n{line}\n```\n")
    with pytest.raises((Refused, SettingsError)):
        check(command)


def test_what_is_said_to_run_end_to_end_is_run_there() -> None:
    source = END_TO_END.read_text(encoding="utf-8")
    for command, proof in RUN_IN_END_TO_END.items():
        assert proof in source, command
        assert any(shlex.join(each.words) == command for each in COMMANDS), command
    ci = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    for command in RUN_BY_CI:
        assert command in ci, command


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if heading:
            assert heading in headings(file), target


def test_every_page_of_the_documentation_is_in_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert f"](docs/{page.name})" in readme, f"add docs/{page.name} to README.md's table"


def test_every_command_is_told_of() -> None:
    manual = "\n".join(page.read_text(encoding="utf-8") for page in MANUAL)
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8").partition("## More")[0]
    for name in main.COMMANDS:
        assert f"dsx {name}" in manual, name
    for name in ("prepare", "local", "coordinator", "plan", "doctor", "audit", "report", "export"):
        assert f"dsx {name}" in text, f"the README's text does not name dsx {name}"


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def known_keys() -> set[str]:
    keys = {".".join(path) for path in walk(Settings)}
    return keys | {name.removeprefix("dsx.") for name in keys}


def is_module_name(dotted: str) -> bool:
    """`dsx.train`, or `dsx.models.stage.Stage`: a name of the code, not of the settings."""
    parts = dotted.split(".")
    for end in range(len(parts), 1, -1):
        place = REPOSITORY.joinpath(*parts[:end])
        if place.with_suffix(".py").is_file():
            return end >= len(parts) - 1  # The module, or something in it.
        if place.is_dir():
            return end == len(parts)
    return False


@pytest.mark.parametrize("page", MANUAL, ids=shown)
def test_every_settings_key_in_backticks_exists(page: Path) -> None:
    keys = known_keys()
    blocks = {key.partition(".")[0] for key in keys}
    # A model's config is its family's own; what is refused is told by its name.
    free = ("dsx.model.config.", "model.config.")
    refused = {name for name, _ in refusals(Settings)}
    for key in KEY.findall(page.read_text(encoding="utf-8")):
        first, _, rest = key.partition(".")
        if first not in blocks or rest.rpartition(".")[2] in FILE_SUFFIXES:
            continue
        known = key in keys or key in refused or key.startswith(free)
        assert known or (first == "dsx" and is_module_name(key)), key


def test_a_misspelt_key_would_be_found() -> None:
    found = KEY.findall("`dsx.outer.localsteps`, `outer.delai=3`, `dsx.outer.delay: 0`, `a b.c`")
    assert found == ["dsx.outer.localsteps", "outer.delai", "dsx.outer.delay"]
    assert "dsx.outer.delay" in known_keys()
    assert "outer.delay" in known_keys()
    assert not is_module_name("dsx.outer.localsteps")
    assert is_module_name("dsx.train")
    assert is_module_name("dsx.settings.tree.walk")


def scripts() -> list[str]:
    named = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named |= set(re.findall(r"(?<![\w/.-])\.?/?((?:[\w-]+/)+[\w-]+\.sh)\b", text))
    return sorted(named)


def test_every_named_script_exists_and_is_sound_bash() -> None:
    names = scripts()
    assert {"launch/quickstart.sh", "launch/test.sh"} <= set(names)
    for name in [*names, ".ci/run"]:
        path = REPOSITORY / name
        assert path.is_file(), name
        subprocess.run(["bash", "-n", str(path)], check=True)
