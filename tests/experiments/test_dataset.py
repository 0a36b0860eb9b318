"""Data: the mask, the split, the order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_tokenizer

from experiments.config import ConfigError, DataConfig, DataSource
from experiments.data import dataset
from experiments.losses import IGNORED

GYM = DataConfig("d", DataSource.reasoning_gym, ("number_sorting", "word_sorting"), num_train=50, num_test=20)


def test_labels_cover_the_completion_and_its_end() -> None:
    tokenizer = tiny_tokenizer()
    row = dataset.encode(tokenizer, "ab", "xyz", 99)
    text = tokenizer.decode(row["input_ids"])
    assert text == "<user>ab<assistant>xyz<end>"
    labelled = [t for t, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED]
    assert tokenizer.decode(labelled) == "xyz<end>"
    assert all(label in (IGNORED, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))


def test_long_examples_are_cut_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    rows = [{"prompt": "p", "completion": "c" * n} for n in (1, 2, 50)] + [{"prompt": "p" * 50, "completion": "c"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig("d", DataSource.jsonl, path=str(file), num_train=3, num_test=1, max_tokens=20)
    data = dataset.load(config, tiny_tokenizer())
    assert data.num_cut == 2 and data.num_dropped == 1
    assert max(len(ids) for part in (data.train, data.test) for ids in part["input_ids"]) <= 20


def test_conversations_complete_the_last_assistant_turn(tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "w")]
    file = tmp_path / "d.jsonl"
    line = json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n"
    file.write_text(line * 2)
    data = dataset.load(DataConfig("d", DataSource.jsonl, path=str(file), num_train=1, num_test=1), tiny_tokenizer())
    row, tokenizer = data.train[0], tiny_tokenizer()
    assert tokenizer.decode(row["input_ids"]) == "<system>s<user>u<assistant>a<user>v<assistant>w<end>"
    assert tokenizer.decode([t for t in row["labels"] if t != IGNORED]) == "w<end>"


def test_no_held_out_example_is_trained_on() -> None:
    data = dataset.load(GYM, tiny_tokenizer())
    train, test = ({tuple(ids) for ids in part["input_ids"]} for part in (data.train, data.test))
    assert len(test) == 20 and len(train) == 50 and not train & test


def test_split_is_the_same_for_every_run() -> None:
    one = dataset.load(GYM, tiny_tokenizer()).test["input_ids"]
    dataset._load.cache_clear()
    assert dataset.load(GYM, tiny_tokenizer()).test["input_ids"] == one


def test_order_is_fixed_by_its_seed_and_visits_all_before_any_twice() -> None:
    first = dataset.order(10, 35, seed=3)
    assert np.array_equal(first, dataset.order(10, 35, seed=3))
    assert not np.array_equal(first, dataset.order(10, 35, seed=4))
    assert all(sorted(first[k : k + 10]) == list(range(10)) for k in (0, 10, 20))
    assert np.array_equal(first[:20], dataset.order(10, 20, seed=3))  # a longer run begins like a shorter one


def test_too_few_examples_is_named(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(ConfigError, match="need 30 examples; d has 1"):
        dataset.load(DataConfig("d", DataSource.jsonl, path=str(file), num_train=20, num_test=10), tiny_tokenizer())
