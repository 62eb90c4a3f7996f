"""A plan for people, and for programs."""

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from dsx.planning.outer_choice import OuterPlan
from dsx.planning.plan import Plan
from dsx.planning.quality import BASIS, label
from dsx.tracking.text import bytes_text, count_text, number_text, seconds_text


def as_json(plan: Plan, tokens: float | None, price: float | None) -> dict[str, Any]:
    """Everything, in SI units; `rows` holds the methods, dsx first."""
    layout, outer = plan.chosen.layout, plan.outer
    return {
        "parameters": plan.parameters,
        "clusters": plan.request.clusters,
        "gpus_per_cluster": plan.request.gpus,
        "gpu": asdict(plan.request.gpu),
        "utilization_while_computing": plan.chosen.machine.utilization,
        "link": asdict(plan.request.link),
        "layout": asdict(layout),
        "stages": [
            {
                "layers": [cost.stage.start, cost.stage.stop],
                "parameters": cost.parameters,
                "device": {**asdict(device), "total": device.total},
                "host": {**asdict(host), "total": host.total},
            }
            for cost, device, host in zip(
                plan.chosen.costs, plan.chosen.memory, plan.chosen.host, strict=True
            )
        ],
        "tightest_stage": plan.chosen.tightest,
        "step": {**asdict(plan.chosen.step), "seconds": plan.chosen.step.seconds},
        "tokens_per_step": plan.tokens_per_step * plan.request.clusters,
        "outer": {
            **outer.settings.model_dump(mode="json"),
            "hides": outer.hides,
            "delay_steps": outer.time.delay,
            "link_seconds": outer.link_seconds,
            "roundtrips": outer.traffic.roundtrips,
        },
        "quality": {
            "expected_kept": outer.expected_kept,
            "measured": asdict(outer.measured),
            "basis": BASIS,
        },
        "rows": [
            {
                **asdict(method),
                "bytes_per_token": method.bytes_per_token,
                "bytes_per_day": method.bytes_per_day,
                "step_seconds": method.round_seconds / method.local_steps,
                "days": method.days(tokens) if tokens else None,
                "cost": _cost(plan, method.days(tokens), price) if tokens and price else None,
            }
            for method in plan.methods
        ],
    }


def _cost(plan: Plan, days: float, price: float) -> float:
    return days * 24 * price * plan.request.gpus * plan.request.clusters


def tables(plan: Plan, tokens: float | None, price: float | None) -> RenderableType:
    """Fit, layout, outer settings, methods, loss; one after the other."""
    return Group(_summary(plan), "", _memory(plan), "", _methods(plan, tokens, price))


def _summary(plan: Plan) -> Table:
    layout, outer, step = plan.chosen.layout, plan.outer, plan.chosen.step
    request = plan.request
    tightest = plan.chosen.memory[plan.chosen.tightest]
    rows = [
        (
            "model",
            f"{count_text(plan.parameters)} parameters ({plan.parameters:,}), "
            f"{plan.request.settings.dsx.data.seq_len} tokens a sequence",
        ),
        (
            "clusters",
            f"{request.clusters} x {request.gpus} {request.gpu.name}, "
            f"{request.link.rate / 1e6:,.0f} Mbit/s, {1000 * request.link.latency:g} ms",
        ),
        (
            "layout",
            f"{layout.stages} stages x {layout.replicas} replicas, {layout.micro_batches} "
            f"micro-batches of {layout.micro_batch}"
            + (", layers recomputed" if layout.checkpointing else ""),
        ),
        (
            "fits",
            f"stage {plan.chosen.tightest} is the tightest: {bytes_text(tightest.total)} of "
            f"{bytes_text(request.gpu.usable)} usable; {bytes_text(plan.chosen.node_host_bytes)} "
            f"of {bytes_text(request.gpu.host_memory)} on a node's host",
        ),
        (
            "inner step",
            f"{seconds_text(step.seconds)}: compute {seconds_text(step.compute)}, bubble "
            f"{seconds_text(step.bubble)} ({plan.chosen.bubble_share():.0%}), transfers "
            f"{seconds_text(step.transfers)}, replicas {seconds_text(step.reduce)}; "
            f"{count_text(plan.tokens_per_step)} tokens a cluster, "
            f"{plan.chosen.machine.utilization:.0%} of the peak while computing",
        ),
        (
            "rounds",
            f"H {outer.settings.local_steps}, {label(outer.settings.compression.matrices)}, "
            f"{bytes_text(outer.traffic.bytes)} a round and cluster, exchange "
            f"{seconds_text(outer.exchange_seconds)} ({seconds_text(outer.link_seconds)} on the "
            f"link), applied after {outer.time.delay} steps"
            + ("" if outer.hides else "; inner steps WAIT for it"),
        ),
        (
            "loss",
            f"{_expected(outer)}; nearest measurement "
            f"{outer.measured.kept:.2f} ({outer.measured.text}); {BASIS}",
        ),
    ]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _expected(outer: OuterPlan) -> str:
    if outer.expected_kept > 0:
        return f"about {outer.expected_kept:.2f} of the gap to all-reduce kept"
    return (
        f"NO BETTER THAN ONE CLUSTER ALONE: rounds of {outer.settings.local_steps} steps are far "
        "beyond what was measured; a larger batch of a step (gradient_accumulation_steps) or a "
        "faster link makes them shorter"
    )


def _memory(plan: Plan) -> Table:
    """First, tightest and last stage; all others lie between."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = ("weights", "gradients", "optimizer", "activations", "working", "stepping")
    for column in ("stage", "layers", "parameters", *names, "GPU", "host"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    last = len(plan.chosen.memory) - 1
    for index in sorted({0, plan.chosen.tightest, last}):
        cost, device = plan.chosen.costs[index], plan.chosen.memory[index]
        table.add_row(
            f"{index}" + (" (tightest)" if index == plan.chosen.tightest else ""),
            f"{cost.stage.start} to {cost.stage.stop - 1}",
            count_text(cost.parameters),
            *(bytes_text(getattr(device, name)) for name in names),
            bytes_text(device.total),
            bytes_text(plan.chosen.host[index].total),
        )
    return table


def _methods(plan: Plan, tokens: float | None, price: float | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ["method", "H", "exchange", "tokens/s", "utilization", "sent a day", "dsx is"]
    columns += ["days"] if tokens else []
    columns += ["cost"] if tokens and price else []
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in plan.methods:
        cells = [
            method.method,
            str(method.local_steps),
            seconds_text(method.exchange_seconds),
            number_text(method.tokens_per_second, digits=1),
            f"{method.utilization:.1%}",
            bytes_text(method.bytes_per_day),
            f"{plan.speedup(method.method):,.2f}x",
        ]
        if tokens:
            cells.append(number_text(method.days(tokens), digits=1))
            if price:
                cells.append(count_text(_cost(plan, method.days(tokens), price)))
        table.add_row(*cells)
    return table
