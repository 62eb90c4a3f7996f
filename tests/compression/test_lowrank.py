"""Factors of low rank: how close they come, what they remember, what they survive."""

import pytest
import torch

from dsx.compression.build import build_codec
from dsx.compression.exact import exact_product
from dsx.compression.lowrank import LowRank
from dsx.compression.measure import relative_error
from dsx.compression.orthonormal import fit, orthonormal_columns
from dsx.errors import CheckpointError
from dsx.settings.codec_block import Int4Codec, LowRankCodec, NoneCodec
from tests.compression.codecs import decaying


def build(rank: int, factors=None, seed: int = 0) -> LowRank:
    codec = build_codec(LowRankCodec(rank=rank, factors=factors or NoneCodec()), seed)
    assert isinstance(codec, LowRank)
    return codec


def error_after(codec: LowRank, value: torch.Tensor, rounds: int, name: str = "w") -> float:
    for _ in range(rounds):
        body = codec.encode(name, value)
        codec.commit(name)
    return relative_error(value, codec.decode(body, value.shape))


def test_full_rank_is_the_matrix_itself():
    value = torch.randn(30, 20)
    codec = build(20)
    assert codec.decode(codec.encode("w", value), value.shape).equal(value)


@pytest.mark.parametrize("shape", [(96, 64), (64, 96), (8, 12, 64)])
def test_a_matrix_of_that_rank_comes_back_to_1e_5(shape):
    columns = shape[-1]
    rows = torch.Size(shape).numel() // columns
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, 6, generator=generator)
    value = (left @ torch.randn(6, columns, generator=generator)).view(shape)
    codec = build(6)
    assert codec.encode("w", value).numel() == 4 * 6 * (rows + columns) + 1
    assert error_after(codec, value, rounds=2) < 1e-5


def test_warm_starts_approach_the_best_subspace():
    value = decaying(128, 96)
    singular = torch.linalg.svdvals(value)
    best = float(singular[8:].norm() / singular.norm())
    first = error_after(build(8), value, rounds=1)
    last = error_after(build(8), value, rounds=6)
    assert best <= last < 1.01 * best
    assert first > 1.1 * best


def test_int4_factors_cost_little_more_error():
    value = decaying(512, 384)
    exact = error_after(build(16), value, rounds=6)
    coarse = error_after(build(16, Int4Codec()), value, rounds=6)
    assert exact < coarse < 1.4 * exact


def test_encoding_changes_nothing_until_the_round_commits():
    value = decaying(64, 48)
    codec = build(4)
    first = codec.encode("w", value)
    assert codec.encode("w", value).equal(first)
    codec.discard("w")
    codec.commit("w")
    assert codec.encode("w", value).equal(first)
    assert codec.state_dict() == {}
    codec.commit("w")
    assert not codec.encode("w", value).equal(first)


def test_the_first_subspace_follows_from_seed_and_name():
    value = decaying(64, 48)
    body = build(4, seed=1).encode("a", value)
    assert build(4, seed=1).encode("a", value).equal(body)
    assert not build(4, seed=2).encode("a", value).equal(body)
    assert not build(4, seed=1).encode("b", value).equal(body)


def test_a_restored_state_goes_on_alike():
    value = decaying(64, 48)
    codec, restored = build(4), build(4)
    error_after(codec, value, rounds=2)
    restored.load_state_dict(codec.state_dict())
    assert restored.encode("w", value).equal(codec.encode("w", value))


def test_the_state_of_another_shape_is_refused():
    codec = build(4)
    codec.load_state_dict({"w": torch.randn(50, 4)})
    with pytest.raises(CheckpointError, match="48"):
        codec.encode("w", torch.randn(64, 48))


def test_the_rank_may_change_between_rounds():
    value = decaying(128, 96)
    codec = build(8)
    at_8 = error_after(codec, value, rounds=5)
    codec.set_rank(4)
    assert error_after(codec, value, rounds=1) < 1.02 * error_after(build(4), value, rounds=5)
    codec.set_rank(12)
    at_12 = error_after(codec, value, rounds=4)
    assert at_12 < at_8
    assert codec.settings.rank == 12


@pytest.mark.parametrize("factors", [NoneCodec(), Int4Codec()])
def test_degenerate_matrices_survive(factors):
    rank_one = torch.outer(torch.randn(64), torch.randn(48))
    constant = torch.ones(64, 48)
    one_row = torch.zeros(64, 48)
    one_row[7] = torch.randn(48)
    for value in (rank_one, constant, one_row, 1e-30 * rank_one, 1e30 * rank_one):
        error = error_after(build(4, factors), value, rounds=3)
        assert error < (1e-5 if factors == NoneCodec() else 0.4)


@pytest.mark.parametrize("matrix", ["random", "zero", "repeated", "tiny", "huge", "graded"])
def test_columns_become_orthonormal(matrix):
    a = torch.randn(50, 8)
    if matrix == "zero":
        a = torch.zeros(50, 8)
    elif matrix == "repeated":
        a = a[:, :1].repeat(1, 8)
    elif matrix == "tiny":
        a *= 1e-38
    elif matrix == "huge":
        a *= 1e37
    elif matrix == "graded":
        a *= torch.logspace(0, -30, 8)
    q = orthonormal_columns(a)
    assert torch.allclose(q.T @ q, torch.eye(8), atol=1e-4)
    if matrix == "random":
        assert torch.allclose(q @ (q.T @ a), a, atol=1e-4)


def test_a_fit_to_a_rounded_basis_is_the_least_squares_one():
    matrix, basis = torch.randn(60, 40), torch.randn(60, 5)
    expected = torch.linalg.lstsq(basis, matrix).solution.T
    assert torch.allclose(fit(basis, matrix), expected, atol=1e-4)
    assert bool(torch.isfinite(fit(torch.zeros(60, 5), matrix)).all())


def test_the_product_does_not_depend_on_the_order_of_summation():
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(64, 40, generator=generator) * torch.logspace(0, -6, 64).unsqueeze(1)
    q = torch.randn(64, 30, generator=generator) * torch.logspace(2, -9, 64).unsqueeze(1)
    product = exact_product(p, q)
    for _ in range(20):
        order = torch.randperm(64, generator=generator)
        assert exact_product(p[order], q[order]).equal(product)
    assert not all(
        (p[order].T @ q[order]).equal(p.T @ q)
        for order in [torch.randperm(64, generator=generator) for _ in range(20)]
    )
    exact = p.double().T @ q.double()
    assert float((product - exact).norm() / exact.norm()) < 1e-6
