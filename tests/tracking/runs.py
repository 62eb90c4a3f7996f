"""Made-up events of a small run: two clusters, two rounds of two steps each."""

from typing import Any

from dsx.tracking.events import EvalEvent, Event, InnerEvent, OuterEvent, PhasesEvent, RunEvent
from dsx.tracking.jsonl import JsonlSink

PARAMETERS = 1_000
BYTES_SENT = 500
CLUSTERS = ("c0", "c1")


def run_event(cluster: str = "c0", time: float = 100.0, **changes: Any) -> RunEvent:
    values: dict[str, Any] = {
        "settings": {"dsx": {"name": "tiny", "seed": 0}, "gradient_clipping": 1.0},
        "versions": {"torch": "2.13.0"},
        "model_size": PARAMETERS,
        "layout": {"stages": 2, "replicas": 1},
        "heldout_bytes_per_token": 2.0,
    }
    return RunEvent(cluster=cluster, time=time, **(values | changes))


def inner_event(cluster: str = "c0", step: int = 1, **changes: Any) -> InnerEvent:
    values: dict[str, Any] = {
        "time": 100.0 + step,
        "round": (step - 1) // 2,
        "loss": 5.0 - step,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens": 64 * step,
        "tokens_per_second": 128.0,
    }
    return InnerEvent(cluster=cluster, step=step, **(values | changes))


def outer_event(cluster: str = "c0", round_: int = 1, **changes: Any) -> OuterEvent:
    values: dict[str, Any] = {
        "time": 100.5 + 2 * round_,
        "participants": list(CLUSTERS),
        "bytes_sent": BYTES_SENT,
        "bytes_received": BYTES_SENT,
        "exchange_seconds": 0.4,
        "blocked_seconds": 0.1,
        "local_steps": 2,
        "codec": "none",
        "pseudo_gradient_norm": 0.25,
        "shared_digest": "abc",
        "tokens_total": 256 * round_,
    }
    return OuterEvent(cluster=cluster, round=round_, **(values | changes))


def eval_event(cluster: str = "c0", step: int = 4, **changes: Any) -> EvalEvent:
    values: dict[str, Any] = {"time": 105.0, "round": 2, "loss": 2.0, "weights": "shared"}
    return EvalEvent(cluster=cluster, step=step, **(values | changes))


def phases_event(
    cluster: str = "c0", round_: int = 1, rank: int = 0, **changes: Any
) -> PhasesEvent:
    start = 100.0 + 2 * round_
    values: dict[str, Any] = {
        "time": start + 2.0,
        "spans": [
            ("outer step", start, 0.05),
            ("exchange", start + 0.05, 0.9),
            ("encode", start + 0.05, 0.2),
            ("inner steps", start + 0.05, 1.0),
            ("wait", start + 1.05, 0.1),
            ("inner steps", start + 1.2, 0.75),
        ],
    }
    return PhasesEvent(cluster=cluster, round=round_, rank=rank, **(values | changes))


def cluster_events(cluster: str) -> list[Event]:
    return [
        run_event(cluster),
        inner_event(cluster, 1),
        inner_event(cluster, 2),
        outer_event(cluster, 1),
        *(phases_event(cluster, 1, rank) for rank in (0, 1)),
        inner_event(cluster, 3),
        inner_event(cluster, 4),
        outer_event(cluster, 2),
        *(phases_event(cluster, 2, rank) for rank in (0, 1)),
        eval_event(cluster),
    ]


def write_run(run_dir: Any, clusters: tuple[str, ...] = CLUSTERS) -> None:
    for cluster in clusters:
        sink = JsonlSink(run_dir, cluster)
        for event in cluster_events(cluster):
            sink.write(event)
        sink.close()
