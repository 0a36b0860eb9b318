"""What Slurm's words mean for a task: pure functions of its output."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Seen:
    """One element as a command shows it: its state in capitals, the reason or the exit code."""

    state: str
    detail: str = ""


@dataclass
class Job:
    """An array job as a command shows it."""

    job_id: int
    elements: dict[int, Seen] = field(default_factory=dict)


class Fate(enum.Enum):
    """What a state means for the runs of a task."""

    alive = "alive"  # queued or running; also held by a person, who has a reason
    returning = "returning"  # Slurm's word for an end that it usually takes back
    ended = "ended"  # COMPLETED: no proof of anything, the summary is
    died = "died"
    memory = "memory"
    time = "time"
    node = "node"
    held = "held"  # by Slurm, after it could not start it; it does not try again by itself
    cancelled = "cancelled"
    unknown = "unknown"


FATES = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING",
                     "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD"), Fate.alive),
    # A job that may be requeued shows these between two of its lives; so no word here is an end.
    **dict.fromkeys(("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "PREEMPTED", "NODE_FAIL", "REVOKED"), Fate.returning),
    "COMPLETED": Fate.ended,
    "FAILED": Fate.died,
    "OUT_OF_MEMORY": Fate.memory,
    "TIMEOUT": Fate.time,
    "DEADLINE": Fate.time,
    "BOOT_FAIL": Fate.node,
    "CANCELLED": Fate.cancelled,
}  # fmt: skip

HOLDS = ("SPECIAL_EXIT", "RESV_DEL_HOLD")
HELD_AT_START = ("launch failed requeued held", "JobHoldMaxRequeue")
"""Reasons of a pending job that could not be started: a node's prolog failed, or starts failed too often."""

RETRIES = {Fate.ended: 2, Fate.died: 2, Fate.memory: 1, Fate.time: 20, Fate.node: 5, Fate.returning: 5,
           Fate.held: 3, Fate.unknown: 3}  # fmt: skip
"""How often a run is submitted again for each cause (see ``slurm.retries``). Guesses: a time limit is the normal life
of a long run, a dead node is nobody's fault, a death by itself tends to repeat."""

SAID = {
    Fate.ended: "its job ended without the run's summary",
    Fate.died: "its job died",
    Fate.memory: "out of memory",
    Fate.time: "time limit",
    Fate.node: "its node failed",
    Fate.returning: "its job was stopped and did not come back",
    Fate.held: "its job could not be started and was held",
    Fate.cancelled: "cancelled",
    Fate.unknown: "Slurm lost its job",
}


def fate(seen: Seen | None) -> Fate:
    """What a task's state means; a word that is not known here counts as alive, never as an end."""
    if seen is None:
        return Fate.unknown
    if seen.state == "PENDING" and seen.detail.replace("_", " ") in HELD_AT_START:
        return Fate.held
    return FATES.get(seen.state.split()[0].rstrip("+"), Fate.alive)  # "CANCELLED by 0"


def is_held(seen: Seen | None) -> bool:
    """Whether a task stays in the queue until somebody releases it, whoever holds it."""
    if seen is None or seen.state not in ("PENDING", *HOLDS):
        return False
    return seen.state in HOLDS or "held" in seen.detail.lower() or seen.detail in HELD_AT_START


def parse_squeue(text: str) -> dict[str, Job]:
    """Lines ``job|element|STATE|reason|name`` as jobs by name; jobs that are no arrays are left out."""
    found: dict[str, Job] = {}
    for line in text.splitlines():
        job, element, state, reason, name = (line.split("|", 4) + [""] * 5)[:5]
        if job.isdigit() and element.isdigit():
            found.setdefault(name, Job(int(job))).elements[int(element)] = Seen(state, reason)
    return found


def parse_sacct(text: str) -> dict[str, Job]:
    """Lines ``44_3|STATE|code|name`` and ``44_[0-3,7%2]|STATE|code|name`` as jobs by name.

    Of several rows for an element the last counts. The name tells a job from another one with its number, which a
    controller that has lost its state gives out again.
    """
    found: dict[str, Job] = {}
    for line in text.splitlines():
        element, state, code, name = (line.split("|", 3) + [""] * 4)[:4]
        match = re.fullmatch(r"(\d+)_(?:(\d+)|\[([\d,-]+)(?:%\d+)?\])", element)
        if match and state:
            for index in [int(match[2])] if match[2] else indices(match[3]):
                found.setdefault(name, Job(int(match[1]))).elements[index] = Seen(state, code)
    return found


def indices(text: str) -> list[int]:
    """``0-2,7`` as [0, 1, 2, 7]."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def ran_out_of_memory(text: str) -> bool:
    """Whether a log or a cause tells of a death by memory: torch's, Python's or Slurm's words."""
    words = ("OutOfMemoryError", "MemoryError", "out of memory", "exceeded memory limit", "oom-kill", "oom_kill")
    return any(word in text for word in words)
