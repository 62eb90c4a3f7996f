"""What is looked at from outside while clusters run: bytes on the link, memory of the ranks."""

import bisect
import time
from pathlib import Path

import psutil

from dsx.bench.namespaces import Counted, SlowLink

CLUSTER = "DSX_BENCH_CLUSTER"
"""Environment variable of a cluster's processes: its name."""
_COUNT_SECONDS = 0.2
_MEMORY_SECONDS = 2.0


class Watch:
    """A display for `run_clusters` that shows nothing and remembers what it sees."""

    def __init__(self, link: SlowLink) -> None:
        self.peaks: dict[str, int] = {}
        """Peak resident memory in bytes, by CLUSTER/RANK."""
        self._link = link
        self._times: list[float] = []
        self._counted: list[list[Counted]] = []
        self._memory_due = 0.0
        self._ranks: dict[int, str] = {}

    def update(self) -> None:
        now = time.time()
        if not self._times or now - self._times[-1] >= _COUNT_SECONDS:
            self._times.append(now)
            self._counted.append(self._link.counted())
        if now >= self._memory_due:
            self._memory_due = now + _MEMORY_SECONDS
            self._look_at_memory()

    def set_phase(self, cluster: str, phase: str) -> None:
        pass

    def tell(self, text: str) -> None:
        pass

    def slowest_step(self) -> float:
        """None that is waited for: nobody goes on with a run of a bench."""
        return 0.0

    def sent(self, cluster: int, start: float, end: float) -> float:
        """Bytes that a cluster's interface sent between two moments (`time.time()`)."""
        return self._sent_by(cluster, end) - self._sent_by(cluster, start)

    def received(self, cluster: int, start: float, end: float) -> float:
        """Bytes that it received."""
        return self._received_by(cluster, end) - self._received_by(cluster, start)

    def _sent_by(self, cluster: int, moment: float) -> float:
        return self._at(moment, [counted[cluster].sent for counted in self._counted])

    def _received_by(self, cluster: int, moment: float) -> float:
        return self._at(moment, [counted[cluster].received for counted in self._counted])

    def _at(self, moment: float, values: list[int]) -> float:
        after = bisect.bisect(self._times, moment)
        if after == 0 or after == len(values):
            return values[min(after, len(values) - 1)]
        before = after - 1
        share = (moment - self._times[before]) / (self._times[after] - self._times[before])
        return values[before] + share * (values[after] - values[before])

    def _look_at_memory(self) -> None:
        for process in psutil.Process().children(recursive=True):
            rank = self._ranks.get(process.pid) or _rank_of(process)
            if rank is not None:
                self._ranks[process.pid] = rank
                self.peaks[rank] = max(self.peaks.get(rank, 0), _peak(process.pid))


def _rank_of(process: psutil.Process) -> str | None:
    try:
        environment = process.environ()
    except psutil.Error:
        return None
    if "RANK" not in environment or CLUSTER not in environment:
        return None
    return f"{environment[CLUSTER]}/{environment['RANK']}"


def _peak(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(peaks[0]) if peaks else 0
