"""One pipeline stage: consecutive layers of a causal LM, run by the library's own forward."""

from collections.abc import Callable

from torch import Tensor, nn
from transformers import PretrainedConfig

from dsx.errors import ModelError
from dsx.models.partition import StageRange


class Stage(nn.Module):
    """The layers of `stage_range` with, at the ends, the embedding and the output layer.

    Attributes:
        config: the unsplit model's config.
        stage_range: which layers these are.
        hf_names: from own parameter names to names in the unsplit model's state dict; both copies
            of a tied matrix map to the one name that checkpoints keep.
        hf_buffer_names: the same for persistent buffers.
        root: the causal LM (last stage) or its decoder (other stages), cut to these layers.
    """

    def __init__(
        self,
        root: nn.Module,
        config: PretrainedConfig,
        stage_range: StageRange,
        names: dict[int, str],
        tied: str | None,
    ) -> None:
        super().__init__()
        self.root = root
        self.config = config
        self.stage_range = stage_range
        self.hf_names = {n: names[id(p)] for n, p in self.named_parameters()}
        self.hf_buffer_names = {n: names[id(b)] for n, b in self.named_buffers() if id(b) in names}
        holders = [own for own, hf in self.hf_names.items() if hf == tied]
        self._tied_name = holders[0] if holders else None
        self._input = "input_ids" if stage_range.is_first else "inputs_embeds"
        self._output = "logits" if stage_range.is_last else "last_hidden_state"

    def forward(self, inputs: Tensor) -> Tensor:
        """Runs the layers.

        Args:
            inputs: token ids (B, T) int64 on the first stage, else hidden states (B, T, H).

        Returns:
            logits (B, T, V) on the last stage, else hidden states (B, T, H).
        """
        return getattr(self.root(use_cache=False, **{self._input: inputs}), self._output)

    @property
    def tied_parameter(self) -> nn.Parameter | None:
        """This stage's copy of the matrix that embedding and output layer share, if it has one."""
        return None if self._tied_name is None else self.get_parameter(self._tied_name)

    @property
    def tied_weight(self) -> nn.Parameter:
        """`tied_parameter` under the attribute that DeepSpeed's TiedLayerSpec is given."""
        parameter = self.tied_parameter
        if parameter is None:
            raise ModelError(f"stage {self.stage_range.index} holds no tied matrix")
        return parameter

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Stage":
        # `.bfloat16()` would round rotary frequencies; parameters alone follow a change of dtype.
        before = [
            (module._buffers, name, buffer)
            for module in self.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        ]
        super()._apply(fn, recurse)
        for buffers, name, buffer in before:
            after = buffers[name]
            if after is not None and after.dtype != buffer.dtype:
                buffers[name] = buffer.to(after.device)
        return self
