"""`dsx bench chaos`: real clusters, broken again and again at random moments of their rounds.

Every fault is waited for until all clusters have committed a round together again. What was killed
is started again by the command that it had printed. At the end the run is stopped, brought back,
and made to finish.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsx.bench.faults import PHASES, Fault, Kind, Plan
from dsx.bench.flood import Flood
from dsx.bench.namespaces import SlowLink
from dsx.bench.sites import Coordinator, Site, stop, wait_until
from dsx.cluster.launch import cluster_names
from dsx.exchange.secret import RunSecret
from dsx.settings import Settings, load_settings, parse_settings

QUICKSTART = "configs/quickstart.json"
STAGES, LOCAL_STEPS = 2, 8
_MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LONGEST_SECONDS = 600.0
"""For a fault to happen, or for the clusters to be together again after it."""
_HELD_SECONDS = (2.0, 20.0)
"""How long a cluster is stopped, a link is cut or slow, a coordinator is away."""
WEIGHTS = {
    "a rank is killed": 30,
    "a rank is stopped": 12,
    "a cluster is stopped": 12,
    "the disk is full": 10,
    "the coordinator is killed": 12,
    "the link is cut": 12,
    "the link has 10 Mbit/s, all taken": 6,
    "all clusters are killed": 6,
}
"""Kinds of faults, and how often each comes."""
_SLOW = 10e6
"""Bits per second."""
_LINK_KINDS = {"the link is cut", "the link has 10 Mbit/s, all taken"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deepspeed_config", default=QUICKSTART, metavar="FILE")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE"
    )
    parser.add_argument("--faults", type=int, default=50, help="how many (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of kinds, moments and clusters")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=list(WEIGHTS),
        default=[],
        metavar="KIND",
        help=f"of faults (default: all; links need root): {', '.join(WEIGHTS)}",
    )
    parser.add_argument("--clusters", type=int, default=3, help="of two ranks each (default: 3)")


def run(arguments: argparse.Namespace) -> int:
    """Break, print; returns the exit code: 1 when anything was lost, trained twice or stuck."""
    result = run_chaos_bench(
        load_settings(arguments.deepspeed_config, arguments.overrides),
        arguments.faults,
        arguments.seed,
        arguments.clusters,
        arguments.kinds,
        tell=None if arguments.json else print,
    )
    if arguments.json:
        print(json.dumps(result))
    else:
        _print_table(result)
    return 0 if result["clean"] else 1


def run_chaos_bench(
    settings: Settings,
    faults: int = 50,
    seed: int = 0,
    clusters: int = 3,
    kinds: Sequence[str] = (),
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Break a run of `clusters` clusters `faults` times.

    Args:
        settings: whose data are trained on.
        seed: of the faults.
        kinds: those of `WEIGHTS` to choose from; all by default. Links need root.
        tell: called with a line for every fault.

    Returns:
        `rows`: a fault each; `rounds`: committed; `longest_stall_rounds`: that a survivor made
        without a commit, after one fault; `digests_equal`: after every round that clusters told
        of; `finished`; `audit`: the tokens by their fate; `clean`: all is well.

    Raises:
        LaunchError: the clusters did not come together again, or links can't be made here.
    """
    chosen = [kind for kind in WEIGHTS if not kinds or kind in kinds]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsx-chaos-")))
        link = None
        if _LINK_KINDS & set(chosen):
            link = stack.enter_context(SlowLink(clusters))
        chaos = Chaos(settings, folder, clusters, random.Random(seed), link)
        stack.callback(chaos.end)
        chaos.begin()
        for number in range(faults):
            row = chaos.break_something(chosen, number)
            if tell is not None:
                tell(
                    f"{number + 1:3} {row.kind}, {row.where}: together again after "
                    f"{row.seconds:.1f} s, {row.stalled} rounds without a commit, stood still for "
                    f"{row.stood:.1f} s"
                )
        return chaos.finish()


@dataclass(frozen=True)
class Row:
    """One fault, and what it cost."""

    kind: str
    where: str
    clusters: tuple[str, ...]
    seconds: float
    """Until all clusters had committed a round together again."""
    stalled: int
    """Rounds that a survivor ended without a commit, although there was a coordinator."""
    stood: float
    """Seconds for which a survivor's inner steps stood still in one round."""


