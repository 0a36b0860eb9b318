"""What the packed engine is measured against: PEFT, transformers and torch.optim.AdamW, one arm at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tiny import tiny_tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from experiments import adapters, models
from experiments.config import (
    DataConfig,
    DataSource,
    MethodConfig,
    MethodKind,
    ModelConfig,
    ModelSource,
    OptimConfig,
    Placement,
    RunConfig,
    SeedConfig,
)
from experiments.data.dataset import pad
from experiments.losses import IGNORED
from experiments.packed import arms
from experiments.packed.decoder import Decoder
from experiments.packed.pack import Arm, Pack
from experiments.packed.rows import Rows, lay_out

NUM_TOKENS = len(tiny_tokenizer())
SIZES = {
    "vocab_size": NUM_TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    "initializer_range": 0.1,
}  # fmt: skip


def _drawn(model: PreTrainedModel) -> PreTrainedModel:
    """Norms that are not all one, so that it shows where they are left out."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def _llama() -> PreTrainedModel:
    """An unembedding of its own, a key for each query: the bundled bases' shape."""
    torch.manual_seed(7)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return _drawn(LlamaForCausalLM(LlamaConfig(**SIZES, **heads, tie_word_embeddings=False)))


def _qwen3() -> PreTrainedModel:
    """Tied embeddings, grouped heads, norms of queries and keys."""
    torch.manual_seed(8)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return _drawn(Qwen3ForCausalLM(Qwen3Config(**SIZES, **heads, tie_word_embeddings=True)))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"llama": _llama, "qwen3": _qwen3}


@dataclass(frozen=True)
class Base:
    """A saved base model and the arms on it."""

    name: str
    root: Path

    @cached_property
    def decoder(self) -> Decoder:
        return Decoder(self.model())

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(self.name, ModelSource.hub, str(self.root / self.name), "main")

    def model(self) -> PreTrainedModel:
        return models.load_model(self.config, self.root)

    def run(self, rank: int = 4, placement: str = "all", unembed: bool = False, init: int = 0, alpha: float = 32.0,
            lr: float = 1e-2, **optim: float) -> RunConfig:  # fmt: skip
        """A run's configuration; rank 0 is full fine-tuning."""
        lora = MethodConfig(MethodKind.lora, rank, alpha, Placement[placement], unembed) if rank else None
        return RunConfig(
            model=self.config,
            data=DataConfig("none", DataSource.jsonl, path="none"),
            method=lora or MethodConfig(MethodKind.full, 0),
            optim=OptimConfig(lr=lr, **optim),  # type: ignore[arg-type]
            seed=SeedConfig(init=init),
        )

    def arm(self, config: RunConfig, moved: float = 0.0) -> Arm:
        """The arm before its first step, or away from it: then no B is zero, and no gradient."""
        arm, _ = arms.fresh(self.decoder, config, self.root)
        for slot in arm.layout.slots:  # what lies between the slots stays zero
            draw = torch.Generator().manual_seed(slot.at + config.seed.init)
            slot.of(arm.theta[None])[0].add_(moved * torch.randn(slot.shape, generator=draw))
        return arm

    def reference(self, arm: Arm) -> nn.Module:
        """PEFT's model (the bare one for full fine-tuning) with the arm's weights."""
        model = adapters.attach(self.model(), arm.config.method, arm.config.seed).to(arm.theta.dtype)
        arms.load_into(arm, model)
        return model


def doubled(arm: Arm) -> Arm:
    return replace(arm, theta=arm.theta.double(), m=arm.m.double(), v=arm.v.double())


def examples(seed: int, count: int = 4, longest: int = 14) -> list[dict]:
    """Tokens of differing lengths; the first of them, the prompt, carry no loss."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(count):
        ids = rng.integers(5, NUM_TOKENS, int(rng.integers(6, longest + 1)))
        labels = np.where(np.arange(len(ids)) < int(rng.integers(2, 5)), IGNORED, ids)
        drawn.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return drawn


def batches(num_steps: int, seed: int = 0, count: int = 4) -> list[list[dict]]:
    return [examples(1000 * seed + step, count) for step in range(num_steps)]


def loss_of(model: nn.Module, rows: Sequence[dict]) -> Tensor:
    """Mean NLL of the labelled tokens, by transformers and torch."""
    ids, labels, mask = (torch.from_numpy(array) for array in pad(rows, 0))
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def plain(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default.weight", "")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of the trainable parameters, by the names that the arms give them."""
    return {plain(name): p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {plain(name): p.detach() for name, p in model.named_parameters() if p.requires_grad}


def named(arm: Arm, row: Tensor) -> dict[str, Tensor]:
    """A row's parts by name."""
    return {slot.name: slot.of(row[None])[0] for slot in arm.layout.slots}


def row_like(arm: Arm, parts: dict[str, Tensor]) -> Tensor:
    """``named`` the other way."""
    row = torch.zeros_like(arm.theta)
    for name, part in named(arm, row).items():
        part.copy_(parts[name])
    return row


def gradient_of(pack: Pack, name: str) -> Tensor:
    """What an arm has accumulated, as a row."""
    return pack.stack.row(pack.stack.grad, pack.arms.index(name))


def optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    chosen = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(chosen, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps,
                             weight_decay=optim.weight_decay)  # fmt: skip


def single_losses(base: Base, arm: Arm, data: Iterable[Sequence[dict]]) -> list[float]:
    """The arm's loss at every step, trained by PEFT and torch."""
    model = base.reference(arm)
    chosen, found = optimizer(model, arm.config.optim), []
    for rows in data:
        chosen.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        if arm.config.optim.max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), arm.config.optim.max_grad_norm)
        chosen.step()
        found.append(loss.item())
    return found


def packed_losses(pack: Pack, data: Iterable[Sequence[Sequence[dict]] | Rows]) -> Tensor:
    """(steps, K) losses of every arm, in the pack's order. ``data``: each arm's rows of each step."""
    found = []
    for step in data:
        rows = step if isinstance(step, Rows) else lay_out(step)
        found.append(pack.accumulate(rows, rows.num_tokens))
        pack.step()
    return torch.stack(found)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest number."""
    return float((found - wanted).abs().max() / wanted.abs().max())
