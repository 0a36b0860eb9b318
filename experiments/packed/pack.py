"""A pack: arms that take their steps together, each as if it were alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.config import MethodKind, OptimConfig, RunConfig
from experiments.packed import stacks
from experiments.packed.adamw import Settings, step_
from experiments.packed.decoder import Decoder, Weights
from experiments.packed.rows import Rows
from experiments.packed.stacks import FullLayout, Layout, LoRALayout


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
        groups = [order[key] for key in sorted(order)]
        self.members = [arm for group in groups for arm in group]
        self.is_full = self.members[0].is_full
        if any(arm.is_full != self.is_full for arm in self.members):
            raise ValueError("a pack holds full fine-tuning or LoRA, not both")
        self.layouts = [group[0].layout for group in groups]
        self.thetas, self.ms, self.vs = ([torch.stack([getattr(arm, which) for arm in group]) for group in groups]
                                         for which in ("theta", "m", "v"))  # fmt: skip
        self.scales = [self._column([arm.scale for arm in group])[..., None] for group in groups]
        self.num_steps = [self._column([float(arm.num_steps) for arm in group]) for group in groups]
        self.settings = [self._settings([arm.config.optim for arm in group]) for group in groups]
        self.grads: list[Tensor | None] = [None] * len(groups)
        self._weights = self._made()

    @property
    def arms(self) -> list[str]:
        return [arm.name for arm in self.members]

    def _column(self, values: Sequence[float]) -> Tensor:
        like = self.decoder.base["norm"]
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.tensor(values, dtype=dtype, device=like.device)[:, None]

    def _settings(self, optims: Sequence[OptimConfig]) -> Settings:
        names = ("lr", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm")
        return Settings(*(self._column([getattr(optim, name) for optim in optims]) for name in names))

    def _made(self) -> Weights:
        """The weights of the forward pass; what carries gradients are its leaves."""
        if self.is_full:
            (layout,) = self.layouts
            assert isinstance(layout, FullLayout)
            made = stacks.full_weights(self.decoder, layout, self.thetas[0])
            for name, tensor in made.stacked.items():
                made.stacked[name] = tensor.detach().requires_grad_()
            return made
        lora: list[LoRALayout] = self.layouts  # type: ignore[assignment]
        if self.merged:
            stacked = stacks.merge(self.decoder, lora, self.thetas, self.scales)
            return Weights(self.decoder.base, {n: t.requires_grad_() for n, t in stacked.items()}, {})
        pairs = stacks.factors(self.decoder, lora, self.thetas, self.scales)
        for leaf in (leaf for pair in pairs.values() for leaf in (pair.a, pair.b)):
            leaf.requires_grad_()
        return Weights(self.decoder.base, {}, pairs)

    def accumulate(self, rows: Rows, num_tokens: Tensor) -> Tensor:
        """Add the gradient of one micro-step; returns (K,) its summed NLL over ``num_tokens`` of the whole batch.

        The total is the sum over arms, so that an arm's gradient is what it would be alone.
        """
        losses = self.decoder.nll(self._weights, rows) / num_tokens
        losses.sum().backward()
        for g, grad in enumerate(self._pulled()):
            before = self.grads[g]
            self.grads[g] = grad if before is None else before.add_(grad)
        return losses.detach()

    @torch.no_grad()
    def _pulled(self) -> list[Tensor]:
        """Gradients of the leaves, brought to the rows; the leaves are cleared."""
        made = self._weights
        if self.is_full:
            grad = torch.zeros_like(self.thetas[0])
            view = stacks.full_weights(self.decoder, self.layouts[0], grad).stacked  # type: ignore[arg-type]
            for name, leaf in made.stacked.items():
                if leaf.grad is not None:
                    view[name].copy_(leaf.grad)
                    leaf.grad = None
            return [grad]
        lora: list[LoRALayout] = self.layouts  # type: ignore[assignment]
        if self.merged:
            of_weights = {name: _taken(leaf) for name, leaf in made.stacked.items()}
            return stacks.unmerge(of_weights, lora, self.thetas, self.scales)
        of_factors = {n: pair._replace(a=_taken(pair.a), b=_taken(pair.b)) for n, pair in made.factors.items()}
        return stacks.unfactor(self.decoder, of_factors, lora, self.thetas, self.scales)

    @torch.no_grad()
    def step(self, stepping: Sequence[bool] | None = None) -> None:
        """An AdamW step of the arms whose batch is complete (default: all); the others go on accumulating."""
        first = 0
        for g, theta in enumerate(self.thetas):
            mine = [True] * len(theta) if stepping is None else stepping[first : first + len(theta)]
            first += len(theta)
            grad = self.grads[g]
            assert grad is not None
            if all(mine):
                self.num_steps[g] += 1
                step_(theta, self.ms[g], self.vs[g], grad, self.num_steps[g], self.settings[g])
                self.grads[g] = None
            elif any(mine):  # on a copy of their rows: nothing of the others is read or written
                chosen = torch.tensor([k for k, is_on in enumerate(mine) if is_on])
                self.num_steps[g][chosen] += 1
                new_theta, m, v = theta[chosen], self.ms[g][chosen], self.vs[g][chosen]
                step_(new_theta, m, v, grad[chosen], self.num_steps[g][chosen], self.settings[g].of(chosen))
                theta[chosen], self.ms[g][chosen], self.vs[g][chosen] = new_theta, m, v
                grad[chosen] = 0.0
        self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        lora: list[LoRALayout] = self.layouts  # type: ignore[assignment]
        if self.is_full:
            return  # views
        if self.merged:
            stacks.merge(self.decoder, lora, self.thetas, self.scales, out=self._weights.stacked)
        else:
            stacks.factors(self.decoder, lora, self.thetas, self.scales, out=self._weights.factors)

    def _place(self, name: str) -> tuple[int, int]:
        """(stack, row) of an arm."""
        k = self.arms.index(name)
        for g, theta in enumerate(self.thetas):
            if k < len(theta):
                return g, k
            k -= len(theta)
        raise KeyError(name)

    def take(self, name: str) -> Arm:
        """A copy of an arm's state as it stands."""
        g, k = self._place(name)
        arm = self.members[self.arms.index(name)]
        return Arm(arm.name, arm.config, arm.layout, self.thetas[g][k].clone(), self.ms[g][k].clone(),
                   self.vs[g][k].clone(), int(self.num_steps[g][k]))  # fmt: skip

    @torch.no_grad()
    def weights_of(self, name: str) -> Weights:
        """An arm's weights for evaluation, merged."""
        g, k = self._place(name)
        theta, layout = self.thetas[g][k : k + 1], self.layouts[g]
        if isinstance(layout, FullLayout):
            return stacks.full_weights(self.decoder, layout, theta)
        return Weights(
            self.decoder.base, stacks.merge(self.decoder, [layout], [theta], [self.scales[g][k : k + 1]]), {}
        )


def _taken(leaf: Tensor) -> Tensor:
    grad, leaf.grad = leaf.grad, None
    assert grad is not None
    return grad
