"""DeepSpeed's own keys that a pipeline with ZeRO-1 can use, as its users know them.

Names and meaning follow DeepSpeed 0.19's `runtime/config.py` and `runtime/zero/config.py`, which
accept any key and ignore those they don't know. Here every key is either modelled, or refused with
the reason and the way out (`dsx.settings.deepspeed_refusals`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from dsx.settings import deepspeed_refusals as refusals
from dsx.settings.base import Block, FieldError


def _whole(value: object) -> object:
    """`5e8` is how DeepSpeed's users write element counts; JSON reads it as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Elements = Annotated[int, BeforeValidator(_whole), Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0)]


class _AdamParams(Block):
    unsupported: ClassVar[Mapping[str, str]] = refusals.ADAM_PARAMS

    lr: LearningRate = Field(
        ..., description="Largest learning rate, reached after the warm-up of `dsx.training`."
    )
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999),
        strict=False,
        description="Decay of the first and second moment; OpenDiLoCo and most LLMs: 0.9, 0.95.",
    )
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay; most LLMs use 0.1.")
    torch_adam: bool = Field(
        True, description="Only `true`: `torch.optim`'s implementation, which needs no compiler."
    )
    fused: bool | None = Field(
        None, description="torch's one-pass kernel; unset: where the device has it."
    )

    @field_validator("torch_adam")
    @classmethod
    def _torch_only(cls, value: bool) -> bool:
        if not value:
            raise ValueError(
                "is false, but DeepSpeed's own Adam is not used (it is compiled when a run starts; "
                "torch's fused kernel is as fast); leave it out"
            )
        return value


class AdamWParams(_AdamParams):
    """Adam with decoupled weight decay."""

    unsupported: ClassVar[Mapping[str, str]] = {
        **refusals.ADAM_PARAMS,
        "adam_w_mode": "AdamW is always decoupled and DeepSpeed ignores the key for it; leave it "
        'out, or set `optimizer.type` to "Adam"',
    }


class AdamParams(_AdamParams):
    """Adam, with the weight decay as `adam_w_mode` says."""

    adam_w_mode: bool = Field(
        ...,
        description="`true` decouples the weight decay (this is AdamW), `false` adds it to the "
        "gradient. Always explicit: DeepSpeed's Adam would silently be AdamW.",
    )


class SGDParams(Block):
    """Stochastic gradient descent, with momentum or without."""

    unsupported: ClassVar[Mapping[str, str]] = refusals.SGD_PARAMS

    lr: LearningRate = Field(
        ..., description="Largest learning rate, reached after the warm-up of `dsx.training`."
    )
    momentum: Beta = Field(0.0, description="Momentum.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay, added to the gradient.")
    nesterov: bool = Field(False, description="Nesterov momentum; needs `momentum` above 0.")

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "SGDParams":
        if self.nesterov and self.momentum == 0:
            raise FieldError(
                "nesterov", "is true, but `momentum` is 0; set `momentum`, for example to 0.9"
            )
        return self


class AdamWOptimizer(Block):
    """AdamW: Adam with decoupled weight decay."""

    type: Literal["AdamW"] = Field(..., description="The inner optimizer's name.")
    params: AdamWParams = Field(..., description="Its parameters.")


class AdamOptimizer(Block):
    """Adam."""

    type: Literal["Adam"] = Field(..., description="The inner optimizer's name.")
    params: AdamParams = Field(..., description="Its parameters.")


class SGDOptimizer(Block):
    """Stochastic gradient descent."""

    type: Literal["SGD"] = Field(..., description="The inner optimizer's name.")
    params: SGDParams = Field(..., description="Its parameters.")


Optimizer = Annotated[AdamWOptimizer | AdamOptimizer | SGDOptimizer, Field(discriminator="type")]


class ZeroOptimization(Block):
    """ZeRO stage 1: each replica keeps a share of the optimizer state and of the fp32 masters."""

    unsupported: ClassVar[Mapping[str, str]] = refusals.ZERO

    stage: int = Field(1, description="Always 1: the one stage that works in pipelines here.")
    allgather_bucket_size: Elements = Field(
        500_000_000, description="Elements gathered at a time after an optimizer step."
    )
    reduce_bucket_size: Elements = Field(
        500_000_000,
        description="fp32 runs: elements reduced at a time; a buffer of this size is allocated.",
    )
    reduce_scatter: bool = Field(
        True, description="fp32 runs: reduce each replica's share to that replica only."
    )
    use_multi_rank_bucket_allreduce: bool = Field(
        True, description="fp32 runs: reduce the shares of several replicas in one all-reduce."
    )
    contiguous_gradients: bool = Field(
        True, description="fp32 runs: copy gradients into one buffer as they appear."
    )
    overlap_comm: bool = Field(
        False, description="Only `false`: DeepSpeed turns the overlap off in pipelines."
    )

    @field_validator("stage")
    @classmethod
    def _stage_one(cls, value: int) -> int:
        if value != 1:
            reason = refusals.ZERO_STAGES.get(value, "DeepSpeed has stages 0 to 3")
            raise ValueError(f"is {value}; {reason}; use 1")
        return value

    @field_validator("overlap_comm")
    @classmethod
    def _no_overlap(cls, value: bool) -> bool:
        if value:
            raise ValueError("is true, but DeepSpeed turns it off in pipelines; use false")
        return value


