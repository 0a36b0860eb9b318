"""C24: how many parameters LoRA trains on Llama-3.1-8B, from shapes alone.

Nothing is loaded: the model stands on the meta device. The post's table can only be met with the
unembedding adapted too, which its text does not say; so every row is counted both ways.
"""

from __future__ import annotations

from typing import Any

import torch

from experiments import adapters, models, shapes
from experiments.config import MethodConfig, MethodKind, Placement, SeedConfig

LLAMA_3_1_8B = shapes.Shape(width=4096, ffn=14336, num_layers=32, head_dim=128)
"""From the model's public config.json (meta-llama/Llama-3.1-8B), as are the next two."""
VOCAB_SIZE = 128256
NUM_KV_HEADS = 8

TABLE = ((Placement.mlp, 256), (Placement.attn, 256), (Placement.all, 256), (Placement.mlp, 128), (Placement.all, 1))
"""The four rows of the post's table of parameter counts, and the rank 1 of its "3M parameters"."""


def closed_form(placement: Placement, rank: int, unembed: bool) -> int:
    """Trainable parameters of LoRA on Llama-3.1-8B: rank * (in + out), summed over the matrices."""
    return adapters.num_trainable(_model(), _method(placement, rank, unembed))


def peft_count(placement: Placement, rank: int, unembed: bool) -> int:
    """The same, counted on the model that PEFT makes (about 0.3 s)."""
    with torch.device("meta"):
        adapted = adapters.attach(_model(), _method(placement, rank, unembed), SeedConfig())
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def measure() -> dict[str, Any]:
    """Every row of the table with and without the unembedding, and the size of the model; plain numbers."""
    rows = []
    for placement, rank in TABLE:
        row: dict[str, Any] = {"placement": placement.name, "rank": rank}
        for name, unembed in (("with_unembedding", True), ("without_unembedding", False)):
            row[name] = closed_form(placement, rank, unembed)
            row[f"{name}_peft"] = peft_count(placement, rank, unembed)
        rows.append(row)
    model = _model()
    return {
        "model": "Llama-3.1-8B",
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_matrix_parameters": models.num_matrix_parameters(model),
        "rows": rows,
    }


def _model() -> Any:
    return shapes.empty_llama(LLAMA_3_1_8B, VOCAB_SIZE, NUM_KV_HEADS)


def _method(placement: Placement, rank: int, unembed: bool) -> MethodConfig:
    return MethodConfig(MethodKind.lora, rank, placement=placement, unembed=unembed)
