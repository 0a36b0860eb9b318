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
