"""Sampling for many arms at once: their sequences take each decoding step together.

An arm draws from its own generator, row by row as ``rollouts.TransformersSampler`` does, so that its completions
are those it would draw alone, by either sampler, up to rounding.

Sizes as in ``ops``; P prompts and n sequences per arm, T cells of cache per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.packed.decoder import EMBEDDING, Decoder, Weights
from experiments.packed.ops import turn
from experiments.packed.rows import MULTIPLE
from experiments.rollouts import Completion, Sampling, draw, pad_left, runs

WORTH_A_COPY = 0.75
"""Rows that go on, as a fraction of all, from which on the cache is copied without the others."""


@dataclass
class Request:
    """What one arm asks for: a completion of each prompt, a repeated one being computed once."""

    prompts: Sequence[Sequence[int]]
    how: Sampling
    seed: int


@torch.no_grad()
def generate(decoder: Decoder, weights: Weights, requests: Sequence[Request]) -> list[list[Completion] | Exception]:
    """The completions of each request, of arm k with the weights of arm k; an exception where its draws failed."""
    device = decoder.base[EMBEDDING].device
    arms = [_Arm(request, device) for request in requests]
    batch = _Batch(decoder, weights, arms, device)
    logits = batch.prompts()
    while True:
        for k, arm in enumerate(arms):
            arm.take(logits[k])
        if not any(arm.live for arm in arms):
            return [arm.error or arm.completions() for arm in arms]
        logits = batch.step()


class _Arm:
    """The sequences of a request: what was drawn, and which of the arm's rows go on."""

    def __init__(self, request: Request, device: torch.device) -> None:
        self.how, self.generator = request.how, torch.Generator(device).manual_seed(request.seed)
        self.distinct, repeats = runs(request.prompts)
        self.parents = [i for i, repeat in enumerate(repeats) for _ in range(repeat)]
        self.ids: list[list[int]] = [[] for _ in request.prompts]
        self.logps: list[list[float]] = [[] for _ in request.prompts]
        self.live = list(range(len(request.prompts)))  # sequences
        self.rows = torch.arange(len(self.live), device=device)  # the row of each of them
        self.error: Exception | None = None

    def take(self, logits: Tensor) -> None:
        """Draw the next token of every sequence that goes on, from its row of ``logits`` (n, V)."""
        if not self.live:
            return
        try:
            next_N1, logp_N1 = draw(logits.index_select(0, self.rows), self.how, self.generator)
        except RuntimeError as error:  # no distribution to draw from: not finite
            self.error, self.live, self.rows = error, [], self.rows[:0]
            return
        tokens = next_N1[:, 0].tolist()
        for sequence, token, logp in zip(self.live, tokens, logp_N1[:, 0].tolist(), strict=True):
            self.ids[sequence].append(token)
            self.logps[sequence].append(logp)
        at_end = len(self.ids[self.live[0]]) == self.how.max_new_tokens
        alive = [i for i, token in enumerate(tokens) if token not in self.how.end_ids and not at_end]
        self.live, self.rows = [self.live[i] for i in alive], self.rows[alive]

    def completions(self) -> list[Completion]:
        return [
            Completion(ids, logps, ids[-1] not in self.how.end_ids)
            for ids, logps in zip(self.ids, self.logps, strict=True)
        ]


