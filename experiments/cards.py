"""What ships with a base model: its weights rounded to bf16, its card, and the table of all cards.

Every number on a card is measured on the weights that ship.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from experiments import shapes
from experiments.data.pool import collate, tokenize
from experiments.data.tasks import FINETUNE_TASKS, TASKS, Example, generate, score

TEST_SEED = 3  # a stream of examples of its own, apart from those of pretrain.py (see tasks.py)
NUM_TEST = 256
MAX_NEW_TOKENS = 48


@torch.no_grad()
def held_out_nll(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> float:
    """Nats per completion token (END counts), over all tokens of all examples."""
    pool = tokenize(tokenizer, examples)
    ids_BT, weight_BT = collate(pool, np.arange(len(examples)), prompt_weight=0.0)
    nll_BT, _ = shapes.token_nll(model, ids_BT)
    return float((nll_BT * weight_BT[:, 1:]).sum() / weight_BT[:, 1:].sum())


@torch.no_grad()
def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], sample: bool
) -> list[str]:
    """The model's answers: greedy, or sampled at temperature 1 from the whole distribution (seed 0)."""
    prompts = tokenizer(
        [shapes.prompt_text(e.prompt) for e in examples], padding=True, padding_side="left", return_tensors="pt"
    )
    torch.manual_seed(0)
    chosen: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
    out_BT = model.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        do_sample=sample,
        max_new_tokens=MAX_NEW_TOKENS,
        **chosen,
    )
    return tokenizer.batch_decode(out_BT[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Per reasoning-gym task: held-out NLL, and the fraction of answers its own scorer calls correct (score 1)."""
    model.eval()
    result: dict[str, dict[str, float]] = {}
    for task in [task for task in tasks if task in TASKS]:
        examples = generate(task, NUM_TEST, TEST_SEED)
        row = {"nll_nats": held_out_nll(model, tokenizer, examples)}
        for name, sample in (("greedy_accuracy", False), ("sampled_accuracy", True)):
            given = answers(model, tokenizer, examples, sample)
            row[name] = sum(score(e, a) == 1.0 for e, a in zip(examples, given, strict=True)) / len(examples)
        result[task] = {name: round(value, 4) for name, value in row.items()}
    return result


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ship(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, made: dict[str, Any], out_dir: Path
) -> dict[str, Any]:
    """Writes ``out_dir/name``, the card last. ``made`` is how: it must hold the recipe, with its tasks.

    Rounds ``model`` to bf16 in place. Returns the card.
    """
    directory = out_dir / name
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(directory))
    model.to(torch.bfloat16).save_pretrained(str(directory))  # pyright: ignore[reportArgumentType]
    rounded = shapes.load_model(directory)
    card = {
        "name": name,
        "shape": asdict(shapes.shape(name)),
        "num_parameters": sum(p.numel() for p in rounded.parameters()),
        **made,
        "num_test_per_task": NUM_TEST,
        "base_tasks": evaluate(rounded, tokenizer, made["recipe"]["tasks"]),
        "finetune_tasks": evaluate(rounded, tokenizer, FINETUNE_TASKS),
        "sha256": {file: sha256_file(directory / file) for file in ("model.safetensors", "tokenizer.json")},
        "versions": {"python": platform.python_version()}
        | {p: version(p) for p in ("torch", "transformers", "tokenizers", "reasoning-gym")},
    }
    partial = directory / "card.json.partial"
    partial.write_text(json.dumps(card, indent=2) + "\n")
    partial.replace(directory / "card.json")
    return card


def _scores(found: dict[str, float] | None) -> str:
    """A cell of the table; a base may not know a task."""
    if found is None:
        return "–"
    return f"{found['nll_nats']:.2f} · {100 * found['greedy_accuracy']:.0f} / {100 * found['sampled_accuracy']:.0f}"


def table(out_dir: Path) -> str:
    """The README of the shipped bases, from their cards. Raises ValueError if there are none."""
    paths = [out_dir / name / "card.json" for name in shapes.SHAPES]
    cards = [json.loads(path.read_text()) for path in paths if path.exists()]
    if not cards:
        raise ValueError(f"out: {str(out_dir)!r} holds no base; train one first")

    def row(title: str, values: Sequence[str]) -> str:
        return f"| {title} | {' | '.join(values)} |"

    runs = [card["run"] for card in cards]
    lines = [
        "# Base models",
        "",
        "Made by `make bases`; this page by `python -m experiments.pretrain --table`, from the cards beside it.",
        "",
        row("", [card["name"] for card in cards]),
        "|---|" + "---:|" * len(cards),
        row("parameters", [f"{card['num_parameters']:,}" for card in cards]),
        row("steps", [f"{run['step']:,}" for run in runs]),
        row("tokens", [f"{run['num_tokens'] / 1e6:.0f} M" for run in runs]),
        row("wall minutes, cores shared and pauses included", [f"{run['wall_time_s'] / 60:.0f}" for run in runs]),
        row("last training NLL, nats per completion token", [f"{run['train_nll_nats']:.3f}" for run in runs]),
        row("SHA-256 of the weights", [f"`{card['sha256']['model.safetensors'][:12]}`" for card in cards]),
    ]
    for title, rows in (("Pretraining tasks", "base_tasks"), ("Tasks kept for fine-tuning", "finetune_tasks")):
        lines += [
            "",
            f"{title}: held-out NLL in nats per completion token · % correct greedy / sampled at temperature 1,",
            f"on {cards[0]['num_test_per_task']} examples.",
            "",
            row("", [card["name"] for card in cards]),
            "|---|" + "---:|" * len(cards),
        ]
        for task in cards[0][rows]:
            lines.append(row(task, [_scores(card[rows].get(task)) for card in cards]))
    lines += [
        "",
        "Held-out examples are fresh draws. The pretraining tasks are small and most of their questions recur: the",
        "training pool holds 52 to 100 % of the held-out ones; 16 % for simple_equations, none for number_filtering.",
    ]
    return "\n".join(lines) + "\n"
