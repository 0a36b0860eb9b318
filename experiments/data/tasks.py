"""The reasoning-gym boundary: named tasks at easy settings, examples drawn by seed, and their scorers.

``BASE_TASKS`` are what the shipped base models were pretrained on; ``FINETUNE_TASKS`` they never saw.
reasoning-gym words its questions for large instruction-tuned models. Its configurations offer no
shorter wording, so prompts are rebuilt here from the metadata of an entry, at about 10 to 40 tokens;
answers are its own, and its own scorer grades them.
"""

from __future__ import annotations

import difflib
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset

Metadata = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One question with its answer.

    ``entry`` is what the task's own scorer reads: ``question``, ``answer`` and ``metadata``.
    """

    task: str
    prompt: str
    completion: str
    entry: dict[str, Any]


@dataclass(frozen=True)
class Preset:
    """A reasoning-gym data set at one setting.

    ``prompt`` words the question from an entry's metadata. ``drop`` names metadata that depends on the
    day of generation and that no scorer reads.
    """

    dataset: str
    prompt: Callable[[Metadata], str]
    config: dict[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()


def _list(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)


def _rows(matrix: Sequence[Sequence[int]]) -> str:
    return "\n".join(" ".join(str(value) for value in row) for row in matrix)


def _sort_prompt(key: str) -> Callable[[Metadata], str]:
    return lambda m: f"sort {m['direction']}: {_list(m[key])}"


_BASE: dict[str, Preset] = {
    "chain_sum": Preset(
        "chain_sum",
        lambda m: f"compute {m['expression']}",
        {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    ),
    "products": Preset(
        "products",
        lambda m: f"compute {m['expression']}",
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    ),
    "basic_arithmetic": Preset(
        "basic_arithmetic",
        lambda m: f"compute {m['expression']}",
        {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    ),
    "gcd": Preset("gcd", lambda m: f"gcd of {_list(m['numbers'])}", {"max_value": 100}),
    "lcm": Preset("lcm", lambda m: f"lcm of {_list(m['numbers'])}", {"max_value": 60}),
    "count_bits": Preset("count_bits", lambda m: f"count 1 bits of {m['number']}", {"max_n": 4095}),
    "base_conversion": Preset(
        "base_conversion",
        lambda m: f"convert {m['source_repr']} from base {m['source_base']} to base {m['target_base']}",
        {"max_base": 10, "min_value": 1, "max_value": 200},
    ),  # for 0 the reference answer is empty
    "simple_equations": Preset(
        "simple_equations",
        lambda m: f"solve for {m['variable']}: {m['equation']}",
        {"min_terms": 2, "max_terms": 2, "max_value": 20},
    ),
    "fraction_simplification": Preset(
        "fraction_simplification",
        lambda m: f"simplify {m['numerator']}/{m['denominator']}",
        {"max_value": 20, "max_factor": 10, "styles": ("plain",)},
    ),
    "letter_counting": Preset(
        "letter_counting",
        lambda m: f"count {m['target_letter']} in: {' '.join(m['span'])}",
        {"min_words": 1, "max_words": 4},
    ),
    "spell_backward": Preset(
        "spell_backward", lambda m: f"spell backward: {m['word']}", {"min_word_len": 3, "max_word_len": 6}
    ),
    "number_filtering": Preset(
        "number_filtering",
        lambda m: f"{m['operation'].replace('_', ' ')} than {m['filter_value']}: {_list(m['original_numbers'])}",
        {"min_numbers": 3, "max_numbers": 4, "max_decimals": 0, "min_value": -99, "max_value": 99},
    ),
}

_FINETUNE: dict[str, Preset] = {
    "number_sorting": Preset(
        "number_sorting",
        _sort_prompt("original_numbers"),
        {"min_numbers": 3, "max_numbers": 5, "max_decimals": 0, "min_value": -99, "max_value": 99},
    ),
    "word_sorting": Preset(
        "word_sorting",
        _sort_prompt("transformed_words"),
        {"min_words": 3, "max_words": 4, "min_word_length": 3, "max_word_length": 7},
    ),
    "word_sequence_reversal": Preset(
        "word_sequence_reversal", lambda m: f"reverse: {_list(m['words'])}", {"min_words": 3, "max_words": 6}
    ),
    "string_insertion": Preset(
        "string_insertion", lambda m: f"insert into: {m['string']}", {"min_string_length": 8, "max_string_length": 16}
    ),
    "rotate_matrix": Preset(
        "rotate_matrix",
        lambda m: f"rotate {90 * m['num_rotations']}:\n{_rows(m['matrix'])}",
        {"min_n": 2, "max_n": 4, "min_rotations": 1, "max_rotations": 3},
    ),
    "time_intervals": Preset(
        "time_intervals",
        lambda m: f"time from {m['start_time'][11:]} to {m['end_time'][11:]}",
        {"task_types": ["time_seconds"]},
        drop=("start_time", "end_time"),
    ),
    "decimal_chain_sum": Preset(
        "decimal_chain_sum",
        lambda m: f"compute {m['expression']}",
        {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2, "max_decimal_places": 3},
    ),
}

TASKS: dict[str, Preset] = _BASE | _FINETUNE
BASE_TASKS: tuple[str, ...] = tuple(_BASE)
FINETUNE_TASKS: tuple[str, ...] = tuple(_FINETUNE)


def preset(task: str) -> Preset:
    """The preset of a task. Raises ValueError naming the known tasks, and the nearest one to ``task``."""
    if task in TASKS:
        return TASKS[task]
    near = difflib.get_close_matches(task, TASKS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"task: {task!r} is unknown{hint}; allowed: {', '.join(sorted(TASKS))}")


def _dataset(task: str, size: int, seed: int) -> ProceduralDataset:
    chosen = preset(task)
    return reasoning_gym.create_dataset(chosen.dataset, size=size, seed=seed, **chosen.config)


def _stream_seed(task: str, seed: int) -> int:
    """A 48-bit seed, far from every other. reasoning-gym seeds example i with seed + i, so that the
    neighbouring seeds 0 and 1 would give one and the same data set, moved by one example."""
    return int.from_bytes(hashlib.sha256(f"{task}/{seed}".encode()).digest()[:6], "big")


def generate(task: str, size: int, seed: int) -> list[Example]:
    """``size`` examples of a task; a function of (task, size, seed), and a prefix of any longer draw.

    Raises ValueError for an unknown task or a size below 1.
    """
    chosen = preset(task)
    if size < 1:
        raise ValueError(f"size: {size!r} is not allowed; it must be at least 1")
    dataset = _dataset(task, size, _stream_seed(task, seed))
    examples = []
    for index in range(size):
        entry = dataset[index]
        metadata = entry["metadata"]
        prompt = chosen.prompt(metadata)
        kept = {key: value for key, value in metadata.items() if key not in chosen.drop}
        examples.append(Example(task, prompt, entry["answer"], {**entry, "question": prompt, "metadata": kept}))
    return examples


def generate_mixture(tasks: Sequence[str], size: int, seed: int) -> list[Example]:
    """``size`` examples in equal shares (the first tasks take the remainder), shuffled by ``seed``.

    Raises ValueError for an empty or repeating list of tasks, an unknown task, or fewer examples than tasks.
    """
    if not tasks or len(set(tasks)) != len(tasks):
        raise ValueError(f"tasks: {list(tasks)!r} is not allowed; name at least one task, each once")
    if size < len(tasks):
        raise ValueError(f"size: {size!r} is not allowed; it must be at least the number of tasks ({len(tasks)})")
    share, extra = divmod(size, len(tasks))
    mixture = [example for i, task in enumerate(tasks) for example in generate(task, share + (i < extra), seed)]
    random.Random(seed).shuffle(mixture)
    return mixture


@cache
def _scorer(task: str) -> ProceduralDataset:
    return _dataset(task, 1, 0)


def score(example: Example, answer: str) -> float:
    """The task's own score of an answer, in [0, 1]; 1 is correct, and some tasks give partial credit.

    What the scorer raises is passed on: a failure of the grader is not a wrong answer.
    Raises ValueError for an unknown task.
    """
    return float(_scorer(example.task).score_answer(answer, example.entry))