class _Batch:
    """The sequences of all arms side by side, n of each arm, with their cache. Shorter prompts begin later."""

    def __init__(self, decoder: Decoder, weights: Weights, arms: Sequence[_Arm], device: torch.device) -> None:
        self.decoder, self.weights, self.arms = decoder, weights, arms
        most = max(len(arm.distinct) for arm in arms)
        padded = [[*arm.distinct, *[arm.distinct[0]] * (most - len(arm.distinct))] for arm in arms]
        ids, is_token = pad_left([prompt for prompts in padded for prompt in prompts], 0, device)
        self.ids, self.num_cells = ids.view(len(arms), -1), ids.shape[1]
        self.starts = self.num_cells - is_token.sum(1)  # (K P,) cell of the first token; of sequences later
        self.room = max(arm.how.max_new_tokens for arm in arms)
        self.keys: list[Tensor] = []  # of each layer, (K P, H_kv, T, d); of sequences later
        self.values: list[Tensor] = []
        cos, sin = decoder.turns(self.num_cells + self.room)
        self.cos, self.sin = cos, sin[:, : sin.shape[-1] // 2]

    def prompts(self) -> Tensor:
        """(K, n, V) logits of the first token of every sequence."""
        cells = torch.arange(self.num_cells, device=self.ids.device)
        seen = (cells[None, :, None] >= cells) & (cells >= self.starts[:, None, None])
        mask = self._mask(seen | torch.eye(len(cells), dtype=torch.bool, device=cells.device))
        turns = self._turns((cells - self.starts[:, None]).clamp(min=0))

        def attention(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries, keys, values = self._heads(q, k, v, turns)
            self.keys.append(keys)
            self.values.append(values)
            return self._attended(queries, keys, values, mask).view(q.shape)

        last = (torch.arange(len(self.starts), device=cells.device) + 1) * len(cells) - 1
        logits = self.decoder.forward(self.weights, self.ids, attention, last)
        parents = self._rows([arm.parents for arm in self.arms], most=logits.shape[1])
        self._keep(parents, self.room)
        return logits.flatten(0, 1).index_select(0, parents).unflatten(0, (len(self.arms), -1))

    def step(self) -> Tensor:
        """(K, n, V) logits of the next token, after the one that was just drawn."""
        self._leave()
        n, cell = len(self.starts) // len(self.arms), self.num_cells
        self.ids = torch.zeros((len(self.arms), n), dtype=torch.long, device=self.starts.device)
        for arm, row in zip(self.arms, self.ids, strict=True):
            row[arm.rows] = torch.tensor([arm.ids[i][-1] for i in arm.live], dtype=torch.long, device=row.device)
        turns = self._turns((cell - self.starts)[:, None])
        mask = self._mask((torch.arange(cell + 1, device=self.starts.device) >= self.starts[:, None])[:, None])

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries, key, value = self._heads(q, k, v, turns)
            keys, values = self.keys[layer], self.values[layer]
            keys[:, :, cell], values[:, :, cell] = key[:, :, 0], value[:, :, 0]
            return self._attended(queries, keys[:, :, : cell + 1], values[:, :, : cell + 1], mask).view(q.shape)

        self.num_cells += 1
        return self.decoder.forward(self.weights, self.ids, attention)

    def _leave(self) -> None:
        """Drop the rows of sequences that have ended, where they are enough to be worth a copy of the others."""
        n = len(self.starts) // len(self.arms)
        if _rounded(max(len(arm.live) for arm in self.arms)) <= WORTH_A_COPY * n:
            self._keep(self._rows([arm.rows.tolist() for arm in self.arms], most=n), 0)
            for arm in self.arms:
                arm.rows = torch.arange(len(arm.live), device=arm.rows.device)

    def _rows(self, of_arms: Sequence[Sequence[int]], most: int) -> Tensor:
        """(K n,) the rows of each arm, of ``most`` it has, counted through all arms; filled up with its first."""
        n = _rounded(max(map(len, of_arms)))
        rows = [k * most + i for k, of_arm in enumerate(of_arms) for i in [*of_arm, *[0] * (n - len(of_arm))]]
        return torch.tensor(rows, device=self.starts.device)

    def _keep(self, rows: Tensor, room: int) -> None:
        """Go on with these rows, in this order, and so many more cells."""
        self.starts = self.starts[rows]
        for cache in (self.keys, self.values):
            for j, cells in enumerate(cache):
                kept = cells.index_select(0, rows)
                cache[j] = F.pad(kept, (0, 0, 0, room)) if room else kept

    def _mask(self, seen: Tensor) -> Tensor:
        """(K P, 1, L, T) 0 where a cell is attended to, else -inf."""
        return self.cos.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None]

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos (K P, L, 1, d) and sin (K P, L, 1, d / 2) of the positions (K P, L)."""
        return self.cos[positions][:, :, None], self.sin[positions][:, :, None]

    def _heads(self, q: Tensor, k: Tensor, v: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(K P, heads, L, d) of rows (K, P L, heads d), queries and keys turned by their positions."""
        shape = (len(self.starts), -1, self.cos.shape[-1])
        length = turns[0].shape[1]
        q, k, v = (x.reshape(shape[0], length, -1, shape[2]) for x in (q, k, v))
        return turn(q, *turns).transpose(1, 2), turn(k, *turns).transpose(1, 2), v.transpose(1, 2)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """(K P, L, H d)."""
        found = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] > k.shape[1])
        return found.transpose(1, 2).flatten(2)


def _rounded(num_rows: int) -> int:
    return -(-num_rows // MULTIPLE) * MULTIPLE
