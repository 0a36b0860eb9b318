"""Bring runs to an end on a cluster: submit what is missing, follow, submit again what was lost.

All that is needed to go on is in the store: a launcher that is killed, or left with Ctrl-C, loses nothing, and
the same command takes its jobs up. A run has ended when its directory says so; of Slurm is asked only whether a
run may still come.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from experiments import store
from experiments.config import LaunchConfig, RunConfig, said
from slurm import preflight, retries
from slurm.classes import trains
from slurm.client import Client, SlurmDown, SlurmError
from slurm.cluster import Cluster, ResourceClass
from slurm.holds import held_lines
from slurm.judge import Finding, judge, last_step, look
from slurm.ledger import Entry, Ledger, Place
from slurm.states import Fate
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
        self.doubted: dict[tuple[str, int], float] = {}  # tasks that Slurm does not answer for, since when
        self.retry: dict[str, tuple[float, int]] = {}  # run -> not before, the submission that it was lost in
        self.steps: dict[str, int] = {}
        self.said_held: set[str] = set()
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
            found = self._look(mine) if mine else {}
            missing = [run for run in self.open if run not in mine or not self._in_flight(mine[run], found[run])]
            given_up = self._given_up({run: mine[run] for run in missing if run in mine}, found)
            entries = self._submit(missing, given_up)
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
        found = self._look(watched)
        self._read_directories()  # a run that ended while Slurm was asked is no loss
        for run, place in watched.items():
            if run in self.open:
                self._take(run, place, found[run])

    def _look(self, places: Mapping[str, Place]) -> dict[str, Finding]:
        """How each of these runs stands; says what is held, and takes out of the queue what Slurm will not start."""
        snapshot = look(self.client, self.ledger, places.values())
        found = {run: judge(self.ledger, at, run, snapshot.seen(self.ledger, at)) for run, at in places.items()}
        for line in held_lines(self.ledger, places.values(), snapshot):
            if line not in self.said_held:
                self.said_held.add(line)
                _say(line)
        stuck = {run: at for run, at in places.items() if found[run].fate is Fate.held}
        for at in stuck.values():
            self._note_death(at, Fate.held)  # first, so that nobody takes it for cancelled by a person
        if stuck:
            self.client.cancel(sorted({f"{at.entry.job_id}_{at.task}" for at in stuck.values()}))
        return found

    def _take(self, run: str, place: Place, finding: Finding) -> None:
        """Act on what was found of one run."""
        key = (place.entry.name, place.task)
        if finding.fate in (Fate.returning, Fate.unknown):
            since = self.doubted.setdefault(key, time.monotonic())
            if time.monotonic() - since < self._patience_s(place):
                return
        else:
            self.doubted.pop(key, None)
        if finding.fate is Fate.alive:
            self._progress(run)
            return
        self._note_death(place, finding.fate)
        verdict = retries.decide(run, place, finding, self.cluster, self._fits(run))
        log = self.ledger.log_path(place.entry, place.task)
        if verdict.again:
            self.retry[run] = (time.monotonic() + self.cluster.retry_pause_s, place.entry.sequence)
            self.on_event("lost", run, {"cause": verdict.cause, "log": str(log)})
        else:
            own_log = store.log_path(self.batch.root, run)
            self._end("failed", run, cause=verdict.cause, log=str(own_log if finding.failed else log))

    def _fits(self, run: str) -> Callable[[ResourceClass], bool]:
        """Which classes can train a run: not each run can be split over several GPUs."""
        return lambda resources: trains(self.batch.configs[run], self.batch.launch, resources)

    def _patience_s(self, place: Place) -> float:
        """How long Slurm's silence about a task, or its word that it comes back, is borne."""
        return self.cluster.lost_s if place.entry.job_id else UNCONFIRMED_S

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

    def _submit(self, runs: Sequence[str], given_up: Collection[str] = ()) -> list[Entry]:
        """Queue these runs; those that were given up with all their retries again."""
        if not runs:
            return []
        places = self.ledger.places()
        begun = {run for run in self.open if store.exists(self.batch.root / run / "config.json")}
        chosen = {r: retries.class_for(r, places.get(r), self.batch.classes, self.cluster, self._fits(r)) for r in runs}
        spent = {r: {} if r in given_up else retries.spent(r, places.get(r), begun) for r in runs}
        return submit(self.batch, runs, self.ledger, self.client, self.max_array_size, chosen, spent)

    def _given_up(self, places: Mapping[str, Place], found: Mapping[str, Finding]) -> dict[str, str]:
        """Those runs that an earlier launch has given up, and why; says so."""
        verdicts = {
            run: retries.decide(run, at, found[run], self.cluster, self._fits(run)) for run, at in places.items()
        }
        given_up = {run: verdict.cause for run, verdict in verdicts.items() if verdict.used_up}
        for cause, num in Counter(given_up.values()).items():
            _say(f"{num} runs were given up before ({cause}): tried anew, with all their retries")
        return given_up

    def _in_flight(self, place: Place, finding: Finding) -> bool:
        if finding.fate in (Fate.returning, Fate.unknown):
            if time.time() - place.entry.time_unix_s < self._patience_s(place):
                return True
        elif finding.fate is Fate.alive:
            return True
        self._note_death(place, finding.fate)
        return False

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
