"""Loss maths against values worked out by hand."""

from __future__ import annotations

import math

import torch

from experiments.losses import IGNORED, num_labelled, token_nll_sum


def test_token_nll_sum_closed_form() -> None:
    """Two tokens predicted: one with probability 1/4 (uniform), one with e / (e + 3)."""
    logits = torch.zeros(1, 3, 4)
    logits[0, 1, 2] = 1.0
    labels = torch.tensor([[IGNORED, 3, 2]])
    expected = math.log(4) - math.log(math.e / (math.e + 3))
    assert math.isclose(token_nll_sum(logits, labels).item(), expected, rel_tol=1e-6)
    assert num_labelled(labels) == 2


def test_loss_ignores_prompt_and_padding() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7)
    labels = torch.tensor([[IGNORED, IGNORED, 3, 1, IGNORED], [IGNORED, 2, 1, 6, 0]])
    changed = logits.clone()
    changed[0, 0] += 5  # predicts an ignored token
    changed[0, 3:] -= 3  # predicts padding, and the last position predicts nothing
    changed[1, 4] *= 9
    assert torch.equal(token_nll_sum(logits, labels), token_nll_sum(changed, labels))
    assert num_labelled(labels) == 6


def test_first_position_is_never_predicted() -> None:
    assert num_labelled(torch.tensor([[4, IGNORED]])) == 0
