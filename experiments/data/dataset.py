"""Prompts and completions in, token ids and labels out, in a seeded order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice

import numpy as np
from datasets import Dataset, Features, List, Value, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from experiments.chat import Turns, spans
from experiments.config import ConfigError, DataConfig, DataSource, LossOn
from experiments.data.facts import make_facts
from experiments.data.records import Reader, source_of
from experiments.data.tasks import Example, generate_mixture
from experiments.losses import IGNORED

Pair = tuple[str | Turns, str]
"""What is given (a user's prompt, or all turns so far) and the assistant's completion of it."""

DRAWS = 4
TEST_STREAM = 500  # far from the training draws' numbers 0 to DRAWS - 1
COLUMNS = ("messages", "conversations", "prompt", "completion")
PAIRS = 'each row is an object with text "prompt" and "completion", or "messages" ending with the assistant\'s'
FEATURES = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
CHUNK = 4096  # examples that are Python lists at a time: a million of those would take a hundred gigabytes
MANY_CUT_FRAC = 0.05  # share of cut examples from which on it is said with the run


@dataclass(frozen=True)
class TokenizedData:
    """``train`` and ``test`` hold input_ids and labels; the split of every reported loss is ``test``."""

    train: Dataset
    test: Dataset
    num_cut: int  # examples shortened to max_tokens
    num_dropped: int  # examples of which no completion token was left
    num_duplicates: int = 0  # rows read but left out: repeated, or with a prompt of the test split
    num_malformed: int = 0  # rows that are no example, left out as data.max_malformed allows
    notes: tuple[str, ...] = ()  # what of this a reader of the run must know


def load(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> TokenizedData:
    """Read, split and tokenize one data set. Kept in memory, so a worker does it once.

    Raises ConfigError for an unknown task, malformed rows (with their lines) or too few examples.
    """
    return _load(config, tokenizer, tokenizer.name_or_path)


@lru_cache(maxsize=4)
def _load(config: DataConfig, tokenizer: PreTrainedTokenizerBase, _name: str) -> TokenizedData:
    found = _split(config)
    wanted = config.num_train + config.num_test
    if len(found.train) < config.num_train or len(found.test) < config.num_test:
        raise ConfigError(
            f"data.num_train: {config.num_train} and data.num_test {config.num_test} need {wanted} distinct examples; "
            f"{config.name} has {len(found.train) + len(found.test)}"
        )
    train, train_cut = _tokenized(config, tokenizer, found.train[: config.num_train])
    test, test_cut = _tokenized(config, tokenizer, found.test)
    num_cut, dropped = train_cut + test_cut, wanted - len(train) - len(test)
    if not len(test) or not len(train):
        raise ConfigError(
            f"data.max_tokens: {config.max_tokens} leaves no completion token of any example of {config.name}; raise it"
        )
    notes = [reader.left_out() for reader in found.readers if reader.malformed]
    if dropped:
        notes.append(
            f"{dropped} of {wanted} examples have no completion token among the first {config.max_tokens}: dropped"
        )
    if num_cut > MANY_CUT_FRAC * wanted:
        notes.append(f"{num_cut} of {wanted} examples are cut at {config.max_tokens} tokens")
    malformed = sum(len(reader.malformed) for reader in found.readers)
    return TokenizedData(train, test, num_cut, dropped, found.num_duplicates, malformed, tuple(notes))


def _tokenized(config: DataConfig, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair]) -> tuple[Dataset, int]:
    """The examples that have a label, and how many were cut."""
    num_cut, chunks = 0, []
    for start in range(0, len(pairs), CHUNK):
        rows = [encode(tokenizer, p, c, config.max_tokens, config.loss_on) for p, c in pairs[start : start + CHUNK]]
        num_cut += sum(row.pop("cut") for row in rows)
        kept = [row for row in rows if any(label != IGNORED for label in row["labels"])]
        chunks.append(Dataset.from_dict({name: [row[name] for row in kept] for name in FEATURES}, features=FEATURES))
    return concatenate_datasets(chunks), num_cut


def split(config: DataConfig) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out examples before they are tokenized: as many as there are, up to those asked for.

    Raises ConfigError for malformed rows (with their lines).
    """
    found = _split(config)
    return found.train[: config.num_train], found.test


@dataclass
class _Split:
    train: list[Pair]
    test: list[Pair]
    num_duplicates: int = 0
    readers: tuple[Reader[Pair], ...] = ()


def _split(config: DataConfig) -> _Split:
    """Training and held-out examples; the second never depend on num_train."""
    if config.source is DataSource.facts:
        facts = make_facts(config.num_train, config.bits_per_fact, config.seed)
        return _Split(list(facts), list(facts[: config.num_test]))
    if config.source is DataSource.reasoning_gym:
        test = _draw(config, config.num_test, frozenset(), TEST_STREAM)
        return _Split(_draw(config, config.num_train, frozenset(str(prompt) for prompt, _ in test), 0), test)
    return _read(config)


def _read(config: DataConfig) -> _Split:
    """From files or the hub: the held-out examples from the sets named for it, or else the first of the shuffled rows.

    A file is read whole. Of a hub set no more rows are read than are needed, in shuffled order.
    """
    reader = Reader(source_of(config, COLUMNS), _pair, PAIRS, config.max_malformed)
    apart = [Reader(source_of(config, COLUMNS, name), _pair, PAIRS, config.max_malformed) for name in config.held_out]
    if config.source is DataSource.jsonl:
        rows = list({json.dumps(row): row for row in reader()}.values())
        shuffled = iter([rows[i] for i in np.random.default_rng(config.seed).permutation(len(rows))])
    else:
        shuffled = reader(np.random.default_rng(config.seed).permutation(len(reader.source)).tolist())
    seen: set[bytes] = set()
    elsewhere = list(_new(chain.from_iterable(r() for r in apart), seen))
    test = elsewhere[: config.num_test] if apart else list(islice(_new(shuffled, seen), config.num_test))
    asked = {json.dumps(prompt) for prompt, _ in elsewhere or test}
    rest = (row for row in _new(shuffled, seen) if json.dumps(row[0]) not in asked)
    train = list(islice(rest, config.num_train))
    for each in (reader, *apart):
        each.check()
    num_read = reader.num_read - len(reader.malformed)
    num_left = sum(1 for _ in rest) if config.source is DataSource.jsonl else 0  # good, and more than were asked for
    duplicates = num_read - len(train) - num_left - (0 if apart else len(test))
    return _Split(train, test, duplicates, (reader, *apart))


def _new(rows: Iterator[Pair], seen: set[bytes]) -> Iterator[Pair]:
    """The rows that were not seen before."""
    for row in rows:
        key = hashlib.blake2b(json.dumps(row).encode(), digest_size=16).digest()
        if key not in seen:
            seen.add(key)
            yield row


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


def _pair(row: object) -> Pair:
    """Prompt and completion of one record; of a conversation, the last assistant turn is completed.

    Knows ``messages`` (Tulu 3, No Robots), ``conversations`` of ``from`` and ``value`` (OpenThoughts 3), and ``prompt``
    with ``completion``, as text or as turns. Raises ValueError for anything else.
    """
    if not isinstance(row, dict):
        raise ValueError(f"found {type(row).__name__}, not an object")
    if row.get("messages") is not None:
        turns = _turns(row["messages"])
    elif row.get("conversations") is not None:
        turns = _turns(row["conversations"])
    else:
        missing = [key for key in ("prompt", "completion") if row.get(key) is None]
        if missing:
            raise ValueError(f"no {missing[0]!r} field (found: {', '.join(map(repr, row)) or 'none'})")
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt, completion
        if isinstance(prompt, str) or isinstance(completion, str):
            raise ValueError("prompt and completion must be text, or both turns of a conversation")
        turns = [*_turns(prompt), *_turns(completion)]
    *context, last = turns
    if last["role"] != "assistant" or not context:
        raise ValueError("the messages do not end with an assistant turn")
    return context, last["content"]


ROLES = {"human": "user", "gpt": "assistant"}  # as data sets of ``from`` and ``value`` call them


def _turns(found: object) -> Turns:
    if not isinstance(found, list) or not found:
        raise ValueError("the messages are no list of turns")
    turns = []
    for turn in found:
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError("prompt and completion must be text")
        turns.append({"role": ROLES.get(role, role), "content": content})
    return turns


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Turns) -> list[int]:
    """Token ids of the prompt in the chat template, up to where the assistant begins."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(str(text), add_special_tokens=False)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Turns,
    completion: str,
    max_tokens: int,
    loss_on: LossOn = LossOn.last,
) -> dict:
    """Token ids through the chat template; labels cover the completion and its end-of-turn token.

    With ``LossOn.assistant`` they cover every assistant turn before it too.
    Returns {"input_ids": [T], "labels": [T], "cut": bool} with T at most ``max_tokens``.
    """
    end = tokenizer.eos_token_id
    if loss_on is LossOn.last or isinstance(prompt, str):
        head = encode_prompt(tokenizer, prompt)
        tail = [*tokenizer.encode(completion, add_special_tokens=False), end]
        ids, labels = head + tail, [IGNORED] * len(head) + tail
    else:
        ids, labels = [], []
        for text, learned in spans(tokenizer, [*prompt, {"role": "assistant", "content": completion}]):
            words = text.removesuffix(str(tokenizer.eos_token)) if learned else text
            piece = tokenizer.encode(words, add_special_tokens=False) + ([end] if learned else [])
            ids += piece
            labels += piece if learned else [IGNORED] * len(piece)
    return {"input_ids": ids[:max_tokens], "labels": labels[:max_tokens], "cut": len(ids) > max_tokens}


def order(num_examples: int, num_drawn: int, seed: int) -> np.ndarray:
    """Which example is seen when: epoch after epoch, each its own permutation.

    Depends on nothing but its arguments, so all arms of a data seed see the same batches, and a
    resumed run finds its place by counting. Returns (num_drawn,) indices.
    """
    rng = np.random.default_rng(seed)
    epochs = -(-num_drawn // num_examples)
    return np.concatenate([rng.permutation(num_examples) for _ in range(epochs)])[:num_drawn]


def joined(rows: Sequence[dict]) -> dict[str, np.ndarray]:
    """The rows end to end: input_ids, labels and position_ids, each (1, N) int64, the positions of each from 0.

    From the positions and the absence of a mask, transformers tells the sequences apart: none attends to another.
    A row's first token has no label, for what would predict it is the end of the row before.
    """
    labels = [[IGNORED, *row["labels"][1:]] for row in rows]
    columns = {"input_ids": [row["input_ids"] for row in rows], "labels": labels,
               "position_ids": [range(len(row["input_ids"])) for row in rows]}  # fmt: skip
    return {
        name: np.concatenate([np.asarray(v, dtype=np.int64) for v in values])[None] for name, values in columns.items()
    }


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
