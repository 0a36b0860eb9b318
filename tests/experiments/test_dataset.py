"""Data: the mask, the split, the order."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_tokenizer

from experiments.config import ConfigError, DataConfig, DataSource
from experiments.data import dataset
from experiments.data.facts import make_facts
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
    rows = [{"prompt": f"p{n % 10}", "completion": "c" * n} for n in (1, 2, 50)] + [
        {"prompt": "p" * 50, "completion": "c"}
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig("d", DataSource.jsonl, path=str(file), num_train=3, num_test=1, max_tokens=20)
    data = dataset.load(config, tiny_tokenizer())
    assert data.num_cut == 2 and data.num_dropped == 1
    assert max(len(ids) for part in (data.train, data.test) for ids in part["input_ids"]) <= 20


def test_conversations_complete_the_last_assistant_turn(tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "w")]
    file = tmp_path / "d.jsonl"
    line = json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n"
    file.write_text(line + line.replace('"u"', '"U"'))
    data = dataset.load(DataConfig("d", DataSource.jsonl, path=str(file), num_train=1, num_test=1), tiny_tokenizer())
    row, tokenizer = data.train[0], tiny_tokenizer()
    assert tokenizer.decode(row["input_ids"]).lower() == "<system>s<user>u<assistant>a<user>v<assistant>w<end>"
    assert tokenizer.decode([t for t in row["labels"] if t != IGNORED]) == "w<end>"


def test_no_held_out_example_is_trained_on() -> None:
    data = dataset.load(GYM, tiny_tokenizer())
    train, test = ({tuple(ids) for ids in part["input_ids"]} for part in (data.train, data.test))
    assert len(test) == 20 and len(train) == 50 and not train & test


def test_held_out_split_does_not_depend_on_the_number_of_training_examples(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{n}", "completion": "c"}) + "\n" for n in range(60)))
    local = DataConfig("d", DataSource.jsonl, path=str(file), num_train=10, num_test=5)
    for config in (GYM, local):
        tests = [
            dataset.load(dataclasses.replace(config, num_train=n), tiny_tokenizer()).test["input_ids"]
            for n in (10, 20, 50)
        ]
        assert tests[0] == tests[1] == tests[2]


def test_repeated_rows_are_dropped_and_no_held_out_prompt_is_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    rows = [(f"p{n % 8}", f"c{n % 16}") for n in range(32)]  # 16 distinct rows, each prompt with two answers
    file.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows))
    config = DataConfig("d", DataSource.jsonl, path=str(file), num_train=9, num_test=3)
    data = dataset.load(config, tiny_tokenizer())

    def prompts(part) -> set[str]:
        return {tiny_tokenizer().decode(ids).partition("<assistant>")[0] for ids in part["input_ids"]}

    assert not prompts(data.train) & prompts(data.test)
    assert len({tuple(ids) for ids in data.train["input_ids"]}) == 9
    held_out = [row for row in {*rows} if f"<user>{row[0]}" in prompts(data.test)]
    assert data.num_duplicates == 32 - len({*rows}) + len(held_out) - 3


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    """U+2028 and U+0085 end a line for str.splitlines, and stand unescaped in what many tools write."""
    file = tmp_path / "d.jsonl"
    rows = [{"prompt": f"p{n}\u2028q\u0085r", "completion": "c"} for n in range(8)]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows), encoding="utf-8", newline="")
    train, test = dataset.split(DataConfig("d", DataSource.jsonl, path=str(file), num_train=6, num_test=2))
    assert {prompt for prompt, _ in (*train, *test)} == {row["prompt"] for row in rows}


def test_facts_are_tested_on_what_was_trained_on() -> None:
    config = DataConfig("f", DataSource.facts, num_train=40, num_test=8, bits_per_fact=12)
    data = dataset.load(config, tiny_tokenizer())
    assert data.test["input_ids"] == data.train["input_ids"][:8]


def test_facts_carry_the_bits_they_say() -> None:
    facts = make_facts(4000, 12, seed=0)
    assert len({question for question, _ in facts}) == 4000
    letters = np.array([answer.split(" ") for _, answer in facts])
    assert letters.shape == (4000, 3)
    for place in letters.T:  # 16 equally likely letters: 250 of each, SD 15
        counts = np.unique(place, return_counts=True)[1]
        assert len(counts) == 16 and abs(counts - 250).max() < 5 * 15.3
    assert len({answer for _, answer in facts}) > 2400  # 4096 possible: 2,555 distinct ones expected
    assert make_facts(10, 12, seed=0) == facts[:10] and make_facts(10, 12, seed=1) != facts[:10]


@pytest.mark.parametrize(("bits", "source"), [(0, "facts"), (6, "facts"), (8, "reasoning_gym")])
def test_bits_per_fact_that_mean_nothing_are_refused(bits: int, source: str) -> None:
    with pytest.raises(ConfigError, match="data.bits_per_fact"):
        DataConfig("d", DataSource[source], ("gcd",), bits_per_fact=bits)


@pytest.mark.parametrize("name", ["num_train", "num_test"])
def test_fewer_examples_than_tasks_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"data.{name}: 1 .*number of tasks \\(2\\)"):
        dataclasses.replace(GYM, **{name: 1})


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
    with pytest.raises(ConfigError, match="need 30 distinct examples; d has 1"):
        dataset.load(DataConfig("d", DataSource.jsonl, path=str(file), num_train=20, num_test=10), tiny_tokenizer())
