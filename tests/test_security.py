"""Two clusters that share a secret train on, whoever else comes: real processes, real sockets."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dsx.cluster.launch import free_ports
from dsx.exchange.secret import RunSecret
from tests.checkpoint.settings import raw_settings, write_corpus
from tests.distributed import ENVIRONMENT, run_ranks

pytestmark = pytest.mark.multiprocess

BIN = Path(sys.executable).parent
ADDRESSES = {"coordinator": "127.0.0.2", "c0": "127.0.0.3", "c1": "127.0.0.4"}
PATIENCE = 240.0


class Scene:
    """A run of two clusters that has met a stranger, a wrong secret and other settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        (folder / "corpus").mkdir()
        write_corpus(folder / "corpus")
        raw = raw_settings(folder, "run", outer={"start_clusters": 2}, steps=1_000_000)
        (folder / "settings.json").write_text(json.dumps(raw))
        for name in ("secret", "wrong"):
            RunSecret.create(folder / name)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def play(self) -> None:
        bind = f"{ADDRESSES['coordinator']}:0"
        secret = ["--secret-file", str(self.folder / "secret")]
        self.start("coordinator", [str(BIN / "dsx"), "coordinator", "--bind", bind, *secret])
        self.wait_for(lambda: "http://" in self.log("coordinator"), "the coordinator's address")
        words = self.log("coordinator").split()
        self.url = next(word for word in words if word.startswith("http://"))
        (port,) = free_ports(1)
        launcher = [str(BIN / "deepspeed"), "--num_gpus", "1", "--master_port", str(port)]
        self.start("c0", [*launcher, "--module", "dsx.train", *self.arguments("c0"), *secret])
        # The other way to name it.
        self.start(
            "c1",
            [sys.executable, "-m", "dsx.train", *self.arguments("c1")],
            DSX_SECRET_FILE=str(self.folder / "secret"),
        )
        self.wait_for(lambda: min(map(self.rounds, ("c0", "c1"))) > 0, "a first round")
        self.stranger = self.visit("stranger")
        self.wrong = self.visit("wrong-secret", "--secret-file", str(self.folder / "wrong"))
        self.other = self.visit("other-settings", *secret, "--set", "dsx.outer.lr=0.123")
        reached = max(map(self.rounds, ("c0", "c1")))
        self.wait_for(lambda: min(map(self.rounds, ("c0", "c1"))) > reached, "one more round")
        self.listening = {name: self.listeners(name) for name in self.processes}
        self.command_lines = b"".join(
            path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()
        )
        family = [child for name in ("c0", "c1") for child in self.family(name)]
        for name in ("c0", "c1"):
            os.killpg(self.processes[name].pid, signal.SIGTERM)
        self.codes = {name: self.processes[name].wait(PATIENCE) for name in ("c0", "c1")}
        # The launcher may end before its rank, which saves.
        assert psutil.wait_procs(family, PATIENCE)[1] == []

    def arguments(self, cluster: str) -> list[str]:
        words = ["--deepspeed_config", str(self.folder / "settings.json"), "--cluster", cluster]
        words += ["--coordinator", self.url]
        return [*words, "--address", ADDRESSES[cluster]] if cluster in ADDRESSES else words

    def start(self, name: str, command: list[str], **variables: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=os.environ | ENVIRONMENT | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def visit(self, cluster: str, *words: str) -> tuple[int, str]:
        arguments = [*self.arguments(cluster), *words]
        (outcome,) = run_ranks("tests.security_workers:launch", 1, arguments)
        return outcome

    def wait_for(self, happened, what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} has ended:\n{self.log(name)}"
            assert time.monotonic() < deadline, f"{what} did not come\n{self.log('c0')[-3000:]}"
            time.sleep(0.05)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def digests(self, cluster: str) -> dict[int, str]:
        path = self.run / f"metrics-{cluster}.jsonl"
        text = path.read_text() if path.exists() else ""
        whole = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return {e["round"]: e["shared_digest"] for e in whole if e["kind"] == "outer"}

    def rounds(self, cluster: str) -> int:
        return len(self.digests(cluster))

    def family(self, name: str) -> list[psutil.Process]:
        own = psutil.Process(self.processes[name].pid)
        return [own, *own.children(recursive=True)]

    def listeners(self, name: str) -> set[str]:
        return {
            socket.laddr.ip
            for process in self.family(name)
            for socket in process.net_connections(kind="tcp")
            if socket.status == psutil.CONN_LISTEN
        }

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("security"))
    try:
        scene.play()
        yield scene
    finally:
        scene.end()


def test_a_stranger_is_told_that_it_needs_the_secret(scene: Scene) -> None:
    code, printed = scene.stranger
    assert code == 1
    assert "does not let in who has no run secret; give --secret-file" in printed
    assert "refused 127.0.0.1: it has no run secret" in scene.log("coordinator")


def test_a_wrong_secret_is_refused_by_name_on_both_sides(scene: Scene) -> None:
    code, printed = scene.wrong
    assert code == 1
    assert "has another run secret than this cluster's --secret-file" in printed
    assert "refused cluster 'wrong-secret' at 127.0.0.1: it has another run secret" in scene.log(
        "coordinator"
    )


def test_other_settings_are_refused_by_name_with_the_key_that_differs(scene: Scene) -> None:
    code, printed = scene.other
    assert code == 1
    assert "trains something else than other-settings: dsx.outer.lr is" in printed
    assert "0.123" in printed
    assert "cluster other-settings trains something else than c1: dsx.outer.lr is 0.123 there" in (
        scene.log("c1")
    )


def test_the_run_goes_on_with_equal_digests(scene: Scene) -> None:
    one, other = scene.digests("c0"), scene.digests("c1")
    both = one.keys() & other.keys()
    assert len(both) > 2
    assert len({one[number] for number in both}) == len(both)
    assert {number: one[number] for number in both} == {number: other[number] for number in both}
    for name in ("c0", "c1"):
        assert "asked to end at step" in scene.log(name)
    assert scene.codes["c1"] == 75


def test_the_secret_is_in_no_log_no_run_folder_and_no_process_list(scene: Scene) -> None:
    for name in ("secret", "wrong"):
        digits = (scene.folder / name).read_bytes().strip()
        assert len(digits) == 64
        assert digits not in scene.command_lines
        told = scene.stranger[1] + scene.wrong[1] + scene.other[1]
        assert digits not in told.encode()
        files = [path for path in scene.folder.rglob("*") if path.is_file()]
        assert len(files) > 10
        for path in files:
            if path.name in ("secret", "wrong"):
                continue
            data = path.read_bytes()
            assert digits not in data, path
            assert bytes.fromhex(digits.decode()) not in data, path
    assert b"--secret-file" in scene.command_lines


def test_everything_listens_on_the_address_that_it_was_given_or_on_loopback(scene: Scene) -> None:
    for name, address in ADDRESSES.items():
        assert scene.listening[name] == {address, "127.0.0.1"}, name
