"""Tasks: drawn by seed, graded by their own scorers, split between bases and fine-tuning."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from pathlib import Path

import pytest

from experiments.compose import parse
from experiments.data.tasks import (
    BASE_TASKS,
    FINETUNE_TASKS,
    TASKS,
    Example,
    generate,
    generate_mixture,
    score,
)


@pytest.mark.parametrize("task", TASKS)
def test_task_scores_its_own_answer_correct_and_another_not(task: str) -> None:
    for example in generate(task, 300, seed=5):
        assert score(example, example.completion) == 1.0, example
        assert score(example, "no answer") < 1.0, example


@pytest.mark.parametrize("task", TASKS)
def test_task_is_a_function_of_its_seed_and_a_prefix_of_longer_draws(task: str) -> None:
    assert generate(task, 20, seed=3) == generate(task, 30, seed=3)[:20]


def test_neighbouring_seeds_share_no_examples() -> None:
    first, second = ({e.prompt for e in generate("number_sorting", 200, seed)} for seed in (0, 1))
    assert not first & second


@pytest.mark.parametrize("task", TASKS)
def test_examples_do_not_depend_on_the_day(task: str) -> None:
    today = str(datetime.date.today())
    assert all(today not in json.dumps(e.entry, default=str) + e.prompt for e in generate(task, 20, seed=0))


def test_finetune_tasks_are_disjoint_from_the_base_mixture() -> None:
    assert not set(BASE_TASKS) & set(FINETUNE_TASKS)
    assert set(BASE_TASKS) | set(FINETUNE_TASKS) == set(TASKS)
    assert not {TASKS[t].dataset for t in BASE_TASKS} & {TASKS[t].dataset for t in FINETUNE_TASKS}
    assert len(FINETUNE_TASKS) >= 4


def test_scoring_is_the_tasks_own_not_string_equality() -> None:
    numbers = generate("number_sorting", 1, seed=0)[0]
    assert score(numbers, numbers.completion.replace("'", '"')) == 1.0
    words = generate("word_sorting", 1, seed=0)[0]
    assert 0.0 < score(words, ", ".join(reversed(words.completion.split(", ")))) < 1.0
    total = generate("chain_sum", 1, seed=0)[0]
    assert score(total, total.completion + ".0") == 1.0


def test_score_passes_on_a_failure_of_the_grader() -> None:
    broken = Example("word_sorting", "sort", "a, b", {"answer": "a, b", "question": "", "metadata": {}})
    with pytest.raises(KeyError):
        score(broken, "a, b")


def test_mixture_has_equal_shares_shuffled_by_seed() -> None:
    mixture = generate_mixture(["gcd", "lcm", "products"], 32, seed=4)
    assert Counter(e.task for e in mixture) == {"gcd": 11, "lcm": 11, "products": 10}
    assert mixture == generate_mixture(["gcd", "lcm", "products"], 32, seed=4)
    assert [e.task for e in mixture] != sorted(e.task for e in mixture)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: generate("chain_sums", 1, 0),
            r"'chain_sums' is unknown \(did you mean 'chain_sum'\?\); allowed: .*gcd",
        ),
        (lambda: generate("gcd", 0, 0), "size: 0 is not allowed"),
        (lambda: generate_mixture([], 4, 0), "name at least one task"),
        (lambda: generate_mixture(["gcd", "gcd"], 4, 0), "each once"),
        (lambda: generate_mixture(["gcd", "lcm"], 1, 0), "at least the number of tasks"),
        (lambda: score(Example("nope", "", "", {}), ""), "'nope' is unknown; allowed"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_example_rows_of_the_readme_are_drawn_from_the_tasks_of_symbols() -> None:
    """``docs/rows.jsonl``: to make it again, write these rows."""
    tasks = parse(["data=mini-symbols", "optim.lr=1e-3"])[0].data.tasks
    rows = [{"prompt": e.prompt, "completion": e.completion} for e in generate_mixture(tasks, 500, seed=1)]
    file = Path(__file__).parents[2] / "docs" / "rows.jsonl"
    assert file.read_text(encoding="utf-8") == "".join(json.dumps(row) + "\n" for row in rows)
