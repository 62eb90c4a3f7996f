"""The rules for the rank, on made-up spectra."""

import pytest
import torch

from dsx.compression.table import CodecTable
from dsx.errors import SettingsError
from dsx.outer.agreement import AloneAgreement
from dsx.outer.control import Control, Observed
from dsx.outer.rank_control import RankRule, build_rank_rule, payload_bytes
from dsx.outer.spectrum import effective_rank, leading_energies
from dsx.outer.state import Progress
from dsx.settings.codec_block import CompressionSettings
from dsx.settings.dsx_block import OuterSettings

SHAPES = {"a": torch.Size([40, 60]), "b": torch.Size([64, 32]), "norm": torch.Size([60])}


def with_values(shape: torch.Size, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A matrix of these singular values."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(side, len(values), generator=generator)).Q for side in shape
    )
    return left * values @ right.T


def outer(rank_rule: object, rank: int = 8, steps: object = "fixed", **more: object):  # type: ignore[no-untyped-def]
    return OuterSettings.model_validate(
        {
            "local_steps": 20,
            "compression": {"matrices": {"type": "lowrank", "rank": rank, "factors": "none"}},
            "adapt": {"rank": rank_rule, "local_steps": steps},
            **more,
        }
    )


def prepared(settings: OuterSettings) -> RankRule:
    rule = build_rank_rule(settings, None)
    rule.prepare(SHAPES, AloneAgreement())
    return rule


def totals(rule: RankRule, tensors: dict[str, torch.Tensor]) -> list[float]:
    parts = [rule.measure(name, value) for name, value in tensors.items()]
    return [sum(column) for column in zip(*parts, strict=True)]


@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (700, 600), (600, 1500)])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
def test_leading_energies_are_the_squared_singular_values(
    shape: tuple[int, int], scale: float
) -> None:
    values = 2.0 ** -torch.arange(12.0)
    matrix = with_values(torch.Size(shape), values) * scale
    energies, total = leading_energies(matrix, 10)
    expected = (values.double() * scale) ** 2
    torch.testing.assert_close(energies, expected[:10], rtol=1e-3, atol=1e-5 * scale**2)
    assert total == pytest.approx(float(expected.sum()), rel=1e-4)


def test_a_sketch_of_a_full_matrix_misses_little() -> None:
    matrix = with_values(torch.Size([600, 800]), 1 / torch.arange(1.0, 601.0))
    energies, total = leading_energies(matrix, 20)
    exact = torch.linalg.svdvals(matrix.double()) ** 2
    assert total == pytest.approx(float(exact.sum()), rel=1e-5)
    assert float(energies.sum()) == pytest.approx(float(exact[:20].sum()), rel=0.01)


def test_the_effective_rank_holds_its_share_and_no_smaller_one_does() -> None:
    energies = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    assert effective_rank(energies, 16.0, 0.5) == 1
    assert effective_rank(energies, 16.0, 0.25) == 2
    assert effective_rank(energies, 16.0, 0.2) == 3
    assert effective_rank(energies, 16.0, 0.01) == 5
    assert effective_rank(energies, 32.0, 0.01) == 5
    assert effective_rank(torch.zeros(3, dtype=torch.float64), 0.0, 0.1) == 1


def rounds(settings: OuterSettings, ranks: list[float]) -> list[tuple[int, int]]:
    """(rank, local steps) of the round after each commit."""
    control = Control(settings, None)
    progress = Progress()
    control.prepare(progress, SHAPES, AloneAgreement())
    seen = []
    for number, rank in enumerate(ranks, start=1):
        control.decide(progress, Observed(0.0, 0.0, [rank, rank], {}, 20 * number))
        seen.append((progress.rank, progress.local_steps))
    return seen


def test_the_papers_rank_follows_the_spectrum_and_never_rises() -> None:
    settings = outer({"type": "paper", "window": 3, "eps": 0.1})
    rule = prepared(settings)
    measured = []
    for real in (6, 6, 6, 6, 2, 2, 2, 2, 7, 7, 7, 7):
        tensors = {n: with_values(s, torch.ones(real)) for n, s in SHAPES.items() if len(s) == 2}
        tensors["norm"] = torch.ones(60)
        measured.append(rule.summary(totals(rule, tensors)))
    # Of r equal singular values, 9 tenths of the energy are in ceil(0.9 r).
    assert measured == [6.0] * 4 + [2.0] * 4 + [7.0] * 4
    ranks = [rank for rank, _ in rounds(settings, measured)]
    # Decided with the third round, in force a round later; (6 + 6 + 2) / 3 is 5 rounded up.
    assert ranks == [8, 8, 8, 6, 6, 5, 4, 2, 2, 2, 2, 2]


