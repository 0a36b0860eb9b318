"""The packed engine: runs trained together in one process, each with the record it would have alone.

A run's id, metrics, checkpoints and summary are those of the single-run engine (``sft``); what differs is rounding.
The arms of a pack take their steps together; one that ends or diverges leaves, the next one waiting takes
its place. An arm's numbers depend on its companions in rounding only, and not at all where these have its data
order and its step, and ranks that are padded alike (up to ``stacks.LEAST_RANK``, or above).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import adapters, claim, failures, provenance, store, tracking
from experiments.config import LaunchConfig, RunConfig, encode, run_id
from experiments.data import dataset
from experiments.losses import IGNORED
from experiments.packed import arms, width
from experiments.packed.decoder import EMBEDDING
from experiments.packed.pack import Arm, Kind, Pack, kind
from experiments.packed.rows import lay_out
from experiments.packed.session import Session, open_session
from experiments.recorder import Interrupted, Progress, Recorder, finite_or_none


@dataclass
class Reports:
    """What the outside hears of the runs, by run id, and says."""

    started: Callable[[str], None] = lambda run: None
    step: Callable[[str, int, int, float | None], None] = lambda run, step, steps, value: None
    ended: Callable[[str, dict[str, Any]], None] = lambda run, summary: None
    failed: Callable[[str, BaseException], None] = lambda run, error: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass
class Member:
    """A run in training: its place on disk, what it has recorded, its state, its data."""

    config: RunConfig
    arm: Arm
    writer: claim.RunWriter
    recorder: Recorder
    order: np.ndarray
    init_hash: str
    holding: contextlib.ExitStack
    step: int
    at: int = 0  # sequences of the current batch already seen
    nll: float = 0.0
    seconds: float = 0.0
    num_trainable: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_trainable = sum(slot.size for slot in self.arm.layout.slots)

    @property
    def name(self) -> str:
        return self.arm.name

    def examples(self, session: Session, first: int, count: int) -> list[dict]:
        start = self.step * self.config.optim.batch_size + first
        return [session.train[i] for i in self.order[start : start + count]]


def execute(configs: Sequence[RunConfig], launch: LaunchConfig, reports: Reports) -> None:
    """Bring every run to its end. All share model, data, batch size and kind of method (``config.pack_key``).

    How each run ended is reported: its summary, or the exception that ended it (Busy, Interrupted, ConfigError,
    StoreError as in ``run.execute``; any other is recorded in failure.json first, if the run had begun).
    """
    if not configs:
        return
    try:
        session = open_session(configs[0].model, configs[0].data, Path(launch.root) / "cache")
        groups = _by_kind(session, configs)
    except Exception as error:
        for config in configs:
            reports.failed(run_id(config), error)
        return
    for of_kind, group in groups:
        _Engine(session, group, of_kind.merged, launch, reports).run()


def _by_kind(session: Session, configs: Iterable[RunConfig]) -> list[tuple[Kind, list[RunConfig]]]:
    """Runs that are computed alike."""
    found: dict[Kind, list[RunConfig]] = {}
    mean = float(np.mean([len(row["input_ids"]) for row in session.train[:64]]))
    for config in configs:
        layout = arms.layout(session.decoder, config, session.cache)
        found.setdefault(kind(layout, round(mean * config.optim.batch_size)), []).append(config)
    return sorted(found.items())


class _Engine:
    def __init__(
        self, session: Session, configs: Sequence[RunConfig], merged: bool, launch: LaunchConfig, reports: Reports
    ) -> None:
        self.session, self.merged, self.launch, self.reports = session, merged, launch, reports
        self.waiting = deque(configs)
        self.members: dict[str, Member] = {}
        self.pack: Pack | None = None
        self.width = 1
        self.micro = launch.micro_batch_size or configs[0].optim.batch_size

    def run(self) -> None:
        """Train until nothing is waiting and nothing in training; on an error that names no run, one by one."""
        left: list[RunConfig] = []
        try:
            self.width = self._chosen_width()
            while self._filled():
                self._tick()
        except BaseException as error:
            left = self._broken(error)
        for config in left:  # here, since the error would keep what its frames hold
            _Engine(self.session, [config], self.merged, self.launch, self.reports).run()

    def _chosen_width(self) -> int:
        if len(self.waiting) == 1:
            return 1
        probe, _ = arms.fresh(self.session.decoder, self.waiting[0], self.session.cache)
        timing = width.measure(self.session.decoder, probe, self.session.train[: self.micro], self.merged)
        return timing.width(len(self.waiting))

    def _filled(self) -> bool:
        """Take in runs while there is room; False when all is done."""
        stop = self.reports.should_stop()
        before = len(self.members)
        while self.waiting and len(self.members) < self.width and not stop:
            config = self.waiting.popleft()
            try:
                member = self._begun(config)
            except Exception as error:
                self.reports.failed(run_id(config), error)
                continue
            if member:
                self.members[member.name] = member
        if stop:
            while self.waiting:
                self.reports.failed(run_id(self.waiting.popleft()), Interrupted("not begun"))
        if len(self.members) > before:
            self._compose()
        return bool(self.members)

    def _begun(self, config: RunConfig) -> Member | None:
        """Claim a run and bring it to where it stands on disk; None if it is done."""
        name = run_id(config)
        root = store.ensure_root(Path(self.launch.root))
        self.reports.started(name)
        with contextlib.ExitStack() as holding:
            writer = holding.enter_context(claim.claim(root, name, encode(config)))
            if writer.summary is not None:
                self.reports.ended(name, writer.summary)
                return None
            try:
                writer.mirrors.append(holding.enter_context(tracking.tracker(config, self.launch, writer)))
                return self._resumed(config, writer, holding)
            except BaseException as error:
                raise failures.recorded(error, writer) from error.__cause__

    def _resumed(self, config: RunConfig, writer: claim.RunWriter, holding: contextlib.ExitStack) -> Member:
        name, session, optim = run_id(config), self.session, config.optim
        engine = {"name": "packed", "width": self.width, "form": "merged" if self.merged else "factored"}
        writer.write_provenance(provenance.of_run(config, engine))
        recorder = Recorder(
            config, self.launch, writer, self._progress(name),
            evaluate=lambda: {"test/nll_nats": self._held_out_nll(name)},
            measure=lambda: self._norms(name),
            limit=lambda base: base + config.eval.diverged_nats,
        )  # fmt: skip
        arm, digest = arms.fresh(session.decoder, config, session.cache)
        resume = writer.resume_point()
        if resume:
            arm = arms.restore(arm, resume.checkpoint)
            recorder.restore(resume.rows)
        else:
            recorder.base = recorder.last = {"test/nll_nats": session.base_model_nll()}
            writer.append({"step": 0, **recorder.base})
        order = dataset.order(len(session.train), optim.batch_size * optim.steps, config.seed.data)
        return Member(config, arm, writer, recorder, order, digest, holding.pop_all(), resume.step if resume else 0)

    def _progress(self, name: str) -> Progress:
        return Progress(lambda step, steps, value: self.reports.step(name, step, steps, value),
                        self.reports.should_stop)  # fmt: skip

    def _compose(self) -> None:
        """The pack of the present members, each with its newest state."""
        for member in self.members.values():
            if self.pack and member.name in self.pack.arms:
                member.arm = self.pack.take(member.name)
        self.pack = Pack(self.session.decoder, [m.arm for m in self.members.values()], self.merged)

    def _tick(self) -> None:
        """One micro-step of every arm, and what follows from it."""
        assert self.pack
        begun = time.monotonic()
        present = [self.members[name] for name in self.pack.arms]
        seen: dict[tuple, list[dict]] = {}
        batches, sizes = [], []
        for member in present:
            key = (member.config.seed.data, member.step, member.at)
            whole = member.examples(self.session, 0, member.config.optim.batch_size)
            batches.append(seen.setdefault(key, whole[member.at : member.at + self.micro]))
            sizes.append(sum(label != IGNORED for row in whole for label in row["labels"][1:]))
        like = self.session.decoder.base[EMBEDDING]
        counts = torch.tensor(sizes, dtype=like.dtype)
        losses = self.pack.accumulate(lay_out(batches), counts).tolist()
        stepping = []
        for member, loss in zip(present, losses, strict=True):
            member.nll += loss
            member.at += self.micro
            stepping.append(member.at >= member.config.optim.batch_size)
        self.pack.step(stepping)
        share = (time.monotonic() - begun) / len(present)
        gone = []
        for member, stepped, size in zip(present, stepping, sizes, strict=True):
            member.seconds += share
            if stepped and self._after_step(member, size):
                gone.append(self.members.pop(member.name))
        if gone:
            if self.members:
                self._compose()
            else:
                self.pack = None

    def _after_step(self, member: Member, num_tokens: int) -> bool:
        """Record, evaluate, checkpoint; True if the run is over or stopped."""
        nll, member.nll, member.at = member.nll, 0.0, 0
        member.step += 1
        row = {"train/nll_nats": finite_or_none(nll), "train/num_tokens": num_tokens}
        recorder = member.recorder
        recorder.take_row = lambda: (row, bool(np.isfinite(nll)))
        try:
            wish = recorder.after_step(member.step)
            if wish.save:
                self._save(member)
            if recorder.interrupted:
                raise Interrupted(f"stopped at step {member.step}, checkpointed")
            over = wish.stop or member.step >= member.config.optim.steps
            if over:
                summary = member.writer.finish(self._summary(member))
                member.holding.close()
                self.reports.ended(member.name, summary)
            return over
        except (MemoryError, torch.OutOfMemoryError):
            raise  # the whole pack's
        except Exception as error:
            member.holding.close()
            self.reports.failed(member.name, failures.recorded(error, member.writer))
            return True

    def _save(self, member: Member) -> None:
        assert self.pack
        directory = member.writer.scratch / f"checkpoint-{member.step}"
        arms.save(self.pack.take(member.name), directory, self.session.cache)
        member.recorder.saved(directory)

    def _held_out_nll(self, name: str) -> float:
        assert self.pack
        return self.session.held_out_nll(self.pack.weights_of(name))

    def _norms(self, name: str) -> dict[str, float]:
        assert self.pack
        arm = self.pack.take(name)
        if arm.is_full:
            return {}
        return adapters.factor_norms((slot.name, slot.of(arm.theta[None])[0]) for slot in arm.layout.slots)

    def _summary(self, member: Member) -> dict[str, Any]:
        recorder, data = member.recorder, self.session.data
        if recorder.outcome == "finished" and not recorder.last_value < recorder.base_value:
            recorder.outcome = "diverged"  # ended no better than the untrained base
        return {
            "outcome": recorder.outcome,
            "step": member.step,
            "metrics": {
                "test/nll_nats": finite_or_none(recorder.last_value),
                "test/nll_base_nats": recorder.base_value,
                "test/num_tokens": self.session.num_test_tokens,
                **self._norms(member.name),
            },
            "init_hash": member.init_hash,
            "model_commit": self.session.model_commit,
            "num_trainable": member.num_trainable,
            "num_cut": data.num_cut,
            "num_dropped": data.num_dropped,
            "num_malformed": data.num_malformed,
            "num_duplicates": data.num_duplicates,
            "time": {"total_s": member.seconds + recorder.eval_s, "eval_s": recorder.eval_s},
            "run_id": member.name,
            "time_unix_s": time.time(),
            "notes": [*data.notes, *member.writer.notes],
        }

    def _broken(self, error: BaseException) -> list[RunConfig]:
        """After an error that is no single run's: the runs to try again one by one, from their checkpoints.

        Of one alone it is the end. The pack is let go of: the error may have been that it found no memory.
        """
        alone = len(self.members) == 1
        left = deque([member.config for member in self.members.values()] + list(self.waiting))
        for member in self.members.values():
            if alone:
                self.reports.failed(run_id(left.popleft()), failures.recorded(error, member.writer))
            member.holding.close()
        self.pack, self.members = None, {}
        if not isinstance(error, Exception):
            raise error
        return list(left)
