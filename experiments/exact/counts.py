"""C24: how many parameters LoRA trains on Llama-3.1-8B, from shapes alone.

Nothing is loaded: the model stands on the meta device. The post's table can only be met with the
unembedding adapted too, which its text does not say; so every row is counted both ways.
``python -m experiments.exact.counts`` (``make table-params``) prints the table beside the post's.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from experiments import adapters, models
from experiments.config import MethodConfig, MethodKind, ModelConfig, ModelSource, Placement, SeedConfig

LLAMA_3_1_8B = ModelConfig("llama-3.1-8b", ModelSource.hub, "meta-llama/Llama-3.1-8B", "main")
TABLE = ((Placement.mlp, 256), (Placement.attn, 256), (Placement.all, 256), (Placement.mlp, 128), (Placement.all, 1))
"""The four rows of the post's table of parameter counts, and the rank 1 of its "3M parameters"."""
PRINTED = {"mlp r256": "0.49B", "attn r256": "0.25B", "all r256": "0.70B", "mlp r128": "0.24B", "all r1": "3M"}
"""What the post prints."""


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


def main() -> int:
    """Print the post's table, recounted; returns 0 if every row comes out as printed there, else 1."""
    table = Table("configuration", "with unembedding", "without", "as printed", "post", box=None)
    agree = True
    for placement, rank in TABLE:
        name = f"{placement.name} r{rank}"
        count = closed_form(placement, rank, unembed=True)
        same = _as_printed(count, PRINTED[name])
        agree &= same
        table.add_row(name, f"{count:,}", f"{closed_form(placement, rank, unembed=False):,}",
                      "yes" if same else "no", PRINTED[name])  # fmt: skip
    Console(highlight=False, width=100).print(table)
    return 0 if agree else 1


def _as_printed(count: int, printed: str) -> bool:
    """Whether a count is within one unit of the last digit printed: the post cuts some rows and rounds others."""
    digits, scale = printed[:-1], {"B": 1e9, "M": 1e6}[printed[-1]]
    return abs(count - float(digits) * scale) < scale * 10.0 ** -len(digits.partition(".")[2])


def _model() -> Any:
    return copy.deepcopy(models.empty_model(LLAMA_3_1_8B, Path("unused")))


def _method(placement: Placement, rank: int, unembed: bool) -> MethodConfig:
    return MethodConfig(MethodKind.lora, rank, placement=placement, unembed=unembed)


if __name__ == "__main__":
    sys.exit(main())
