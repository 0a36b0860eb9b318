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
import platform
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from experiments import shapes
from experiments.data.tasks import BASE_TASKS, FINETUNE_TASKS, TASKS, Example, generate, score

WORK_DIR = Path("runs/bases")
TOKENIZER_SEED, TRAIN_SEED, TEST_SEED = 1, 2, 3  # streams of examples, apart by construction (see tasks.py)
TOKENIZER_EXAMPLES_PER_TASK = 2000
MAX_NEW_TOKENS = 48


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


# Steps are what fits in about 40 minutes (mini-w64, mini-w128) or 50 (the others) on one core.
RECIPES: dict[str, Recipe] = {
    "mini-w64": Recipe(steps=20_000, peak_lr=3e-3),
    "mini-w128": Recipe(steps=7_000, peak_lr=2e-3),
    "mini-w256": Recipe(steps=2_800, peak_lr=1.5e-3),
    "mini-moe": Recipe(steps=14_000, peak_lr=3e-3),
}

# ---------------------------------------------------------------- data


@dataclass(frozen=True)
class Pool:
    """Tokenised examples end to end: example n is ``ids[start[n]:start[n + 1]]``, END included."""

    ids: np.ndarray  # uint16
    start: np.ndarray  # int64, one more than there are examples
    num_prompt: np.ndarray  # int64, tokens of the prompt with its template

    @property
    def num_tokens(self) -> np.ndarray:
        return np.diff(self.start)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of all bases, trained on text of every task, those kept for fine-tuning included."""
    drawn = (example for task in TASKS for example in generate(task, TOKENIZER_EXAMPLES_PER_TASK, TOKENIZER_SEED))
    return shapes.train_tokenizer(text for example in drawn for text in (example.prompt, example.completion))


def tokenize(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> Pool:
    """Prompt (with the chat template) and completion, tokenised apart and joined."""
    prompts = tokenizer([shapes.prompt_text(e.prompt) for e in examples])["input_ids"]
    completions = tokenizer([e.completion + shapes.END for e in examples])["input_ids"]
    joined = [np.array(p + c, dtype=np.uint16) for p, c in zip(prompts, completions, strict=True)]
    start = np.concatenate([[0], np.cumsum([len(ids) for ids in joined])])
    return Pool(np.concatenate(joined), start.astype(np.int64), np.array([len(p) for p in prompts], dtype=np.int64))


def cached_pool(tokenizer: PreTrainedTokenizerFast, recipe: Recipe, work_dir: Path) -> Pool:
    """The training pool, generated once and kept beside the checkpoints: it takes minutes."""
    spec = [tokenizer.backend_tokenizer.to_str(), recipe.examples_per_task, TRAIN_SEED,
            [[task, TASKS[task].dataset, TASKS[task].config] for task in recipe.tasks]]
    path = work_dir / f"pool-{hashlib.sha256(json.dumps(spec).encode()).hexdigest()[:10]}.npz"
    if not path.exists():
        parts = [tokenize(tokenizer, generate(task, recipe.examples_per_task, TRAIN_SEED)) for task in recipe.tasks]
        num_tokens = np.concatenate([part.num_tokens for part in parts])
        pool = Pool(np.concatenate([part.ids for part in parts]), np.concatenate([[0], np.cumsum(num_tokens)]),
                    np.concatenate([part.num_prompt for part in parts]))
        partial = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(partial, **vars(pool))
        partial.replace(path)
    with np.load(path) as stored:
        return Pool(**{name: stored[name] for name in stored.files})


def epoch_batches(num_tokens: np.ndarray, recipe: Recipe, epoch: int) -> list[np.ndarray]:
    """Example indices of each batch of one epoch; a function of (lengths, recipe, epoch).

    Examples are shuffled, sorted by length within blocks (so that little is padding), cut into batches
    of at most ``batch_tokens`` padded tokens, and the batches are shuffled.
    """
    rng = np.random.default_rng([recipe.seed, epoch])
    order = rng.permutation(len(num_tokens))
    batches: list[np.ndarray] = []
    for block in np.array_split(order, max(1, len(order) // 16_384)):
        block = block[np.argsort(num_tokens[block], kind="stable")]
        first = 0
        for last in range(1, len(block) + 1):
            if last == len(block) or (last + 1 - first) * num_tokens[block[last]] > recipe.batch_tokens:
                batches.append(block[first:last])
                first = last
    return [batches[i] for i in rng.permutation(len(batches))]


def batches(pool: Pool, recipe: Recipe, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids_BT, weight_BT) from ``first_step`` on. A token's weight is 0 where it is padding."""
    seen, epoch = 0, 0
    while True:
        planned = epoch_batches(pool.num_tokens, recipe, epoch)
        for chosen in planned[max(0, first_step - seen):]:
            yield collate(pool, chosen, recipe.prompt_loss_weight)
        seen, epoch = seen + len(planned), epoch + 1


