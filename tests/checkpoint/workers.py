"""What the ranks of a test do: whole runs, stopped and brought back."""

import logging
import os
import resource
import signal
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

from dsx.checkpoint.folders import RunFolder
from dsx.errors import CheckpointError
from dsx.settings import parse_settings
from dsx.tracking.events import EvalEvent, OuterEvent, latest_by_step, read_file
from dsx.training.preflight import preflight
from dsx.training.run import ClusterRun, Launch


class StoppingRun(ClusterRun):
    """Gets a SIGTERM after inner step `stop` (0: before it meets the others), on its last rank
    only."""

    stop: int | None = None

    def begin(self) -> None:
        if self.stop == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        super().begin()

    def _inner_step(self) -> None:
        super()._inner_step()
        if self.step == self.stop and self.engine.rank == self.engine.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def open_run(raw: dict[str, Any], launch: Launch) -> StoppingRun:
    settings = parse_settings(raw)
    ready = preflight(settings, int(os.environ["WORLD_SIZE"]), check_split=False)
    return StoppingRun(settings, launch, ready)


def train(
    raw: dict[str, Any], launch: Launch, stop: int | None = None, close: bool = True
) -> str | None:
    """One launch; returns the folder of the checkpoint that a stopped one left."""
    run = open_run(raw, launch)
    run.stop = stop
    over = run.train()
    run.saver.close()
    run.abandon()
    if run.outer is not None and close:
        run.outer.close()
    return None if over else str(run.saved)


def stop_and_go_on(
    cases: list[tuple[dict[str, Any], dict[str, Any], int]], urls: list[list[str]]
) -> list[Any]:
    """For every case (straight settings, interrupted settings, stop): both runs to their end.

    `urls`: for every case, the coordinators of its three launches.
    """
    results = []
    for (straight, interrupted, stop), places in zip(cases, urls, strict=True):
        joins = straight["dsx"]["name"] == "outer"
        launches = [Launch("c0", url if joins else None, None, "auto") for url in places]
        train(straight, launches[0])
        saved = train(interrupted, launches[1], stop)
        results.append((saved, train(interrupted, launches[2])))
    return results


class CrampedRun(StoppingRun):
    """Its disk is full from step 11 to step 31."""

    def _inner_step(self) -> None:
        super()._inner_step()
        if self.step in (11, 21, 31):
            # The save of the step before finds the disk as it is now, and is over when the next
            # one is due, however slow it is: that would be passed over.
            with suppress(CheckpointError):
                self.saver.writer.wait()
        if self.step == 11:
            self._fill(Path(self._dsx.run_dir))
        if self.step == 31:
            (Path(self._dsx.run_dir) / "filler").unlink(missing_ok=True)
            _limit_files(resource.RLIM_INFINITY)

    def _fill(self, disk: Path) -> None:
        if not disk.is_mount():
            _limit_files(1 << 16)  # more than the metrics are, less than a checkpoint
            return
        with (disk / "filler").open("wb", buffering=0) as file:
            for size in (1 << 16, 1):
                with suppress(OSError):
                    while True:
                        file.write(b"x" * size)


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def train_on_a_full_disk(raw: dict[str, Any], launch: Launch) -> str:
    """Returns what was logged."""
    told = StringIO()
    logging.basicConfig(stream=told, level=logging.WARNING, format="%(message)s", force=True)
    settings = parse_settings(raw)
    run = CrampedRun(settings, launch, preflight(settings, 1, check_split=False))
    assert run.train()
    run.close()
    return told.getvalue()


def relayout(raw: dict[str, Any], source: str, url: str) -> None:
    """Bring the run folder `source` into another layout, and save it at once."""
    run = open_run(raw, Launch("c0", url, None, source))
    run.begin()
    assert run.save(wait=True) is not None
    run.saver.close()
    run.abandon()
    assert run.outer is not None
    run.outer.close()


def checksums(run_dir: Path | str, cluster: str = "c0", index: int = 0) -> dict[str, int]:
    """Of every tensor in a checkpoint, and in its shared part; `index` 0 is the newest."""
    checkpoint = RunFolder(run_dir).list(cluster).complete[index]
    files = [*checkpoint.manifest.files.values()]
    if checkpoint.shared is not None:
        files += checkpoint.shared.files.values()
    return {key: record.crc32 for file in files for key, record in file.tensors.items()}


def history(run: Path, cluster: str = "c0") -> dict[str, Any]:
    """What a run's metrics file says, times and speeds apart."""
    events = read_file(run / f"metrics-{cluster}.jsonl")
    inner = latest_by_step(events)
    rounds = {e.round: e for e in events if isinstance(e, OuterEvent)}
    return {
        "losses": [(e.step, e.loss, e.grad_norm, e.lr) for e in inner],
        "evaluations": {e.step: e.loss for e in events if isinstance(e, EvalEvent)},
        "rounds": {
            number: (e.shared_digest, e.pseudo_gradient_norm, e.tokens_total, e.participants)
            for number, e in rounds.items()
        },
    }


def evaluate_only(raws: list[dict[str, Any]], urls: list[str | None]) -> list[str | None]:
    """Runs of no steps, one after the other; the checkpoints that they left."""
    return [
        train(raw, Launch("c0", url, None, "auto")) for raw, url in zip(raws, urls, strict=True)
    ]
