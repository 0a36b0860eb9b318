"""Boundary to wandb: a mirror of what is on disk already. Off unless asked, never read back, never in the way.

A run is one wandb run, whose id is the run's, however often it is interrupted. Rows are sent when a checkpoint or the
end of the run covers them, so that those which an interrupted attempt would train again are never sent, and which step
was sent last stands in the run's directory: each step is sent at most once, in order. All of it happens in a thread
beside the training. What goes wrong there (no key, no network) is said in one line; it ends the mirror, not the run.
The summary's notes hold that line too, unless the mirror was late: that is found out once the summary is written, and
said on stderr alone. A late mirror goes on, but writes nothing more in the run's directory, which may be another's.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from experiments.claim import RunWriter
from experiments.config import LaunchConfig, RunConfig, encode, run_id
from experiments.store import read_json

PROJECT = "lora-vs-full"
MARK = "wandb.json"
"""In the run's directory: the last step that was sent."""
BEGIN_S = 20.0
"""How long wandb may try to begin a run, beside the training."""
END_S = 10.0
"""How long a run that has ended waits for its mirror."""
RETRIES = 10
RETRY_S = 4.0
"""wandb itself retries for hours, and its process is waited for when ours ends. What it kept is sent by wandb sync."""

_lost = threading.Event()
"""Set once wandb has failed in this process: its other runs do without, and nothing is said again."""


class Tracker:
    """The null tracker: a run without wandb needs no ``if``."""

    def log(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl, new or read back at the start of an attempt."""

    def seal(self) -> None:
        """What was logged will not be trained again."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run is done."""


class WandbTracker(Tracker):
    """The mirror of one attempt."""

    def __init__(self, config: RunConfig, root: str, writer: RunWriter) -> None:
        self.name, self.config, self.root, self.writer = run_id(config), encode(config), root, writer
        self.sent = int(read_json(writer.path / MARK)["step"]) if (writer.path / MARK).exists() else -1
        self.code = 1
        self._closed, self._marking = False, threading.Lock()
        self._waiting: list[dict[str, Any]] = []
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()  # functions of wandb's run; None ends it
        self._thread = threading.Thread(target=self._mirror, daemon=True)
        self._thread.start()

    def log(self, row: Mapping[str, Any]) -> None:
        self._waiting.append(dict(row))

    def seal(self) -> None:
        rows, self._waiting = self._waiting, []
        self._orders.put(partial(self._send, rows))

    def end(self, summary: Mapping[str, Any]) -> None:
        self.seal()
        self.code = 0
        found = {name: summary[name] for name in ("outcome", "step", "num_trainable") if name in summary}
        self._orders.put(lambda run: run.summary.update({**found, **_present(summary["metrics"])}))

    def close(self) -> None:
        """Wait a little for what was ordered. Rows that nothing covers are dropped: they will be trained again."""
        self._orders.put(None)
        self._thread.join(END_S)
        with self._marking:
            self._closed = True
        if self._thread.is_alive():
            _say(f"not done {END_S:g} s after the run; wandb sync {self.root}/wandb/* sends what is left")

    def _mirror(self) -> None:
        try:
            run = self._begun()
            while order := self._orders.get():
                order(run)
            run.finish(exit_code=self.code)
        except Exception as error:
            said = f"{(str(error) or type(error).__name__).splitlines()[0]}; runs go on without it"
            if _say(said):
                self.writer.notes.append(f"wandb: {said}")

    def _begun(self) -> Any:
        import wandb  # takes a second, and starts a service

        quiet = wandb.setup(wandb.Settings(silent=True, x_disable_viewer=True))
        if quiet.settings.mode == "online" and not wandb.login(
            prompt=False, verify=False
        ):  # a prompt would wait for a person
            raise RuntimeError("no API key (WANDB_API_KEY, or wandb login)")
        settings = wandb.Settings(
            init_timeout=BEGIN_S, silent=True, console="off", disable_git=True, x_disable_stats=True,
            reinit="create_new",  # an engine may train many runs at once
            x_graphql_retry_max=RETRIES, x_graphql_retry_wait_max_seconds=RETRY_S,
            x_file_stream_retry_max=RETRIES, x_file_stream_retry_wait_max_seconds=RETRY_S,
        )  # fmt: skip
        return wandb.init(project=PROJECT, id=self.name, name=self.name, resume="allow", config=self.config,
                          dir=self.root, settings=settings)  # fmt: skip

    def _send(self, rows: Sequence[Mapping[str, Any]], run: Any) -> None:
        """Send what was not sent before. It is marked first: after a kill in between a step is missing, not twice.

        Late, once the run is given back, the rows of one that is done are sent unmarked, since no other attempt will;
        those of one that is not are left to the next attempt.
        """
        new = [row for row in rows if row["step"] > self.sent]
        with self._marking:
            if self._closed and self.code:
                return
            if new and not self._closed:
                self.sent = new[-1]["step"]
                self.writer.write(MARK, {"step": self.sent})
        for row in new:
            run.log({name: value for name, value in _present(row).items() if name != "step"}, step=row["step"])


def _say(what: str) -> bool:
    """Say it, once a process; returns whether it was said now."""
    if _lost.is_set():
        return False
    _lost.set()
    print(f"wandb: {what}", file=sys.stderr)
    return True


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@contextlib.contextmanager
def tracker(config: RunConfig, launch: LaunchConfig, writer: RunWriter) -> Iterator[Tracker]:
    """The tracker that ``launch.wandb`` asks for; WANDB_MODE=offline works as everywhere."""
    if not launch.wandb or _lost.is_set():
        yield Tracker()
        return
    active = WandbTracker(config, launch.root, writer)
    try:
        yield active
    finally:
        active.close()