def collate(pool: Pool, chosen: np.ndarray, prompt_weight: float) -> tuple[Tensor, Tensor]:
    """(ids_BT, weight_BT), padded on the right with id 0, which is PAD."""
    lengths = pool.num_tokens[chosen]
    column = np.arange(lengths.max())
    real = column < lengths[:, None]
    ids = np.zeros(real.shape, dtype=np.int64)
    ids[real] = pool.ids[(pool.start[chosen][:, None] + column)[real]]
    weight = np.where(column < pool.num_prompt[chosen][:, None], prompt_weight, 1.0) * real
    return torch.from_numpy(ids), torch.from_numpy(weight.astype(np.float32))


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


def token_nll(model: PreTrainedModel, ids_BT: Tensor, router: bool = False) -> tuple[Tensor, Tensor | None]:
    """(nll_BT' in nats of tokens 1 .. T-1, the experts' balance loss or None).

    No attention mask: padding is on the right, where a causal model cannot see it from a real token.
    """
    extra = {"output_router_logits": True} if router else {}
    out = model(input_ids=ids_BT[:, :-1], use_cache=False, **extra)
    nll = F.cross_entropy(out.logits.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    return nll.view(ids_BT.shape[0], -1), out.aux_loss if router else None


def train(model: PreTrainedModel, pool: Pool, recipe: Recipe, checkpoint: Path, *,
          stop_at: int | None = None, checkpoint_every_s: float = 120.0) -> Progress | None:
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
        lr=recipe.peak_lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, fused=True)
    state = Progress()
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        changed = [k for k, v in asdict(recipe).items() if saved["recipe"].get(k) != v]
        if changed:
            raise ValueError(f"{checkpoint}: made by a recipe with other {', '.join(changed)}; delete it to begin anew")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = Progress(**saved["state"])

    def save() -> None:
        partial = checkpoint.with_suffix(".partial")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": asdict(state),
                    "recipe": asdict(recipe)}, partial)
        partial.replace(checkpoint)

    stopping: list[int] = []
    handlers = {number: signal.signal(number, lambda caught, _: stopping.append(caught))
                for number in (signal.SIGINT, signal.SIGTERM)}
    model.train()
    began = logged = saved_at = time.monotonic()
    first_step, first_tokens, wall_before = state.step, state.num_tokens, state.wall_time_s
    try:
        for ids_BT, weight_BT in batches(pool, recipe, first_step):
            if state.step >= recipe.steps or stopping or state.step == stop_at:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(state.step, recipe)
            nll_BT, aux = token_nll(model, ids_BT, router)
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
                print(f"step {state.step}/{recipe.steps}  completion nll {state.train_nll_nats:.4f}  "
                      f"{rate:.0f} tokens/s  {left / 60:.1f} min left", flush=True)
                logged = now
            if now - saved_at > checkpoint_every_s:
                save()
                saved_at = now
        save()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return state if state.step >= recipe.steps else None


# ---------------------------------------------------------------- evaluation


@torch.no_grad()
def held_out_nll(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> float:
    """Nats per completion token (END counts), over all tokens of all examples."""
    pool = tokenize(tokenizer, examples)
    ids_BT, weight_BT = collate(pool, np.arange(len(examples)), prompt_weight=0.0)
    nll_BT, _ = token_nll(model, ids_BT)
    return float((nll_BT * weight_BT[:, 1:]).sum() / weight_BT[:, 1:].sum())


@torch.no_grad()
def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example],
            sample: bool) -> list[str]:
    """The model's answers: greedy, or sampled at temperature 1 from the whole distribution (seed 0)."""
    prompts = tokenizer([shapes.prompt_text(e.prompt) for e in examples], padding=True, padding_side="left",
                        return_tensors="pt")
    torch.manual_seed(0)
    chosen: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
    out_BT = model.generate(input_ids=prompts["input_ids"], attention_mask=prompts["attention_mask"],
                            do_sample=sample, max_new_tokens=MAX_NEW_TOKENS, **chosen)
    return tokenizer.batch_decode(out_BT[:, prompts["input_ids"].shape[1]:], skip_special_tokens=True)


