"""Questions with a verifiable answer, for reinforcement learning: drawn, or read from files and the hub."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from experiments.config import ConfigError, DataConfig, DataSource
from experiments.data import tables
from experiments.data.dataset import TEST_STREAM, draw_examples
from experiments.data.records import Reader, source_of

SCHEMAS = (  # (question, answer) columns of GSM8K and DeepMath-103K, MATH, AIME 2024 and 2025, our own files
    ("question", "final_answer"),
    ("question", "answer"),
    ("problem", "answer"),
    ("problem", "solution"),
    ("Problem", "Answer"),
    ("prompt", "answer"),
)
COLUMNS = tuple({name for pair in SCHEMAS for name in pair})
EXPECTED = "each row is an object with text " + ", ".join(f'"{q}" and "{a}"' for q, a in SCHEMAS)


PROMPTS = ("prompt", "question", "problem", "Problem")
PROMPTED = "each row is an object with a text " + ", ".join(f'"{name}"' for name in PROMPTS[:3])


@dataclass(frozen=True)
class Problem:
    """One question. ``answer`` is what a grader compares with; ``entry`` what the task's scorer reads."""

    prompt: str
    answer: str
    task: str = ""
    entry: dict[str, Any] = field(default_factory=dict, hash=False)

    def record(self) -> dict[str, Any]:
        """As plain data, for the process that grades. The entry is the problem's own, not a copy."""
        return dict(vars(self))


@dataclass(frozen=True)
class Problems:
    """``train`` is sampled and learned from; ``test`` is held out and shares no prompt with it."""

    train: tuple[Problem, ...]
    test: tuple[Problem, ...]
    num_duplicates: int = 0
    num_malformed: int = 0
    notes: tuple[str, ...] = ()


@lru_cache(maxsize=4)
def load(config: DataConfig, answers: bool = True) -> Problems:
    """Read and split one set of problems, the test split first, so that it never depends on ``num_train``.

    Without ``answers`` a row of a file or the hub needs a prompt only, and the problem's ``entry`` is the row.

    Raises ConfigError for a source without verifiable answers, a malformed row (with its line), or too few.
    """
    found = _split(config, answers)
    if len(found.train) < config.num_train or len(found.test) < config.num_test:
        raise ConfigError(
            f"data.num_train: {config.num_train} and data.num_test {config.num_test} were asked for; "
            f"{config.name} has {len(found.train)} and {len(found.test)} distinct problems"
        )
    return replace(found, train=found.train[: config.num_train])


def split(config: DataConfig, answers: bool = True) -> Problems:
    """As ``load``, but as many problems as there are, up to those asked for."""
    found = _split(config, answers)
    return replace(found, train=found.train[: config.num_train])


def _split(config: DataConfig, answers: bool) -> Problems:
    """All problems that are not held out, and those that are."""
    if config.source is DataSource.reasoning_gym:
        test = _drawn(config, config.num_test, frozenset(), TEST_STREAM)
        train = _drawn(config, config.num_train, frozenset(p.prompt for p in test), 0)
        return Problems(tuple(train), tuple(test))
    if config.source is DataSource.table_walk:
        train, test = (
            [_walk(walk) for walk in tables.draw_walks(num, config.hops, config.seed, stream)]
            for num, stream in ((config.num_train, 0), (config.num_test, TEST_STREAM))
        )
        return Problems(tuple(train), tuple(test))
    if config.source not in (DataSource.jsonl, DataSource.hub):
        raise ConfigError(f"data.source: {config.source.name!r} is not allowed; rl needs problems with answers")
    readers = [
        Reader(
            source_of(config, COLUMNS if answers else (), name),
            _problem if answers else _asked,
            EXPECTED if answers else PROMPTED,
            config.max_malformed,
        )
        for name in (None, *config.held_out)
    ]
    read, *others = [list(reader()) for reader in readers]
    for reader in readers:
        reader.check()
    elsewhere = [problem for found in others for problem in found]
    num_malformed = sum(len(reader.malformed) for reader in readers)
    notes = tuple(reader.left_out() for reader in readers if reader.malformed)
    order = np.random.default_rng(config.seed).permutation(len(read))
    shuffled = _distinct([read[i] for i in order])
    held_out = _distinct(elsewhere)
    test = (held_out or shuffled)[: config.num_test]
    asked = {problem.prompt for problem in [*held_out, *test]}
    train = [problem for problem in shuffled if problem.prompt not in asked]
    num_duplicates = len(read) - len(train) - (0 if held_out else len(test)) + len(elsewhere) - len(held_out)
    return Problems(tuple(train), tuple(test), num_duplicates, num_malformed, notes)


def _distinct(found: list[Problem]) -> list[Problem]:
    """The first problem of each prompt."""
    unique: dict[str, Problem] = {}
    for problem in found:
        unique.setdefault(problem.prompt, problem)
    return list(unique.values())


def _drawn(config: DataConfig, wanted: int, excluded: frozenset[str], stream: int) -> list[Problem]:
    examples = draw_examples(config, wanted, excluded, stream)
    return [Problem(e.prompt, e.completion, e.task, e.entry) for e in examples]


def _walk(walk: tables.Walk) -> Problem:
    return Problem(walk.prompt, walk.answer, tables.TASK, asdict(walk))


def _problem(row: object) -> Problem:
    """One record of any schema. Raises ValueError if it is none, or has no final answer."""
    if not isinstance(row, dict):
        raise ValueError(f"found {type(row).__name__}, not an object")
    for question, answer in SCHEMAS:
        if isinstance(row.get(question), str) and isinstance(row.get(answer), str | int):
            return Problem(row[question].strip(), final_answer(str(row[answer])))
    raise ValueError(f"no question and answer among {', '.join(map(repr, row)) or 'nothing'}")


def _asked(row: object) -> Problem:
    """One record of which only the prompt is known to us. Raises ValueError if it has none."""
    if not isinstance(row, dict):
        raise ValueError(f"found {type(row).__name__}, not an object")
    for name in PROMPTS:
        if isinstance(row.get(name), str):
            return Problem(row[name].strip(), "", entry=row)
    raise ValueError(f"no prompt among {', '.join(map(repr, row)) or 'nothing'}")


def final_answer(solution: str) -> str:
    """The answer at the end of a worked solution: after ``####`` (GSM8K), or in the last ``\\boxed{}`` (MATH).

    A text with neither is the answer itself. Raises ValueError if nothing is left of it.
    """
    _head, marked, tail = solution.rpartition("####")
    at = solution.rfind("\\boxed{")
    if marked:
        answer = tail.strip().replace(",", "")
    elif at >= 0:
        answer = _braced(solution[at + len("\\boxed{") :])
    else:
        answer = solution.strip()
    if not answer:
        raise ValueError("the answer is empty")
    return answer


def _braced(text: str) -> str:
    """What stands before the brace that closes one opened before ``text``."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:i]
    raise ValueError("\\boxed{ is not closed")