class Bf16(Block):
    """Compute in bfloat16; master weights, moments and the outer state stay in fp32."""

    unsupported: ClassVar[Mapping[str, str]] = refusals.BF16

    enabled: bool = Field(..., description="Compute in bfloat16; `false` computes in fp32.")


class DataTypes(Block):
    """Number formats inside a cluster."""

    unsupported: ClassVar[Mapping[str, str]] = refusals.DATA_TYPES

    grad_accum_dtype: str = Field(
        "fp32", description="Format in which micro-batches' gradients add up; always `fp32`."
    )

    @field_validator("grad_accum_dtype")
    @classmethod
    def _accumulate_in_fp32(cls, value: str) -> str:
        if value != "fp32":
            raise ValueError(
                f'is "{value}"; sums of many micro-batches need "fp32", and the outer step needs '
                "the fp32 masters that come with it"
            )
        return value


class CommsLogger(Block):
    """Log every collective operation inside a cluster, for debugging."""

    enabled: bool = Field(False, description="Log collectives.")
    verbose: bool = Field(True, description="A line for each operation as it happens.")
    prof_all: bool = Field(True, description="Log all operations, or only those of `prof_ops`.")
    prof_ops: list[str] = Field(
        default_factory=list, description="Names of the operations to log, as `all_reduce`."
    )
    debug: bool = Field(False, description="Name the calling function, too.")


class ThroughputTimer(Block):
    """DeepSpeed's throughput timer."""

    enabled: bool = Field(True, description="Measure samples per second.")
    synchronized: bool = Field(
        True, description="Wait for the accelerator before reading the clock: exact, but slower."
    )


class Timers(Block):
    """DeepSpeed's timers."""

    throughput: ThroughputTimer = Field(
        default_factory=ThroughputTimer, description="The throughput timer."
    )


class DeepSpeedSettings(Block):
    """The keys at the top level of the file, all but `dsx`."""

    unsupported: ClassVar[Mapping[str, str]] = refusals.TOP_LEVEL

    train_micro_batch_size_per_gpu: int = Field(
        ..., gt=0, description="Sequences of one micro-batch: what passes through a stage at once."
    )
    gradient_accumulation_steps: int = Field(
        ..., gt=0, description="Micro-batches of one inner step; they fill the pipeline."
    )
    train_batch_size: int | None = Field(
        None,
        gt=0,
        description="Sequences of one inner step of one cluster; checked when given: micro-batch "
        "size x accumulation x replicas.",
    )
    gradient_clipping: float = Field(
        ...,
        ge=0,
        description="Largest norm of the whole model's gradient; 0 turns clipping off. Always "
        "explicit: without it DeepSpeed would silently clip at 1.0.",
    )
    optimizer: Optimizer = Field(
        ..., description="The inner optimizer: `type` (`AdamW`, `Adam` or `SGD`) and `params`."
    )
    zero_optimization: ZeroOptimization = Field(
        default_factory=ZeroOptimization, description="ZeRO; stage 1 also when left out."
    )
    bf16: Bf16 = Field(
        default_factory=lambda: Bf16(enabled=False), description="bfloat16; fp32 when left out."
    )
    data_types: DataTypes = Field(
        default_factory=DataTypes, description="Number formats inside a cluster."
    )
    communication_data_type: Literal["fp32", "bf16"] = Field(
        "fp32", description="Format of gradients on the wire between a cluster's replicas."
    )
    prescale_gradients: bool = Field(
        False, description="Divide by the number of replicas before reducing, not after."
    )
    gradient_predivide_factor: float = Field(
        1.0, gt=0, description="Divide by this before reducing, by the rest after."
    )
    steps_per_print: int | None = Field(
        None, gt=0, description="Inner steps between DeepSpeed's own status lines; unset: none."
    )
    wall_clock_breakdown: bool = Field(
        False, description="Print times of forward, backward and step; needs `steps_per_print`."
    )
    memory_breakdown: bool = Field(False, description="Print memory use around each step.")
    dump_state: bool = Field(False, description="Print DeepSpeed's whole configuration at start.")
    disable_python_gc: bool = Field(
        False, description="Let DeepSpeed collect Python's garbage at step boundaries only."
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = Field(
        None, description="How much DeepSpeed logs; unset: its own default."
    )
    comms_logger: CommsLogger | None = Field(None, description="Log collectives, for debugging.")
    timers: Timers = Field(default_factory=Timers, description="DeepSpeed's timers.")

    def deepspeed_config(self) -> dict[str, Any]:
        """The `config` of `deepspeed.initialize`: plain JSON, every value explicit."""
        keys = set(DeepSpeedSettings.model_fields)
        config = self.model_dump(mode="json", include=keys, exclude_none=True)
        if self.bf16.enabled:
            # Each gradient joins the fp32 sum as soon as it is there, and is freed: the same sums,
            # in two bytes per parameter less.
            config["bf16"]["immediate_grad_update"] = True
        # DeepSpeed knows ZeRO with torch's SGD only as "untested"; the tests of dsx cover it.
        if isinstance(self.optimizer, SGDOptimizer):
            config["zero_allow_untested_optimizer"] = True
        return config
