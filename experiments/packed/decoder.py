"""A Llama-shaped decoder (Llama, Qwen3) for many arms: the forward pass over rows, with weights given from outside.

Gives the logits of transformers' model up to rounding. The rows whose next token carries no loss are dropped
after the last attention, where nothing reads them any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.packed.ops import Factors, attend, linear, rms_norm, swiglu, token_nll
from experiments.packed.rows import Rows

FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Matrices of a layer that read the same input are one product."""
NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class Part:
    """One parameter of the base model, and where it lies in a fused one: rows ``at`` to ``at + size``."""

    name: str
    fused: str
    at: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.shape[0]


def unsupported(model: Any) -> str | None:
    """Why this decoder cannot stand for ``model``, or None if it can."""
    config = model.config.get_text_config()
    if config.model_type not in ("llama", "qwen3"):
        return f"architecture {config.model_type!r} is neither llama nor qwen3"
    if any(name.endswith(".bias") for name, _ in model.named_parameters()):
        return "it has biases"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act!r}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", False):
        return "its attention has a sliding window"
    return None


def parts(model: Any) -> list[Part]:
    """Every parameter of ``model`` and its place among the fused ones, in a fixed order. The meta device will do."""
    sizes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = [Part("model.embed_tokens.weight", "embed", 0, sizes["model.embed_tokens.weight"])]
    for j in range(model.config.get_text_config().num_hidden_layers):
        layer = f"model.layers.{j}."
        for fused, names in FUSED.items():
            at = 0
            for name in names:
                shape = sizes[f"{layer}{name}.weight"]
                found.append(Part(f"{layer}{name}.weight", f"{j}.{fused}", at, shape))
                at += shape[0]
        for fused, name in {**NORMS, **HEAD_NORMS}.items():
            if f"{layer}{name}.weight" in sizes:
                found.append(Part(f"{layer}{name}.weight", f"{j}.{fused}", 0, sizes[f"{layer}{name}.weight"]))
    found.append(Part("model.norm.weight", "norm", 0, sizes["model.norm.weight"]))
    if "lm_head.weight" in sizes:
        found.append(Part("lm_head.weight", "head", 0, sizes["lm_head.weight"]))
    return found


@dataclass
class Weights:
    """Fused parameters of K arms by name: shared by them (base shapes) or stacked, (K, ...)."""

    shared: dict[str, Tensor]
    stacked: dict[str, Tensor]
    factors: dict[str, Factors]

    def vector(self, name: str) -> Tensor:
        """A norm's weight, (1, 1, N) or (K, 1, N)."""
        weight = self.stacked.get(name)
        return self.shared[name][None, None] if weight is None else weight[:, None]

    def linear(self, name: str, x: Tensor, residual: Tensor | None = None) -> Tensor:
        weight = self.stacked.get(name, self.shared.get(name))
        assert weight is not None
        return linear(x, weight, self.factors.get(name), residual)

    def embed(self, ids: Tensor) -> Tensor:
        stacked = self.stacked.get("embed")
        if stacked is None:
            return torch.nn.functional.embedding(ids, self.shared["embed"])
        offsets = torch.arange(len(ids), device=ids.device)[:, None] * stacked.shape[1]
        return torch.nn.functional.embedding(ids + offsets, stacked.flatten(0, 1))


class Decoder:
    """The base model's frozen weights, fused, and the forward pass over them."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self.parts = parts(model)
        base = dict(model.named_parameters())
        fused: dict[str, list[Tensor]] = {}
        for part in self.parts:
            fused.setdefault(part.fused, []).append(base[part.name].detach())
        self.base = {name: torch.cat(tensors) if len(tensors) > 1 else tensors[0] for name, tensors in fused.items()}
        self.tied = "head" not in self.base
        self.matrices = list(self.parts)  # what an adapter may sit on: a tied unembedding is one more
        if self.tied:
            self.base["head"] = self.base["embed"]
            self.matrices.append(Part("lm_head.weight", "head", 0, tuple(self.base["head"].shape)))
        self.num_layers = config.num_hidden_layers
        self.heads = (config.num_attention_heads, config.num_key_value_heads)
        self.eps = config.rms_norm_eps
        self.rotary = model.model.rotary_emb
        self.head_dim = 2 * self.rotary.inv_freq.shape[0]

    def _turns(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin of the positions, (T, 1, d / 2), as the base model's own table has them."""
        at = torch.arange(positions, device=like.device)[None]
        cos, sin = self.rotary(like, at)
        half = self.head_dim // 2
        return cos[0, :, None, :half], sin[0, :, None, :half]

    def logits(self, weights: Weights, rows: Rows) -> Tensor:
        """(K, m, V) logits at the rows that are read."""
        x = weights.embed(rows.ids)
        cos, sin = self._turns(rows.longest, x)
        for j in range(self.num_layers):
            last = j == self.num_layers - 1
            qkv = weights.linear(f"{j}.qkv", rms_norm(x, weights.vector(f"{j}.attn_norm"), self.eps))
            if f"{j}.q_norm" in self.base:
                qkv = self._normed_heads(weights, j, qkv)
            read = rows.read if last else None
            found = attend(qkv, rows.grid, rows.cells, rows.padding, self.heads, cos, sin, read)
            if last:
                x = x.flatten(0, 1).index_select(0, rows.read).view(len(x), -1, x.shape[-1])
            x = weights.linear(f"{j}.o", found, residual=x)
            gate_up = weights.linear(f"{j}.gate_up", rms_norm(x, weights.vector(f"{j}.mlp_norm"), self.eps))
            x = weights.linear(f"{j}.down", swiglu(gate_up), residual=x)
        return weights.linear("embed" if self.tied and "embed" in weights.stacked else "head",
                              rms_norm(x, weights.vector("norm"), self.eps))  # fmt: skip

    def _normed_heads(self, weights: Weights, layer: int, qkv: Tensor) -> Tensor:
        """Qwen3 normalises each head's queries and keys."""
        num_q, num_kv = self.heads
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split((num_q, num_kv, num_kv), dim=2)
        normed = [rms_norm(part, weights.vector(f"{layer}.{name}")[:, None], self.eps)
                  for part, name in ((q, "q_norm"), (k, "k_norm"))]  # fmt: skip
        return torch.cat([*normed, v], dim=2).flatten(2)

    def nll(self, weights: Weights, rows: Rows) -> Tensor:
        """(K,) summed NLL, in nats, of the tokens that carry loss."""
        return (token_nll(self.logits(weights, rows), rows.targets) * rows.weights).sum(-1)
