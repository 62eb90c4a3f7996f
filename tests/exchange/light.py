"""Clusters without DeepSpeed (`light_rank.py`), to be broken and started again by a test."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsx.bench.faults import Fault, Plan
from dsx.cluster.launch import free_ports

RANKS = 2
_LONGEST_SECONDS = 300.0
_DSX = Path(sys.executable).parent / "dsx"


class Light:
    """One cluster of two ranks."""

    def __init__(self, name: str, folder: Path, coordinator: str, settings: str) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self._out = folder / f"{name}.jsonl"
        self._words = [
            *("--cluster", name, "--ranks", str(RANKS), "--coordinator", coordinator),
            *("--settings", settings, "--plan", str(folder / "plan")),
            *("--out", str(self._out), "--end", str(folder / "end")),
        ]
        self._ranks: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        port = str(free_ports(1)[0])
        command = [sys.executable, "-m", "tests.exchange.light_rank", *self._words, "--port", port]
        with self._log.open("ab") as log:
            self._ranks = [
                subprocess.Popen([*command, "--rank", str(rank)], stdout=log, stderr=log)
                for rank in range(RANKS)
            ]

    def signal(self, number: int) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.wait()

    def codes(self) -> list[int | None]:
        return [rank.poll() for rank in self._ranks]

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._out.read_text().split("\n")[:-1]]

    @property
    def round(self) -> int:
        return self.reports()[-1]["round"] if self._out.exists() else 0

    def rounds_of(self, count: int, since: float) -> int:
        """Rounds of `count` contributors since a moment."""
        if not self._out.exists():
            return 0
        return sum(r["time"] > since and len(r["participants"]) == count for r in self.reports())


class Lights:
    """Several, and their coordinator."""

    def __init__(self, folder: Path, count: int, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.plan = Plan(folder / "plan")
        self._bind = f"127.0.0.1:{free_ports(1)[0]}"
        self._coordinator: subprocess.Popen[str] | None = None
        text = json.dumps({"start_clusters": count, **settings})
        self.clusters = [
            Light(f"c{index}", folder, f"http://{self._bind}", text) for index in range(count)
        ]

    def begin(self) -> None:
        self.start_coordinator()
        for cluster in self.clusters:
            cluster.start()
        self.together()

    def start_coordinator(self) -> None:
        self._coordinator = subprocess.Popen(
            [str(_DSX), "coordinator", "--bind", self._bind], stdout=subprocess.PIPE, text=True
        )
        assert self._coordinator.stdout is not None
        assert self._bind in self._coordinator.stdout.readline()

    def kill_coordinator(self) -> None:
        if self._coordinator is not None:
            self._coordinator.kill()
            self._coordinator.wait()

    def together(self) -> None:
        """Wait for two rounds of all from now on; whoever has died is started again."""
        since = time.time()
        count = len(self.clusters)

        def are() -> bool:
            for cluster in self.clusters:
                if any(code is not None for code in cluster.codes()):
                    cluster.kill()
                    cluster.start()
            return all(cluster.rounds_of(count, since) >= 2 for cluster in self.clusters)

        self.wait("two rounds of all", are)

    def befall(self, fault: Fault) -> None:
        """Wait until it has happened."""
        self.plan.add(fault)
        self.wait(f"{fault}", lambda: self.plan.happened(fault))

    def finish(self) -> None:
        """Let all end."""
        (self.folder / "end").touch()
        self.wait("the end", lambda: all(None not in c.codes() for c in self.clusters))

    def close(self) -> None:
        for cluster in self.clusters:
            cluster.kill()
        self.kill_coordinator()

    def wait(self, what: str, ready: Callable[[], bool]) -> None:
        ends = time.monotonic() + _LONGEST_SECONDS
        while not ready():
            if time.monotonic() > ends:
                logs = "\n".join(f"--- {c.name}\n{c.log()[-3000:]}" for c in self.clusters)
                raise AssertionError(f"{what} did not come:\n{logs}")
            time.sleep(0.05)
