"""The inner training of one cluster: DeepSpeed's pipeline engine behind a narrow interface.

What DeepSpeed is told comes from `Settings.deepspeed_config()`, where three choices are fixed:

* ZeRO-1 always. Without it, fp32 pipelines clip each stage by its own norm, and bf16 pipelines
  can't resume.
* Gradients are accumulated, and averaged over replicas, in fp32. DeepSpeed's default for bf16 is to
  do both in bf16. Against the same bf16 model with exact accumulation of 8 micro-batches, that left
  a relative error of 3 to 8 % in Adam's first moment after ten steps of a small Llama; reducing
  alone in bf16 left 3 %, fp32 for both 8e-7. The price is a gradient buffer of 4 bytes per
  parameter of the stage on each replica.
* `gradient_clipping` is always written; it clips by the norm of the whole model.

fp32 then runs under DeepSpeed's `DeepSpeedZeroOptimizer` and bf16 under its `BF16_Optimizer`; both
keep fp32 masters and moments, cut among the replicas of a stage. The optimizer inside
(`dsx.cluster.optimizer`) and its learning rate (`dsx.cluster.schedule`) are ours.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import nn

from dsx.cluster.agreement import ClusterAgreement
from dsx.cluster.distributed import initialize
from dsx.cluster.master_weights import MasterWeights, TiedLink
from dsx.cluster.optimizer import build_optimizer
from dsx.cluster.quiet import quiet_deepspeed
from dsx.errors import LaunchError
from dsx.models.loss import causal_lm_loss
from dsx.settings.settings import Settings

Batch = tuple[torch.Tensor, torch.Tensor]
"""(input_ids, labels): LongTensors (micro_batch, seq_len); labels are the next tokens."""

_TIED_KEY = "embeddings"


class StageModule(Protocol):
    """What the engine needs from `dsx.models.Stage`, an `nn.Module` in fp32."""

    hf_names: dict[str, str]
    """Own parameter name -> HF state-dict name."""

    @property
    def tied_parameter(self) -> nn.Parameter | None:
        """The embedding matrix that the first and the last stage share; None if it isn't here."""
        ...

    @property
    def tied_weight(self) -> nn.Parameter:
        """The same where it exists, for DeepSpeed."""
        ...


StageFactory = Callable[[int], StageModule]
"""Builds stage `index` of the pipeline, in fp32 on the CPU."""


@dataclass(frozen=True)
class StepResult:
    """One inner step."""

    loss: float
    """Mean over the cluster's whole batch: all micro-batches of all replicas."""
    grad_norm: float
    """2-norm of the whole model's averaged gradient before clipping; inf if the step was skipped
    because the gradient was not finite."""
    seconds: float
    """Wall-clock time of the step on this rank."""


