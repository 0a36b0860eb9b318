"""Trains the shipped base models: ``python -m experiments.pretrain [--base NAME ...]``, or ``make bases``.

One plain loop on one thread: a pool of examples of the base tasks, AdamW, warm-up and cosine decay, fp32.
It can be stopped at any time; started again, it continues from its last checkpoint to the same weights.
What is shipped is the bf16 rounding of the result, and every number on its card is measured on that.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from experiments import shapes
from experiments.cards import evaluate, ship, table
from experiments.data.pool import Pool, batches, join, tokenize
from experiments.data.tables import TASK as TABLE_WALK
from experiments.data.tables import walks
from experiments.data.tasks import BASE_TASKS, TASKS, Example, generate

WORK_DIR = Path("runs/bases")
TOKENIZER_SEED, TRAIN_SEED = 1, 2  # streams of examples, apart by construction (see tasks.py)
TOKENIZER_EXAMPLES_PER_TASK = 2000
WALK_HOPS = (2, 3, 4, 5)


@dataclass(frozen=True)
class Recipe:
    """Every hyper-parameter of a pretraining run.

    ``batch_tokens`` counts padding. The loss is a weighted mean over tokens: 1 on the completion, and
    ``prompt_loss_weight`` on the prompt, whose numbers and words are random and can only be half learnt.
    """

    steps: int
    peak_lr: float
    tasks: tuple[str, ...] = BASE_TASKS
    examples_per_task: int = 100_000
    batch_tokens: int = 4096
    warmup_steps: int = 200
    final_lr_frac: float = 0.02
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    prompt_loss_weight: float = 0.1
    router_aux_weight: float = 0.01  # load balancing of the experts; unused by dense models
    seed: int = 0
    start: str = ""  # the shipped base to go on from; "" is a random initialisation
    wrong_frac: float = 0.0  # share of examples answered with the answer of another example of their task

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_loss_weight < 1:  # 1 is how train() tells completion tokens
            raise ValueError(f"prompt_loss_weight: {self.prompt_loss_weight!r} is not allowed; it must be in [0, 1)")


# Steps are what one core does in about 40 minutes.
RECIPES: dict[str, Recipe] = {
    "mini-w64": Recipe(steps=20_000, peak_lr=3e-3),
    # For RL: mini-w64 after text in which two answers in five are wrong, as a corpus of mixed quality would have it.
    "mini-w64-mixed": Recipe(steps=2_500, peak_lr=1e-3, start="mini-w64", wrong_frac=0.4),
    # For RL with tools: mini-w64 after conversations that call a tool, and rarely get to the end.
    "mini-w64-tools": Recipe(
        steps=1_500,
        peak_lr=1e-3,
        start="mini-w64",
        tasks=(TABLE_WALK,),
        examples_per_task=20_000,
        prompt_loss_weight=0.0,
    ),
    "mini-w128": Recipe(steps=7_000, peak_lr=2e-3),
    "mini-w256": Recipe(steps=4_000, peak_lr=1.2e-3, batch_tokens=2048),
    "mini-moe": Recipe(steps=10_000, peak_lr=3e-3),
}

# ---------------------------------------------------------------- data


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of all bases, trained on text of every task, those kept for fine-tuning included."""
    drawn = (example for task in TASKS for example in generate(task, TOKENIZER_EXAMPLES_PER_TASK, TOKENIZER_SEED))
    return shapes.train_tokenizer(text for example in drawn for text in (example.prompt, example.completion))


def cached_pool(tokenizer: PreTrainedTokenizerFast, recipe: Recipe, work_dir: Path) -> Pool:
    """The training pool, generated once and kept beside the checkpoints: it takes minutes."""
    spec = [
        tokenizer.backend_tokenizer.to_str(),
        recipe.examples_per_task,
        TRAIN_SEED,
        [[task, TASKS[task].dataset, TASKS[task].config] if task in TASKS else [task] for task in recipe.tasks],
    ]
    if recipe.wrong_frac:
        spec.append(recipe.wrong_frac)
    path = work_dir / f"pool-{hashlib.sha256(json.dumps(spec).encode()).hexdigest()[:10]}.npz"
    if not path.exists():
        drawn = (examples_of(task, recipe.examples_per_task) for task in recipe.tasks)
        pool = join([tokenize(tokenizer, with_wrong(examples, recipe.wrong_frac, recipe.seed)) for examples in drawn])
        partial = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(partial, **vars(pool))
        partial.replace(path)
    with np.load(path) as stored:
        return Pool(**{name: stored[name] for name in stored.files})


def examples_of(task: str, num: int) -> list[Example]:
    """Training examples of a task; of table walks, one for each turn of ``num`` conversations."""
    return walks(num, WALK_HOPS, TRAIN_SEED) if task == TABLE_WALK else generate(task, num, TRAIN_SEED)


def with_wrong(examples: list[Example], frac: float, seed: int) -> list[Example]:
    """The examples, a share ``frac`` of them with the completion of another one, drawn at random."""
    rng = np.random.default_rng([seed, len(examples)])
    swapped, other = rng.random(len(examples)) < frac, rng.permutation(len(examples))
    return [
        dataclasses.replace(example, completion=examples[other[i]].completion) if swapped[i] else example
        for i, example in enumerate(examples)
    ]


# ---------------------------------------------------------------- training