def test_the_papers_rank_stops_at_its_floor_and_the_steps_follow_it() -> None:
    settings = outer({"type": "paper", "window": 1, "min": 3}, steps="paper")
    assert rounds(settings, [6.0, 4.5, 1.0, 1.0]) == [(8, 20), (6, 15), (5, 13), (3, 8)]


def test_the_energy_rule_keeps_what_it_promises_within_its_budget() -> None:
    eps = 0.1
    settings = outer({"type": "energy", "eps": eps, "budget_bytes": 10_000})
    rule = prepared(settings)
    for decay in (0.3, 0.6, 0.8):
        tensors = {
            name: with_values(shape, decay ** torch.arange(20.0))
            for name, shape in SHAPES.items()
            if len(shape) == 2
        }
        tensors["norm"] = torch.ones(60)
        rank = int(rule.summary(totals(rule, tensors)))

        def kept(rank: int, tensors: dict[str, torch.Tensor] = tensors) -> float:
            matrices = [value for value in tensors.values() if value.dim() == 2]
            energies = [torch.linalg.svdvals(value.double()) ** 2 for value in matrices]
            whole = sum(float(e.sum()) for e in energies)
            return sum(float(e[:rank].sum()) for e in energies) / whole

        assert kept(rank) >= 1 - eps - 1e-6
        assert kept(rank - 1) < 1 - eps
        compression = settings.compression.model_copy(
            update={"matrices": settings.compression.matrices.model_copy(update={"rank": rank})}
        )
        table = CodecTable(compression)
        # The first subspaces are random: after a few rounds they are the leading ones.
        for round_ in range(6):
            sent, left, whole = 0, 0.0, 0.0
            for name, value in tensors.items():
                message, residual = table.encode_with_residual(name, value, round_)
                sent += message.numel()
                if value.dim() == 2:
                    left += float(residual.double().square().sum())
                    whole += float(value.double().square().sum())
            table.commit()
        assert sent <= 10_000
        assert left / whole <= eps + 1e-4


def test_the_energy_rule_stops_at_its_budget() -> None:
    sizes = payload_bytes(outer("fixed").compression, SHAPES, None, 40)
    assert sizes == sorted(sizes)
    settings = outer({"type": "energy", "eps": 0.01, "budget_bytes": sizes[4]})
    rule = prepared(settings)
    flat = {n: with_values(s, torch.ones(30)) for n, s in SHAPES.items() if len(s) == 2}
    assert rule.summary(totals(rule, flat)) == 5.0
    # The rank that the codec starts with is over the budget, too.
    assert rounds(settings, [2.0, 4.0, 4.0, 1.0, 1.0, 1.0]) == [
        (rank, 20) for rank in (5, 2, 4, 4, 4, 4)
    ]


def test_the_sizes_that_the_budget_rests_on_are_those_of_messages() -> None:
    compression = CompressionSettings.model_validate(
        {"matrices": {"type": "lowrank", "rank": 1}, "vectors": "int8"}
    )
    sizes = payload_bytes(compression, SHAPES, None, 9)
    for rank in (1, 4, 9):
        table = CodecTable(compression)
        table.set_rank(rank)
        sent = sum(
            table.encode(name, torch.randn(shape), 7).numel() for name, shape in SHAPES.items()
        )
        # Up to the note on zero rows, of which there are none here.
        assert sizes[rank - 1] - 24 <= sent <= sizes[rank - 1]


def test_a_budget_too_small_for_rank_one_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"budget_bytes is 100, but .* rank 1 takes up to \d+"):
        prepared(outer({"type": "energy", "budget_bytes": 100}))


def test_nothing_measured_changes_nothing() -> None:
    for rule in ({"type": "paper", "window": 1}, {"type": "energy", "budget_bytes": 10_000}):
        settings = outer(rule)
        control = Control(settings, None)
        progress = Progress()
        control.prepare(progress, SHAPES, AloneAgreement())
        for number in range(3):
            control.decide(progress, Observed(0.0, 0.0, [], {}, number))
        assert (progress.rank, progress.next_rank) == (8, 8)
        assert control.rank_rule.summary([0.0] * control.rank_rule.length) == 0.0
