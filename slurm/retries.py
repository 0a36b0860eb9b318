"""Whether a lost run is submitted again: bounded for each cause, in the next larger class after a death by memory.

How often a run was tried again is kept in the ledger, with the submission that was the last try: written once, under
the lock and together with the submission itself, so that a launcher that is killed at any moment goes on with what
was left. A run that was given up, and said to be, has used its retries up: the same command, typed again, is a
decision to try again, and gives new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from slurm.classes import larger
from slurm.cluster import Cluster, ResourceClass
from slurm.judge import Finding
from slurm.ledger import Place
from slurm.states import RETRIES, SAID, Fate

AGAIN = "the same command submits it again"


@dataclass(frozen=True)
class Verdict:
    """What comes of a run that is neither done nor in flight. ``used_up``: it was tried as often as is allowed."""

    again: bool
    cause: str
    used_up: bool = False


Fits = Callable[[ResourceClass], bool]


def _next_class(name: str, cluster: Cluster, fits: Fits) -> ResourceClass | None:
    """The next class after ``name`` that fits."""
    bigger = larger(name, cluster)
    while bigger and not fits(bigger):
        bigger = larger(bigger.name, cluster)
    return bigger


def decide(run: str, place: Place, finding: Finding, cluster: Cluster, fits: Fits = lambda resources: True) -> Verdict:
    """Whether a run is tried again, and what is said of it. ``fits`` says which classes can train it."""
    if finding.fate is Fate.cancelled:
        return Verdict(False, f"cancelled in Slurm; {AGAIN}")
    if finding.failed:
        return Verdict(False, finding.cause, used_up=True)
    why = SAID[finding.fate] + (f" ({finding.cause})" if finding.cause else "")
    here = place.entry.resources
    bigger = _next_class(here, cluster, fits)
    if finding.fate is Fate.memory and bigger is None:
        return Verdict(False, f"{why} in class {here}, the largest", used_up=True)
    num = place.entry.spent.get(run, {}).get(finding.fate.value, 0)
    if num >= RETRIES[finding.fate]:
        return Verdict(False, f"{why}, {num + 1} times; {AGAIN}", used_up=True)
    if finding.fate is Fate.memory and bigger:
        return Verdict(True, f"{why} in class {here}; trying again in class {bigger.name}")
    return Verdict(True, f"{why}; trying again")


def spent(run: str, last: Place | None, begun: Collection[str]) -> dict[str, int]:
    """How often a run will have been tried again, for each cause, once it is submitted after ``last``.

    ``begun`` are the unfinished runs that have begun: where another run of the pack was the one at work when the
    task ended, this one is not to blame.
    """
    if last is None:
        return {}
    counts = dict(last.entry.spent.get(run, {}))
    death = last.entry.deaths.get(str(last.task))
    at_work = [other for other in last.entry.tasks[last.task] if other in begun]
    if death and (death == Fate.returning.value or not at_work or run in at_work):
        counts[death] = counts.get(death, 0) + 1
    return counts


def class_for(
    run: str, last: Place | None, wanted: Mapping[str, ResourceClass], cluster: Cluster,
    fits: Fits = lambda resources: True,
) -> ResourceClass:  # fmt: skip
    """The class of a run: what it needs, or one size up from where it died of memory."""
    resources = wanted[run]
    if last is not None:
        names = [c.name for c in cluster.classes]
        if last.entry.deaths.get(str(last.task)) == Fate.memory.value:
            return _next_class(last.entry.resources, cluster, fits) or resources
        if last.entry.resources in names[names.index(resources.name) :]:  # it had to move up before
            return cluster.classes[names.index(last.entry.resources)]
    return resources