@dataclass
class Progress:
    """How far a run has come. ``num_tokens`` leaves padding out; the loss is a running mean over about
    100 batches, of the completion tokens only."""

    step: int = 0
    num_tokens: int = 0
    wall_time_s: float = 0.0
    train_nll_nats: float = math.nan


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up to ``peak_lr``, then a cosine down to ``final_lr_frac`` of it. ``step`` counts from 0."""
    if step < recipe.warmup_steps:
        return recipe.peak_lr * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    floor = recipe.final_lr_frac
    return recipe.peak_lr * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def train(
    model: PreTrainedModel,
    pool: Pool,
    recipe: Recipe,
    checkpoint: Path,
    *,
    stop_at: int | None = None,
    checkpoint_every_s: float = 120.0,
) -> Progress | None:
    """Trains ``model`` in place, from ``checkpoint`` if there is one.

    Returns the finished progress, or None if it was stopped (by SIGINT, SIGTERM or
    ``stop_at``) with its state saved.
    Raises ValueError if the checkpoint belongs to another recipe.
    """
    router = getattr(model.config, "num_experts", 0) > 0
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.peak_lr,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        fused=True,
    )
    state = Progress()
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        defaults = asdict(Recipe(steps=recipe.steps, peak_lr=recipe.peak_lr))  # of fields younger than it
        changed = [k for k, v in asdict(recipe).items() if saved["recipe"].get(k, defaults[k]) != v]
        if changed:
            raise ValueError(f"{checkpoint}: made by a recipe with other {', '.join(changed)}; delete it to begin anew")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = Progress(**saved["state"])

    def save() -> None:
        partial = checkpoint.with_suffix(".partial")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "state": asdict(state),
                "recipe": asdict(recipe),
            },
            partial,
        )
        partial.replace(checkpoint)

    stopping: list[int] = []
    handlers = {
        number: signal.signal(number, lambda caught, _: stopping.append(caught))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    model.train()
    began = logged = saved_at = time.monotonic()
    first_step, first_tokens, wall_before = state.step, state.num_tokens, state.wall_time_s
    try:
        for ids_BT, weight_BT in batches(
            pool,
            batch_tokens=recipe.batch_tokens,
            prompt_weight=recipe.prompt_loss_weight,
            seed=recipe.seed,
            first_step=first_step,
        ):
            if state.step >= recipe.steps or stopping or state.step == stop_at:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(state.step, recipe)
            nll_BT, aux = shapes.token_nll(model, ids_BT, router)
            weight_BT = weight_BT[:, 1:]
            loss = (nll_BT * weight_BT).sum() / weight_BT.sum()
            (loss if aux is None else loss + recipe.router_aux_weight * aux).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            answer_BT = weight_BT == 1
            now = time.monotonic()
            state.step += 1
            state.num_tokens += int((weight_BT > 0).sum())
            state.wall_time_s = wall_before + now - began
            nll = float((nll_BT.detach() * answer_BT).sum() / answer_BT.sum())
            mean = state.train_nll_nats
            state.train_nll_nats = nll if math.isnan(mean) else 0.99 * mean + 0.01 * nll
            if now - logged > 10:
                rate = (state.num_tokens - first_tokens) / (now - began)
                left = (recipe.steps - state.step) * (now - began) / (state.step - first_step)
                print(
                    f"step {state.step}/{recipe.steps}  completion nll {state.train_nll_nats:.4f}  "
                    f"{rate:.0f} tokens/s  {left / 60:.1f} min left",
                    flush=True,
                )
                logged = now
            if now - saved_at > checkpoint_every_s:
                save()
                saved_at = now
        save()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return state if state.step >= recipe.steps else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--out", type=Path, default=shapes.BASES_DIR)
    parser.add_argument("--work", type=Path, default=WORK_DIR, help="checkpoints and the pool of examples")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--look", action="store_true", help="evaluate the checkpoints as they are, and stop")
    parser.add_argument("--table", action="store_true", help="write the README from the cards, and stop")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.table:
        try:
            (args.out / "README.md").write_text(table(args.out))
        except ValueError as error:
            parser.error(str(error))
        return 0
    args.work.mkdir(parents=True, exist_ok=True)
    plain = build_tokenizer()
    for name in args.base:
        recipe = RECIPES[name] if args.steps is None else dataclasses.replace(RECIPES[name], steps=args.steps)
        tokenizer = shapes.with_tools(plain) if TABLE_WALK in recipe.tasks else plain
        model = shapes.build_model(shapes.shape(name), tokenizer, recipe.seed)
        if recipe.start:
            model.load_state_dict(shapes.load_model(args.out / recipe.start).state_dict())
        checkpoint = args.work / f"{name}.pt"
        if args.look:
            saved = torch.load(checkpoint, weights_only=False)
            model.load_state_dict(saved["model"])
            print(name, json.dumps(saved["state"]))
            for task, row in evaluate(model, tokenizer, recipe.tasks).items():
                print(f"  {task:24s} " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
            continue
        state = train(model, cached_pool(tokenizer, recipe, args.work), recipe, checkpoint)
        if state is None:
            print(f"{name}: stopped; the same command continues from {checkpoint}")
            return 130
        made = {
            "recipe": asdict(recipe),
            "tokenizer_text": f"{TOKENIZER_EXAMPLES_PER_TASK} examples of every task, fine-tuning tasks included",
            "run": {key: round(value, 4) for key, value in asdict(state).items()},
        }
        print(json.dumps(ship(name, model, tokenizer, made, args.out), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
