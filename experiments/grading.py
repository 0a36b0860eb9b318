"""Grades completions in a process of its own, which can be killed: a grader may hang, crash or flood.

Run as ``python -m experiments.grading task``, it answers one JSON line for each JSON line. What it
prints goes nowhere, and its memory is limited; its parent waits ``limit_s`` for each answer and
starts a new one after a kill. How a grade came about is part of it, so that a grader's failure is
never a wrong answer.
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
from dataclasses import dataclass
from typing import Any

from experiments.objective import Grader

OUTCOMES = ("graded", "no_answer", "timeout", "crash")
MEMORY_BYTES = 4 * 2**30
START_LIMIT_S = 120.0
MAX_REPLY_BYTES = 4096

Score = Callable[[Mapping[str, Any], str], float | None]
"""Of a problem's record and a completion: 1 is correct; None where the completion holds no answer."""


@dataclass(frozen=True)
class Grade:
    """``reward`` is 1 or 0 (a user's own: from 0 to 1), and None where the grader failed (``timeout``, ``crash``):
    nothing is known then."""

    outcome: str
    reward: float | None


class GraderProcess:
    """The grader's process, started when first needed and again after it had to be killed."""

    def __init__(self, grader: Grader, limit_s: float, command: Sequence[str] | None = None, reward: str = "") -> None:
        named = (grader.name, reward) if reward else (grader.name,)
        self.command = list(command or (sys.executable, "-m", "experiments.grading", *named))
        self.limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def grade(self, items: Iterable[tuple[Mapping[str, Any], str]]) -> list[Grade]:
        """Grade (problem record, completion) pairs, in order. Raises RuntimeError if no grader starts at all."""
        return [self._grade_one(record, text) for record, text in items]

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            self._process = None

    def _grade_one(self, record: Mapping[str, Any], text: str) -> Grade:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"problem": record, "text": text}).encode() + b"\n")
            process.stdin.flush()
            reply = self._read_line(process, self.limit_s)
        except OSError:
            reply = b""
        if reply is None or not reply:
            self.close()
            return Grade("timeout" if reply is None else "crash", None)
        answer = json.loads(reply)
        return Grade(answer["outcome"], answer["reward"])

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        if self._read_line(self._process, START_LIMIT_S) != b"ready":
            self.close()
            raise RuntimeError(f"the grader did not start: {' '.join(self.command)}")
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


def serve(score: Score, partial: bool = False) -> None:
    """Answer the lines of standard input with ``score``, until it ends. ``partial``: rewards between 0 and 1 count."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends us
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    replies.write("ready\n")
    for line in sys.stdin:
        job = json.loads(line)
        try:
            value = score(job["problem"], job["text"])
            answer = {"outcome": "no_answer", "reward": 0.0} if value is None else _graded(value, partial)
        except Exception:
            answer = {"outcome": "crash", "reward": None}
        replies.write(json.dumps(answer) + "\n")


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


if __name__ == "__main__":
    chosen = Grader[sys.argv[1]]
    if chosen is Grader.own:
        from experiments import own_reward

        function = own_reward.load(sys.argv[2])
        serve(lambda problem, text: own_reward.value(function, problem["prompt"], text, problem["entry"]), partial=True)
        sys.exit(0)
    if chosen is Grader.task:
        from experiments.data import tasks  # noqa: F401  (imported before the first clock runs)
    elif chosen is Grader.math_verify:
        import math_verify  # noqa: F401
    serve(SCORES[chosen])
