"""Grades completions in a process of its own, which can be killed: a grader may hang, crash or flood.

Run as ``python -m experiments.grading task``, it answers one JSON line for each JSON line. What it
prints goes nowhere, also while a user's file is imported, and its memory is limited; its parent waits
``limit_s`` for each answer and starts a new one after a kill. How a grade came about is part of it, so
that a grader's failure is never a wrong answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.checks import ConfigError
from experiments.objective import Grader

OUTCOMES = ("graded", "no_answer", "timeout", "crash")
MEMORY_BYTES = 4 * 2**30
START_LIMIT_S = 120.0
MAX_REPLY_BYTES = 16_384
MAX_REASON = 1000
"""Characters; in JSON each may take twelve bytes."""

Score = Callable[[Mapping[str, Any], str], float | None]
"""Of a problem's record and a completion: 1 is correct; None where the completion holds no answer."""


@dataclass(frozen=True)
class Grade:
    """``reward`` is 1 or 0 (a user's own: from 0 to 1), and None where the grader failed (``timeout``, ``crash``):
    nothing is known then but the ``reason``, for people."""

    outcome: str
    reward: float | None
    reason: str = field(default="", compare=False)


class NoGrader(RuntimeError):
    """The grader's process did not come to its first item. ``reason`` says why, as far as it is known."""

    def __init__(self, reason: str, command: Sequence[str]) -> None:
        super().__init__(f"the grader did not start: {reason}: {' '.join(command)}")
        self.reason = reason


class GraderProcess:
    """The grader's process, started when first needed and again after it had to be killed."""

    def __init__(self, grader: Grader, limit_s: float, command: Sequence[str] | None = None, reward: str = "") -> None:
        named = (grader.name, reward) if reward else (grader.name,)
        self.command = list(command or (sys.executable, "-m", "experiments.grading", *named))
        self.limit_s, self.repeats = limit_s, grader is not Grader.own
        self._process: subprocess.Popen[bytes] | None = None

    def grade(self, items: Iterable[tuple[Mapping[str, Any], str]]) -> list[Grade]:
        """Grade (problem record, completion) pairs, in order. Raises NoGrader if none starts at all.

        Equal pairs are asked about once, except of a user's own grader, which may answer otherwise the next time.
        """
        known: dict[bytes, Grade] = {}
        return [self._known_or_graded(_line(record, text), known) for record, text in items]

    def close(self) -> int | None:
        """End the process, whatever it is doing. Returns its exit code if there was one."""
        code = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            code, self._process = self._process.returncode, None
        return code

    def _known_or_graded(self, line: bytes, known: dict[bytes, Grade]) -> Grade:
        grade = known.get(line) or self._grade_one(line)
        if self.repeats and grade.reward is not None:  # a grader that failed may do better the next time
            known[line] = grade
        return grade

    def _grade_one(self, line: bytes) -> Grade:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            reply = self._read_line(process, self.limit_s)
        except OSError:
            reply = b""
        if not reply:
            code = self.close()
            if reply is None:
                return Grade("timeout", None, f"took longer than {self.limit_s:g} s on one completion")
            return Grade("crash", None, f"ended its process (exit code {code})")
        answer = json.loads(reply)
        return Grade(answer["outcome"], answer["reward"], answer.get("reason", ""))

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        said = self._read_line(self._process, START_LIMIT_S)
        if said != b"ready":
            code = self.close()
            reason = f"took longer than {START_LIMIT_S:g} s to be imported" if said is None else (
                _failure(said) or f"ended its process while it was imported (exit code {code})")  # fmt: skip
            raise NoGrader(reason, self.command)
        return self._process

    @staticmethod
    def _read_line(process: subprocess.Popen[bytes], limit_s: float) -> bytes | None:
        """One line of the process without its end; empty if it died, None if the time was up."""
        assert process.stdout is not None
        until, line = time.monotonic() + limit_s, b""
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not waiting.select(max(0.0, until - time.monotonic())):
                    return None
                part = os.read(process.stdout.fileno(), MAX_REPLY_BYTES)
                line += part
                if not part or len(line) > MAX_REPLY_BYTES:
                    return b""
        return line.strip()


