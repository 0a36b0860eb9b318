"""Problems with verifiable answers: read in each set's own schema, split apart, refused where malformed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from tiny import tiny_tokenizer

from experiments.compose import parse
from experiments.config import ConfigError, DataConfig, DataSource
from experiments.data import dataset, problems, records, tasks
from experiments.data.problems import Problem, final_answer

GYM = DataConfig("d", DataSource.reasoning_gym, ("gcd", "spell_backward"), num_train=40, num_test=12)
Rows = list[Any]


def write(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def local(path: Path, num_train: int, num_test: int, **settings: Any) -> DataConfig:
    return DataConfig("d", DataSource.jsonl, path=str(path), num_train=num_train, num_test=num_test, **settings)


def numbered(first: int, last: int) -> Rows:
    return [{"question": f"q{n}", "answer": f"#### {n}"} for n in range(first, last)]


def asked(part: tuple[Problem, ...]) -> list[str]:
    return [problem.prompt for problem in part]


def refusal(config: DataConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        problems.load(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CLIPS = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72"
NESTED = "Not \\boxed{3}, but $x = \\boxed{\\frac{1}{\\sqrt{2}}}$, as $\\{x\\}$ shows."
SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "GSM8K": ({"question": "Q", "answer": CLIPS}, "72"),
    "GSM8K, thousands": ({"question": "Q", "answer": "That is $1,234,500.\n#### 1,234,500"}, "1234500"),
    "GSM8K, negative": ({"question": "Q", "answer": "#### -5 "}, "-5"),
    "MATH": (
        {"problem": "Q", "level": "Level 5", "type": "Algebra", "solution": NESTED}, "\\frac{1}{\\sqrt{2}}",
    ),
    "MATH, a pair": ({"problem": "Q", "solution": "Thus $\\boxed{(1,234)}$."}, "(1,234)"),  # no thousands here
    "MATH-500": ({"problem": "Q", "solution": "So \\boxed{4}.", "answer": "4", "subject": "Algebra"}, "4"),
    "DeepMath-103K": (
        {"question": "Q", "final_answer": "\\infty", "difficulty": 5.0, "topic": "T", "r1_solution_1": "\\boxed{1}"},
        "\\infty",
    ),
    "AIME 2024": ({"id": 60, "problem": "Q", "solution": "Then 204, \\boxed{1}.", "answer": "204", "url": "u"}, "204"),
    "AIME 2024, other columns": ({"ID": "2024-II-4", "Problem": "Q", "Solution": "\\boxed{1}", "Answer": 33}, "33"),
    "AIME 2025": ({"problem": "Q", "answer": 70, "id": "0"}, "70"),
    "AIME 2025, other columns": ({"question": "Q", "answer": "070"}, "070"),
    "our own": ({"prompt": "Q", "answer": " 1/2 "}, "1/2"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "answer"), SCHEMAS.values(), ids=SCHEMAS)
def test_question_and_final_answer_are_found_in_each_schema(tmp_path: Path, row: dict[str, Any], answer: str) -> None:
    other = {key: value if value != "Q" else "  another\n" for key, value in row.items()}
    data = problems.load(local(write(tmp_path / "d.jsonl", [row, "\n", other]), 1, 1))
    assert {*data.train, *data.test} == {Problem("Q", answer), Problem("another", answer)}
    assert data.train[0].record() == {"prompt": data.train[0].prompt, "answer": answer, "task": "", "entry": {}}


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("#### 1 #### 2", "2"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed{\\text{if } \\{a, b\\}}", "\\text{if } \\{a, b\\}"),
        ("\\boxed{12}\\boxed{13} and }", "13"),
        ("x^2 + 1", "x^2 + 1"),
        ("1,000", "1,000"),
    ],
)
def test_final_answer_is_the_last_one(solution: str, answer: str) -> None:
    assert final_answer(solution) == answer


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{not JSON}\n", "Expecting property name"),
        ([1, 2], "found list, not an object"),
        ("3\n", "found int, not an object"),
        ({}, "no question and answer among nothing"),
        ({"question": "Q", "solution": "\\boxed{1}"}, "no question and answer among 'question', 'solution'"),
        ({"question": 3, "answer": "1"}, "no question and answer"),
        ({"question": "Q", "answer": None}, "no question and answer"),
        ({"question": "Q", "answer": ["1"]}, "no question and answer"),
        ({"question": "Q", "answer": " "}, "the answer is empty"),
        ({"question": "Q", "answer": "I give up. ####"}, "the answer is empty"),
        ({"problem": "Q", "solution": "\\boxed{}"}, "the answer is empty"),
        ({"problem": "Q", "solution": "so \\boxed{\\frac{1}{2}"}, "\\boxed{ is not closed"),
    ],
)
@pytest.mark.parametrize("held_out", [False, True])
def test_malformed_row_is_named_with_its_line(tmp_path: Path, row: object, said: str, held_out: bool) -> None:
    bad = write(tmp_path / "bad.jsonl", [*numbered(0, 2), "\n", row, *numbered(2, 9)])
    good = write(tmp_path / "good.jsonl", numbered(10, 20))
    config = local(good, 2, 2, held_out=(str(bad),)) if held_out else local(bad, 2, 2)
    found = refusal(config)
    assert f"{bad} line 4: " in found and said in found and '"question" and "final_answer"' in found


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    assert "cannot be read; No such file" in refusal(local(tmp_path / "none.jsonl", 1, 1))
    good = write(tmp_path / "good.jsonl", numbered(0, 9))
    assert "none.jsonl" in refusal(local(good, 1, 1, held_out=(str(tmp_path / "none.jsonl"),)))


@pytest.mark.parametrize("name", ["", "#main", ":test", "@abc", "a#", "a:test@"])
def test_held_out_name_that_says_nothing_is_refused(tmp_path: Path, name: str) -> None:
    good = write(tmp_path / "good.jsonl", numbered(0, 9))
    assert f"data.held_out: {name!r} is not allowed" in refusal(local(good, 1, 1, held_out=(name,)))


def test_held_out_files_are_the_test_split_and_never_trained_on(tmp_path: Path) -> None:
    """Both files hold questions of the training file (12 to 18), some of them beyond what is tested."""
    train = write(tmp_path / "train.jsonl", numbered(0, 19))
    first, second = write(tmp_path / "a.jsonl", numbered(12, 15)), write(tmp_path / "b.jsonl", numbered(15, 30))
    held_out = (str(first), str(second))
    data = problems.load(local(train, 12, 5, held_out=held_out))
    assert asked(data.test) == ["q12", "q13", "q14", "q15", "q16"]  # in the order of the files
    assert {*asked(data.train)} == {f"q{n}" for n in range(12)}
    assert "has 12 and 18 distinct problems" in refusal(local(train, 13, 18, held_out=held_out))


def test_without_held_out_files_the_test_split_is_apart(tmp_path: Path) -> None:
    data = problems.load(local(write(tmp_path / "d.jsonl", numbered(0, 30)), 20, 10))
    assert {*asked(data.train), *asked(data.test)} == {f"q{n}" for n in range(30)}
    assert [int(p.answer) for p in data.train] == [int(p.prompt[1:]) for p in data.train]
    assert asked(data.train) != sorted(asked(data.train), key=lambda q: int(q[1:]))  # shuffled


@pytest.mark.parametrize("kind", ["gym", "file", "held_out"])
def test_test_split_does_not_depend_on_num_train(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path / "d.jsonl", numbered(0, 60))
    other = write(tmp_path / "e.jsonl", numbered(50, 80))
    held_out = (str(other),) if kind == "held_out" else ()
    config = GYM if kind == "gym" else local(file, 10, 12, held_out=held_out)
    loaded = [problems.load(dataclasses.replace(config, num_train=n)) for n in (5, 10, 40)]
    assert loaded[0].test == loaded[1].test == loaded[2].test and len(loaded[0].test) == 12
    for data, number in zip(loaded, (5, 10, 40), strict=True):
        assert len(data.train) == number and not {*asked(data.train)} & {*asked(data.test)}


def test_seed_moves_the_split(tmp_path: Path) -> None:
    config = local(write(tmp_path / "d.jsonl", numbered(0, 60)), 10, 10)
    for each in (config, GYM):
        assert problems.load(dataclasses.replace(each, seed=1)).test != problems.load(each).test


def test_repeated_problems_are_trained_on_once(tmp_path: Path) -> None:
    held_out = write(tmp_path / "t.jsonl", numbered(100, 102))
    file = write(tmp_path / "d.jsonl", numbered(0, 9) * 3 + numbered(0, 4) + numbered(100, 101))
    data = problems.load(local(file, 9, 2, held_out=(str(held_out),)))
    assert sorted(asked(data.train)) == [f"q{n}" for n in range(9)]
    assert data.num_duplicates == 2 * 9 + 4 + 1
    assert "has 9 and 2 distinct problems" in refusal(local(file, 10, 2, held_out=(str(held_out),)))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_repeated_problems_are_tested_once(tmp_path: Path, elsewhere: bool) -> None:
    file = write(tmp_path / "d.jsonl", numbered(0, 20) * 3)
    held_out = (str(write(tmp_path / "t.jsonl", numbered(100, 110) * 2)),) if elsewhere else ()
    data = problems.load(local(file, 5, 10, held_out=held_out))
    assert len({*asked(data.test)}) == 10
    assert "distinct problems" in refusal(local(file, 5, 11 if elsewhere else 21, held_out=held_out))


def test_held_out_problems_that_are_not_tested_are_no_duplicates(tmp_path: Path) -> None:
    file, other = write(tmp_path / "d.jsonl", numbered(0, 9)), write(tmp_path / "t.jsonl", numbered(20, 40))
    assert problems.load(local(file, 5, 4, held_out=(str(other),))).num_duplicates == 0


def test_too_few_problems_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", numbered(0, 10))
    assert "data.num_train: 8 and data.num_test 3 were asked for; d has 7 and 3" in refusal(local(file, 8, 3))
    assert "d has 0 and 10 distinct problems" in refusal(local(file, 1, 11))
    held_out = (str(write(tmp_path / "t.jsonl", numbered(20, 22))),)
    assert "d has 10 and 2 distinct problems" in refusal(local(file, 8, 3, held_out=held_out))
    assert problems.load(local(file, 7, 3)).num_duplicates == 0


def test_small_task_runs_out_of_problems_and_says_so() -> None:
    """It asks of 1 to 4,095."""
    found = refusal(dataclasses.replace(GYM, tasks=("count_bits",), num_train=6000, num_test=4))
    assert "were asked for; d has" in found


def test_small_task_trains_on_no_held_out_problem() -> None:
    """300 of 4,095 numbers are held out: some 100 of the 1,500 drawn for training would be among them."""
    data = problems.load(dataclasses.replace(GYM, tasks=("count_bits",), num_train=1500, num_test=300))
    assert len({*asked(data.train)}) == 1500 and len({*asked(data.test)}) == 300
    assert not {*asked(data.train)} & {*asked(data.test)}


def test_procedural_test_split_is_that_of_supervised_runs() -> None:
    """A base fine-tuned on these tasks has not seen what its RL run is tested on."""
    supervised = dataset.load(GYM, tiny_tokenizer()).test["input_ids"]
    prompts = {tiny_tokenizer().decode(ids).partition("<assistant>")[0] for ids in supervised}
    assert prompts == {f"<user>{prompt}" for prompt in asked(problems.load(GYM).test)}


def test_unknown_task_is_one_line() -> None:
    assert "did you mean 'gcd'" in refusal(dataclasses.replace(GYM, tasks=("gcdd",)))


def test_facts_have_no_answer_to_verify() -> None:
    config = DataConfig("f", DataSource.facts, num_train=40, num_test=8, bits_per_fact=12)
    assert refusal(config) == "data.source: 'facts' is not allowed; rl needs problems with answers"


def accepted(problem: Problem) -> bool:
    """Whether the task's own scorer takes the answer, after the journey through JSON to the grader's process."""
    record = json.loads(json.dumps(problem.record()))
    example = tasks.Example(record["task"], record["prompt"], record["answer"], record["entry"])
    return tasks.score(example, problem.answer) == 1 and tasks.score(example, "no answer") < 1


@pytest.mark.parametrize("task", tasks.TASKS)
def test_procedural_problems_carry_what_their_scorer_reads(task: str) -> None:
    data = problems.load(DataConfig("d", DataSource.reasoning_gym, (task,), num_train=6, num_test=3))
    assert [len(data.train), len(data.test), data.num_duplicates] == [6, 3, 0]
    for problem in (*data.train, *data.test):
        assert problem.task == task and accepted(problem)


def test_shipped_puzzles_can_be_learned_from() -> None:
    """At a hundredth of their size: distinct problems of all their tasks in both splits."""
    config = parse(["data=mini-puzzles", "optim.lr=1e-3", "data.num_train=48", "data.num_test=12"])[0].data
    data = problems.load(config)
    assert {p.task for p in data.train} == {p.task for p in data.test} == {*config.tasks}
    prompts = asked(data.train) + asked(data.test)
    assert len({*prompts}) == 60 and all(accepted(p) for p in data.test)


# ---------------------------------------------------------------- sets of the hub, read from a local copy


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in two subsets, as the hub keeps them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "gsm"
    for subset, first in (("main", 0), ("socratic", 100)):
        write(repository / f"{subset}-train.jsonl", numbered(first, first + 10))
        write(repository / f"{subset}-test.jsonl", numbered(first + 8, first + 14))
    card = "".join(
        f"- config_name: {subset}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {subset}-{split}.jsonl\n" for split in ("train", "test"))
        for subset in ("main", "socratic")
    )
    (repository / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    return repository


@pytest.mark.parametrize(
    ("subset", "held_out", "test", "trained_on"),
    [
        ("main", "#main", range(8, 12), range(8)),
        ("main", "#socratic:test", range(108, 112), range(10)),
        ("socratic", "#main:train", range(4), range(100, 110)),
        ("socratic", "#socratic:test@main", range(108, 112), range(100, 108)),
    ],
)
def test_hub_sets_are_read_by_subset_and_split(
    hub: Path, subset: str, held_out: str, test: range, trained_on: range
) -> None:
    config = DataConfig("d", DataSource.hub, path=str(hub), subset=subset, held_out=(f"{hub}{held_out}",),
                        num_train=len(trained_on), num_test=4)  # fmt: skip
    data = problems.load(config)
    assert asked(data.test) == [f"q{n}" for n in test]
    assert {p.prompt: p.answer for p in data.train} == {f"q{n}": str(n) for n in trained_on}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/b", ("a/b", "", "test", "")),
        ("a/b#main", ("a/b", "main", "test", "")),
        ("a/b:train", ("a/b", "", "train", "")),
        ("a/b@0f", ("a/b", "", "test", "0f")),
        ("a/b#main:train[:9]@0f", ("a/b", "main", "train[:9]", "0f")),
    ],
)
def test_held_out_names_have_four_parts(name: str, parts: tuple[str, str, str, str]) -> None:
    assert records.parts(name) == parts  # revisions need the hub itself


def test_malformed_row_of_the_hub_is_one_line(hub: Path) -> None:
    write(hub / "main-train.jsonl", [*numbered(0, 4), {"question": "Q", "answer": ""}])
    config = DataConfig("d", DataSource.hub, path=str(hub), subset="main", num_train=2, num_test=2)
    assert "the answer is empty" in refusal(config)
