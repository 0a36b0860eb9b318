"""Sampling for several arms in one batch: each draws what it would draw alone, by transformers too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from single import NUM_TOKENS, Base
from torch import nn

import experiments.packed.generate as generation
from experiments.packed.decoder import Decoder, Weights
from experiments.packed.generate import Request, generate
from experiments.packed.policy import merged
from experiments.rollouts import Completion, Sampling, TransformersSampler

END = 1


def request(seed: int, num_prompts: int, repeats: int, max_new_tokens: int, temperature: float = 1.0) -> Request:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(5, NUM_TOKENS, int(rng.integers(1, 12))).tolist() for _ in range(num_prompts)]
    ends = (END, *range(20, 32))  # so that completions end at many steps
    how = Sampling(max_new_tokens, ends, 0, temperature)
    return Request([p for p in prompts for _ in range(repeats)], how, seed)


REQUESTS = [request(0, 3, 8, 12), request(1, 9, 1, 5), request(2, 1, 1, 20, 0.5), request(3, 4, 4, 16, 0.0)]


def models_of(base: Base) -> list[nn.Module]:
    ranks = (4, 1, 16, 0)
    return [base.reference(base.arm(base.run(rank, unembed=rank == 4, init=rank), moved=0.1)) for rank in ranks]


def weights_of(decoder: Decoder, models: list[nn.Module]) -> Weights:
    """Of all arms together: a matrix that one of them trains is stacked for all."""
    each = [merged(decoder, model) for model in models]
    names = {name for weights in each for name in weights.stacked}
    stacks = {n: torch.cat([w.stacked.get(n, decoder.base[n][None]) for w in each]) for n in names}
    return Weights(decoder.base, stacks, {})


def alone(model: nn.Module, asked: Request) -> list[Completion]:
    sampler = TransformersSampler()
    sampler.sync(model, 0)
    return sampler.sample(asked.prompts, asked.how, asked.seed)


def completions(found: list[Completion] | Exception) -> list[Completion]:
    assert not isinstance(found, Exception)
    return found


@pytest.mark.parametrize("worth", [1.0, 0.75, 0.0])
def test_arms_draw_together_what_each_draws_alone(
    bases: dict[str, Base], monkeypatch: pytest.MonkeyPatch, worth: float
) -> None:
    """Other prompts, lengths, numbers, temperatures and limits beside them; the same tokens, and what they are worth.
    Rows that have ended leave at once, as usual, or never."""
    base, copies, real = bases["llama"], [], generation._Batch._keep
    monkeypatch.setattr(generation, "WORTH_A_COPY", worth)
    monkeypatch.setattr(generation._Batch, "_keep", lambda *a: (copies.append(len(a[1])), real(*a))[1])
    models = models_of(base)
    together = generate(base.decoder, weights_of(base.decoder, models), REQUESTS)
    lengths = set()
    for model, asked, found in zip(models, REQUESTS, map(completions, together), strict=True):
        expected = alone(model, asked)
        assert [(c.ids, c.truncated) for c in found] == [(c.ids, c.truncated) for c in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.logps == pytest.approx(theirs.logps, abs=1e-4)
        lengths |= {len(c.ids) for c in found}
    assert len(lengths) > 8 and (len(copies) > 1) == (worth > 0)  # and rows left the batch


def test_arm_without_numbers_fails_alone(bases: dict[str, Base]) -> None:
    """The others draw what they draw beside a sound one, bit for bit."""
    base = bases["qwen3"]
    models = models_of(base)
    whole = weights_of(base.decoder, models)
    sound = generate(base.decoder, whole, [*REQUESTS[:3], REQUESTS[0]])
    with torch.no_grad():
        for tensor in whole.stacked.values():
            tensor[1] = torch.nan
    found = generate(base.decoder, whole, [*REQUESTS[:3], REQUESTS[0]])
    assert isinstance(found[1], RuntimeError) and isinstance(sound[1], list)
    assert [found[k] for k in (0, 2, 3)] == [sound[k] for k in (0, 2, 3)]
