"""Tiny models built in code: the tests need no network and no shipped weights."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, with pad, end of turn and roles."""
    special = ["<pad>", "<end>", "<user>", "<assistant>", "<system>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = TEMPLATE
    return fast


def tiny_llama(width: int = 32, tied: bool = False) -> LlamaForCausalLM:
    """Two layers, grouped-query attention, untied head unless asked; the same weights every time."""
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tiny_tokenizer()), hidden_size=width, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def tiny_qwen3() -> Qwen3ForCausalLM:
    """Two layers with norms on queries and keys, heads wider than width / heads, tied head."""
    torch.manual_seed(7)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
            tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def tiny_moe() -> Qwen3MoeForCausalLM:
    """Two layers of four experts, two active."""
    torch.manual_seed(7)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=48, moe_intermediate_size=24,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
            num_experts_per_tok=2, max_position_embeddings=256, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
