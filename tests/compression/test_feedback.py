"""Error feedback: what is remembered, and when."""

import math

import pytest
import torch

from dsx.compression.feedback import ErrorFeedback
from dsx.errors import CheckpointError


def test_the_residual_returns_decayed_after_a_commit():
    feedback = ErrorFeedback(decay=0.5)
    delta = torch.tensor([1.0, 2.0])
    assert feedback.add("w", delta).equal(delta)
    feedback.stage("w", torch.tensor([0.2, -0.4]))
    assert feedback.add("w", delta).equal(delta)
    feedback.commit()
    assert feedback.add("w", delta).allclose(torch.tensor([1.1, 1.8]))


def test_adding_gives_a_new_tensor_and_changes_nothing():
    feedback = ErrorFeedback(decay=1.0)
    delta = torch.ones(3)
    feedback.add("w", delta).zero_()
    assert delta.equal(torch.ones(3))
    feedback.stage("w", torch.ones(3))
    feedback.commit()
    feedback.add("w", delta).zero_()
    assert feedback.add("w", delta).equal(torch.full((3,), 2.0))


def test_a_discarded_round_leaves_no_trace():
    feedback = ErrorFeedback(decay=1.0)
    feedback.stage("w", torch.ones(2))
    feedback.commit()
    feedback.stage("w", torch.full((2,), 7.0))
    feedback.discard()
    feedback.commit()
    assert feedback.state_dict()["w"].equal(torch.ones(2))


def test_staging_again_replaces_and_commits_count_once():
    feedback = ErrorFeedback(decay=1.0)
    feedback.stage("w", torch.full((2,), 5.0))
    feedback.stage("w", torch.ones(2))
    feedback.commit()
    feedback.commit()
    assert feedback.add("w", torch.zeros(2)).equal(torch.ones(2))


def test_tensors_that_were_not_sent_keep_their_residual():
    feedback = ErrorFeedback(decay=1.0)
    feedback.stage("a", torch.ones(1))
    feedback.stage("b", torch.ones(1))
    feedback.commit()
    feedback.stage("a", torch.zeros(1))
    feedback.commit()
    assert feedback.add("b", torch.zeros(1)).equal(torch.ones(1))


def test_no_decay_left_means_no_feedback():
    feedback = ErrorFeedback(decay=0.0)
    feedback.stage("w", torch.ones(2))
    feedback.commit()
    assert feedback.add("w", torch.zeros(2)).equal(torch.zeros(2))
    assert feedback.state_dict() == {}


def test_updates_in_bf16_are_added_in_fp32():
    feedback = ErrorFeedback(decay=1.0)
    feedback.stage("w", torch.full((2,), 1e-4))
    feedback.commit()
    total = feedback.add("w", torch.ones(2, dtype=torch.bfloat16))
    assert total.dtype == torch.float32
    assert total.equal(torch.full((2,), 1.0001))


def test_a_state_comes_back_and_a_broken_one_is_refused():
    feedback, other = ErrorFeedback(decay=1.0), ErrorFeedback(decay=1.0)
    feedback.stage("w", torch.tensor([3.0, 4.0]))
    feedback.commit()
    other.load_state_dict(feedback.state_dict())
    assert other.norm() == 5.0
    with pytest.raises(CheckpointError, match="w in the checkpoint"):
        other.load_state_dict({"w": torch.tensor([math.nan])})
    assert other.norm() == 5.0
