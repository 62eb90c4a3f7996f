"""One cluster that is killed again and again, and goes on with the command that it printed.

A moment to die at is drawn uniformly from the whole time of an undisturbed run, start and last save
included, and found again in the run that is killed as so many seconds after the same inner step:
what else the machine does shifts it by little. One run takes several kills, and what each of them
did stays in all that follows; only its end is compared.
"""

import json
import math
import os
import random
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.bench.resume_history import history
from dsx.cluster.launch import deepspeed_command, free_ports, usable_cores, visible_gpus
from dsx.cluster.processes import ProcessTree
from dsx.errors import LaunchError
from dsx.settings import Settings
from dsx.tracking.events import InnerEvent, latest_by_step, metrics_path, parse_line, read_file
from dsx.tracking.tail import Tail

_CLUSTER = "c0"
_PRINTED = re.compile(r"after an interruption, go on with: (deepspeed .*)")


@dataclass(frozen=True)
class KilledRun:
    """One run, and whether it ended as if it had never been killed."""

    hits: tuple[str, ...]
    """What each kill hit, in words."""
    same: bool
    """The same digest after every round, loss at every step, and last checkpoint."""
    digest: str
    """Of the shared weights at the end."""


@dataclass(frozen=True)
class _Moment:
    """`seconds` after inner step `step`; step 0 is the launch."""

    step: int
    seconds: float


class _Timeline:
    """When an undisturbed run was where."""

    def __init__(self, steps: Sequence[InnerEvent], began: float, ended: float) -> None:
        self._times = [began, *(event.time for event in steps)]
        self.seconds = ended - began

    def moment(self, after: float) -> _Moment:
        """Where the run was `after` seconds after its launch."""
        at = self._times[0] + after
        step = max(index for index, time_ in enumerate(self._times) if time_ <= at)
        return _Moment(step, at - self._times[step])


def killed_runs(
    settings: Settings,
    kills: int,
    kills_per_run: int,
    seed: int,
    folder: Path,
    say: Callable[[str], None],
) -> Iterator[KilledRun]:
    """Kill runs `kills` times in all, `kills_per_run` times each, and let each come to its end.

    Raises:
        LaunchError: a run that was not killed failed.
    """
    if kills == 0:
        return
    undisturbed = _Run(settings, folder / "undisturbed")
    began = time.time()
    undisturbed.to_its_end()
    timeline = _Timeline(undisturbed.steps(), began, time.time())
    expected = undisturbed.history()
    say(f"undisturbed: {timeline.seconds:.1f} s, shared digest {undisturbed.digest()}")
    chance = random.Random(seed)
    done = number = 0
    while done < kills:
        number += 1
        count = min(kills - done, kills_per_run)
        run = _Run(settings, folder / f"killed-{number}")
        hits = []
        for after in sorted(chance.uniform(0.0, timeline.seconds) for _ in range(count)):
            hit = run.killed_at(timeline.moment(after))
            say(f"run {number}: {f'killed {hit}' if hit else 'over before it was killed'}")
            if hit:
                hits.append(hit)
        run.to_its_end()
        same = run.history() == expected
        say(f"run {number}: shared digest {run.digest()}{'' if same else ', DIFFERENT'}")
        done += len(hits)
        yield KilledRun(tuple(hits), same, run.digest())


class _Run:
    """A run of one cluster in a folder of its own, with a coordinator that stays."""

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        from dsx.exchange.coordinator import Coordinator

        self._dir = run_dir
        self._coordinator = Coordinator("127.0.0.1:0")
        self._log = run_dir / "log"
        run_dir.mkdir(parents=True)
        file = run_dir / "settings.json"
        file.write_text(json.dumps(_raw(settings, run_dir)))
        ranks = settings.dsx.pipeline.stages
        self._command = [
            *("deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_ports(1)[0])),
            *("--module", "dsx.train", "--deepspeed_config", str(file)),
            *("--cluster", _CLUSTER, "--coordinator", self._coordinator.address),
        ]
        self._environment = dict(os.environ)
        self._environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
        if not visible_gpus():
            self._environment["DS_ACCELERATOR"] = "cpu"

    def to_its_end(self) -> None:
        """Start it, or go on with it, and leave it alone."""
        with self._started() as tree:
            while (code := tree.exit_code()) is None:
                time.sleep(0.1)
        if code:
            raise self._failed(code)
        self._coordinator.close()

    def killed_at(self, moment: _Moment) -> str | None:
        """Start it, or go on with it, and kill all of it at once.

        Returns:
            what was hit, in words; None when the run was over before.
        """
        metrics = Tail(metrics_path(self._dir, _CLUSTER))
        first = step = 0
        until = time.monotonic() + moment.seconds if moment.step == 0 else math.inf
        with self._started() as tree:
            while time.monotonic() < until:
                if (code := tree.exit_code()) == 0:
                    return None
                if code is not None:
                    raise self._failed(code)
                for line in metrics.new_lines():
                    event = parse_line(line, str(self._dir))
                    if isinstance(event, InnerEvent):
                        first, step = first or event.step, event.step
                if step >= moment.step and math.isinf(until):
                    until = time.monotonic() + moment.seconds
                time.sleep(0.01)
        since = f" (it had gone on from step {first - 1})" if first > 1 else ""
        return f"{moment.seconds:.2f} s after step {step}{since}"

    def steps(self) -> list[InnerEvent]:
        return latest_by_step(read_file(metrics_path(self._dir, _CLUSTER)))

    def history(self) -> Any:
        return history(self._dir, _CLUSTER)

    def digest(self) -> str:
        rounds: dict[int, str] = self.history().digests
        return rounds[max(rounds)]

    def _failed(self, code: int) -> LaunchError:
        log = self._log.read_text(errors="replace")
        return LaunchError(f"the run failed with exit code {code}:\n{log[-6000:]}")

    @contextmanager
    def _started(self) -> Iterator[ProcessTree]:
        """The first command, or the one that it printed; at the end, nothing of it is left."""
        log = self._log.read_text(errors="replace") if self._log.exists() else ""
        printed = _PRINTED.findall(log)
        words = shlex.split(printed[-1]) if printed else self._command
        command = [str(deepspeed_command()), *words[1:]]
        tree = ProcessTree(command, self._environment, self._log)
        try:
            yield tree
        finally:
            while not tree.is_gone():
                tree.signal(signal.SIGKILL)
                time.sleep(0.02)


def _raw(settings: Settings, run_dir: Path) -> dict[str, Any]:
    raw = settings.model_dump(mode="json", exclude_none=True)
    raw["dsx"]["run_dir"] = str(run_dir)
    raw["dsx"]["tracking"]["wandb"] = False
    if raw["dsx"]["outer"]["delay"] == "auto":
        # It follows measured times, which no two runs share: what it starts with instead.
        raw["dsx"]["outer"]["delay"] = math.ceil(raw["dsx"]["outer"]["local_steps"] / 5)
    return raw
