"""The arrows of the architecture: conf -> sweeps -> experiments -> runs -> analysis, slurm beside.

One package turns round: ``sweeps.search``, the loop from results back to runs, reads ``analysis``. Nothing imports it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("experiments", "sweeps", "analysis", "slurm")
SEARCH = "sweeps.search"
ALLOWED = {
    "experiments": {"experiments"},
    "sweeps": {"sweeps", "experiments", "slurm"},
    "analysis": {"analysis", "experiments.store", "experiments.manifests", "experiments.config"},
    "slurm": {"slurm", "experiments"},
    SEARCH: {"sweeps", "analysis", "experiments", "slurm"},
}
BOUNDARIES = {  # library -> the only modules that may import it
    "transformers": {"experiments.models", "experiments.adapters", "experiments.sft", "experiments.shapes",
                     "experiments.pretrain", "experiments.data.dataset", "experiments.data.pool", "experiments.cards",
                     "experiments.recorder", "experiments.rl", "experiments.episodes", "experiments.architectures",
                     "experiments.chat",
                     "experiments.kernels", "experiments.memory", "experiments.bench.plain"},
    "datasets": {"experiments.data.dataset", "experiments.data.records", "experiments.rl"},
    "reasoning_gym": {"experiments.data.tasks"},
    "huggingface_hub": {"experiments.hub"},
    "peft": {"experiments.adapters"},
    "trl": {"experiments.sft", "experiments.rl", "experiments.episodes", "experiments.bench.plain"},
    "vllm": {"experiments.vllm_rollouts"},
    "math_verify": {"experiments.grading"},
    "liger_kernel": {"experiments.kernels"},
    "wandb": {"experiments.tracking"},
    "accelerate": {"experiments.sharding"},
    "jinja2": {"analysis.page"},
    "markupsafe": {"analysis.page"},
    "submitit": {"slurm"},
    "nbclient": {"analysis.notebooks"},
    "hydra": {"experiments.compose"},
    "omegaconf": {"experiments.compose"},
}  # fmt: skip
MAX_LINES = 400


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (PROJECT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, parents: set[str]) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_follow_the_arrows(path: Path) -> None:
    package = SEARCH if within(name_of(path), {SEARCH}) else name_of(path).partition(".")[0]
    ours = [n for n in imports(path) if n.partition(".")[0] in PACKAGES]
    wrong = [n for n in ours if not within(n, ALLOWED[package]) or (within(n, {SEARCH}) and package != SEARCH)]
    assert not wrong, f"{name_of(path)} may import {ALLOWED[package]} of ours, and none {SEARCH}; not {wrong}"
    for name in imports(path):
        library = name.partition(".")[0]
        if library in BOUNDARIES:
            assert within(name_of(path), BOUNDARIES[library]), f"{library} belongs to {BOUNDARIES[library]}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_module_is_one_a_person_can_hold(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    "module",
    [
        "analysis",
        "analysis.figures.__main__",
        "analysis.live.__main__",
        "analysis.report.__main__",
        "analysis.verdict",
        "sweeps.launch",
        "sweeps.status",
        "sweeps.studies",
        "sweeps.search.launch",
        "sweeps.search.bench",
    ],
)
def test_module_starts_without_torch(module: str) -> None:
    """A second launch and every redraw stay fast because nothing heavy is imported."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=False).returncode == 0
