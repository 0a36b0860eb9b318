"""Tiny models built in code: the tests need no network and no shipped weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


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


def tiny_llama(width: int = 32) -> LlamaForCausalLM:
    """Two layers, grouped-query attention, untied head; the same weights every time."""
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tiny_tokenizer()), hidden_size=width, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
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


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Llama with its tokenizer, loadable as any local model is."""
    directory = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty prompts and completions of differing lengths."""
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [{"prompt": f"{n} up", "completion": " ".join(str(n + k) for k in range(1 + n % 5))} for n in range(80)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def tiny_overrides(tiny_base: Path, tiny_data: Path, tmp_path: Path) -> list[str]:
    """Overrides that make any run tiny: seconds become tenths of a second."""
    return [
        "model.name=tiny", "model.source=hub", f"model.path={tiny_base}", "model.revision=main",
        "data.name=pairs", "data.source=jsonl", f"data.path={tiny_data}", "data.tasks=[]",
        "data.num_train=64", "data.num_test=16", "optim.steps=8", "optim.batch_size=16", "optim.lr=1e-3",
        f"launch.root={tmp_path / 'runs'}",
    ]  # fmt: skip
