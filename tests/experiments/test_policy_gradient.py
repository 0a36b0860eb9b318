"""The gradient of the post's objective against derivatives worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from experiments.losses import policy_gradient_loss, token_logps

IDS_BT = torch.tensor([[1, 0], [0, 1]])  # completions (1) and (0, 1) of the toy policy; the first is padded with 0
MASK_BT = torch.tensor([[1, 0], [1, 1]])
ADVANTAGES_B = torch.tensor([0.75, -1.5])
THETA = 0.3


def toy_logps(theta: Tensor) -> Tensor:
    """Log-probabilities of ``IDS_BT`` under a policy with p(1) = sigmoid(theta) everywhere."""
    logits_V = torch.stack([torch.zeros(()), theta])
    return token_logps(logits_V.expand(2, 2, 2), IDS_BT)


def gradient(sampler_BT: Tensor, **settings: float) -> tuple[float, float]:
    theta = torch.tensor(THETA, requires_grad=True)
    loss = policy_gradient_loss(toy_logps(theta), sampler_BT, ADVANTAGES_B, MASK_BT, **settings)
    loss.backward()
    assert theta.grad is not None
    return loss.item(), theta.grad.item()


def test_token_logps_by_hand() -> None:
    logits_BTV = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0]], [[2.0, 1.0], [-5.0, 1000.0]]])
    ids_BT = torch.tensor([[1, 0], [1, 0]])
    expected = torch.tensor([[math.log(3 / 4), math.log(1 / 2)], [-math.log(1 + math.e), -1005.0]])
    torch.testing.assert_close(token_logps(logits_BTV, ids_BT), expected, rtol=1e-6, atol=1e-6)


def test_token_logps_of_bf16_logits_are_fp32() -> None:
    """Logits 0 and 5 are exact in bf16; the log-probability -ln(1 + e^-5) = -0.0067153 is not."""
    found = token_logps(torch.tensor([[[0.0, 5.0]]], dtype=torch.bfloat16), torch.tensor([[1]]))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(-math.log1p(math.exp(-5)), abs=1e-6)


def test_gradient_is_the_derivative_by_hand() -> None:
    """L = -sum ratio A with d log p(1) / d theta = p(0) and d log p(0) / d theta = -p(1)."""
    p1 = 1 / (1 + math.exp(-THETA))
    p0 = 1 - p1
    sampler_BT = torch.tensor([[math.log(0.8), 0.0], [math.log(0.2), math.log(0.3)]])
    loss, slope = gradient(sampler_BT)
    assert loss == pytest.approx(-(p1 / 0.8 * 0.75 + p0 / 0.2 * -1.5 + p1 / 0.3 * -1.5), abs=1e-6)
    assert slope == pytest.approx(-(p1 / 0.8 * 0.75 * p0 + p0 / 0.2 * -1.5 * -p1 + p1 / 0.3 * -1.5 * p0), abs=1e-6)


def test_ratio_one_is_plain_reinforce() -> None:
    """The loss is minus the advantage of every token, and its gradient that of -sum A log p."""
    p1 = 1 / (1 + math.exp(-THETA))
    loss, slope = gradient(toy_logps(torch.tensor(THETA)))
    assert loss == pytest.approx(-(0.75 * 1 + -1.5 * 2), abs=1e-6)
    assert slope == pytest.approx(-(0.75 * (1 - p1) + -1.5 * (-p1) + -1.5 * (1 - p1)), abs=1e-6)


@pytest.mark.parametrize("junk", [-math.inf, -1e30, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("clip_ratio", [0.0, 0.2])
def test_masked_tokens_carry_nothing_whatever_they_hold(junk: float, clip_ratio: float) -> None:
    results = []
    for learner_junk, sampler_junk in ((0.0, 0.0), (junk, 0.0), (0.0, junk), (junk, junk)):
        logps_BT = torch.tensor([[-0.5, learner_junk], [-1.0, -0.2]], requires_grad=True)
        sampler_BT = torch.tensor([[-0.6, sampler_junk], [-1.1, -0.1]])
        loss = policy_gradient_loss(logps_BT, sampler_BT, ADVANTAGES_B, MASK_BT, clip_ratio)
        loss.backward()
        assert logps_BT.grad is not None and logps_BT.grad[0, 1] == 0
        results.append((loss.item(), logps_BT.grad.tolist()))
    assert all(result == results[0] for result in results) and math.isfinite(results[0][0])


def test_mask_may_be_of_any_type_and_of_nothing() -> None:
    logps_BT, sampler_BT = torch.tensor([[-0.5, -0.1], [-1.0, -0.2]]), torch.full((2, 2), -0.7)
    losses = {policy_gradient_loss(logps_BT, sampler_BT, ADVANTAGES_B, MASK_BT.to(t)).item()
              for t in (torch.bool, torch.int32, torch.float32)}  # fmt: skip
    assert len(losses) == 1
    assert policy_gradient_loss(logps_BT, sampler_BT, ADVANTAGES_B, torch.zeros(2, 2)) == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "kept"),
    [
        (1.5, 1.0, 1.2, False),  # already likelier than it may become
        (1.5, -1.0, -1.5, True),
        (0.5, 1.0, 0.5, True),
        (0.5, -1.0, -0.8, False),  # already less likely than it may become
        (1.1, 1.0, 1.1, True),
        (0.9, -1.0, -0.9, True),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_clip_ratio_cuts_the_gradient_where_ppo_does(ratio: float, advantage: float, gain: float, kept: bool) -> None:
    logps_BT = torch.tensor([[-1.0]], requires_grad=True)
    sampler_BT = torch.tensor([[-1.0 - math.log(ratio)]])
    loss = policy_gradient_loss(logps_BT, sampler_BT, torch.tensor([advantage]), torch.ones(1, 1), clip_ratio=0.2)
    loss.backward()
    assert logps_BT.grad is not None
    assert loss.item() == pytest.approx(-gain, abs=1e-6)
    assert logps_BT.grad.item() == pytest.approx(-ratio * advantage if kept else 0.0, abs=1e-6)


@pytest.mark.parametrize("ratio", [0.01, 100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_nothing_is_clipped_by_default(ratio: float, advantage: float) -> None:
    logps_BT = torch.tensor([[-1.0]], requires_grad=True)
    sampler_BT = torch.tensor([[-1.0 - math.log(ratio)]])
    policy_gradient_loss(logps_BT, sampler_BT, torch.tensor([advantage]), torch.ones(1, 1)).backward()
    assert logps_BT.grad is not None and logps_BT.grad.item() == pytest.approx(-ratio * advantage, rel=1e-5)
