"""From a settings file, clusters, GPUs and a link to a whole plan."""

from dataclasses import dataclass

import torch

from dsx.errors import PlanError, SettingsError
from dsx.models.config import load_config
from dsx.models.plan import ModelPlan
from dsx.planning.costs import ModelCosts
from dsx.planning.exchange import Traffic, round_traffic
from dsx.planning.hardware import UTILIZATION, Gpu
from dsx.planning.infeasible import explain
from dsx.planning.layout import Layout, LayoutPlan, Machine, layout_as_set, layouts, plan_layout
from dsx.planning.methods import PUBLISHED_RANK, MethodPlan, method_plan, others
from dsx.planning.outer_choice import OuterPlan, candidates, compressions, outer_plan
from dsx.planning.time import Link
from dsx.settings import Settings
from dsx.settings.checks import check_layout
from dsx.settings.codec_block import CompressionSettings, Int4Codec, LowRankCodec
from dsx.settings.dsx_block import OuterSettings

_PUBLISHED = CompressionSettings(
    matrices=LowRankCodec(rank=PUBLISHED_RANK, factors=Int4Codec()),
    embeddings=LowRankCodec(rank=PUBLISHED_RANK, factors=Int4Codec()),
    averaging="gather",
)


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    settings: Settings
    clusters: int
    gpus: int
    """Of each cluster."""
    gpu: Gpu
    link: Link
    utilization: float = UTILIZATION
    """Share of the GPU's peak while it computes."""
    step_seconds: float | None = None
    """A measured inner step of the settings' own layout, which sets `utilization`."""
    as_set: bool = False
    """Take layout and outer settings as they are, instead of choosing."""


@dataclass(frozen=True)
class Plan:
    """The answer."""

    request: Request
    parameters: int
    chosen: LayoutPlan
    outer: OuterPlan
    methods: tuple[MethodPlan, ...]
    """dsx first."""
    tokens_per_step: int
    """Of one cluster."""

    @property
    def dsx(self) -> MethodPlan:
        return self.methods[0]

    def speedup(self, method: str) -> float:
        """Tokens per second over those of `method`."""
        other = next(plan for plan in self.methods if plan.method == method)
        return self.dsx.tokens_per_second / other.tokens_per_second


