"""Large models on many clusters and links: the points of docs/scale.md's figure and tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from dsx.errors import PlanError
from dsx.planning.hardware import GPUS, Gpu
from dsx.planning.layout import cluster_batch
from dsx.planning.plan import Plan, Planner, Request
from dsx.planning.quality import label
from dsx.planning.time import Link
from dsx.settings.loading import parse_settings
from dsx.tracking.text import bytes_text, count_text, number_text, seconds_text

CLUSTERS = (2, 4, 8, 16, 32, 64)
RATES = (0.1e9, 0.3e9, 1e9, 3e9, 10e9)
LATENCY = 0.05


@dataclass(frozen=True)
class Scenario:
    """A model and the clusters that train it."""

    name: str
    model: dict[str, Any] | None
    """HF config; None: the settings file's own."""
    gpus: int
    """Of each cluster."""
    gpu: Gpu


def _llama(hidden: int, inner: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


def scenarios(own: str) -> tuple[Scenario, ...]:
    """Llama-3.1's shapes at 70B and 405B, the settings file's model, and a made-up dense 1T (the
    shape of the 405B, wider and deeper)."""
    return (
        Scenario("Llama-3.1 70B", _llama(8192, 28672, 80, 64, 128256), 64, GPUS["h100-80g"]),
        Scenario(own, None, 80, GPUS["a800-40g"]),
        Scenario("Llama-3.1 405B", _llama(16384, 53248, 126, 128, 128256), 252, GPUS["h100-80g"]),
        Scenario("dense 1T", _llama(20480, 81920, 168, 160, 128256), 672, GPUS["h200-141g"]),
    )


@dataclass(frozen=True)
class Point:
    """One model on so many clusters and such a link; no `plan`: nothing hides there."""

    scenario: Scenario
    clusters: int
    rate: float
    plan: Plan | None


def points(
    raw: dict[str, Any], clusters: Sequence[int] = CLUSTERS, rates: Sequence[float] = RATES
) -> list[Point]:
    """Every scenario with every number of clusters and every rate. `raw`: a whole settings file.

    Raises:
        PlanError: a model fits its clusters with no layout.
    """
    out = []
    own = parse_settings(raw)
    for scenario in scenarios(own.dsx.name):
        batch = cluster_batch(own, scenario.gpus)
        settings = parse_settings(_of(scenario, raw, batch), source=scenario.name)
        planner = Planner(settings)
        first = Request(settings, 2, scenario.gpus, scenario.gpu, Link(RATES[0], LATENCY))
        try:
            layout = planner.layout(first)
        except PlanError as error:
            raise PlanError(f"{scenario.name}: {error}") from error
        for count in clusters:
            for rate in rates:
                asked = replace(first, clusters=count, link=Link(rate, LATENCY))
                try:
                    plan = planner.complete(asked, layout)
                except PlanError:
                    plan = None
                out.append(Point(scenario, count, rate, plan))
    return out


def as_rows(found: Sequence[Point]) -> list[dict[str, Any]]:
    """One dict a point; None where nothing hides."""
    return [_row(point) for point in found]


def _row(point: Point) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": point.scenario.name,
        "clusters": point.clusters,
        "gpus_per_cluster": point.scenario.gpus,
        "gpu": point.scenario.gpu.name,
        "gbit_per_second": point.rate / 1e9,
    }
    plan = point.plan
    if plan is None:
        return {**row, "utilization": None}
    return {
        **row,
        "parameters": plan.parameters,
        "layout": asdict(plan.chosen.layout),
        "device_bytes": plan.chosen.device_bytes,
        "step_seconds": plan.chosen.step.seconds,
        "exchange_seconds": plan.outer.exchange_seconds,
        "bytes_per_round": plan.outer.traffic.bytes,
        "local_steps": plan.outer.settings.local_steps,
        "codec": label(plan.outer.settings.compression.matrices),
        "delay_steps": plan.outer.time.delay,
        "expected_kept": plan.outer.expected_kept,
        "utilization": plan.dsx.utilization,
        "tokens_per_second": plan.dsx.tokens_per_second,
        **{f"over_{m.method}": plan.speedup(m.method) for m in plan.methods[1:]},
    }


def table(found: Sequence[Point]) -> Table:
    """The rows for people."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("clusters", "Gbit/s", "GPU memory", "inner step", "exchange", "H", "codec", "delay")
    more = ("utilization", "tokens/s", "over all-reduce", "over OpenDiLoCo", "kept")
    out.add_column("model")
    for column in (*columns, *more):
        out.add_column(column, justify="right")
    for row in as_rows(found):
        cells = [row["model"], str(row["clusters"]), f"{row['gbit_per_second']:g}"]
        if row["utilization"] is None:
            out.add_row(*cells, *["nothing hides"])
            continue
        out.add_row(
            *cells,
            bytes_text(row["device_bytes"]),
            seconds_text(row["step_seconds"]),
            seconds_text(row["exchange_seconds"]),
            str(row["local_steps"]),
            row["codec"],
            str(row["delay_steps"]),
            f"{row['utilization']:.1%}",
            count_text(row["tokens_per_second"]),
            f"{row['over_allreduce']:,.1f}x",
            f"{row['over_opendiloco']:,.2f}x",
            number_text(row["expected_kept"], 2),
        )
    return out


def _of(scenario: Scenario, raw: dict[str, Any], batch: int) -> dict[str, Any]:
    if scenario.model is None:
        return raw
    # As much more as it takes to give every GPU of a cluster the same part of it.
    batch = -(-batch // scenario.gpus) * scenario.gpus
    dsx = {**raw["dsx"], "model": {"config": scenario.model, "init": "scratch"}}
    dsx["pipeline"] = {"stages": 1}
    return {
        **raw,
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": batch,
        "dsx": dsx,
    }
