"""A pack: arms that take their steps together, each as if it were alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.config import MethodKind, RunConfig
from experiments.packed import stacks
from experiments.packed.adamw import AdamW, Settings
from experiments.packed.decoder import Decoder, Weights
from experiments.packed.ops import Factors
from experiments.packed.rows import Rows
from experiments.packed.stacks import FullLayout, Layout, LoRALayout, Stack


@dataclass
class Arm:
    """One run's training state, on its own: what a checkpoint holds. Rows of length P (see ``stacks``)."""

    name: str  # the run id
    config: RunConfig
    layout: Layout
    theta: Tensor
    m: Tensor
    v: Tensor
    num_steps: int = 0

    @property
    def is_full(self) -> bool:
        return self.config.method.kind is MethodKind.full

    @property
    def scale(self) -> float:
        """alpha / rank, the factor on B A."""
        return 1.0 if self.is_full else self.config.method.scale


BUCKETS = (16, 64, 256)
"""Ranks up to the same of these share a pack, where all are padded to the largest: at most fourfold above 16."""


class Kind(NamedTuple):
    """What arms of one pack have in common, and a property of each arm alone. ``bucket``: the largest rank it holds."""

    merged: bool
    bucket: int


def kind(layout: Layout, num_tokens: int) -> Kind:
    """How an arm is computed that takes steps on so many tokens.

    Merged is x (W + B A)^T, factored x W^T + x A^T B^T, whichever takes fewer FLOPs, forward and backward. Per matrix
    (o, i): 6 n o i + 6 r o i against 4 n o i + 6 n r (o + i); with many tokens merging wins above about r = N / 6.
    """
    if isinstance(layout, FullLayout):
        return Kind(False, 0)
    factored = merged = 0
    for part, a, _ in layout.pairs():
        o, i = part.shape
        factored += 4 * num_tokens * o * i + 6 * num_tokens * a.shape[0] * (i + o)
        merged += 6 * num_tokens * o * i + 6 * a.shape[0] * o * i
    bucket = next((top for top in BUCKETS if layout.rank <= top), layout.rank)
    return Kind(True, 0) if merged < factored else Kind(False, bucket)


class Pack:
    """K arms on one frozen base. All full fine-tuning, or all LoRA of any rank and placement.

    The arms are ordered by the shape of what they train; ``arms`` holds their names in that order. Their state is
    here while they are in the pack: ``take`` hands it out.
    """

    def __init__(self, decoder: Decoder, arms: Iterable[Arm], merged: bool = False) -> None:
        self.decoder, self.merged = decoder, merged
        order: dict[tuple, list[Arm]] = {}
        for arm in arms:
            order.setdefault((arm.layout.rank, tuple(slot.name for slot in arm.layout.slots)), []).append(arm)
        alike = [order[key] for key in sorted(order)]
        self.members = [arm for group in alike for arm in group]
        self.is_full = self.members[0].is_full
        if any(arm.is_full != self.is_full for arm in self.members):
            raise ValueError("a pack holds full fine-tuning or LoRA, not both")
        self.stack = Stack([arm.layout for arm in self.members], self.members[0].theta)
        self.scale = self.members[0].theta.new_tensor([arm.scale for arm in self.members])[:, None, None]
        self.optimizers = [self._optimizer(k, arm) for k, arm in enumerate(self.members)]
        self._groups = _groups(alike)
        self._weights = self._made()

    @property
    def arms(self) -> list[str]:
        return [arm.name for arm in self.members]

    def _optimizer(self, k: int, arm: Arm) -> AdamW:
        stack, optim = self.stack, arm.config.optim
        for of, row in ((stack.theta, arm.theta), (stack.m, arm.m), (stack.v, arm.v)):
            stack.put(of, k, row)
        settings = Settings(optim.lr, optim.beta1, optim.beta2, optim.eps, optim.weight_decay, optim.max_grad_norm)
        theta, grad, m, v = (stack.views(of, k) for of in (stack.theta, stack.grad, stack.m, stack.v))
        return AdamW(settings, theta, grad, m, v, arm.num_steps)

    def _made(self) -> Weights:
        """The weights of the forward pass; what carries gradients are its leaves."""
        if self.is_full:
            return Weights(self.decoder.base, self.stack.leaves(), {})
        if self.merged:
            stacked = stacks.merge(self.decoder, self.stack, self._groups, self.scale)
            return Weights(self.decoder.base, {name: t.requires_grad_() for name, t in stacked.items()}, {})
        leaves = self.stack.leaves()
        pairs = {part.name: (a.name, b.name) for _, layout in self._groups for part, a, b in layout.pairs()}
        factors = {name: Factors(leaves[a], leaves[b], self.scale) for name, (a, b) in pairs.items()}
        return Weights(self.decoder.base, {}, factors)

    def accumulate(self, rows: Rows, num_tokens: Tensor) -> Tensor:
        """Add the gradient of one micro-step; returns (K,) its summed NLL over ``num_tokens`` of the whole batch.

        The total is the sum over arms, so that an arm's gradient is what it would be alone.
        """
        losses = self.decoder.nll(self._weights, rows) / num_tokens
        losses.sum().backward()
        if self.merged:
            of_weights = {name: _taken(leaf) for name, leaf in self._weights.stacked.items()}
            stacks.unmerge(of_weights, self.stack, self._groups, self.scale)
        return losses.detach()

    @torch.no_grad()
    def step(self, stepping: Sequence[bool] | None = None) -> None:
        """An AdamW step of the arms whose batch is complete (default: all); the others go on accumulating."""
        chosen = [one for k, one in enumerate(self.optimizers) if stepping is None or stepping[k]]
        for optimizer in chosen:
            optimizer.step()
        if len(chosen) == len(self.optimizers):
            self.stack.clear_gradients()
        else:
            for optimizer in chosen:
                torch._foreach_zero_(optimizer.grad)
        self.refresh()

    def refresh(self) -> None:
        """Bring the weights of the forward pass up to the parameters; only merged ones are not the parameters."""
        if self.merged and not self.is_full:
            stacks.merge(self.decoder, self.stack, self._groups, self.scale, out=self._weights.stacked)

    def take(self, name: str) -> Arm:
        """A copy of an arm's state as it stands."""
        k = self.arms.index(name)
        theta, m, v = (self.stack.row(of, k) for of in (self.stack.theta, self.stack.m, self.stack.v))
        arm = self.members[k]
        return Arm(arm.name, arm.config, arm.layout, theta, m, v, self.optimizers[k].num_steps)

    @torch.no_grad()
    def weights_of(self, name: str) -> Weights:
        """An arm's weights for evaluation, merged."""
        k = self.arms.index(name)
        layout = self.stack.layouts[k]
        if isinstance(layout, FullLayout):
            return Weights(self.decoder.base, {n: t[k : k + 1] for n, t in self.stack.theta.items()}, {})
        merged = stacks.merge(self.decoder, self.stack, [(slice(k, k + 1), layout)], self.scale)
        return Weights(self.decoder.base, merged, {})


def _groups(alike: Sequence[Sequence[Arm]]) -> list[stacks.Alike]:
    """Where the arms that train the same lie; of LoRA only."""
    found: list[stacks.Alike] = []
    first = 0
    for group in alike:
        layout = group[0].layout
        if isinstance(layout, LoRALayout):
            found.append((slice(first, first + len(group)), layout))
        first += len(group)
    return found


def _taken(leaf: Tensor) -> Tensor:
    grad, leaf.grad = leaf.grad, None
    assert grad is not None
    return grad
