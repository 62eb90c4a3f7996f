"""What a micro-batch costs on a piece of the model, found by running it without memory or numbers.

The library's own layers run forward and backward on fake tensors, which have shapes and lifetimes
but no data. Operations and live bytes are therefore those of the real code, for every family, and
no formula has to know what an attention or an MLP looks like. Attention is the fused kind, which
keeps no sequence x sequence matrix.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from dsx.errors import ModelError
from dsx.models.build import build_stage
from dsx.models.loss import causal_lm_loss
from dsx.models.partition import StageRange
from dsx.models.plan import ModelPlan
from dsx.models.skeleton import build_skeleton
from dsx.models.stage import Stage


@dataclass(frozen=True)
class Cost:
    """Of one micro-batch on one stage, parameters and their gradients not counted."""

    forward_flops: int
    """Multiplications and additions of the matrix products and the attention (of the whole square,
    as published utilizations count it)."""
    backward_flops: int
    """What is computed again (checkpointing) included."""
    kept_bytes: int
    """Held from the end of the forward pass to the backward pass."""
    peak_bytes: int
    """Most that is live at once in either pass, a parameter's gradient and its fp32 copy included
    while they are added to the sum of the step."""


def trace(
    plan: ModelPlan,
    stage: StageRange,
    micro_batch: int,
    seq_len: int,
    dtype: torch.dtype,
    checkpointing: bool,
) -> Cost:
    """Run `stage` on a micro-batch of `micro_batch` sequences of `seq_len` tokens.

    Raises:
        ModelError: the stage does something that depends on the data, as routing tokens to experts.
    """
    skeleton = build_skeleton(plan.config)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = _with_parameters_of(dtype, build_stage(skeleton, stage, None, checkpointing))
        tokens = (micro_batch, seq_len)
        if stage.is_first:
            inputs = torch.zeros(tokens, dtype=torch.int64)
        else:
            inputs = torch.zeros((*tokens, plan.hidden_size), dtype=dtype, requires_grad=True)
        try:
            return _measure(module, inputs, torch.zeros(tokens, dtype=torch.int64), stage.is_last)
        except RuntimeError as error:
            family = plan.config.model_type
            raise ModelError(
                f"what a layer of the family {family!r} costs depends on the data, so that it "
                f"can't be planned: {str(error).splitlines()[0]}; use a dense model_type"
            ) from error


def _measure(module: Stage, inputs: Tensor, labels: Tensor, is_last: bool) -> Cost:
    live = _LiveBytes()
    forward, backward = (
        FlopCounterMode(
            display=False,
            custom_mapping={
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
            },
        )
        for _ in range(2)
    )
    with _gradients_added_at_once(module), _no_collection(), live:
        with forward:
            output = module(inputs)
            if is_last:
                output = causal_lm_loss(output, labels)
        kept = live.bytes
        with backward:
            output.backward(torch.ones_like(output))
    return Cost(
        forward_flops=forward.get_total_flops(),
        backward_flops=backward.get_total_flops(),
        kept_bytes=kept,
        peak_bytes=live.peak,
    )


def _with_parameters_of(dtype: torch.dtype, module: Stage) -> Stage:
    """Parameters alone change, as under DeepSpeed; buffers stay in fp32."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
    return module


@contextmanager
def _gradients_added_at_once(module: nn.Module) -> Iterator[None]:
    """Each parameter's gradient goes to the fp32 sum as soon as it is there, and is freed."""

    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.float()
            parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(add) for p in module.parameters()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _no_collection() -> Iterator[None]:
    """What only the collector of circles would free counts as live: the same in every run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _LiveBytes(TorchDispatchMode):
    """Adds up the storages made inside of it that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        inputs = [*tree_leaves(args), *tree_leaves(kwargs or {})]
        before = {id(t.untyped_storage()) for t in inputs if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage(), before)
        return result

    def _see(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key = id(storage)
        if key in self._known or key in before:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def _attention(
    query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kw: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))


def _backward(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kw: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))
