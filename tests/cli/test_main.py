"""The console entry: which command runs, what is imported, how errors are told."""

import argparse
import ast
import shlex
import socket
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


@pytest.mark.parametrize(
    "words",
    [
        "coordinator --bind 127.0.0.1",
        "coordinator --bind 0.0.0.0:0",
        "mesh init --output mesh --clusters a=h:1",
        "mesh init --output mesh --clusters a=h:1 b=h:2 --network 8.8.8.0/24",
        "local --deepspeed_config no-such-file.json",
        "simulate --deepspeed_config no-such-file.json --clusters 0",
        "bench scale --clusters 1",
        "bench link --rate 2mbit --clusters 1",
    ],
)
def test_wrong_arguments_end_every_command_with_code_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(words.split()) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    ["report --run nowhere", "audit --run nowhere", "export --run nowhere --output out"],
)
def test_a_run_that_is_not_there_is_a_wrong_argument_and_told_as_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()

    with pytest.raises(SystemExit) as end:
        main.main(words.split())
    assert end.value.code == 2
    assert f"is nowhere, which is not there, seen from {tmp_path}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main.main(words.replace("nowhere", "notes.txt").split())
    assert end.value.code == 2
    assert "is notes.txt, which is a file" in capsys.readouterr().err


PLAN = "plan --deepspeed_config settings.json"
SIMULATE = "simulate --deepspeed_config settings.json --clusters 2"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("report --run folder --output folder", "is folder, which is a folder"),
        ("report --run folder --output ''", "--output: is empty; give a path"),
        ("export --run folder --output ''", "--output: is empty; give a path"),
        ("secret new folder", "is folder, which is a folder"),
        (f"{PLAN} --write folder", "is folder, which is a folder"),
        (f"{PLAN} --figure file/x.svg", "is file/x.svg, but TMP/file is a file"),
        (f"{PLAN} --figure x.foo", "give a name that ends in .svg, .pdf or .png"),
        (f"{PLAN} --figure x", "is x, which does not say in what format"),
        ("secret new file/a/secret", "is file/a/secret, but TMP/file is a file"),
        ("export --run folder --output file", "is file, which is a file"),
        ("export --run folder --output file/hf", "is file/hf, but TMP/file is a file"),
        ("mesh init --clusters a=h:1 b=h:2 --output file", "is file, which is a file"),
        ("tokenizer train --input x --vocab-size 300 --output file", "is file, which is a file"),
        (f"{SIMULATE} --output file", "is file, which is a file"),
        (f"{SIMULATE} --output file/sweep", "is file/sweep, but TMP/file is a file"),
    ],
)
def test_an_output_that_can_not_be_is_told_before_the_work(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    with pytest.raises(SystemExit) as end:
        main.main(shlex.split(words))
    assert end.value.code == 2
    assert said.replace("TMP", str(tmp_path)) in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("cli.main coordinator --bind 29510", 2, "give HOST:PORT"),
        ("cli.main coordinator --bind 0.0.0.0:0", 2, "there is no run secret"),
        ("cli.main coordinator --bind 127.0.0.1:TAKEN", 1, "a port that is free"),
        ("cli.main bench scale --clusters 1", 2, "give numbers from 2 to 250"),
        ("train --deepspeed_config FILE --coordinator 127.0.0.1:29510", 2, "give an address like"),
        ("train --deepspeed_config FILE --coordinator http://10.0.0.1:9", 2, "no run secret"),
    ],
)
def test_a_wrong_argument_is_refused_before_a_heavy_library_is_imported(
    tmp_path: Path, words: str, code: int, said: str
) -> None:
    program = (
        "import importlib, sys\n"
        "code = importlib.import_module('dsx.' + sys.argv[1]).main(sys.argv[2:])\n"
        "heavy = {'torch', 'torchft', 'transformers', 'deepspeed'}\n"
        "print(code, sorted(heavy & set(sys.modules)))\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = words.replace("TAKEN", str(taken.getsockname()[1]))
        words = words.replace("FILE", str(written(tmp_path, valid())))
        command = [sys.executable, "-c", program, *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert said in done.stderr
    assert done.stdout == f"{code} []\n"


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


def test_an_argument_that_is_not_there_is_told_with_the_nearest_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(monkeypatch, 0)

    # No part of a name is taken for the name: it could be another command's argument.
    for words, said in (
        (
            ["bench", "--siz", "4"],
            "dsx bench: error: there is no argument --siz; did you mean --size?",
        ),
        (["bench", "4"], "dsx bench: error: there is no argument 4"),
        (["--sizes"], "dsx: error: there is no argument --sizes"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main.main(words)
        assert capsys.readouterr().err.splitlines()[-1] == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench scale --round 1", "bench scale: error: there is no argument --round; did you mean"),
        ("mesh init --clusters a=h:1 --output x --networ y", "--networ; did you mean --network?"),
        ("secret new --hel file", "secret new: error: there is no argument --hel; did you mean"),
        (
            "tokenizer train --input x --vocab-size 300 --output y --cache z",
            "--cache; did you mean --cache-dir?",
        ),
    ],
)
def test_the_commands_of_a_command_tell_an_argument_that_is_not_there_in_the_same_way(
    capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(words.split())
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_path_that_the_file_system_refuses_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError) as refused:
        (tmp_path / "file" / "folder").mkdir()
    put(monkeypatch, refused.value)

    assert main.main(["bench"]) == 1
    assert capsys.readouterr().err == (
        f"dsx: {tmp_path}/file/folder: Not a directory; choose another path, or make this one "
        "usable\n"
    )


def test_a_draft_that_can_not_take_its_place_is_told_by_the_name_of_that_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / ".draft").touch()
    (tmp_path / "page").mkdir()
    with pytest.raises(IsADirectoryError) as refused:
        (tmp_path / ".draft").rename(tmp_path / "page")
    put(monkeypatch, refused.value)

    assert main.main(["bench"]) == 1
    assert capsys.readouterr().err.startswith(f"dsx: {tmp_path}/page: Is a directory; choose")


@pytest.mark.parametrize("error", [OSError(9, "Bad file descriptor", "x"), OSError("no path")])
def test_other_errors_of_the_system_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    put(monkeypatch, error)

    with pytest.raises(OSError, match=r"."):
        main.main(["bench"])


def test_the_help_shows_first_steps_that_parse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)  # What the second one leaves.
    main.main([])
    shown = [line.split() for line in capsys.readouterr().err.splitlines()]
    steps = [words for words in shown if words[:1] == ["dsx"] and len(words) > 2]

    assert [words[1] for words in steps] == ["prepare", "local", "report"]
    for _, *words in steps:
        assert main._parser(words[0]).parse_args(words).command == words[0]


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_a_count_is_a_whole_number_from_one(text: str) -> None:
    assert common.count("12") == 12
    with pytest.raises(argparse.ArgumentTypeError, match="give a whole number from 1"):
        common.count(text)


@pytest.mark.parametrize("text", ["", "shared", "a/b", "..", ".hidden"])
def test_a_clusters_name_can_be_part_of_a_file_name(text: str) -> None:
    assert common.cluster_name("site-a.2") == "site-a.2"
    with pytest.raises(argparse.ArgumentTypeError, match="give a name without a slash"):
        common.cluster_name(text)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_seconds_are_a_number_above_zero(text: str) -> None:
    assert common.seconds("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match="give a number of seconds above 0"):
        common.seconds(text)
