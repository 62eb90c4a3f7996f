"""The console entry: which command runs, what is imported, how errors are told."""

import argparse
import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import dsx
from dsx.cli import common, main
from dsx.errors import DataError, SettingsError
from tests.settings.files import valid, written

FOLDER = Path(main.__file__).parent
NOT_COMMANDS = {"__init__", "main", "common"}


class Command(types.ModuleType):
    """A stand-in for a command's module."""

    HELP = "Measure this machine and this installation."

    def __init__(self, outcome: int | BaseException) -> None:
        super().__init__("dsx.cli.bench")
        self.outcome = outcome

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int, default=1)

    def run(self, arguments: argparse.Namespace) -> int:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome + arguments.size


def put(monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException) -> None:
    monkeypatch.setitem(sys.modules, "dsx.cli.bench", Command(outcome))


def test_the_chosen_command_gets_its_arguments_and_gives_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(monkeypatch, 3)

    assert main.main(["bench", "--size", "4"]) == 7


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (SettingsError("dsx.seed: is -1"), 2, "dsx: dsx.seed: is -1\n"),
        (DataError("no such corpus"), 1, "dsx: no such corpus\n"),
        (KeyboardInterrupt(), 130, "dsx: interrupted\n"),
    ],
)
def test_errors_a_user_can_act_on_are_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    text: str,
) -> None:
    put(monkeypatch, error)

    assert main.main(["bench"]) == code
    captured = capsys.readouterr()
    assert captured.err == text
    assert captured.out == ""


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, RuntimeError("a fault of ours"))

    with pytest.raises(RuntimeError, match="a fault of ours"):
        main.main(["bench"])


def test_an_unknown_command_is_refused_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["prepair"]) == 2
    assert capsys.readouterr().err == "dsx: unknown command prepair; did you mean prepare?\n"
    assert main.main(["zzz"]) == 2
    assert "there are prepare, tokenizer" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    captured = capsys.readouterr().err
    assert all(name in captured for name in main.COMMANDS)


def test_help_and_version_import_no_command_and_no_heavy_library() -> None:
    program = (
        "import sys\n"
        "from dsx.cli.main import main\n"
        "for words in (['--version'], ['--help']):\n"
        "    try:\n"
        "        main(words)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0\n"
        "print(sorted(m for m in sys.modules if m.startswith('dsx')))\n"
        "print(sorted(set(sys.modules) & {'torch', 'pydantic', 'transformers', 'deepspeed'}))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    first, *_, modules, heavy = done.stdout.splitlines()
    assert first == f"dsx {dsx.__version__}"
    assert modules == "['dsx', 'dsx.cli', 'dsx.cli.main', 'dsx.errors']"
    assert heavy == "[]"


def command_sources() -> dict[str, ast.Module]:
    return {
        path.stem: ast.parse(path.read_text(encoding="utf-8"))
        for path in FOLDER.glob("*.py")
        if path.stem not in NOT_COMMANDS
    }


def test_every_command_module_is_listed_with_its_own_help() -> None:
    for name, module in command_sources().items():
        constants = {
            target.id: ast.literal_eval(node.value)
            for node in module.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        functions = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
        assert constants.get("HELP") == main.COMMANDS.get(name), name
        assert {"add_arguments", "run"} <= functions, name


def test_every_listed_command_has_a_module() -> None:
    assert set(main.COMMANDS) <= set(command_sources())


def test_settings_arguments_are_read_back_and_can_be_handed_on(tmp_path: Path) -> None:
    path = str(written(tmp_path, valid()))
    parser = argparse.ArgumentParser()
    common.add_settings_arguments(parser)
    words = ["--deepspeed_config", path, "--set", "dsx.seed=3", "dsx.name=x", "--set", "dsx.seed=4"]

    arguments = parser.parse_args(words)
    settings = common.settings_from(arguments)
    again = common.settings_from(parser.parse_args(common.settings_arguments(arguments)))

    assert (settings.dsx.seed, settings.dsx.name) == (4, "x")
    assert again == settings
