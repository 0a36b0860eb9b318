"""Loss maths: tensors in, tensors out. No I/O, no configuration."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""Label of a token that carries no loss (prompt and padding)."""


def token_nll_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Summed negative log-likelihood, in nats, of the labelled tokens given what precedes them.

    Args:
        logits_BTV: position t predicts the token at t + 1; cast to fp32 first.
        labels_BT: token ids, or IGNORED where no loss is taken. Position 0 is never predicted.
    Returns: scalar; divide by ``num_labelled`` of the *whole* batch, not of the micro-batch.
    """
    logits_NV = logits_BTV[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits_NV, labels_BT[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def num_labelled(labels_BT: Tensor) -> Tensor:
    """How many tokens of ``labels_BT`` are predicted (position 0 is not). Returns an integer scalar."""
    return (labels_BT[:, 1:] != IGNORED).sum()


def token_logps(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """(B, T) log-probabilities, in nats and fp32, of the tokens ``ids_BT`` that the logits there predict."""
    return -F.cross_entropy(logits_BTV.flatten(0, 1).float(), ids_BT.flatten(), reduction="none").view(ids_BT.shape)


def policy_gradient_loss(
    logps_BT: Tensor, sampler_logps_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor, clip_ratio: float = 0.0
) -> Tensor:
    """Minus the importance-weighted advantage, summed over the sampled tokens (the post, section RL).

    Args:
        logps_BT: of the sampled tokens under the learner; carries the gradient.
        sampler_logps_BT: of the same tokens under the policy that sampled them.
        advantages_B: reward minus the mean of its group.
        mask_BT: 1 for sampled tokens, 0 for padding and for what a tool said.
        clip_ratio: 0 for the post's objective; otherwise PPO's clipping of the ratio to 1 +- this.
    Returns: scalar sum; divide by a constant (the number of completions), not by the number of tokens.
    """
    sampled_BT = mask_BT.bool()
    ratio_BT = (logps_BT - sampler_logps_BT).masked_fill(~sampled_BT, 0.0).exp()
    gain_BT = ratio_BT * advantages_B[:, None]
    if clip_ratio:
        gain_BT = gain_BT.minimum(ratio_BT.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages_B[:, None])
    return -gain_BT.masked_fill(~sampled_BT, 0.0).sum()
