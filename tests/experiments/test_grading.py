"""Grading in a process of its own: whatever a grader does, its failure is known as one and the next item is graded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from experiments import grading
from experiments.data import tasks
from experiments.data.problems import Problem
from experiments.grading import Grade, GraderProcess
from experiments.objective import Grader

PROJECT = Path(grading.__file__).resolve().parent.parent
LIMIT_S = 1.0
RIGHT, WRONG = Grade("graded", 1.0), Grade("graded", 0.0)
TIMEOUT, CRASH = Grade("timeout", None), Grade("crash", None)
NO_ANSWER = Grade("no_answer", 0.0)

EVIL = """
import os, pathlib, signal, subprocess, sys
from experiments.grading import serve
with open(os.environ["STARTS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
def score(problem, text):
    if text == "hang":
        while True: pass
    if text == "deaf":  # a library that undoes what is meant to stop it
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
        while True: pass
    if text == "raise": raise ValueError("no")
    if text == "recurse": return score(problem, text)
    if text == "word": return "right"
    if text == "die": os._exit(0)
    if text == "leave": sys.exit(0)
    if text == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if text == "eat":  # 8 GiB of pages that are never touched: only the limit keeps it from them
        held = [bytes(2**28) for _ in range(32)]
    if text == "flood":
        for _ in range(10):
            print("x" * 2**20)
            print("x" * 2**20, file=sys.stderr)
            os.write(1, b"{}\\n"); os.write(2, b"{}\\n")
        subprocess.run(["echo", "a child's words"])
    if text in ("flood", "eat"): return 1.0
    return None if text == "none" else float(text)
serve(lambda: score)
"""
BARE = """
import sys, time
print("ready", flush=True)
for line in sys.stdin:
    {}
"""
"""A grader that speaks for itself and keeps to none of the rules of ``serve``."""


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """The ids of the processes that ``EVIL`` was started in, in order."""
    file = tmp_path / "starts"
    file.touch()
    monkeypatch.setenv("STARTS", str(file))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    return lambda: [int(line) for line in file.read_text().split()]


@pytest.fixture
def evil(tmp_path: Path, starts: Callable[[], list[int]]) -> Iterator[GraderProcess]:
    script = tmp_path / "evil.py"
    script.write_text(EVIL)
    process = GraderProcess(Grader.task, LIMIT_S, [sys.executable, str(script)])
    yield process
    process.close()


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Callable[[str], GraderProcess]]:
    made = []

    def make(answer: str, limit_s: float = LIMIT_S) -> GraderProcess:
        script = tmp_path / "bare.py"
        script.write_text(BARE.format(answer))
        made.append(GraderProcess(Grader.task, limit_s, [sys.executable, str(script)]))
        return made[-1]

    yield make
    for process in made:
        process.close()


@pytest.fixture(scope="module")
def real() -> Iterator[Callable[[Grader], GraderProcess]]:
    """The shipped graders, each started once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PROJECT))
        processes = {grader: GraderProcess(grader, 5.0) for grader in Grader}
        yield processes.__getitem__
        for process in processes.values():
            process.close()


def grade(process: GraderProcess, *texts: str) -> list[Grade]:
    return process.grade([({}, text) for text in texts])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "expected", "survives"),
    [
        ("hang", TIMEOUT, False),
        ("deaf", TIMEOUT, False),
        ("raise", CRASH, True),
        ("recurse", CRASH, True),
        ("word", CRASH, True),
        ("eat", CRASH, True),
        ("die", CRASH, False),
        ("leave", CRASH, True),
        ("killed", CRASH, False),
        ("flood", RIGHT, True),
        ("none", NO_ANSWER, True),
        ("0.99", WRONG, True),
    ],
)
def test_failure_is_no_grade_and_the_next_item_is_graded(
    evil: GraderProcess, starts: Callable[[], list[int]], text: str, expected: Grade, survives: bool
) -> None:
    assert grade(evil, "1", text, "1", "0") == [RIGHT, expected, RIGHT, WRONG]
    assert len(starts()) == (1 if survives else 2)
    assert not any(is_running(pid) for pid in starts()[:-1])


def test_order_is_kept_through_failures(evil: GraderProcess) -> None:
    texts = ["0", "1", "die", "1", "none", "raise", "0", "hang", "0", "1"]
    expected = [WRONG, RIGHT, CRASH, RIGHT, NO_ANSWER, CRASH, WRONG, TIMEOUT, WRONG, RIGHT]
    assert grade(evil, *texts) == expected


def test_hang_takes_its_limit_and_no_more(evil: GraderProcess) -> None:
    grade(evil, "1")
    begun = time.monotonic()
    assert grade(evil, "hang") == [TIMEOUT]
    assert LIMIT_S <= time.monotonic() - begun < 4 * LIMIT_S