def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[str],
             num_test: int = 256) -> dict[str, dict[str, float]]:
    """Per task: held-out NLL, and the fraction of answers its own scorer calls correct (score 1)."""
    model.eval()
    result: dict[str, dict[str, float]] = {}
    for task in tasks:
        examples = generate(task, num_test, TEST_SEED)
        row = {"nll_nats": held_out_nll(model, tokenizer, examples)}
        for name, sample in (("greedy_accuracy", False), ("sampled_accuracy", True)):
            given = answers(model, tokenizer, examples, sample)
            row[name] = sum(score(e, a) == 1.0 for e, a in zip(examples, given, strict=True)) / len(examples)
        result[task] = {name: round(value, 4) for name, value in row.items()}
    return result


# ---------------------------------------------------------------- shipping


def sha256_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ship(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe,
         state: Progress, out_dir: Path) -> dict[str, Any]:
    """Writes one base with its card, which is written last. Returns the card."""
    directory = out_dir / name
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(directory))
    model.to(torch.bfloat16).save_pretrained(str(directory))
    rounded = shapes.load_model(directory)
    card = {
        "name": name,
        "shape": asdict(shapes.shape(name)),
        "num_parameters": sum(p.numel() for p in rounded.parameters()),
        "recipe": asdict(recipe),
        "tokenizer_text": f"{TOKENIZER_EXAMPLES_PER_TASK} examples of every task, fine-tuning tasks included",
        "run": {key: round(value, 4) for key, value in asdict(state).items()},
        "num_test_per_task": 256,
        "base_tasks": evaluate(rounded, tokenizer, recipe.tasks),
        "finetune_tasks": evaluate(rounded, tokenizer, FINETUNE_TASKS),
        "sha256": {file: sha256_file(directory / file) for file in ("model.safetensors", "tokenizer.json")},
        "versions": {"python": platform.python_version()}
        | {p: version(p) for p in ("torch", "transformers", "tokenizers", "reasoning-gym")},
    }
    partial = directory / "card.json.partial"
    partial.write_text(json.dumps(card, indent=2) + "\n")
    partial.replace(directory / "card.json")
    return card


def table(out_dir: Path) -> str:
    """The README of the shipped bases, from their cards."""
    cards = [json.loads((out_dir / name / "card.json").read_text())
             for name in shapes.SHAPES if (out_dir / name / "card.json").exists()]
    if not cards:
        raise ValueError(f"out: {str(out_dir)!r} holds no base; train one first")
    lines = ["# Base models", "", "Written by `python -m experiments.pretrain --table` from the cards beside it.", "",
             "| base | parameters | steps | tokens | minutes | " + " | ".join(BASE_TASKS) + " |",
             "|" + "---|" * (5 + len(BASE_TASKS))]
    for card in cards:
        scores = [f"{card['base_tasks'][t]['greedy_accuracy']:.2f} / {card['base_tasks'][t]['sampled_accuracy']:.2f}"
                  for t in BASE_TASKS]
        run = card["run"]
        lines.append(f"| {card['name']} | {card['num_parameters'] / 1e6:.2f} M | {run['step']} | "
                     f"{run['num_tokens'] / 1e6:.0f} M | {run['wall_time_s'] / 60:.0f} | " + " | ".join(scores) + " |")
    return "\n".join(lines) + "\n"


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
        (args.out / "README.md").write_text(table(args.out))
        return 0
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    for name in args.base:
        recipe = RECIPES[name] if args.steps is None else dataclasses.replace(RECIPES[name], steps=args.steps)
        model = shapes.build_model(shapes.shape(name), tokenizer, recipe.seed)
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
        card = ship(name, model, tokenizer, recipe, state, args.out)
        print(json.dumps(card, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
