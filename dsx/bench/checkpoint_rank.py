"""One rank of `dsx bench checkpoint`."""

import argparse
import json
import os
import shutil
import time
from pathlib import Path

from dsx.checkpoint.folders import CHECKPOINTS, SHARED, open_checkpoint
from dsx.settings import parse_settings
from dsx.training.preflight import preflight
from dsx.training.run import ClusterRun, Launch

_STEPS = 3
"""Inner steps between two saves, and for the warm-up."""


def measure(request_file: Path) -> None:
    """Do what `dsx.bench.checkpoint` asks for in a file; rank 0 writes the answer."""
    request = json.loads(request_file.read_text())
    raw = request["settings"]
    dsx = raw["dsx"]
    dsx["run_dir"] = request["run_dir"]
    dsx["tracking"] = {**dsx["tracking"], "wandb": False}
    dsx["checkpoint"] = {**dsx["checkpoint"], "every_rounds": 0}
    needed = max(dsx["training"]["steps"], 4 * _STEPS * (request["saves"] + 1))
    dsx["training"] = {**dsx["training"], "steps": needed, "eval_every": 0}
    # No round ends while it is measured.
    dsx["outer"] = {**dsx["outer"], "local_steps": needed, "start_clusters": 1, "min_clusters": 1}
    settings = parse_settings(raw)
    ready = preflight(settings, dsx["pipeline"]["stages"], check_split=False)
    run = ClusterRun(settings, Launch("bench", request["coordinator"], None, "never"), ready)
    run.begin()
    agreement = run.engine.agreement
    kinds = 1 + len(run.engine.weights.moment_kinds()) + 2
    seen: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        """The slowest rank's."""
        seen.setdefault(name, []).append(agreement.maximum([value])[0])

    def steps() -> None:
        for _ in range(_STEPS):
            began = time.perf_counter()
            run.advance_to(run.step + 1)
            note("step_seconds", time.perf_counter() - began)

    def forget_shared() -> None:
        """No round ends here, so that the shared part would be written but once."""
        agreement.barrier()
        if run.engine.rank == 0:
            shutil.rmtree(Path(request["run_dir"]) / CHECKPOINTS / SHARED, ignore_errors=True)
        agreement.barrier()

    steps()
    seen.clear()
    for _ in range(request["saves"]):
        steps()
        forget_shared()
        began = time.perf_counter()
        run.save()
        note("blocked_seconds", time.perf_counter() - began)
        run.advance_to(run.step + 1)  # training goes on while it is written
        run.saver.writer.wait()
        note("write_seconds", run.saver.writer.seconds)
        run.advance_to(run.step + 1)
        forget_shared()
        folder = run.save(wait=True)
        assert folder is not None
        note("idle_write_seconds", run.saver.writer.seconds)
        if run.engine.rank == 0:
            files = _files(folder)
            seen.setdefault("bytes", []).append(sum(file.stat().st_size for file in files))
            seen.setdefault("copy_seconds", []).append(_copy(files, Path(request["run_dir"])))
            seen.setdefault("minimum_bytes", []).append(4 * kinds * ready.model_size)
        agreement.barrier()
    if run.engine.rank == 0:
        Path(request["answer"]).write_text(json.dumps(seen))
    run.close()


def _files(folder: Path) -> list[Path]:
    """Of one checkpoint, its shared part included."""
    checkpoint = open_checkpoint(folder)
    return [*folder.iterdir(), *checkpoint.shared_folder.iterdir()]


def _copy(files: list[Path], target: Path) -> float:
    """Seconds in which they are copied and brought to the disk."""
    copies = target / "copies"
    copies.mkdir()
    began = time.perf_counter()
    for number, file in enumerate(files):
        copy = copies / str(number)
        shutil.copyfile(file, copy)
        with copy.open("rb") as opened:
            os.fsync(opened.fileno())
    seconds = time.perf_counter() - began
    shutil.rmtree(copies)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--request", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    measure(parser.parse_args().request)


if __name__ == "__main__":
    main()
