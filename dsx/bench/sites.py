"""Clusters that are broken and started again, each by the command that it printed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsx.bench.namespaces import SlowLink
from dsx.cluster.launch import cluster_names, deepspeed_command, free_ports
from dsx.cluster.processes import ProcessTree, end_all
from dsx.errors import LaunchError
from dsx.tracking.events import metrics_path

_GO_ON = re.compile(r"after an interruption, go on with: (.*)")
_STAYS = "the pseudo-gradient stays and joins the next one"
_POLL_SECONDS = 0.05


class Coordinator:
    """`dsx coordinator` as a process, always at the same address."""

    def __init__(self, link: SlowLink | None, secret: Path) -> None:
        host = link.hub_address if link is not None else "127.0.0.1"
        self._inside = link.inside(None) if link is not None else ()
        self._more = ["--secret-file", str(secret)]
        self.bind = f"{host}:{free_ports(1)[0]}"
        self.address = f"http://{self.bind}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        dsx = Path(sys.executable).parent / "dsx"
        self._process = subprocess.Popen(
            [*self._inside, str(dsx), "coordinator", "--bind", self.bind, *self._more],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self.address not in self._process.stdout.readline():
            raise LaunchError(f"the coordinator could not be started at {self.bind}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Site:
    """One cluster: its launches, its log and what it has written."""

    def __init__(
        self,
        index: int,
        run_dir: Path,
        words: Sequence[str],
        ranks: int,
        module: str,
        link: SlowLink | None,
    ) -> None:
        self.index = index
        self.cluster = cluster = cluster_names(index + 1)[index]
        self.run_dir = run_dir
        self.log = run_dir / f"{cluster}.log"
        self._environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        self._inside: Sequence[str] = ()
        if link is not None:
            self._environment |= link.environment
            self._inside = link.inside(index)
        self._command = [
            *("deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_ports(1)[0])),
            *("--module", module, *words, "--cluster", cluster),
        ]
        self.tree: ProcessTree | None = None

    def start(self, more: Sequence[str] = ()) -> None:
        """The first time with the command of its own, later with the one that was printed."""
        command = self._printed() or self._command
        assert command[0] == "deepspeed"
        whole = [*self._inside, str(deepspeed_command()), *command[1:], *more]
        self.tree = ProcessTree(whole, self._environment, self.log)

    def _printed(self) -> list[str] | None:
        found = _GO_ON.findall(self.text())
        return shlex.split(found[-1]) if found else None

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def runs(self) -> bool:
        return self.tree is not None and self.tree.exit_code() is None

    def signal(self, number: int) -> None:
        if self.tree is not None:
            self.tree.signal(number)

    def kill(self) -> None:
        """SIGKILL for everything, until nothing is left."""
        while self.tree is not None and not self.tree.is_gone():
            self.tree.signal(signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        path = metrics_path(self.run_dir, self.cluster)
        if not path.exists():
            return []
        whole = path.read_text(encoding="utf-8").split("\n")[:-1]
        return [line for line in map(json.loads, whole) if line["kind"] == kind]

    @property
    def round(self) -> int:
        """The newest round that it has told of."""
        return max((line["round"] for line in self.lines("outer")), default=0)

    def rounds_with(self, clusters: set[str], since: float) -> int:
        """Rounds since a moment in which all of `clusters` took part."""
        return sum(
            line["time"] > since and clusters <= set(line["participants"])
            for line in self.lines("outer")
        )

    def longest_wait(self, since: float) -> float:
        """Seconds for which inner steps stood still in one round, since a moment."""
        return max(
            (line["blocked_seconds"] for line in self.lines("outer") if line["time"] > since),
            default=0.0,
        )

    def stayed(self) -> int:
        """Rounds that ended without a commit here."""
        return self.text().count(_STAYS)


def stop(sites: Sequence[Site]) -> None:
    """End all by SIGTERM, as a user would, so that they save."""
    end_all([site.tree for site in sites if site.tree is not None], 60.0)


def wait_until(what: str, ready: Callable[[], bool], seconds: float, sites: Sequence[Site]) -> None:
    """Raises LaunchError with the ends of the logs when it takes longer than `seconds`."""
    ends = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > ends:
            told = "\n".join(f"--- {site.cluster}\n{site.text()[-3000:]}" for site in sites)
            raise LaunchError(f"{what} did not happen within {seconds:g} s:\n{told}")
        time.sleep(_POLL_SECONDS)