def test_close_ends_the_process_and_grading_can_go_on(evil: GraderProcess, starts: Callable[[], list[int]]) -> None:
    evil.close()  # never started
    assert grade(evil) == [] and starts() == []
    assert grade(evil, "1") == [RIGHT] and is_running(starts()[0])
    evil.close()
    evil.close()
    assert not is_running(starts()[0])
    assert grade(evil, "1") == [RIGHT] and len(starts()) == 2


def test_process_found_dead_is_replaced(evil: GraderProcess, starts: Callable[[], list[int]]) -> None:
    """Someone else may end it between two items: the one that finds out has no grade."""
    assert grade(evil, "1") == [RIGHT]
    os.kill(starts()[0], signal.SIGKILL)
    assert grade(evil, "1", "1") == [CRASH, RIGHT]


def test_interrupt_of_the_run_is_not_the_graders(evil: GraderProcess, starts: Callable[[], list[int]]) -> None:
    assert grade(evil, "1") == [RIGHT]
    os.kill(starts()[0], signal.SIGINT)
    assert grade(evil, "1") == [RIGHT] and len(starts()) == 1


def test_grader_ends_with_its_parent(tmp_path: Path, starts: Callable[[], list[int]]) -> None:
    script = tmp_path / "evil.py"
    script.write_text(EVIL)
    done = subprocess.run([sys.executable, str(script)], input=b"", capture_output=True, check=True, timeout=20)
    assert done.stdout == b"ready\n"


def test_long_and_strange_texts_arrive_whole(bare: Callable[[str], GraderProcess]) -> None:
    """300 KB is more than a pipe holds; a lone surrogate is what a cut-off token decodes to."""
    process = bare(
        "import json; job = json.loads(line); right = job['text'] == job['problem']['answer']; "
        "print(json.dumps({'outcome': 'graded', 'reward': float(right)}), flush=True)"
    )
    texts = ["x" * 300_000, "a\nb\r\n\u2028c", "é\ud800", ""]
    assert process.grade([({"answer": text}, text) for text in texts]) == [RIGHT] * 4
    assert process.grade([({"answer": "a"}, "b")]) == [WRONG]


@pytest.mark.parametrize(("grader", "asked"), [(Grader.task, 2), (Grader.own, 4)])
def test_equal_answers_are_graded_once_unless_the_grader_may_change_its_mind(
    tmp_path: Path, grader: Grader, asked: int
) -> None:
    """The reward is how often was asked before. A later batch asks again."""
    script = tmp_path / "counts.py"
    answer = "import itertools; n = globals().setdefault('n', itertools.count()); "
    answer += 'print(\'{"outcome": "graded", "reward": %d}\' % next(n), flush=True)'
    script.write_text(BARE.format(answer))
    process = GraderProcess(grader, LIMIT_S, [sys.executable, str(script)])
    try:
        found = process.grade([({"answer": a}, text) for a, text in ("12", "13", "12", "12")])
        assert [g.reward for g in found] == ([0, 1, 0, 0] if asked == 2 else [0, 1, 2, 3])
        assert process.grade([({"answer": "1"}, "2")]) == [Grade("graded", asked)]
    finally:
        process.close()


def test_grader_that_failed_is_asked_again(evil: GraderProcess, starts: Callable[[], list[int]]) -> None:
    assert grade(evil, "die", "die") == [CRASH, CRASH] and len(starts()) == 2


def test_flood_of_replies_is_a_crash_and_takes_no_memory(bare: Callable[[str], GraderProcess]) -> None:
    process = bare("sys.stdout.write('x' * 10**7); sys.stdout.flush(); time.sleep(60)")
    tracemalloc.start()
    try:
        assert grade(process, "any") == [CRASH]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20


def test_trickle_of_a_reply_does_not_reset_the_clock(bare: Callable[[str], GraderProcess]) -> None:
    process = bare("[(print('x', end='', flush=True), time.sleep(0.1)) for _ in range(100)]", 0.5)
    begun = time.monotonic()
    assert grade(process, "any") == [TIMEOUT]
    assert time.monotonic() - begun < 4


@pytest.mark.parametrize("code", ["raise SystemExit", "print('hello', flush=True)"])
def test_grader_that_does_not_start_is_an_error_of_the_run(code: str) -> None:
    process = GraderProcess(Grader.task, LIMIT_S, [sys.executable, "-c", code])
    with pytest.raises(RuntimeError, match="the grader did not start"):
        grade(process, "1")
    process.close()


# ---------------------------------------------------------------- the shipped graders


def drawn(task: str) -> Problem:
    example = tasks.generate(task, 1, seed=0)[0]
    return Problem(example.prompt, example.completion, example.task, example.entry)


