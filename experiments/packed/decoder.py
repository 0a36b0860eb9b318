"""A Llama-shaped decoder (Llama, Qwen3) for many arms: the forward pass over rows, with weights given from outside.

Gives the logits of transformers' model up to rounding. The rows whose next token carries no loss are dropped
after the last attention, where nothing reads them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.packed.ops import Factors, attend, linear, places, rms_norm, swiglu, token_nll
from experiments.packed.rows import Rows

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Of a layer's number, queries (K, n, H d), keys and values (K, n, H_kv d): what is attended to, (K, n, H d)."""


@dataclass(frozen=True)
class Part:
    """One parameter of the base model."""

    name: str
    shape: tuple[int, ...]


def unsupported(model: Any) -> str | None:
    """Why this decoder cannot stand for ``model``, or None if it can."""
    config = model.config.get_text_config()
    if config.model_type not in ("llama", "qwen3"):
        return f"architecture {config.model_type!r} is neither llama nor qwen3"
    if any(name.endswith(".bias") for name, _ in model.named_parameters()):
        return "it has biases"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act!r}"
    if config.attention_dropout:
        return "its attention has dropout"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", False):
        return "its attention has a sliding window"
    return None


def parts(model: Any) -> list[Part]:
    """Every parameter of ``model``, in a fixed order. The meta device will do."""
    return [Part(name, tuple(p.shape)) for name, p in model.named_parameters()]


@dataclass
class Weights:
    """Parameters of K arms by name: shared by them (base shapes) or stacked, (K, ...); the adapters of matrices."""

    shared: dict[str, Tensor]
    stacked: dict[str, Tensor]
    factors: dict[str, Factors]

    def vector(self, module: str) -> Tensor:
        """A norm's weight, (1, 1, N) or (K, 1, N)."""
        weight = self.stacked.get(f"{module}.weight")
        return self.shared[f"{module}.weight"][None, None] if weight is None else weight[:, None]

    def linear(self, module: str, x: Tensor, residual: Tensor | None = None) -> Tensor:
        name = f"{module}.weight"
        weight = self.stacked.get(name, self.shared.get(name))
        assert weight is not None
        return linear(x, weight, self.factors.get(name), residual)

    def embed(self, ids: Tensor, padding_idx: int | None) -> Tensor:
        """(K, n, N). Looking up the token ``padding_idx`` gives no gradient, as in ``nn.Embedding``."""
        stacked = self.stacked.get(EMBEDDING)
        if stacked is None:
            return torch.nn.functional.embedding(ids, self.shared[EMBEDDING])
        offsets = torch.arange(len(ids), device=ids.device)[:, None] * stacked.shape[1]
        found = torch.nn.functional.embedding(ids + offsets, stacked.flatten(0, 1))
        if padding_idx is None:
            return found
        # The function's own padding_idx is one row, and here each arm has its own.
        return torch.where((ids == padding_idx)[..., None], found.detach(), found)


class Decoder:
    """The base model's frozen weights, and the forward pass over them."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self.parts = parts(model)
        self.base = {name: p.detach() for name, p in model.named_parameters()}
        self.tied = HEAD not in self.base
        self.matrices = list(self.parts)  # what an adapter may sit on: a tied unembedding is one more
        if self.tied:
            self.base[HEAD] = self.base[EMBEDDING]
            self.matrices.append(Part(HEAD, tuple(self.base[HEAD].shape)))
        self.num_layers = config.num_hidden_layers
        self.heads = (config.num_attention_heads, config.num_key_value_heads)
        self.eps = config.rms_norm_eps
        self.padding_idx = model.get_input_embeddings().padding_idx
        self.rotary = model.model.rotary_emb
        self.head_dim = 2 * self.rotary.inv_freq.shape[0]

    def logits(self, weights: Weights, rows: Rows) -> Tensor:
        """(K, m, V) logits at the rows that are read."""
        at = places(rows, *self.turns(rows.grid.shape[1]))
        return self.forward(weights, rows.ids, lambda _layer, q, k, v: attend(q, k, v, at), rows.read)

    def turns(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """(T, d) cosines and sines of the first positions, as the base model's own."""
        like = self.base[EMBEDDING]
        cos, sin = self.rotary(like, torch.arange(num_positions, device=like.device)[None])
        return cos[0], sin[0]

    def forward(self, weights: Weights, ids: Tensor, attention: Attention, read: Tensor | None = None) -> Tensor:
        """(K, m, V) logits of tokens ``ids`` (K, n) at rows ``read`` (K m,), counted through all arms; None: all."""
        x = weights.embed(ids, self.padding_idx)
        for j in range(self.num_layers):
            layer = f"model.layers.{j}"
            found = attention(j, *self._queries_keys_values(weights, layer, x))
            if read is not None and j == self.num_layers - 1:  # nothing reads the other rows any more
                x, found = (y.flatten(0, 1).index_select(0, read).unflatten(0, (len(y), -1)) for y in (x, found))
            x = weights.linear(f"{layer}.self_attn.o_proj", found, residual=x)
            normed = rms_norm(x, weights.vector(f"{layer}.post_attention_layernorm"), self.eps)
            gate, up = (weights.linear(f"{layer}.mlp.{name}_proj", normed) for name in ("gate", "up"))
            x = weights.linear(f"{layer}.mlp.down_proj", swiglu(gate, up), residual=x)
        head = "model.embed_tokens" if self.tied and EMBEDDING in weights.stacked else "lm_head"
        return weights.linear(head, rms_norm(x, weights.vector("model.norm"), self.eps))

    def _queries_keys_values(self, weights: Weights, layer: str, x: Tensor) -> Iterator[Tensor]:
        normed = rms_norm(x, weights.vector(f"{layer}.input_layernorm"), self.eps)
        for name in "qkv":
            y = weights.linear(f"{layer}.self_attn.{name}_proj", normed)
            norm = f"{layer}.self_attn.{name}_norm"
            if f"{norm}.weight" in self.base:  # Qwen3 normalises each head's queries and keys
                heads = y.unflatten(-1, (-1, self.head_dim))
                y = rms_norm(heads, weights.vector(norm)[:, None], self.eps).flatten(2)
            yield y

    def nll(self, weights: Weights, rows: Rows) -> Tensor:
        """(K,) summed NLL, in nats, of the tokens that carry loss."""
        return (token_nll(self.logits(weights, rows), rows.targets) * rows.weights).sum(-1)
