"""The policy on rows: its gradients and log-probabilities are transformers', whatever shares a prompt with what."""

from __future__ import annotations

import pytest
import torch
from single import Base, distance, doubled, plain
from test_gradients import EXACT, LORA, exact_norms  # noqa: F401  (a fixture)
from torch import Tensor, nn

from experiments.packed import rows
from experiments.packed.decoder import Decoder
from experiments.packed.policy import PackedSampler, completion_logps, merged, trained
from experiments.packed.rows import lay_out_completions

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7], [10, 11, 0, 12, 13, 14, 15], [5]]  # one begins as another, one holds a pad
ASKED = [0, 1, 2, 0, 0, 3, 2, 1, 0, 2]  # not in groups: TRL shuffles a batch
COMPLETIONS = [[6, 1], [1], [7, 8, 9, 10, 11, 12, 1], [6, 1], [9, 0, 5, 1], [5, 5], [1], [8, 9], [12, 11, 10], [13, 1]]
TEMPERATURE = 0.7


def padded() -> dict[str, Tensor]:
    """As TRL pads: prompts where they begin, completions where they end."""
    found = {}
    for part, texts in (("prompt", [PROMPTS[i] for i in ASKED]), ("completion", COMPLETIONS)):
        longest = max(map(len, texts))
        fills = [[0] * (longest - len(text)) for text in texts]
        pairs = [(f, t) if part == "prompt" else (t, f) for t, f in zip(texts, fills, strict=True)]
        found[f"{part}_ids"] = torch.tensor([[*a, *b] for a, b in pairs])
        marks = [([0] * len(f), [1] * len(t)) for t, f in zip(texts, fills, strict=True)]
        found[f"{part}_mask"] = torch.tensor([[*a, *b] if part == "prompt" else [*b, *a] for a, b in marks])
    return found


def by_transformers(model: nn.Module) -> Tensor:
    """(B, T), each completion by itself after its prompt."""
    found = []
    for i, completion in zip(ASKED, COMPLETIONS, strict=True):
        logits = model(input_ids=torch.tensor([[*PROMPTS[i], *completion]]), use_cache=False).logits[0]
        logps = (logits / TEMPERATURE).log_softmax(-1)[len(PROMPTS[i]) - 1 : -1]
        chosen = logps[torch.arange(len(completion)), torch.tensor(completion)]
        found.append(nn.functional.pad(chosen, (0, 7 - len(completion))))
    return torch.stack(found)


def gradients(model: nn.Module, logps: Tensor) -> dict[str, Tensor]:
    chosen = {plain(name): p for name, p in model.named_parameters() if p.requires_grad}
    weights = torch.linspace(-1, 2, logps.numel(), dtype=logps.dtype).view_as(logps)
    return dict(zip(chosen, torch.autograd.grad((logps * weights).sum(), list(chosen.values())), strict=True))


@pytest.mark.parametrize("block", [64, 8], ids=["together", "apart"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_log_probabilities_and_gradients_are_transformers(
    bases: dict[str, Base],
    exact_norms: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    block: int,
) -> None:
    """In double precision, full fine-tuning and LoRA; blocks with room for every completion and for one or two."""
    monkeypatch.setattr(rows, "SHARED_BLOCK", block)
    base = bases[name]
    decoder = Decoder(base.model().double())
    for config in [base.run(0), *(base.run(*lora) for lora in LORA)]:
        model = base.reference(doubled(base.arm(config, moved=0.05)))
        found, wanted = completion_logps(decoder, model, padded(), TEMPERATURE), by_transformers(model)
        assert distance(found.detach(), wanted.detach()) <= EXACT
        mine, theirs = gradients(model, found), gradients(model, wanted)
        assert max(distance(mine[key], theirs[key]) for key in theirs) <= EXACT


def test_prompt_is_computed_once_for_what_fits_with_it() -> None:
    prompts = [PROMPTS[i] for i in ASKED]
    laid = lay_out_completions(prompts, COMPLETIONS)
    num_tokens = sum(map(len, PROMPTS)) + sum(map(len, COMPLETIONS))
    assert laid.grid.shape == (1, 64) and laid.ids.shape[1] == -(-(num_tokens + 1) // 8) * 8
    assert laid.targets[laid.weights.bool()].tolist() == [token for text in COMPLETIONS for token in text]
    long = lay_out_completions([[5] * 50] * 4, [[6] * 10, [7] * 5, [8] * 9, [9] * 4])
    assert long.grid.shape == (3, 64) and (long.ids == 5).sum() == 3 * 50  # with 10; with 5 and 9; with 4


def test_merged_weights_are_a_copy(bases: dict[str, Base]) -> None:
    """What a sampler was given does not move with the trainer; a sync moves it."""
    for config in (bases["llama"].run(0), bases["llama"].run(4, unembed=True)):
        model = bases["llama"].reference(bases["llama"].arm(config, moved=0.05))
        decoder = bases["llama"].decoder
        sampler = PackedSampler(decoder)
        sampler.sync(model, 0)
        prompts = [PROMPTS[i] for i in ASKED]
        before = torch.cat(sampler.score(prompts, COMPLETIONS))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.ones_like(parameter) * parameter.requires_grad)
        assert torch.equal(torch.cat(sampler.score(prompts, COMPLETIONS)), before)
        sampler.sync(model, 1)
        after = torch.cat(sampler.score(prompts, COMPLETIONS))
        with torch.no_grad():
            wanted = completion_logps(decoder, model, padded(), 1.0)[padded()["completion_mask"].bool()]
        assert (after - before).abs().max() > 0.01 and torch.allclose(after, wanted, atol=1e-5)


def test_untrained_matrices_are_the_bases_own(bases: dict[str, Base]) -> None:
    """A sampler copies what is trained and nothing else."""
    base = bases["qwen3"]
    model = base.reference(base.arm(base.run(4, "attn")))
    assert set(merged(base.decoder, model).stacked) == set(trained(base.decoder, model).factors)
    assert len(trained(base.decoder, model).factors) == 2 * 4