def test_task_grader_tells_right_from_wrong_and_from_nothing(real: Callable[[Grader], GraderProcess]) -> None:
    problem = Problem("simplify 3/6", "1/2", "fraction_simplification", {
        "question": "simplify 3/6", "answer": "1/2",
        "metadata": {"numerator": 3, "denominator": 6, "simplified_numerator": 1, "simplified_denominator": 2,
                     "style": "plain"},
    })  # fmt: skip
    texts = ["1/2", "1/3", "", " \n", "half"]
    found = real(Grader.task).grade([(problem.record(), text) for text in texts])
    assert found == [RIGHT, WRONG, NO_ANSWER, NO_ANSWER, WRONG]


@pytest.mark.parametrize("task", ["gcd", "spell_backward", "fraction_simplification", "word_sorting", "rotate_matrix"])
def test_task_grader_accepts_the_tasks_own_answer(real: Callable[[Grader], GraderProcess], task: str) -> None:
    problem = drawn(task)
    assert real(Grader.task).grade([(problem.record(), problem.answer)]) == [RIGHT]


def test_partial_credit_is_no_reward(real: Callable[[Grader], GraderProcess]) -> None:
    problem = drawn("word_sorting")
    partly = ", ".join(reversed(problem.answer.split(", ")))
    assert 0 < tasks.score(tasks.Example(problem.task, problem.prompt, problem.answer, problem.entry), partly) < 1
    assert real(Grader.task).grade([(problem.record(), partly)]) == [WRONG]


@pytest.mark.parametrize("record", [Problem("p", "a", "no such task"), Problem("p", "5", "gcd")])
def test_problem_that_the_task_grader_cannot_read_is_a_crash(
    real: Callable[[Grader], GraderProcess], record: Problem
) -> None:
    assert real(Grader.task).grade([(record.record(), "5")]) == [CRASH]


@pytest.mark.parametrize(
    ("reference", "text", "expected"),
    [
        ("72", "72", RIGHT),
        ("72", "The answer is 72.", RIGHT),
        ("72", "The answer is \\boxed{72}.", RIGHT),
        ("72", "She sold 48 + 24 = 72 clips.", RIGHT),
        ("72", "71? no, 72", RIGHT),  # the last one counts
        ("72", "72? no, 71", WRONG),
        ("72", "It is \\boxed{71}, not 72", WRONG),  # a box is the answer
        ("72", "The answer is 73.", WRONG),
        ("72", "-72", WRONG),
        ("72", "", NO_ANSWER),
        ("72", "I do not know", NO_ANSWER),
        ("70000", "$70,000", RIGHT),
        ("033", "33", RIGHT),
        ("\\frac{1}{2}", "$0.5$", RIGHT),
        ("\\frac{1}{2}", "$\\frac{2}{4}$", RIGHT),
        ("\\frac{1}{2}", "1/2", RIGHT),
        ("\\frac{1}{2}", "$\\frac{1}{3}$", WRONG),
        ("x^2+1", "$1+x^2$", RIGHT),
        ("(0,1)", "$(0,1)$", RIGHT),
        ("(0,1)", "$[0,1]$", WRONG),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", RIGHT),
        ("", "72", CRASH),
        ("\\frac{", "72", CRASH),
        ("???", "72", CRASH),
    ],
)
def test_math_grader(real: Callable[[Grader], GraderProcess], reference: str, text: str, expected: Grade) -> None:
    assert real(Grader.math_verify).grade([(Problem("p", reference).record(), text)]) == [expected]


def test_expression_that_computes_for_ever_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    process = GraderProcess(Grader.math_verify, max(LIMIT_S, 5.0))  # the first answer takes imports
    items = [(Problem("p", "72").record(), text) for text in ("72", "$9^{9^{9^{9}}}$", "72")]
    try:
        assert process.grade(items) == [RIGHT, TIMEOUT, RIGHT]
    finally:
        process.close()


def test_hanging_grader_ends_with_the_run(tmp_path: Path, starts: Callable[[], list[int]]) -> None:
    """A run that is killed while its grader hangs leaves no process behind that computes for ever."""
    script = tmp_path / "orphan.py"
    script.write_text(EVIL)
    parent_code = (
        "import sys; from experiments.grading import GraderProcess; from experiments.objective import Grader\n"
        f"GraderProcess(Grader.task, 1e6, [sys.executable, {str(script)!r}]).grade([({{}}, 'hang')])"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], cwd=PROJECT)
    until = time.monotonic() + 60
    while not starts() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)  # it is in the grade by now
    parent.kill()
    parent.wait()
    while _lives(starts()[0]) and time.monotonic() < until:
        time.sleep(0.1)
    assert not _lives(starts()[0])


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
