"""Shapes of the hub models that studies name, from their published ``config.json``: enough to count, to estimate
and to check an adapter without a download. Weights and everything else come from the hub."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

_LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8}


def _sizes(width: int, ffn: int, num_layers: int, num_heads: int, tied: bool) -> dict[str, Any]:
    return {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads, "tie_word_embeddings": tied}  # fmt: skip


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {**_LLAMA, **_sizes(4096, 14_336, 32, 32, tied=False), "head_dim": 128},
    "meta-llama/Llama-3.2-1B": {**_LLAMA, **_sizes(2048, 8192, 16, 32, tied=True), "head_dim": 64},
    "meta-llama/Llama-3.2-3B": {**_LLAMA, **_sizes(3072, 8192, 28, 24, tied=True), "head_dim": 128},
    "Qwen/Qwen3-30B-A3B-Base": {
        **_sizes(2048, 6144, 48, 32, tied=False), "model_type": "qwen3_moe", "vocab_size": 151_936,
        "num_key_value_heads": 4, "head_dim": 128,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    },
}  # fmt: skip


def known(path: str) -> PretrainedConfig | None:
    """The configuration of a hub model as far as shapes go, None for one that is not listed."""
    values = dict(ARCHITECTURES.get(path, {}))
    return AutoConfig.for_model(values.pop("model_type"), **values) if values else None
