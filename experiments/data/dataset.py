"""Boundary to datasets: prompts and completions in, token ids and labels out, in a seeded order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

from experiments.config import ConfigError, DataConfig, DataSource
from experiments.data.facts import make_facts
from experiments.data.tasks import Example, generate_mixture
from experiments.losses import IGNORED

T = TypeVar("T")
Turns = list[dict[str, str]]
"""A conversation: role and content of each turn."""
Pair = tuple[str | Turns, str]
"""What is given (a user's prompt, or all turns so far) and the assistant's completion of it."""

DRAWS = 4
TEST_STREAM = 500  # far from the training draws' numbers 0 to DRAWS - 1


@dataclass(frozen=True)
class TokenizedData:
    """``train`` and ``test`` hold input_ids and labels; the split of every reported loss is ``test``."""

    train: Dataset
    test: Dataset
    num_cut: int  # examples shortened to max_tokens
    num_dropped: int  # examples of which no completion token was left
    num_duplicates: int = 0  # rows of a file left out: repeated, or with a prompt of the test split


def load(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> TokenizedData:
    """Read, split and tokenize one data set. Kept in memory, so a worker does it once.

    Raises ConfigError for an unknown task, a malformed line (with its number) or too few examples.
    """
    return _load(config, tokenizer, tokenizer.name_or_path)


@lru_cache(maxsize=4)
def _load(config: DataConfig, tokenizer: PreTrainedTokenizerBase, _name: str) -> TokenizedData:
    train, test, num_duplicates = _split(config)
    wanted = config.num_train + config.num_test
    if len(train) < config.num_train or len(test) < config.num_test:
        raise ConfigError(
            f"data.num_train: {config.num_train} and data.num_test {config.num_test} need {wanted} distinct examples; "
            f"{config.name} has {len(train) + len(test)}"
        )
    train = train[: config.num_train]
    train_rows, test_rows = ([encode(tokenizer, p, c, config.max_tokens) for p, c in part] for part in (train, test))
    num_cut = sum(row["cut"] for row in train_rows + test_rows)
    kept_train, kept_test = (
        [{"input_ids": r["input_ids"], "labels": r["labels"]} for r in rows if any(t != IGNORED for t in r["labels"])]
        for rows in (train_rows, test_rows)
    )
    dropped = wanted - len(kept_train) - len(kept_test)
    if not kept_test or not kept_train:
        raise ConfigError(f"data.max_tokens: {config.max_tokens} leaves no completion token; raise it")
    return TokenizedData(Dataset.from_list(kept_train), Dataset.from_list(kept_test), num_cut, dropped, num_duplicates)


def _split(config: DataConfig) -> tuple[list[Pair], list[Pair], int]:
    """(training examples, held-out examples, number of rows left out); the second never depends on num_train."""
    if config.source is DataSource.facts:
        facts = make_facts(config.num_train, config.bits_per_fact, config.seed)
        return list(facts), list(facts[: config.num_test]), 0
    if config.source is DataSource.reasoning_gym:
        test = _draw(config, config.num_test, frozenset(), TEST_STREAM)
        return _draw(config, config.num_train, frozenset(str(prompt) for prompt, _ in test), 0), test, 0
    rows = list(_rows(config))
    distinct = list({json.dumps(row): row for row in rows}.values())
    order = np.random.default_rng(config.seed).permutation(len(distinct))
    shuffled = [distinct[i] for i in order]
    test, rest = shuffled[: config.num_test], shuffled[config.num_test :]
    asked = {json.dumps(prompt) for prompt, _ in test}
    train = [row for row in rest if json.dumps(row[0]) not in asked]
    return train, test, len(rows) - len(test) - len(train)


def _draw(config: DataConfig, wanted: int, excluded: frozenset[str], stream: int) -> list[Pair]:
    """Distinct procedural examples, none with an excluded prompt; small tasks may run out of them."""
    return [(e.prompt, e.completion) for e in draw_examples(config, wanted, excluded, stream)]


def draw_examples(config: DataConfig, wanted: int, excluded: frozenset[str], stream: int) -> list[Example]:
    """At most ``wanted`` distinct examples of the tasks, none with an excluded prompt. Raises ConfigError."""
    unique: dict[Pair, Example] = {}
    for attempt in range(DRAWS):  # a draw repeats some examples: top it up from the next ones
        try:
            examples = generate_mixture(config.tasks, wanted, 1000 * config.seed + stream + attempt)
        except ValueError as error:
            raise ConfigError(f"data.tasks: {error}") from None
        for example in examples:
            if example.prompt not in excluded:
                unique.setdefault((example.prompt, example.completion), example)
        if len(unique) >= wanted:
            break
    return list(unique.values())[:wanted]


def read_jsonl(path: Path, what: str, convert: Callable[[object], T]) -> Iterator[T]:
    """``convert`` of every line of a file. Raises ConfigError naming the line, and ``what`` was expected."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"data.path: {str(path)!r} cannot be read; {reason}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield convert(json.loads(line))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(f"data.path: {path} line {number}: {error}; {what}") from None


def read_hub(path: str, split: str, revision: str, convert: Callable[[object], T], subset: str = "") -> Iterator[T]:
    """``convert`` of every row of a hub data set. Raises ConfigError naming the row."""
    for number, row in enumerate(load_dataset(path, subset or None, split=split, revision=revision or None), start=1):
        try:
            yield convert(dict(row))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(f"data.path: {path} ({split}) row {number}: {error}") from None


PAIRS = 'each line is an object with text "prompt" and "completion", or "messages" ending with the assistant\'s'


def _rows(config: DataConfig) -> Iterator[Pair]:
    if config.source is DataSource.jsonl:
        return read_jsonl(Path(config.path), PAIRS, _pair)
    return read_hub(config.path, "train", config.revision, _pair)


def _pair(row: object) -> Pair:
    """Prompt and completion of one record; of a conversation, the last assistant turn is completed."""
    if not isinstance(row, dict):
        raise ValueError(f"found {type(row).__name__}, not an object")
    if "messages" in row:
        *context, last = row["messages"]
        if last["role"] != "assistant" or not context:
            raise ValueError("the messages do not end with an assistant turn")
        prompt, completion = [{"role": m["role"], "content": m["content"]} for m in context], last["content"]
    else:
        missing = [key for key in ("prompt", "completion") if key not in row]
        if missing:
            raise ValueError(f"no {missing[0]!r} field (found: {', '.join(map(repr, row)) or 'none'})")
        prompt, completion = row["prompt"], row["completion"]
    texts = [prompt, completion] if isinstance(prompt, str) else [completion, *(m["content"] for m in prompt)]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("prompt and completion must be text")
    return prompt, completion


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Turns) -> list[int]:
    """Token ids of the prompt in the chat template, up to where the assistant begins."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(str(text), add_special_tokens=False)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str | Turns, completion: str, max_tokens: int) -> dict:
    """Token ids through the chat template; labels cover the completion and its end-of-turn token.

    Returns {"input_ids": [T], "labels": [T], "cut": bool} with T at most ``max_tokens``.
    """
    head = encode_prompt(tokenizer, prompt)
    tail = [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]
    ids = head + tail
    labels = [IGNORED] * len(head) + tail
    return {"input_ids": ids[:max_tokens], "labels": labels[:max_tokens], "cut": len(ids) > max_tokens}


def order(num_examples: int, num_drawn: int, seed: int) -> np.ndarray:
    """Which example is seen when: epoch after epoch, each its own permutation.

    Depends on nothing but its arguments, so all arms of a data seed see the same batches, and a
    resumed run finds its place by counting. Returns (num_drawn,) indices.
    """
    rng = np.random.default_rng(seed)
    epochs = -(-num_drawn // num_examples)
    return np.concatenate([rng.permutation(num_examples) for _ in range(epochs)])[:num_drawn]


def pad(rows: Sequence[dict], pad_token_id: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Right-pad to the longest row. Returns input_ids, labels, attention_mask, each (B, T) int64."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = np.full((len(rows), longest), pad_token_id, dtype=np.int64)
    labels = np.full((len(rows), longest), IGNORED, dtype=np.int64)
    mask = np.zeros((len(rows), longest), dtype=np.int64)
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[i, :length], labels[i, :length], mask[i, :length] = row["input_ids"], row["labels"], 1
    return ids, labels, mask
