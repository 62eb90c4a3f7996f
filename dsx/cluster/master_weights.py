"""The fp32 master weights and optimizer moments of a rank's stage, by HF parameter name.

With ZeRO-1 the inner optimizer owns one flat fp32 partition per replica; the module's weights (bf16
or fp32) are copies that every step overwrites. An outer step therefore writes both. DeepSpeed's own
`safe_set_full_fp32_param` writes the partition only: the module is stale until the next step.

Two DeepSpeed optimizers arise (see `dsx.cluster.engine`): `DeepSpeedZeroOptimizer` for
fp32 and `BF16_Optimizer` for bf16 with fp32 accumulation. Both leave in torch's optimizer one flat
fp32 tensor per parameter group, and on each parameter a `_hp_mapping` that says which of its
elements lie where in that tensor. This module relies on these two facts and on nothing else.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from dsx.cluster.ownership import Span, assign_owners, buckets

BUCKET_ELEMENTS = 16 * 2**20
"""fp32 elements that move between replicas at a time: 64 MiB, of which a few exist at once."""

MASTER = "master"
"""The kind of state that is the weight itself; others are optimizer moments (`exp_avg`, ...)."""


@dataclass(frozen=True)
class TiedLink:
    """The way from the first stage's embedding matrix to the last stage's copy of it."""

    name: str
    """HF name of the matrix, the same on both stages."""
    source: int
    """Global rank of the first stage's end."""
    group: dist.ProcessGroup
    """Exactly the two ranks of one replica that hold a copy."""


