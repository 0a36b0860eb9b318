"""The decoder on the parameters of a model that PEFT and TRL train: its forward pass and its sampler.

TRL pads every completion with its prompt to one length. Here there is no padding, and the prompt of a group is
computed once: with short answers most rows are gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.packed.decoder import Decoder, Weights
from experiments.packed.generate import Request, generate
from experiments.packed.ops import Factors, token_nll
from experiments.packed.rows import Rows, lay_out_completions
from experiments.rollouts import Completion, Sampling


def trained(decoder: Decoder, model: nn.Module) -> Weights:
    """The weights of one arm as leaves of a backward pass into ``model``'s own parameters.

    ``model``: what ``decoder`` was made from, trained in full, or with PEFT's LoRA on it since.
    """
    if not hasattr(model, "peft_config"):
        return Weights(decoder.base, {name: p[None] for name, p in model.named_parameters()}, {})
    factors = {}
    for name, layer in _adapted(model):
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        factors[f"{name}.weight"] = Factors(a[None], b.mT[None], a.new_full((1, 1, 1), layer.scaling["default"]))
    return Weights(decoder.base, {}, factors)


@torch.no_grad()
def merged(decoder: Decoder, model: nn.Module) -> Weights:
    """A copy of the weights of one arm, its adapters added to the matrices: sampling reads them many times."""
    found = trained(decoder, model)
    stacked = {name: tensor.detach().clone() for name, tensor in found.stacked.items()}
    for name, (a, b, scale) in found.factors.items():
        stacked[name] = torch.baddbmm(decoder.base[name][None], b.mT, a * scale)
    return Weights(decoder.base, stacked, {})


def _adapted(model: Any) -> list[tuple[str, Any]]:
    """(name in the base model, layer) of every matrix with an adapter."""
    return [(name, m) for name, m in model.get_base_model().named_modules() if "default" in getattr(m, "lora_A", {})]


def token_logps(decoder: Decoder, weights: Weights, rows: Rows, temperature: float = 1.0) -> Tensor:
    """(m,) log-probabilities, in nats, of the completions' tokens that one arm's ``rows`` hold, in their order."""
    logits = decoder.logits(weights, rows)
    if temperature != 1.0:
        logits = logits / temperature
    return -token_nll(logits, rows.targets)[rows.weights.bool()]


def completion_logps(decoder: Decoder, model: nn.Module, padded: Mapping[str, Tensor], temperature: float) -> Tensor:
    """(B, T) the same of a batch as TRL pads it, 0 in the padding; carries the gradient to ``model``.

    Args: ``padded`` holds prompt_ids and prompt_mask (B, P), completion_ids and completion_mask (B, T).
    """
    prompts, completions = (
        [ids[here].tolist() for ids, here in zip(padded[f"{part}_ids"], padded[f"{part}_mask"].bool(), strict=True)]
        for part in ("prompt", "completion")
    )
    rows = lay_out_completions(prompts, completions).to(padded["prompt_ids"].device)
    logps = token_logps(decoder, trained(decoder, model), rows, temperature)
    here = padded["completion_mask"].bool()
    return logps.new_zeros(here.shape).masked_scatter(here, logps)


class PackedSampler:
    """Samples with a merged copy of the trainer's weights."""

    name = "packed"
    separate = False  # the copy is made in ``sync``, of the model it is given: nothing that could lag behind

    def __init__(self, decoder: Decoder) -> None:
        self.version = -1
        self.decoder = decoder
        self._weights: Weights | None = None

    def sync(self, model: nn.Module, version: int) -> None:
        self._weights, self.version = merged(self.decoder, model), version

    def sample(self, prompts: Sequence[Sequence[int]], how: Sampling, seed: int) -> list[Completion]:
        (found,) = generate(self.decoder, self._synchronised(), [Request(prompts, how, seed)])
        if isinstance(found, Exception):
            raise found
        return found

    @torch.no_grad()
    def score(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[Tensor]:
        rows = lay_out_completions(prompts, completions)
        return list(token_logps(self.decoder, self._synchronised(), rows).split([len(c) for c in completions]))

    def close(self) -> None:
        self._weights = None

    def _synchronised(self) -> Weights:
        if self._weights is None:
            raise RuntimeError("the sampler was never synchronised")
        return self._weights
