"""The suite's own small models and their tokenizer: built, saved and loaded.

Three dense models in the shape of Llama (widths 64, 128, 256) and one mixture of experts in the shape
of Qwen3-MoE. All have four layers, heads of 32, and an unembedding of their own (untied), so that the
placements of an adapter mean here what they mean on the large models.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

BASES_DIR = Path(__file__).resolve().parent / "bases"

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('role: ' + message['role'] + ' is not allowed; use user or assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOOLS_CHAT_TEMPLATE = (  # a tool answers in a user turn, as Qwen's and others' templates have it
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '[' + call['function']['name'] }}"
    "{% for key, value in call['function']['arguments'].items() %}{{ ' ' + key + '=' + value|string }}{% endfor %}"
    "{{ ']' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOOLS_RESPONSE_TEMPLATE = {  # how transformers reads a call back from what the model wrote
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open_pattern": r"\[(?P<name>\w+) ",
            "close": "]",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"(?P<key>\w+)=(?P<value>[^\s\]]+)"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": END, "content": "text"},
    },
}
VOCAB_SIZE = 512
MAX_POSITIONS = 512  # tokens; the longest example of any task takes about 100


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. ``ffn`` is the width of the gated feed-forward, per expert if there are any."""

    width: int
    ffn: int
    num_layers: int = 4
    head_dim: int = 32
    num_experts: int = 0  # 0: dense
    num_active_experts: int = 0

    @property
    def num_heads(self) -> int:
        return self.width // self.head_dim


# Dense ffn: 8/3 of the width, rounded up to a multiple of 16. Experts: two active ones make 3 widths.
SHAPES: dict[str, Shape] = {
    "mini-w64": Shape(width=64, ffn=176),
    "mini-w64-mixed": Shape(width=64, ffn=176),
    "mini-w64-tools": Shape(width=64, ffn=176),
    "mini-w128": Shape(width=128, ffn=352),
    "mini-w256": Shape(width=256, ffn=688),
    "mini-moe": Shape(width=64, ffn=96, num_experts=8, num_active_experts=2),
}


def shape(name: str) -> Shape:
    """The sizes of a shipped base. Raises ValueError naming the known ones."""
    if name not in SHAPES:
        raise ValueError(f"base: {name!r} is unknown; allowed: {', '.join(SHAPES)}")
    return SHAPES[name]


def build_model(sizes: Shape, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A freshly initialised fp32 model; weights are a function of (sizes, seed).

    The initial standard deviation is 0.4 / sqrt(width): transformers' fixed 0.02 is that of a model of
    width 400, and starts these ones needlessly close to zero. (0.4 is a guess, not a tuned value.)
    """
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": sizes.width,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": round(0.4 / sizes.width**0.5, 4),
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    if sizes.num_experts == 0:
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**common))
    else:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **common,
                moe_intermediate_size=sizes.ffn,
                num_experts=sizes.num_experts,
                num_experts_per_tok=sizes.num_active_experts,
                norm_topk_prob=True,
            )
        )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model.float()


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; a function of the texts.

    Digits and capital letters are always tokens of their own: numbers are read digit by digit, and
    strings over A to E symbol by symbol. END closes every turn and is the eos
    token; PAD is not it, so that masking the padding never masks the end of an answer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9A-Z]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[AddedToken(token, special=True) for token in (PAD, END, USER, ASSISTANT)],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def with_tools(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same tokens with the chat template of tools."""
    able = copy.deepcopy(tokenizer)
    able.chat_template = TOOLS_CHAT_TEMPLATE
    able.response_template = TOOLS_RESPONSE_TEMPLATE
    return able


def prompt_text(prompt: str) -> str:
    """What the chat template makes of one user turn followed by the generation prompt."""
    return f"{USER}{prompt}{END}{ASSISTANT}"


def token_nll(model: PreTrainedModel, ids_BT: Tensor, router: bool = False) -> tuple[Tensor, Tensor | None]:
    """(nll_BT' in nats of tokens 1 .. T-1, the experts' balance loss or None).

    No attention mask: padding is on the right, where a causal model cannot see it from a real token.
    """
    extra = {"output_router_logits": True} if router else {}
    out = model(input_ids=ids_BT[:, :-1], use_cache=False, **extra)
    nll = F.cross_entropy(out.logits.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    return nll.view(ids_BT.shape[0], -1), out.aux_loss if router else None


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in a base's directory."""
    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def load_model(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model saved in a base's directory; its bf16 weights are exact in fp32."""
    return AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype, local_files_only=True)
