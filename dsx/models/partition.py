"""Which consecutive layers each pipeline stage holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dsx.errors import ModelError


@dataclass(frozen=True)
class StageRange:
    """Stage `index` of `stages`: the layers `start` to `stop - 1` of the model.

    The first stage also holds the embedding, the last one the final norm and the output layer.
    """

    index: int
    stages: int
    start: int
    stop: int

    @property
    def is_first(self) -> bool:
        """Takes token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Gives logits."""
        return self.index == self.stages - 1


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of the embedding, of each layer, and of the final norm with the output layer.

    A tied matrix counts in `embedding` and, if `tied` (its size) is not 0, once more in `head`,
    because first and last stage each hold it; `total` counts it once.
    """

    embedding: int
    layers: tuple[int, ...]
    head: int
    tied: int

    @property
    def total(self) -> int:
        """Parameters of the unsplit model."""
        return self.embedding + sum(self.layers) + self.head - self.tied


def split_layers(
    counts: ParameterCounts, stages: int, how: Literal["parameters", "uniform"] | Sequence[int]
) -> list[StageRange]:
    """Deals the layers out to `stages` stages, at least one each, in order.

    "parameters" makes the largest stage (embedding and head included) as small as possible,
    "uniform" gives each stage the same number of layers (earlier ones take the remainder), a
    sequence gives the number of layers of each stage.

    Raises ModelError if that can't be done.
    """
    total = len(counts.layers)
    if stages < 1 or stages > total:
        raise ModelError(
            f"{stages} pipeline stages can't share {total} layers: every stage needs at least one; "
            f"set dsx.pipeline.stages to 1..{total}"
        )
    if isinstance(how, str):
        sizes = _balanced(counts, stages) if how == "parameters" else _uniform(total, stages)
    else:
        sizes = list(how)
        if len(sizes) != stages or sum(sizes) != total or min(sizes) < 1:
            raise ModelError(
                f"dsx.pipeline.partition {sizes} (sum {sum(sizes)}) must be {stages} positive "
                f"layer counts that sum to {total}"
            )
    bounds = [sum(sizes[:i]) for i in range(stages + 1)]
    return [StageRange(i, stages, bounds[i], bounds[i + 1]) for i in range(stages)]


def _uniform(total: int, stages: int) -> list[int]:
    size, extra = divmod(total, stages)
    return [size + (i < extra) for i in range(stages)]


def _balanced(counts: ParameterCounts, stages: int) -> list[int]:
    """Minimises the largest stage, then the sum of squares, by dynamic programming."""
    prefix = [0]
    for count in counts.layers:
        prefix.append(prefix[-1] + count)
    total = len(counts.layers)

    def size(stage: int, start: int, stop: int) -> int:
        extra = counts.embedding * (stage == 0) + counts.head * (stage == stages - 1)
        if stages == 1:
            extra -= counts.tied
        return prefix[stop] - prefix[start] + extra

    # best[stop] = (largest stage, sum of squares, layers per stage) for the layers before `stop`
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(stages):
        reached: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        remaining = stages - stage - 1
        for stop in range(stage + 1, total - remaining + 1):
            if remaining == 0 and stop != total:
                continue
            options = []
            for start, (largest, squares, sizes) in best.items():
                if start < stop:
                    own = size(stage, start, stop)
                    options.append((max(largest, own), squares + own**2, (*sizes, stop - start)))
            reached[stop] = min(options)
        best = reached
    return list(best[total][2])
