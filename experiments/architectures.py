"""Shapes of the hub models that studies name, from their published ``config.json``: enough to count, to estimate
and to check an adapter without a download. Weights and everything else come from the hub."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import AutoConfig, PretrainedConfig

from experiments.checks import ConfigError

_LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8}
_QWEN3: dict[str, Any] = {"model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}


def _sizes(width: int, ffn: int, num_layers: int, num_heads: int, tied: bool) -> dict[str, Any]:
    return {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads, "tie_word_embeddings": tied}  # fmt: skip


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {**_LLAMA, **_sizes(4096, 14_336, 32, 32, tied=False), "head_dim": 128},
    "meta-llama/Llama-3.2-1B": {**_LLAMA, **_sizes(2048, 8192, 16, 32, tied=True), "head_dim": 64},
    "meta-llama/Llama-3.2-3B": {**_LLAMA, **_sizes(3072, 8192, 28, 24, tied=True), "head_dim": 128},
    "Qwen/Qwen3-0.6B-Base": {**_QWEN3, **_sizes(1024, 3072, 28, 16, tied=True)},
    "Qwen/Qwen3-1.7B-Base": {**_QWEN3, **_sizes(2048, 6144, 28, 16, tied=True)},
    "Qwen/Qwen3-4B-Base": {**_QWEN3, **_sizes(2560, 9728, 36, 32, tied=True)},
    "Qwen/Qwen3-8B-Base": {**_QWEN3, **_sizes(4096, 12_288, 36, 32, tied=False)},
    "Qwen/Qwen3-30B-A3B-Base": {
        **_QWEN3, **_sizes(2048, 6144, 48, 32, tied=False), "model_type": "qwen3_moe", "num_key_value_heads": 4,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    },
}  # fmt: skip

GROUPS: dict[str, str] = {
    "attn": r"\.self_attn\.([qkvo]_proj|[qk]_norm)",
    "router": r"\.mlp\.gate",
    "experts": r"\.mlp\.experts\.(gate_up_proj|down_proj)",  # stacked parameters since transformers 5
    "mlp": r"\.mlp\.(gate|up|down)_proj",
    "embed": r"embed_tokens",
    "unembed": r"lm_head",
    "norm": r"(input_layernorm|post_attention_layernorm|model\.norm)",
}
"""Which group a parameter belongs to, by the end of its name (without ``.weight``)."""


def known(path: str) -> PretrainedConfig | None:
    """The configuration of a hub model as far as shapes go, None for one that is not listed."""
    values = dict(ARCHITECTURES.get(path, {}))
    return AutoConfig.for_model(values.pop("model_type"), **values) if values else None


def group_of(name: str) -> str | None:
    """The group of a module or parameter by its dotted name, None for one of another architecture."""
    plain = name.removesuffix(".weight")
    return next((group for group, ends in GROUPS.items() if re.search(rf"({ends})$", plain)), None)


def groups(model: nn.Module) -> dict[str, str]:
    """Every parameter of a bare model, layers as ``*``, and its group. A tied unembedding has its own name.

    Raises ConfigError for a parameter of no group: its architecture is not known here.
    """
    found: dict[str, str] = {}
    for name, _parameter in model.named_parameters(remove_duplicate=False):
        group = group_of(name)
        if group is None:
            raise ConfigError(
                f"model: {name!r} of {type(model).__name__} belongs to no group; allowed: {', '.join(GROUPS)}"
            )
        found[re.sub(r"\.\d+\.", ".*.", name)] = group
    return found
