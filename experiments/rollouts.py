"""Sampling from the policy: one small interface, and its implementation on transformers.

A sampler holds a *version* of the policy: the step whose weights it samples with. ``sync`` brings it
to the trainer's; sampling with a version that was not asked for is an error, never a silent answer.
``experiments.vllm_rollouts`` is the same interface on vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn

from experiments.losses import token_logps


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. ``temperature`` 0 takes the likeliest."""

    max_new_tokens: int
    end_ids: tuple[int, ...]
    pad_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Completion:
    """Sampled tokens, the end token included unless truncated, and their log-probabilities when drawn, in nats."""

    ids: list[int]
    logps: list[float]
    truncated: bool


class Sampler(Protocol):
    """What generates completions of prompts with some version of the policy."""

    name: str
    version: int
    separate: bool  # whether it is an engine elsewhere, of which must be shown that it follows the trainer

    def sync(self, model: nn.Module, version: int) -> None:
        """Sample with ``model``'s present weights from now on, under this version."""

    def sample(self, prompts: Sequence[Sequence[int]], how: Sampling, seed: int) -> list[Completion]:
        """One completion for each prompt (token ids); a function of the policy, the arguments and the seed."""

    def score(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probabilities, in nats, of the given tokens after the given prompts, one tensor for each pair."""

    def close(self) -> None:
        """Free what the sampler holds."""


class TransformersSampler:
    """Samples with the training model itself, so that a sync only moves the version.

    A prompt that follows itself (a group) is computed once and its cache repeated; completions that have
    ended leave the batch.
    """

    name = "transformers"
    separate = False

    def __init__(self) -> None:
        self.version = -1
        self._model: nn.Module | None = None

    def sync(self, model: nn.Module, version: int) -> None:
        self._model, self.version = model, version

    def close(self) -> None:
        self._model = None

    @torch.no_grad()
    def score(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[Tensor]:
        model = self._model
        if model is None:
            raise RuntimeError("the sampler was never synchronised")
        scores = []
        for prompt, completion in zip(prompts, completions, strict=True):
            ids_1T = torch.tensor([[*prompt, *completion]], device=next(model.parameters()).device)
            logits_1TV = model(input_ids=ids_1T, use_cache=False).logits[:, len(prompt) - 1 : -1]
            scores.append(token_logps(logits_1TV, ids_1T[:, len(prompt) :])[0].cpu())
        return scores

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], how: Sampling, seed: int) -> list[Completion]:
        model = self._model
        if model is None:
            raise RuntimeError("the sampler was never synchronised")
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
        was_training = model.training
        model.eval()
        distinct, repeats = runs(prompts)
        ids_PT, mask_PT = pad_left(distinct, how.pad_id, device)
        position_PT = (mask_PT.cumsum(1) - 1).clamp(min=0)
        out = model(
            input_ids=ids_PT, attention_mask=mask_PT, position_ids=position_PT, use_cache=True, logits_to_keep=1
        )
        cache, parent_N = (
            out.past_key_values,
            torch.arange(len(distinct), device=device).repeat_interleave(torch.tensor(repeats, device=device)),
        )
        cache.batch_select_indices(parent_N)
        logits_NV, mask_NT, position_N1 = out.logits[parent_N, -1], mask_PT[parent_N], position_PT[parent_N, -1:]
        end_ids = torch.tensor(how.end_ids, device=device)
        rows = list(range(len(prompts)))
        ids: list[list[int]] = [[] for _ in prompts]
        logps: list[list[float]] = [[] for _ in prompts]
        for drawn in range(1, how.max_new_tokens + 1):
            next_N1, logp_N1 = draw(logits_NV, how, generator)
            for row, token, logp in zip(rows, next_N1[:, 0].tolist(), logp_N1[:, 0].tolist(), strict=True):
                ids[row].append(token)
                logps[row].append(logp)
            alive_N = ~torch.isin(next_N1[:, 0], end_ids)
            if drawn == how.max_new_tokens or not alive_N.any():
                break
            if not alive_N.all():
                kept = alive_N.nonzero()[:, 0]
                rows = [rows[i] for i in kept.tolist()]
                cache.batch_select_indices(kept)
                next_N1, mask_NT, position_N1 = next_N1[kept], mask_NT[kept], position_N1[kept]
            mask_NT = torch.cat([mask_NT, torch.ones_like(next_N1)], dim=1)
            position_N1 = position_N1 + 1
            logits_NV = model(
                input_ids=next_N1,
                attention_mask=mask_NT,
                position_ids=position_N1,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
        model.train(was_training)
        return [Completion(row, logp, row[-1] not in how.end_ids) for row, logp in zip(ids, logps, strict=True)]


class FollowTest:
    """Proves, once a run, that a separate sampler follows the trainer.

    A few completions of the first batch are scored by both before and after an update. At the first
    update that moves the trainer's log-probabilities by more than ``LARGE_NATS`` on average, the
    sampler's must have moved alike; a sampler that answers with stale weights has not moved at all.
    """

    NUM_PROBES = 8
    LARGE_NATS = 0.02
    MAX_SHARE = 0.25

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.trainer = sampler, TransformersSampler()
        self.passed = not sampler.separate
        self._probes: tuple[list[Sequence[int]], list[list[int]]] | None = None
        self._before: tuple[Tensor, Tensor]

    def remember(self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> None:
        """Take the probes, scored by both, from a batch that was just sampled."""
        if not self.passed and self._probes is None and self.trainer.version == self.sampler.version:
            self._probes = list(prompts[: self.NUM_PROBES]), [c.ids for c in completions[: self.NUM_PROBES]]
            self._before = self._scores()

    def check(self, model: nn.Module) -> dict[str, float]:
        """Call after each sync. Returns how far trainer and sampler moved, once tested; RuntimeError if not alike."""
        self.trainer.sync(model, self.sampler.version)
        if self.passed or self._probes is None:
            return {}
        trainer, sampler = self._scores()
        moved, gap = trainer - self._before[0], (trainer - self._before[0]) - (sampler - self._before[1])
        if moved.abs().mean() < self.LARGE_NATS:
            return {}
        if not gap.abs().mean() <= self.MAX_SHARE * moved.abs().mean():
            raise RuntimeError(
                f"the {self.sampler.name} sampler does not follow the trainer: an update moved log-probabilities by "
                f"{moved.abs().mean():.3g} nats a token, the sampler's differ from that by {gap.abs().mean():.3g}"
            )
        self.passed = True
        return {"sampler/moved_nats": float(moved.abs().mean()), "sampler/moved_gap_nats": float(gap.abs().mean())}

    def _scores(self) -> tuple[Tensor, Tensor]:
        assert self._probes is not None
        return torch.cat(self.trainer.score(*self._probes)), torch.cat(self.sampler.score(*self._probes))


def draw(logits_NV: Tensor, how: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one token a row. Returns (N, 1) ids and their log-probabilities *in the distribution drawn from*."""
    if how.temperature == 0:
        logps_NV = torch.log_softmax(logits_NV.float(), dim=-1)
        chosen_N1 = logps_NV.argmax(dim=-1, keepdim=True)
        return chosen_N1, logps_NV.gather(1, chosen_N1)
    scaled_NV = logits_NV.float() / how.temperature
    if how.top_k:
        least_N1 = scaled_NV.topk(min(how.top_k, scaled_NV.shape[1])).values[:, -1:]
        scaled_NV = scaled_NV.masked_fill(scaled_NV < least_N1, -torch.inf)
    if how.top_p < 1:
        sorted_NV, order_NV = scaled_NV.softmax(dim=-1).sort(dim=-1, descending=True)
        beyond_NV = sorted_NV.cumsum(dim=-1) - sorted_NV >= how.top_p
        scaled_NV = scaled_NV.masked_fill(beyond_NV.gather(1, order_NV.argsort(dim=-1)), -torch.inf)
    logps_NV = torch.log_softmax(scaled_NV, dim=-1)
    chosen_N1 = torch.multinomial(logps_NV.exp(), 1, generator=generator)
    return chosen_N1, logps_NV.gather(1, chosen_N1)


def pad_left(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids_PT, mask_PT) of prompts of several lengths, padded where they begin."""
    longest = max(map(len, prompts))
    ids_PT = torch.full((len(prompts), longest), pad_id)
    mask_PT = torch.zeros((len(prompts), longest), dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids_PT[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask_PT[i, longest - len(prompt) :] = 1
    return ids_PT.to(device), mask_PT.to(device)


def runs(prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """Prompts without their immediate repetitions, and how often each stood there."""
    grouped = [(list(prompt), len(list(same))) for prompt, same in groupby(prompts, key=tuple)]
    return [prompt for prompt, _ in grouped], [count for _, count in grouped]