class MasterWeights:
    """State of one rank's stage: reads and writes whole tensors, owner by owner.

    Implements `dsx.outer.weights.LocalWeights`. All methods that move tensors are collective over
    the cluster: every rank calls them in the same order, with the same `kind`. With one replica
    nothing is sent but the tied matrix.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        replica_group: dist.ProcessGroup,
        tied: TiedLink | None,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        """`parameters`: all trainable parameters of the stage by HF name, after
        `deepspeed.initialize`; `optimizer`: torch's, the one inside DeepSpeed's;
        `replica_group`: the ranks that hold the same stage; `tied`: on the first and the last stage
        of a model with tied embeddings, when these are two stages. Collective.
        """
        self._parameters = dict(parameters)
        self._optimizer = optimizer
        self._group = replica_group
        self._replica = dist.get_rank(replica_group)
        self._replicas = dist.get_world_size(replica_group)
        self._tied = tied
        self._bucket_elements = bucket_elements
        self._device = next(iter(self._parameters.values())).device
        own = {name: self._own_fragment(name) for name in self._parameters}
        everybody: list[dict[str, Span]] = [{}] * self._replicas
        dist.all_gather_object(everybody, own, group=replica_group)
        self._fragments = everybody
        """Of each replica: which elements of each parameter its partition holds."""
        self._sizes = {
            name: parameter.numel()
            for name, parameter in self._parameters.items()
            if not self._is_copy(name)
        }
        self._owners = assign_owners(self._sizes, self._replicas)

    # ------------------------------------------------------------------ what there is

    def shapes(self) -> dict[str, torch.Size]:
        """Names and shapes of the tensors that this replica owns, in the stage's order."""
        return {
            name: self._parameters[name].shape
            for name, owner in self._owners.items()
            if owner == self._replica
        }

    def moment_kinds(self) -> tuple[str, ...]:
        """Kinds of optimizer moments: ("exp_avg", "exp_avg_sq"), ("momentum_buffer",) or ()."""
        if isinstance(self._optimizer, torch.optim.Adam):  # AdamW is a subclass
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self._optimizer.defaults.get("momentum") else ()

    # ------------------------------------------------------------------ reading

    def fetch(self, kind: str = MASTER) -> dict[str, torch.Tensor]:
        """Copies of the owned tensors: fp32, on the CPU. Collective."""
        return dict(self.stream(kind))

    @torch.no_grad()
    def stream(self, kind: str = MASTER) -> Iterator[tuple[str, torch.Tensor]]:
        """`fetch`, one tensor at a time. Collective: every rank has to exhaust it."""
        flats = self._flats(kind)
        pending: dict[str, torch.Tensor] = {}
        for bucket in buckets(self._sizes, self._bucket_elements):
            for span, values in self._gather(bucket, flats):
                size = self._sizes[span.name]
                whole = pending.setdefault(span.name, torch.empty(size, dtype=torch.float32))
                whole[span.start : span.stop].copy_(values)
                if span.stop == size:
                    del pending[span.name]
                    yield span.name, whole.view(self._parameters[span.name].shape)

    # ------------------------------------------------------------------ writing

    @torch.no_grad()
    def store(self, tensors: Mapping[str, torch.Tensor], kind: str = MASTER) -> None:
        """Set all owned tensors, and every copy of them: partitions, module, tied. Collective.

        `tensors` holds fp32 tensors for exactly the names of `shapes()`; a lazy mapping is read
        once per name, in that order. Raises ValueError on other names or shapes.
        """
        shapes = self.shapes()
        if set(tensors) != set(shapes):
            wrong = sorted(set(tensors) ^ set(shapes))
            raise ValueError(f"every owned tensor must be given and no other; differing: {wrong}")
        flats = self._flats(kind)
        current = ("", torch.empty(0))
        for bucket in buckets(self._sizes, self._bucket_elements):
            for owner in range(self._replicas):
                spans = [span for span in bucket if self._owners[span.name] == owner]
                if not spans:
                    continue
                values = torch.empty(sum(map(len, spans)), dtype=torch.float32, device=self._device)
                at = 0
                for span in spans:
                    if owner == self._replica:
                        if current[0] != span.name:
                            current = (span.name, self._checked(span.name, tensors, shapes))
                        part = current[1][span.start : span.stop]
                        values[at : at + len(span)].copy_(part)
                    at += len(span)
                if self._replicas > 1:
                    source = dist.get_global_rank(self._group, owner)
                    dist.broadcast(values, src=source, group=self._group)
                at = 0
                for span in spans:
                    self._put(span, values[at : at + len(span)], flats, kind)
                    at += len(span)
        self._hand_over_tied(flats, kind)

    @torch.no_grad()
    def fill_masters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set this replica's part of the masters, and nothing else. `values`: whole fp32 tensors by
        name, the same on all replicas.
        """
        flats = self._flats(MASTER)
        for name, value in values.items():
            mine = self._fragments[self._replica][name]
            if len(mine):
                self._part(mine, flats).copy_(value.reshape(-1)[mine.start : mine.stop])

    # ------------------------------------------------------------------ the optimizer's step count

    @property
    def optimizer_steps(self) -> int:
        """Steps the inner optimizer has counted, as far as it counts (Adam's bias correction)."""
        counts = {int(state["step"]) for state in self._optimizer.state.values() if "step" in state}
        return max(counts, default=0)

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        if "exp_avg" in self.moment_kinds():
            for group in self._optimizer.param_groups:
                for flat in group["params"]:
                    self._state(flat)["step"].fill_(steps)

    # ------------------------------------------------------------------ inside one rank

    def _is_copy(self, name: str) -> bool:
        tied = self._tied
        return tied is not None and tied.name == name and dist.get_rank() != tied.source

    def _own_fragment(self, name: str) -> Span:
        mapping = self._parameters[name]._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return Span(name, 0, 0)
        address = mapping.lp_fragment_address
        return Span(name, address.start, address.start + address.numel)

    def _flats(self, kind: str) -> list[torch.Tensor]:
        """This replica's flat partition of `kind`, per parameter group."""
        flats = [group["params"][0] for group in self._optimizer.param_groups]
        if kind == MASTER:
            return [flat.data for flat in flats]
        if kind not in self.moment_kinds():
            raise ValueError(
                f"the inner optimizer has no {kind!r}; it has {', '.join(self.moment_kinds())}"
            )
        return [self._state(flat)[kind] for flat in flats]

    def _state(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """torch's state of a flat partition; before the first step, what that step would create."""
        state = self._optimizer.state[flat]
        if not state:
            if "exp_avg" in self.moment_kinds():
                on_device = (
                    self._optimizer.defaults["fused"] or self._optimizer.defaults["capturable"]
                )
                state["step"] = torch.zeros(
                    (), dtype=torch.float32, device=flat.device if on_device else "cpu"
                )
            for kind in self.moment_kinds():
                state[kind] = torch.zeros_like(flat.data)
        return state

    def _part(self, span: Span, flats: list[torch.Tensor]) -> torch.Tensor:
        """A view of the elements of `span`, all of which this replica's partition holds."""
        mapping = self._parameters[span.name]._hp_mapping  # type: ignore[attr-defined]
        offset = mapping.hp_fragment_address.start - mapping.lp_fragment_address.start
        return flats[mapping.param_group_index].narrow(0, offset + span.start, len(span))

    def _put(self, span: Span, values: torch.Tensor, flats: list[torch.Tensor], kind: str) -> None:
        """Write `values`, the elements of `span`, wherever this rank keeps them."""
        fragment = self._fragments[self._replica][span.name]
        mine = span.cut(fragment.start, fragment.stop)
        if len(mine):
            part = values[mine.start - span.start : mine.stop - span.start]
            self._part(mine, flats).copy_(part)
        if kind == MASTER:
            self._parameters[span.name].data.view(-1)[span.start : span.stop].copy_(values)

    def _checked(
        self, name: str, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]
    ) -> torch.Tensor:
        tensor = tensors[name]
        if tensor.shape != shapes[name] or tensor.dtype != torch.float32:
            raise ValueError(
                f"{name} must be fp32 of shape {tuple(shapes[name])}, but is {tensor.dtype} of "
                f"shape {tuple(tensor.shape)}"
            )
        return tensor.reshape(-1)

    # ------------------------------------------------------------------ between ranks

    def _gather(
        self, bucket: list[Span], flats: list[torch.Tensor]
    ) -> Iterator[tuple[Span, torch.Tensor]]:
        """The spans of `bucket` that this replica owns, with values from all partitions."""
        if self._replicas == 1:
            for span in bucket:
                yield span, self._part(span, flats)
            return
        outgoing = [
            [self._held(span, self._replica) for span in bucket if self._owners[span.name] == owner]
            for owner in range(self._replicas)
        ]
        owned = [span for span in bucket if self._owners[span.name] == self._replica]
        incoming = [
            [self._held(span, replica) for span in owned] for replica in range(self._replicas)
        ]
        parts = [self._part(span, flats) for spans in outgoing for span in spans if len(span)]
        nothing = torch.empty(0, dtype=torch.float32, device=self._device)
        sent = torch.cat(parts) if parts else nothing
        received_from = [sum(map(len, spans)) for spans in incoming]
        received = torch.empty(sum(received_from), dtype=torch.float32, device=self._device)
        dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=received_from,
            input_split_sizes=[sum(map(len, spans)) for spans in outgoing],
            group=self._group,
        )
        wholes = {span: torch.empty(len(span), device=self._device) for span in owned}
        at = 0
        for spans in incoming:
            for span, piece in zip(owned, spans, strict=True):
                low = piece.start - span.start
                wholes[span][low : low + len(piece)].copy_(received[at : at + len(piece)])
                at += len(piece)
        yield from wholes.items()

    def _held(self, span: Span, replica: int) -> Span:
        fragment = self._fragments[replica][span.name]
        return span.cut(fragment.start, fragment.stop)

    def _hand_over_tied(self, flats: list[torch.Tensor], kind: str) -> None:
        """One tied matrix, two stages: the owner's result goes to the other copy (invariant I3).

        The first stage holds the whole matrix in its module, but in fp32 only by partition, so
        with several replicas it is gathered again span by span.
        """
        if self._tied is None:
            return
        name = self._tied.name
        sizes = {name: self._parameters[name].numel()}
        is_source = not self._is_copy(name)
        for bucket in buckets(sizes, self._bucket_elements):
            for span in bucket:
                if is_source:
                    values = self._whole(span, flats)
                else:
                    values = torch.empty(len(span), dtype=torch.float32, device=self._device)
                dist.broadcast(values, src=self._tied.source, group=self._tied.group)
                if not is_source:
                    self._put(span, values, flats, kind)

    def _whole(self, span: Span, flats: list[torch.Tensor]) -> torch.Tensor:
        """The values of `span` on every replica of this stage."""
        values = torch.zeros(len(span), dtype=torch.float32, device=self._device)
        mine = self._held(span, self._replica)
        if len(mine):
            low = mine.start - span.start
            values[low : low + len(mine)].copy_(self._part(mine, flats))
        if self._replicas > 1:
            # The others add zeros; as integers, so that a -0.0 keeps its sign bit.
            dist.all_reduce(values.view(torch.int32), group=self._group)
        return values
