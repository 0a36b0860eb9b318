"""Bring runs to an end on a cluster: submit what is missing, follow, submit again what was lost.

All that is needed to go on is in the store: a launcher that is killed, or left with Ctrl-C, loses nothing, and
the same command takes its jobs up. A run has ended when its directory says so; of Slurm is asked only whether a
run may still come.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import store
from experiments.config import LaunchConfig, RunConfig, said
from slurm import preflight
from slurm.classes import larger, trains
from slurm.client import Client, SlurmDown, SlurmError
from slurm.cluster import Cluster, ResourceClass
from slurm.judge import Finding, Snapshot, judge, last_step, look
from slurm.ledger import Ledger, Place
from slurm.states import RETRIES, SAID, Fate
from slurm.submit import Batch, batch, submit

OnEvent = Callable[[str, str, dict[str, Any]], None]
TICK_S = 1.0
UNCONFIRMED_S = 30.0
"""After which a submission is taken as not accepted if its launcher could not write down a job id."""


def run_all(
    study: str, scale: str, configs: Mapping[str, RunConfig], launch: LaunchConfig, cluster: Cluster, on_event: OnEvent
) -> None:
    """Bring every run to an end, reporting each event as it comes: (kind, run id, detail).

    Raises ConfigError or StoreError before anything is queued, SlurmDown when the controller has been silent for
    ``cluster.outage_s``. KeyboardInterrupt leaves the jobs alone and is raised again.
    """
    follower = Follower.prepared(study, scale, configs, launch, cluster, on_event)
    follower.start()
    follower.follow()


class Follower:
    """One launcher of one study."""

    def __init__(self, wanted: Batch, client: Client, max_array_size: int, on_event: OnEvent) -> None:
        self.batch, self.client, self.max_array_size, self.on_event = wanted, client, max_array_size, on_event
        self.cluster = wanted.cluster
        self.ledger = Ledger(wanted.root)
        self.open = dict.fromkeys(wanted.configs)
        self.spent: Counter[tuple[str, Fate]] = Counter()
        self.doubted: dict[tuple[str, int], float] = {}  # tasks that Slurm does not answer for, since when
        self.retry: dict[str, tuple[float, int]] = {}  # run -> not before, the submission that it was lost in
        self.steps: dict[str, int] = {}
        self.trouble_since: float | None = None

    @classmethod
    def prepared(
        cls, study: str, scale: str, configs: Mapping[str, RunConfig], launch: LaunchConfig, cluster: Cluster,
        on_event: OnEvent = lambda kind, run, detail: None,
    ) -> Follower:  # fmt: skip
        """After the preflight. Raises ConfigError or StoreError, in one line, for what cannot work."""
        wanted, sizes = batch(study, scale, configs, launch, cluster)
        client = Client(cluster.call_s)
        return cls(wanted, client, preflight.check(wanted, sizes, client), on_event)

    def start(self) -> None:
        """Take up what is queued or running, submit the rest; says how many of each."""
        with self.ledger.locked():
            places = self.ledger.places()
            mine = {run: places[run] for run in self.open if run in places}
            snapshot = look(self.client, self.ledger, mine.values()) if mine else Snapshot()
            missing = [run for run in self.open if run not in mine or not self._in_flight(mine[run], run, snapshot)]
            entries = self._submit(missing)
        jobs = ", ".join(str(entry.job_id or "unconfirmed") for entry in entries)
        num_tasks = sum(len(entry.tasks) for entry in entries)
        _say(
            f"cluster {self.cluster.name}: {len(self.open) - len(missing)} runs in the queue already, "
            f"{len(missing)} submitted in {num_tasks} tasks" + (f" (jobs {jobs})" if jobs else "")
        )

    def follow(self) -> None:
        """Watch until every run has ended."""
        next_look = 0.0
        while self.open:
            try:
                self._read_directories()
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + self.cluster.poll_s
                    self._ask_slurm()
                    self._trouble_over()
                self._resubmit()
            except (SlurmDown, store.StoreError) as error:
                self._trouble(error)
            if self.open:
                time.sleep(TICK_S)

    # ------------------------------------------------------------ what is seen

    def _read_directories(self) -> None:
        for run in list(self.open):
            try:
                summary = store.read_summary(self.batch.root / run)
            except store.StoreError as error:
                if isinstance(error.__cause__, OSError):
                    raise
                self._end("failed", run, cause=str(error))
                continue
            if summary is not None:
                headline = self.batch.configs[run].headline
                detail = {"step": summary["step"], "notes": summary.get("notes", [])}
                self._end(summary["outcome"], run, found=said(headline, summary["metrics"][headline]), **detail)

    def _ask_slurm(self) -> None:
        places = self.ledger.places()
        watched = {run: places[run] for run in self.open if run in places and run not in self.retry}
        snapshot = look(self.client, self.ledger, watched.values())
        found = {run: judge(self.ledger, at, run, snapshot.seen(self.ledger, at)) for run, at in watched.items()}
        self._read_directories()  # a run that ended while Slurm was asked is no loss
        for run, place in watched.items():
            if run in self.open:
                self._take(run, place, found[run])

    def _take(self, run: str, place: Place, finding: Finding) -> None:
        """Act on what was found of one run."""
        key = (place.entry.name, place.task)
        if finding.fate in (Fate.returning, Fate.unknown):
            since = self.doubted.setdefault(key, time.monotonic())
            if time.monotonic() - since < (self.cluster.lost_s if place.entry.job_id else UNCONFIRMED_S):
                return
        else:
            self.doubted.pop(key, None)
        if finding.fate is Fate.alive:
            self._progress(run)
            return
        log = str(self.ledger.log_path(place.entry, place.task))
        if finding.fate is Fate.cancelled:
            self._end("failed", run, cause="cancelled in Slurm; the same command submits it again", log=log)
            return
        self._note_death(place, finding.fate)
        why = SAID[finding.fate] + (f" ({finding.cause})" if finding.cause else "")
        if finding.failed:
            self._end("failed", run, cause=finding.cause, log=str(store.log_path(self.batch.root, run)))
            return
        again = "; trying again"
        if finding.fate is Fate.memory:
            bigger = self._larger(run, place.entry.resources)
            if bigger is None:
                self._end("failed", run, cause=f"{why} in class {place.entry.resources}, the largest", log=log)
                return
            again = f" in class {place.entry.resources}; trying again in class {bigger.name}"
        counts = finding.fate is not Fate.returning and not self._began_elsewhere(run, place)
        num = self.spent[run, finding.fate]
        if num >= RETRIES[finding.fate]:
            self._end("failed", run, cause=f"{why}, {num + 1} times", log=log)
            return
        self.spent[run, finding.fate] += counts or finding.fate is Fate.returning
        self.retry[run] = (time.monotonic() + self.cluster.retry_pause_s, place.entry.sequence)
        self.on_event("lost", run, {"cause": why + again, "log": log})

    def _began_elsewhere(self, run: str, place: Place) -> bool:
        """Whether another run of the pack was the one at work when the task ended: this one is not to blame."""
        began = [r for r in place.entry.tasks[place.task] if r in self.open and self._has_begun(r)]
        return bool(began) and run not in began

    def _has_begun(self, run: str) -> bool:
        return store.exists(self.batch.root / run / "config.json")

    def _progress(self, run: str) -> None:
        step = last_step(self.batch.root / run)
        if step != self.steps.get(run, 0):
            if run not in self.steps:
                self.on_event("started", run, {})
            self.steps[run] = step
            self.on_event("step", run, {"step": step, "steps": self.batch.configs[run].optim.steps})

    # ------------------------------------------------------------ what is done

    def _resubmit(self) -> None:
        due = [run for run, (when, _) in self.retry.items() if run in self.open and when <= time.monotonic()]
        if not due:
            return
        with self.ledger.locked():
            places = self.ledger.places()
            # Another launcher may have been quicker: then its submission is followed.
            mine = [run for run in due if places[run].entry.sequence == self.retry[run][1]]
            self._submit(mine)
        for run in due:
            del self.retry[run]

    def _submit(self, runs: Sequence[str]) -> list[Any]:
        places = self.ledger.places()
        chosen = {run: self._class_for(run, places.get(run)) for run in runs}
        return submit(self.batch, runs, self.ledger, self.client, self.max_array_size, chosen) if runs else []

    def _class_for(self, run: str, last: Place | None) -> ResourceClass:
        """The class of a run: what it needs, or one size up from where it died of memory."""
        resources = self.batch.classes[run]
        if last is not None:
            names = [c.name for c in self.cluster.classes]
            if last.entry.deaths.get(str(last.task)) == Fate.memory.value:
                return self._larger(run, last.entry.resources) or resources
            if last.entry.resources in names[names.index(resources.name) :]:  # it had to move up before
                return self.cluster.classes[names.index(last.entry.resources)]
        return resources

    def _larger(self, run: str, name: str) -> ResourceClass | None:
        """The next class after ``name`` that can train a run: not each can be split over several GPUs."""
        bigger = larger(name, self.cluster)
        while bigger and not trains(self.batch.configs[run], self.batch.launch, bigger):
            bigger = larger(bigger.name, self.cluster)
        return bigger

    def _in_flight(self, place: Place, run: str, snapshot: Snapshot) -> bool:
        found = judge(self.ledger, place, run, snapshot.seen(self.ledger, place)).fate
        if found in (Fate.returning, Fate.unknown):
            limit_s = self.cluster.lost_s if place.entry.job_id else UNCONFIRMED_S
            return time.time() - place.entry.time_unix_s < limit_s
        if found is not Fate.alive:
            self._note_death(place, found)
        return found is Fate.alive

    def _note_death(self, place: Place, found: Fate) -> None:
        if found is not Fate.cancelled and place.entry.deaths.get(str(place.task)) != found.value:
            place.entry.deaths[str(place.task)] = found.value
            self.ledger.save(place.entry)

    def _end(self, kind: str, run: str, **detail: Any) -> None:
        self.open.pop(run, None)
        self.retry.pop(run, None)
        self.on_event(kind, run, {"log": str(store.log_path(self.batch.root, run)), **detail})

    def _trouble(self, error: SlurmError | store.StoreError) -> None:
        """Slurm or the store does not answer: the jobs go on, and so does the following, for a while."""
        now = time.monotonic()
        if self.trouble_since is None:
            self.trouble_since = now
            _say(f"{error}; the jobs go on, asking again for up to {self.cluster.outage_s:g} s")
        elif now - self.trouble_since > self.cluster.outage_s:
            raise error

    def _trouble_over(self) -> None:
        if self.trouble_since is not None:
            _say(f"all answer again after {time.monotonic() - self.trouble_since:.0f} s")
            self.trouble_since = None


def _say(line: str) -> None:
    print(line, file=sys.stderr)