@dataclass
class Chaos:
    """A run that can be broken.

    Args:
        settings: whose data are trained on.
        folder: an empty one.
        count: clusters.
        link: between them; None: the loopback interface.
    """

    settings: Settings
    folder: Path
    count: int
    chance: random.Random
    link: SlowLink | None
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = cluster_names(self.count)
        self.run_dir = self.folder / "run"
        self.run_dir.mkdir()
        self.plan = Plan(self.folder / "faults")
        secret = self.folder / "run-secret"
        RunSecret.create(secret)
        self.coordinator = Coordinator(self.link, secret)
        file = self.folder / "settings.json"
        file.write_text(json.dumps(self._settings()))
        words = [
            *("--faults", str(self.folder / "faults")),
            *("--deepspeed_config", str(file), "--coordinator", self.coordinator.address),
            *("--secret-file", str(secret)),
        ]
        self.sites = [
            Site(index, self.run_dir, words, STAGES, "dsx.bench.chaos_rank", self.link)
            for index in range(self.count)
        ]

    def _settings(self) -> dict[str, Any]:
        raw = self.settings.model_dump(mode="json", exclude_none=True)
        raw |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
        raw.pop("train_batch_size", None)
        dsx = raw["dsx"]
        vocabulary = (dsx["model"].get("config") or {}).get("vocab_size", 4096)
        dsx["run_dir"] = str(self.run_dir)
        dsx["model"] = {"config": {**_MODEL, "vocab_size": vocabulary}}
        dsx["pipeline"] = {"stages": STAGES}
        dsx["data"]["seq_len"] = 32
        # Enough to outlast all faults; the end is set when they are over.
        dsx["training"] |= {"steps": 10**6, "eval_every": 0, "eval_batches": 1}
        dsx["outer"] = {
            "local_steps": LOCAL_STEPS,
            "delay": 2,
            "start_clusters": self.count,
            "timeout_seconds": 60,
        }
        dsx["checkpoint"] = {"every_rounds": 3, "keep": 2}
        dsx["tracking"] = {"wandb": False}
        parse_settings(raw)
        return dict(raw)

    # ------------------------------------------------------------------ the run

    def begin(self) -> None:
        """Start everything; return when all clusters have committed a round together."""
        self.coordinator.start()
        for site in self.sites:
            site.start()
        self._together(0.0)

    def end(self) -> None:
        """Leave no process behind."""
        for site in self.sites:
            site.kill()
        self.coordinator.kill()

    def _together(self, since: float) -> None:
        """Wait for a round of all clusters, and restart whatever ends meanwhile."""

        def are() -> bool:
            self._restart_ended()
            return all(site.rounds_with(set(self.names), since) for site in self.sites)

        wait_until("a round of all clusters", are, _LONGEST_SECONDS, self.sites)

    def _restart_ended(self) -> None:
        for site in self.sites:
            if not site.runs:
                site.kill()
                site.start()

    # ------------------------------------------------------------------ faults

    def break_something(self, kinds: Sequence[str], number: int) -> Row:
        """A fault of one of `kinds`, and what it cost."""
        kind = self.chance.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        return self.break_at(kind, self.chance.choice(self.sites), number)

    def break_at(self, kind: str, victim: Site, number: int, phase: str = "") -> Row:
        """A fault of one kind, at a phase by chance or at a given one, and what it cost."""
        survivors = [site for site in self.sites if site is not victim]
        before = {site.cluster: site.stayed() for site in self.sites}
        began = time.time()
        where = self._break(kind, victim, number, phase)
        self._together(time.time())
        stalled = max(site.stayed() - before[site.cluster] for site in survivors)
        if kind == "the coordinator is killed":
            stalled = 0  # There are no rounds without one: they all train on, and nobody stalls.
        stood = max(site.longest_wait(began) for site in survivors)
        row = Row(kind, where, (victim.cluster,), time.time() - began, stalled, stood)
        self.rows.append(row)
        return row

    def _break(self, kind: str, victim: Site, number: int, phase: str) -> str:
        hold = self.chance.uniform(*_HELD_SECONDS)
        if kind == "a rank is killed":
            return self._in_a_rank(victim, "kill", number, phase)
        if kind in ("a rank is stopped", "a cluster is stopped"):
            phase = self._in_a_rank(victim, "stop", number, phase)
            if kind == "a cluster is stopped":
                victim.signal(signal.SIGSTOP)
            time.sleep(hold)
            victim.signal(signal.SIGCONT)
            return phase
        if kind == "the disk is full":
            return self._in_a_rank(victim, "disk", number, "while saving")
        if kind == "the coordinator is killed":
            self.coordinator.kill()
            time.sleep(hold)
            self.coordinator.start()
            return f"for {hold:.0f} s"
        if kind == "all clusters are killed":
            for site in self.sites:
                site.signal(signal.SIGKILL)
            for site in self.sites:
                site.kill()
            return "at once"
        assert self.link is not None
        if kind == "the link is cut":
            self.link.cut(victim.index)
            time.sleep(hold)
            self.link.mend(victim.index)
        else:
            near, far = self.link.inside(None), self.link.inside(victim.index)
            self.link.shape(_SLOW, victim.index)
            with Flood(near, far, self.link.hub_address):
                time.sleep(hold)
            self.link.shape(None, victim.index)
        return f"for {hold:.0f} s"

    def _in_a_rank(self, victim: Site, kind: Kind, number: int, phase: str = "") -> str:
        """Let it happen to a rank of the victim; returns the phase."""
        choices = list(PHASES)
        if kind == "stop":
            choices.remove("while healing")
        phase = phase or self.chance.choice(choices)
        rank = self.chance.randrange(STAGES)
        heals = phase == "while healing"
        round_ = 0 if heals else victim.round + 1
        fault = Fault(f"{number}", victim.cluster, rank, phase, kind, round_)
        self.plan.add(fault)
        if heals:
            # Whoever comes back behind the others is healed.
            rounds = max(site.round for site in self.sites)
            victim.kill()
            wait_until(
                "a round without the victim",
                lambda: any(site.round > rounds + 2 for site in self.sites),
                _LONGEST_SECONDS,
                self.sites,
            )
            victim.start()

        def happened() -> bool:
            there = self.plan.happened(fault)
            if not there:
                self._restart_ended()
            return there

        wait_until(f"{fault}", happened, _LONGEST_SECONDS, self.sites)
        if kind == "kill":
            wait_until("the end of the victim", lambda: not victim.runs, 60.0, self.sites)
        return phase

    # ------------------------------------------------------------------ the end

    def finish(self) -> dict[str, Any]:
        """Stop the run, bring it back, let it end; returns what `run_chaos_bench` does."""
        stop(self.sites)
        last = max(line["step"] for site in self.sites for line in site.lines("inner"))
        for site in self.sites:
            site.start(["--set", f"dsx.training.steps={last + 3 * LOCAL_STEPS}"])
        wait_until(
            "the end of the run",
            lambda: not any(site.runs for site in self.sites),
            _LONGEST_SECONDS,
            self.sites,
        )
        codes = [site.tree.exit_code() for site in self.sites if site.tree is not None]
        digests = {
            site.cluster: {line["round"]: line["shared_digest"] for line in site.lines("outer")}
            for site in self.sites
        }
        rounds = set().union(*digests.values())
        different = [
            round_
            for round_ in sorted(rounds)
            if len({told[round_] for told in digests.values() if round_ in told}) > 1
        ]
        last_rounds = {max(told) for told in digests.values()}
        finished = codes == [0] * len(codes) and len(last_rounds) == 1
        audit, audited = self._audit()
        stall = max((row.stalled for row in self.rows), default=0)
        return {
            "clusters": self.count,
            "faults": len(self.rows),
            "rounds": max(rounds),
            "longest_stall_rounds": stall,
            "digests_equal": not different,
            "different_rounds": different,
            "finished": finished,
            "audit": audit,
            "clean": not different and finished and audited and stall <= 2,
            "rows": [row.__dict__ for row in self.rows],
        }

    def _audit(self) -> tuple[Any, bool]:
        dsx = Path(sys.executable).parent / "dsx"
        done = subprocess.run(
            [str(dsx), "audit", "--run", str(self.run_dir), "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            return json.loads(done.stdout), done.returncode == 0
        except json.JSONDecodeError:
            return done.stdout + done.stderr, False


def _print_table(result: dict[str, Any]) -> None:
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        where = row["where"] if row["where"] in PHASES else ""
        kinds.setdefault((row["kind"], where), []).append(row)
    print(f"{'fault':34} {'phase':28} {'times':>5} {'stalled':>8} {'stood':>9} {'together':>9}")
    for (kind, phase), rows in sorted(kinds.items()):
        stalled = max(row["stalled"] for row in rows)
        slowest = max(row["seconds"] for row in rows)
        stood = max(row["stood"] for row in rows)
        print(f"{kind:34} {phase:28} {len(rows):5} {stalled:8} {stood:7.1f} s {slowest:7.1f} s")
    print(
        f"{result['faults']} faults, {result['rounds']} rounds; at most "
        f"{result['longest_stall_rounds']} rounds without a commit; digests "
        f"{'equal' if result['digests_equal'] else 'DIFFERENT'}; "
        f"{'finished' if result['finished'] else 'NOT FINISHED'}"
    )
    print(f"audit: {json.dumps(result['audit'])}")