class Planner:
    """Plans for one model: what is traced once serves every request about it."""

    def __init__(self, settings: Settings) -> None:
        self.model = ModelPlan(load_config(settings.dsx.model))
        dtype = torch.bfloat16 if settings.bf16.enabled else torch.float32
        self.costs = ModelCosts(self.model, settings.dsx.data.seq_len, dtype)
        self._known: dict[tuple[Layout, str, int], Traffic] = {}

    def plan(self, request: Request) -> Plan:
        """The fastest layout that fits, with outer settings that hide on the link.

        Raises:
            SettingsError: `as_set`, and the settings' layout is none of so many GPUs.
            PlanError: nothing fits, or the batch can't be dealt out; it says what to change.
            ModelError: the model can't be split or counted.
        """
        return self.complete(request, self.layout(request))

    def complete(self, request: Request, chosen: LayoutPlan) -> Plan:
        """The plan of `request` with a layout that is chosen already."""
        outer = self.outer(request, chosen)
        tokens = chosen.layout.sequences * request.settings.dsx.data.seq_len
        step, all_tokens = chosen.step.seconds, tokens * request.clusters
        own = method_plan(
            "dsx",
            step,
            all_tokens,
            outer.settings.local_steps,
            outer.settings.delay,
            outer.traffic.bytes,
            outer.exchange_seconds,
            outer.boundary_seconds,
        )
        parameters = self.model.parameter_counts().total
        published = self._traffic(chosen, _PUBLISHED, request.clusters)
        rest = others(parameters, request.clusters, step, all_tokens, request.link, published)
        return Plan(request, parameters, chosen, outer, (own, *rest), tokens)

    def _utilization(self, request: Request) -> float:
        if request.step_seconds is None:
            return request.utilization
        layout = layout_as_set(request.settings, request.gpus)
        ideal = plan_layout(request.settings, self.costs, layout, Machine(request.gpu, 1.0)).step
        moving = ideal.transfers + ideal.reduce
        if request.step_seconds <= moving + ideal.compute + ideal.bubble:
            raise SettingsError(
                f"--step-seconds {request.step_seconds:g}: at its peak, {request.gpu.name} takes "
                f"{ideal.seconds:.3g} s for the settings' layout; check the value and --gpu"
            )
        return (ideal.compute + ideal.bubble) / (request.step_seconds - moving)

    def layout(self, request: Request) -> LayoutPlan:
        """The fastest layout that fits; raises as `plan`."""
        settings = request.settings
        machine = Machine(request.gpu, self._utilization(request))
        if request.as_set:
            check_layout(settings, request.gpus)
            options = [layout_as_set(settings, request.gpus)]
        else:
            options = list(layouts(settings, request.gpus, self.model.layer_count))
        plans = [plan_layout(settings, self.costs, option, machine) for option in options]
        fitting = [plan for plan in plans if plan.fits]
        if not fitting:
            raise PlanError(explain(settings, self.costs, plans, request.gpus, machine))
        return min(fitting, key=lambda plan: (plan.step.seconds, plan.device_bytes))

    def outer(self, request: Request, chosen: LayoutPlan) -> OuterPlan:
        """Outer settings for a layout: the settings' own where their exchange hides behind rounds
        of `local_steps`, else those of the least expected loss that hide."""
        own = request.settings.dsx.outer
        as_set = self._outer(request, chosen, own)
        if request.as_set or (as_set.hides and as_set.settings.local_steps == own.local_steps):
            return as_set
        options = [
            self._outer(request, chosen, option)
            for compression in compressions(own.compression)
            for option in candidates(
                own,
                compression,
                self._outer(
                    request, chosen, own.model_copy(update={"compression": compression})
                ).exchange_seconds,
                chosen.step.seconds,
            )
        ]
        hidden = [option for option in (as_set, *options) if option.hides]
        if not hidden:
            raise PlanError(self._never_hides(request, chosen))
        return max(hidden, key=lambda option: option.expected_kept)

    def _never_hides(self, request: Request, chosen: LayoutPlan) -> str:
        """Why no round does, when even that of the quickest exchange does not."""
        own = request.settings.dsx.outer
        tried = (
            self._outer(request, chosen, own.model_copy(update={"compression": compression}))
            for compression in compressions(own.compression)
        )
        least = min(tried, key=lambda option: option.exchange_seconds)
        waiting = 2 * request.link.latency * least.traffic.roundtrips
        better = "less latency" if waiting > least.exchange_seconds / 2 else "a higher rate"
        return (
            f"an exchange takes {least.exchange_seconds:,.3g} s at the fewest bits "
            f"({least.traffic.bytes / 1e6:,.3g} MB and {least.traffic.roundtrips} round trips a "
            f"round) and an inner step {chosen.step.seconds:.3g} s: no round of up to 500 steps "
            f"hides it; find a link of {better}, or raise the batch of a step "
            "(gradient_accumulation_steps), or see with --as-set what the file's own settings give"
        )

    def _outer(self, request: Request, chosen: LayoutPlan, outer: OuterSettings) -> OuterPlan:
        layout = chosen.layout
        traffic = self._traffic(chosen, outer.compression, request.clusters)
        stages = [cost.stage for cost in chosen.costs]
        owned = max(self.costs.owned(stage, layout.replicas) for stage in stages)
        return outer_plan(
            outer, traffic, owned, request.clusters, request.link, chosen.step.seconds
        )

    def _traffic(
        self, chosen: LayoutPlan, compression: CompressionSettings, clusters: int
    ) -> Traffic:
        key = (chosen.layout, compression.model_dump_json(), clusters)
        if key not in self._known:
            stages = [self.model.stage_shapes(cost.stage) for cost in chosen.costs]
            self._known[key] = round_traffic(
                stages, chosen.layout.replicas, compression, self.model.vocab_size, clusters
            )
        return self._known[key]
