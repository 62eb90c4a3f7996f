"""`dsx local` with a stand-in for the `deepspeed` command."""

import os
import shlex
import signal
import threading
from argparse import ArgumentParser
from pathlib import Path

import pytest

from dsx.cli import local
from dsx.cluster import launch
from dsx.errors import CheckpointError, LaunchError, SettingsError
from dsx.exchange.secret import RunSecret
from dsx.training import preflight
from tests.checkpoint.made_up import save
from tests.cluster.fake_deepspeed import FakeDeepSpeed
from tests.cluster.test_supervise import wait_for
from tests.settings.files import changed, written
from tests.tracking.runs import write_run


def call(*words: str) -> int:
    parser = ArgumentParser()
    local.add_arguments(parser)
    return local.run(parser.parse_args(words))


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    return written(tmp_path, changed(**{"dsx.run_dir": str(tmp_path / "run")}))


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, **behaviour: object) -> FakeDeepSpeed:
    fake = FakeDeepSpeed(folder / "fake", behaviour)
    monkeypatch.setattr(launch, "deepspeed_command", lambda: fake.command)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    # What preflight refuses is tested with it; here it would only prepare a corpus.
    monkeypatch.setattr(preflight, "preflight", lambda settings, processes: None)
    return fake


def test_all_clusters_are_started_together_and_a_summary_ends_the_run(
    settings: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    fake = use(monkeypatch, tmp_path, c0="succeed", c1="succeed")
    write_run(tmp_path / "run")  # What the clusters would have left.
    words = ["--deepspeed_config", str(settings), "--clusters", "2", "--replicas", "3"]
    assert call(*words, "--set", "dsx.seed=7", "dsx.outer.local_steps=5") == 0
    calls = [fake.call(name)["arguments"] for name in ("c0", "c1")]
    for name, arguments in zip(("c0", "c1"), calls, strict=True):
        assert arguments[:2] == ["--num_gpus", "6"]
        at = arguments.index("--module")
        assert arguments[at : at + 10] == [
            "--module",
            "dsx.train",
            "--deepspeed_config",
            str(settings),
            "--set",
            "dsx.outer.start_clusters=2",
            "--set",
            "dsx.seed=7",
            "--set",
            "dsx.outer.local_steps=5",
        ]
        assert arguments[at + 10 : at + 13] == ["--checked", "--resume", "auto"]
        assert arguments[at + 13 : at + 16] == ["--cluster", name, "--coordinator"]
        assert arguments[-1].startswith("http://127.0.0.1:")
    assert calls[0][-1] == calls[1][-1]
    assert calls[0][3] != calls[1][3]
    output, errors = capfd.readouterr()
    assert ": c0  starting | c1  starting" in errors
    assert "c0  finished | c1  finished" in errors
    assert "held-out loss of the shared weights" in output
    assert "2.0000 (1.4427 bits per byte)" in output
    assert "16.0 times as much" in output


def test_the_secrets_file_is_handed_on_by_its_path(
    settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake = use(monkeypatch, tmp_path, c0="succeed", c1="succeed")
    write_run(tmp_path / "run")
    secret = tmp_path / "secret"
    RunSecret.create(secret)
    assert call("--deepspeed_config", str(settings), "--secret-file", str(secret)) == 0
    monkeypatch.setenv("DSX_SECRET_FILE", str(secret))
    assert call("--deepspeed_config", str(settings)) == 0
    for name in ("c0", "c1"):
        arguments = fake.call(name)["arguments"]
        assert arguments[arguments.index("--secret-file") + 1] == str(secret)
        assert secret.read_text().strip() not in arguments
    secret.chmod(0o644)
    with pytest.raises(LaunchError, match="chmod 600"):
        call("--deepspeed_config", str(settings))


def test_a_finished_run_says_so_and_starts_nothing(
    settings: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    fake = use(monkeypatch, tmp_path, c0="succeed", c1="succeed")
    write_run(tmp_path / "run")
    for cluster in ("c0", "c1"):
        save(tmp_path / "run", cluster, step=70, round_=2)
    assert call("--deepspeed_config", str(settings), "--set", "dsx.training.steps=70") == 0
    assert "this run has finished" in capfd.readouterr().out
    assert fake.pids() == {}


def test_a_failed_cluster_fails_the_command_with_its_error(
    settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    failing = {"after": ["c0"], "print": "dsx: DataError: no such file: corpus.txt", "code": 3}
    fake = use(monkeypatch, tmp_path, c0="forever", c1=failing)
    with pytest.raises(LaunchError, match=r"c1 failed with exit code 3: DataError: no such file"):
        call("--deepspeed_config", str(settings))
    assert fake.alive() == []


def test_wrong_settings_are_refused_before_anything_is_started(
    settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake = use(monkeypatch, tmp_path, c0="succeed", c1="succeed")
    with pytest.raises(SettingsError, match="min_clusters"):
        call("--deepspeed_config", str(settings), "--set", "dsx.outer.min_clusters=3")
    with pytest.raises(SettingsError, match="train_batch_size"):
        call("--deepspeed_config", str(settings), "--set", "train_batch_size=7")
    assert not (fake.folder / "pids").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dsx.outer.min_clusters": 3}, r"^--clusters 2: dsx\.outer\.start_clusters: is 2, fewer"),
        ({"dsx.outer": 3}, r"settings\.json: dsx\.outer: is 3; expected a JSON object"),
        ({"dsx": 3}, r"settings\.json: dsx: is 3; expected a JSON object"),
    ],
)
def test_no_set_is_blamed_that_nobody_has_typed(
    tmp_path: Path, changes: dict[str, object], said: str
):
    with pytest.raises(SettingsError, match=said) as refused:
        call("--deepspeed_config", str(written(tmp_path, changed(**changes))))
    assert "--set" not in str(refused.value)


@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_a_number_of_clusters_below_one_is_wrong_usage(settings: Path, count: str):
    with pytest.raises(SystemExit):
        call("--deepspeed_config", str(settings), "--clusters", count)


def test_waiting_for_more_clusters_than_are_started_is_refused(settings: Path):
    words = ["--deepspeed_config", str(settings), "--set", "dsx.outer.start_clusters=3"]
    with pytest.raises(SettingsError, match=r"start_clusters is 3, but --clusters is 2"):
        call(*words, "--clusters", "2")


def test_a_checkpoint_that_is_not_there_is_refused_before_anything_is_started(
    settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake = use(monkeypatch, tmp_path, c0="succeed", c1="succeed")
    with pytest.raises(CheckpointError, match=f"--resume {tmp_path}/nowhere: there is neither"):
        call("--deepspeed_config", str(settings), "--resume", f"{tmp_path}/nowhere")
    assert not (fake.folder / "pids").exists()


@pytest.mark.parametrize(
    ("given", "saves"),
    [
        (["--resume", "OLD"], False),
        (["--resume=OLD"], False),
        (["--resume=OLD"], True),
        ([], False),
    ],
)
def test_the_way_on_after_a_signal_is_the_command_to_type_again(
    settings: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    given: list[str],
    saves: bool,
):
    """From where it began, until anything is saved: then without the `--resume`."""
    fake = use(monkeypatch, tmp_path, c0="slow", c1="slow")
    old = tmp_path / "old run"
    for cluster in ("c0", "c1"):
        save(old, cluster, step=70, round_=2)
    words = ["--deepspeed_config", str(settings), *(w.replace("OLD", str(old)) for w in given)]
    monkeypatch.setattr("sys.argv", ["dsx", "local", *words])

    def stop() -> None:
        wait_for(lambda: {"c0", "c1"} <= set(fake.pids()))
        if saves:
            save(tmp_path / "run", "c0", step=80, round_=3)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert call(*words) == 128 + signal.SIGTERM
    thread.join()
    way_on = shlex.split(capfd.readouterr().err.splitlines()[-1])
    plain = ["dsx", "local", "--deepspeed_config", str(settings)]
    assert way_on == ([*plain, "--resume", str(old)] if given and not saves else plain)
    assert fake.alive() == []