def _line(record: Mapping[str, Any], text: str) -> bytes:
    """A job, as the process reads it."""
    return json.dumps({"problem": record, "text": text}).encode() + b"\n"


def _failure(said: bytes) -> str:
    """What ``serve`` says instead of ``ready``; empty if it is something else."""
    try:
        return str(json.loads(said)["failure"])
    except (ValueError, TypeError, KeyError):
        return ""


def serve(load: Callable[[], Score], partial: bool = False) -> None:
    """Answer the lines of standard input with the score that ``load`` returns, until they end. ``partial``: rewards
    between 0 and 1 count. Whatever ``load`` and the score print or read does not reach the parent."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends us
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    jobs, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    try:
        score = load()
    except (Exception, SystemExit) as error:
        replies.write(json.dumps({"failure": _said(error)}) + "\n")
        return
    replies.write("ready\n")
    for line in jobs:
        job = json.loads(line)
        try:
            value = score(job["problem"], job["text"])
            answer = {"outcome": "no_answer", "reward": 0.0} if value is None else _graded(value, partial)
        except (Exception, SystemExit) as error:
            answer = {"outcome": "crash", "reward": None, "reason": _said(error)}
        replies.write(json.dumps(answer) + "\n")


def _said(error: BaseException) -> str:
    """``ValueError: what was wrong``, in one line; of our own errors the text alone."""
    named = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    return " ".join(named.split())[:MAX_REASON]


def _end_with(parent: int) -> None:
    """End this process once its parent is gone: one that hangs in a grade would never read that its input ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _graded(value: float, partial: bool) -> dict[str, Any]:
    """Reward is correctness (post, section RL): partial credit of a task's scorer does not count, a user's own does."""
    return {"outcome": "graded", "reward": value if partial else 1.0 if value >= 1 else 0.0}


def score_by_task(problem: Mapping[str, Any], text: str) -> float | None:
    """The scorer of the problem's reasoning-gym task."""
    from experiments.data import tasks

    if not text.strip():
        return None
    return tasks.score(tasks.Example(problem["task"], problem["prompt"], problem["answer"], problem["entry"]), text)


def score_by_math(problem: Mapping[str, Any], text: str) -> float | None:
    """Whether the last answer in ``text`` equals the reference, symbolically (math-verify)."""
    from math_verify import parse, verify

    # Its own time limit needs signals of the main thread and raises where it is not met; ours is outside.
    gold = parse(f"\\boxed{{{problem['answer']}}}", parsing_timeout=None)
    if all(isinstance(reading, str) for reading in gold):  # its own text is what it falls back to
        raise ValueError(f"the reference answer {problem['answer']!r} cannot be read")
    found = parse(text, parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None)) if found else None


def score_exactly(problem: Mapping[str, Any], text: str) -> float | None:
    """Whether ``text`` is the reference answer."""
    return float(text.strip() == problem["answer"]) if text.strip() else None


SCORES: dict[Grader, Score] = {
    Grader.task: score_by_task,
    Grader.math_verify: score_by_math,
    Grader.exact: score_exactly,
}


def _own(spec: str) -> Score:
    """The user's function. Runs their file."""
    from experiments import own_reward

    function = own_reward.load(spec)
    return lambda problem, text: own_reward.value(function, problem["prompt"], text, problem["entry"])


def _shipped(grader: Grader) -> Score:
    if grader is Grader.task:
        from experiments.data import tasks  # noqa: F401  (imported before the first clock runs)
    elif grader is Grader.math_verify:
        import math_verify  # noqa: F401
    return SCORES[grader]


if __name__ == "__main__":
    chosen = Grader[sys.argv[1]]
    if chosen is Grader.own:
        serve(lambda: _own(sys.argv[2]), partial=True)
    else:
        serve(lambda: _shipped(chosen))