class ClusterEngine:
    """A pipeline of S stages with D data-parallel replicas (ZeRO-1); rank = stage * D + replica.

    All methods are collective over the cluster. `weights` reads and writes the fp32 masters,
    `agreement` makes decisions common to all ranks.
    """

    def __init__(self, settings: Settings, build_stage: StageFactory, *, tied: bool) -> None:
        """Build this rank's stage, and DeepSpeed's engine around it. Opens the process group from
        the launcher's environment if need be.

        `tied`: whether the model's first and last stage share the embedding matrix. Raises
        LaunchError when the number of ranks is no multiple of the number of stages.
        """
        initialize()
        config = settings.deepspeed_config()
        stages = settings.dsx.pipeline.stages
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size % stages:
            raise LaunchError(
                f"{self.world_size} ranks can't hold {stages} stages (dsx.pipeline.stages) a whole "
                f"number of times; start a multiple of {stages}"
            )
        self.stage_count, self.replica_count = stages, self.world_size // stages
        self.stage_index, self.replica_index = divmod(self.rank, self.replica_count)
        self.micro_batches = settings.gradient_accumulation_steps
        self._batch_shape = (settings.train_micro_batch_size_per_gpu, settings.dsx.data.seq_len)
        with quiet_deepspeed(config.get("log_level")):
            pipeline = self._build_pipeline(build_stage, tied and stages > 1)
            full = {self.stage.hf_names[n]: p.data for n, p in self.stage.named_parameters()}
            self.optimizer = build_optimizer(
                config.pop("optimizer"), pipeline.parameters(), next(pipeline.parameters()).device
            )
            self._engine = deepspeed.initialize(
                model=pipeline, optimizer=self.optimizer, config=config
            )[0]
        if self._engine.using_bf16_optimizer:
            self._skip_idle_passes()
        self.agreement = ClusterAgreement()
        self.weights = self._link_weights(pipeline)
        # DeepSpeed fills bf16's masters from weights it has rounded; give them all their bits.
        self.weights.fill_masters(full)

    # ------------------------------------------------------------------ training and evaluation

    def train_step(self, batches: Iterator[Batch], lr: float) -> StepResult:
        """One inner step over `micro_batches` micro-batches of this replica, at rate `lr`.

        `batches` is drawn from on the first and the last stage only (ids here, labels there), so
        a stream's own position means nothing on the stages between.
        """
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = float(self._engine.train_batch(batches))
        return StepResult(
            loss=loss,
            grad_norm=float(self._engine.get_global_grad_norm()),
            seconds=time.perf_counter() - started,
        )

    def eval_loss(self, batches: Sequence[Batch]) -> float:
        """Mean loss over `batches`, the same list on every rank; the same value on every rank.

        The replicas share the work. Raises ValueError for an empty list, and for a micro-batch that
        hasn't the shape of training's, which the stages' buffers have.
        """
        if not batches:
            raise ValueError("an evaluation needs at least one micro-batch")
        for ids, _ in batches:
            if ids.shape != self._batch_shape:
                raise ValueError(
                    f"a micro-batch has the shape {tuple(ids.shape)}, but that of training is "
                    f"{self._batch_shape}"
                )
        own = batches[self.replica_index :: self.replica_count]
        losses = self._engine.eval_batch(
            iter(own), reduce_output=None, bcast_loss=False, num_micro_batches=len(own)
        )
        summed = sum(float(loss) for loss in losses) if losses else 0.0
        return self.agreement.total([summed])[0] / len(batches)

    def close(self) -> None:
        """Leave the cluster for good: the process group ends with the engine."""
        self._engine.destroy()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    # ------------------------------------------------------------------ construction

    def _build_pipeline(self, build_stage: StageFactory, tied: bool) -> PipelineModule:
        """One spec per stage: DeepSpeed then has nothing to partition, count or name."""
        specs = [
            _TiedStageSpec(build_stage, index)
            if tied and index in (0, self.stage_count - 1)
            else _StageSpec(build_stage, index)
            for index in range(self.stage_count)
        ]
        pipeline = PipelineModule(
            layers=specs,
            topology=PipeDataParallelTopology(num_pp=self.stage_count, num_dp=self.replica_count),
            loss_fn=causal_lm_loss,
            partition_method="uniform",
        )
        self.stage = cast(Any, specs[self.stage_index].stage)
        # On the last stage DeepSpeed takes the whole module that holds a tied weight for a copy
        # and leaves all of it out of the gradient norm; only the matrix itself is one.
        for parameter in self.stage.parameters():
            parameter.ds_pipe_replicated = (
                tied and self.stage_index > 0 and parameter is self.stage.tied_parameter
            )
        return pipeline

    def _skip_idle_passes(self) -> None:
        """Passes over all fp32 gradients that DeepSpeed makes in a bf16 step, to no effect."""
        if self.replica_count == 1:
            # It would copy them into a flat buffer, average it with nobody, and copy it back.
            self._engine.pipeline_enable_backward_allreduce = False
        # It would zero them a second time: its step() ends with that.
        wrapped = self._engine.optimizer
        wrapped.zero_grad = partial(wrapped.clear_lp_grads, set_to_none=True)

    def _link_weights(self, pipeline: PipelineModule) -> MasterWeights:
        named = dict(self.stage.named_parameters())
        parameters = {hf_name: named[own] for own, hf_name in self.stage.hf_names.items()}
        tied = None
        for link in pipeline.tied_comms.values():
            (name,) = (n for n, p in parameters.items() if p is self.stage.tied_parameter)
            tied = TiedLink(name=name, source=min(link["ranks"]), group=link["group"])
        group = pipeline.mpu().get_data_parallel_group()
        return MasterWeights(parameters, self.optimizer, group, tied)


class _StageSpec(LayerSpec):
    """A spec that builds one whole stage, and remembers it."""

    def __init__(self, build_stage: StageFactory, index: int) -> None:
        super().__init__(nn.Module)
        self._build_stage, self._index = build_stage, index
        self.stage: StageModule | None = None

    def build(self, log: bool = False) -> StageModule:
        self.stage = self._build_stage(self._index)
        return self.stage


class _TiedStageSpec(TiedLayerSpec):
    """`_StageSpec` for the first and the last stage of a model with tied embeddings."""

    def __init__(self, build_stage: StageFactory, index: int) -> None:
        super().__init__(_TIED_KEY, nn.Module, tied_weight_attr="tied_weight")
        self._build_stage, self._index = build_stage, index
        self.stage: StageModule | None = None

    def build(self, log: bool = False) -> StageModule:
        self.stage = self._build_stage(self._index)
        return self.stage
