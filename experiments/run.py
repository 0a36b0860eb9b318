"""Entry point of one run: ``python -m experiments.run method=lora method.rank=4 optim.lr=1e-3``.

``-m`` runs every combination of comma-separated values, one after the other. A finished run is
returned as it is, a begun one goes on from its newest sound checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments import claim, hub, own_reward, store
from experiments.compose import expand, parse
from experiments.config import ConfigError, Engine, LaunchConfig, RunConfig, SamplerKind, encode, run_id, said
from experiments.objective import Grader
from experiments.split import check_processes

RESUMABLE = 130
"""Exit code after Ctrl-C: everything is on disk, the same command goes on."""


def prepare_process(processes: int = 1) -> None:
    """One thread per process (two threads on two busy cores were seen 10 to 30 times slower), and no
    denormals, which diverging runs make and which are slow. Every process that trains calls it first.

    One GPU too, the first in sight: over several, transformers' Trainer would split each batch (DataParallel)
    and so train on a larger one than the configuration says. One that has its runs trained by several ``processes``
    keeps as many GPUs to hand out.
    """
    import torch

    num = torch.cuda.device_count()
    if num > processes:  # counting does not start CUDA, which reads the environment when it starts
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num)))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:processes])
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def check(config: RunConfig, launch: LaunchConfig) -> None:
    """Refuse what cannot run before anything is written: batch split, sync, rank, model. Raises ConfigError."""
    from experiments import adapters, kernels, models  # torch is imported only by a process that needs it

    check_processes(config, launch)
    if config.rl.reward:
        own_reward.check(config.rl.reward, config.rl.reward_digest)
    kernels.check(config, launch)
    if config.is_rl and launch.sampler is SamplerKind.vllm:
        from experiments.vllm_rollouts import sync_mode

        sync_mode(config, launch)
    shapes = models.empty_model(config.model, Path(launch.root) / "cache")
    adapters.check_rank(shapes, config.method)
    if config.is_rl and launch.sampler is SamplerKind.vllm:
        _check_engine(config, shapes.config.get_text_config())


def _check_engine(config: RunConfig, shapes: Any) -> None:
    """Refuse a model that vLLM would sample from with other weights than the trainer's. Raises ConfigError."""
    import torch

    reason = ""
    if shapes.tie_word_embeddings and config.method.unembed:
        reason = "ties its unembedding to the embedding, and vLLM would take the adapted one for both"
    elif getattr(shapes, "num_experts", 0) and not torch.cuda.is_available():
        reason = "has experts, whose weights vLLM repacks on a CPU and cannot load again"
    if reason:
        raise ConfigError(f"launch.sampler: 'vllm' is not allowed; {config.model.name} {reason}; take transformers")


def execute(config: RunConfig, launch: LaunchConfig, progress: Any = None) -> dict[str, Any]:
    """Bring one run to its summary, whatever state it is in, and return the summary.

    Raises claim.Busy if another process writes it, ConfigError and StoreError for bad input,
    recorder.Interrupted after a requested stop. Any other exception is recorded in failure.json first.
    """
    from experiments import engines, failures, kernels, memory, models, provenance, recorder, tracking

    root = store.ensure_root(Path(launch.root))
    notes: tuple[str, ...] = ()
    if store.state_of(root / run_id(config)) != "done":
        check(config, launch)
        kernels.check_device(launch)
        notes = load_data(config, models.load_tokenizer(config.model, root / "cache"))
        if launch.processes == 1:  # else the processes load them, and here they would only take memory
            models.check_weights(config.model, root / "cache")
        if engines.chosen(config, launch) is Engine.packed and not config.is_rl:
            return _execute_packed(config, launch, progress or recorder.Progress())
        launch = memory.resolved(config, launch, root / "cache", memory.device_bytes())
    with claim.claim(root, run_id(config), encode(config)) as writer:
        if writer.summary is not None:  # finished by someone else while we waited for the lock
            return writer.summary
        try:
            with tracking.tracker(config, launch, writer) as tracker:
                writer.mirrors.append(tracker)
                writer.write_provenance(provenance.of_run(config, _engine(config, launch)))
                summary = _flow(config, launch)(config, launch, writer, progress or recorder.Progress())
                notes = (*notes, *summary.pop("warnings", ()))
                return writer.finish({**summary, "run_id": run_id(config), "time_unix_s": time.time(),
                                      "notes": [*notes, *writer.notes]})  # fmt: skip
        except BaseException as error:
            raise failures.recorded(error, writer) from error.__cause__


def _engine(config: RunConfig, launch: LaunchConfig) -> dict[str, Any]:
    """What trains a run here, for its provenance."""
    from experiments import engines

    names = ("processes", "attention", "gradient_checkpointing", "liger")
    said = {name: value for name, value in encode(launch).items() if name in names}
    return {"name": engines.chosen(config, launch).name, **said}


def _execute_packed(config: RunConfig, launch: LaunchConfig, progress: Any) -> dict[str, Any]:
    """A pack of one."""
    from experiments.packed import train

    ends: list[dict[str, Any] | BaseException] = []
    train.execute(
        [config],
        launch,
        train.Reports(
            step=lambda _run, step, steps, value: progress.on_step(step, steps, value),
            ended=lambda _run, summary: ends.append(summary),
            failed=lambda _run, error: ends.append(error),
            should_stop=progress.should_stop,
        ),
    )
    (end,) = ends
    if isinstance(end, BaseException):
        raise end
    return end


def _flow(config: RunConfig, launch: LaunchConfig) -> Callable[..., dict[str, Any]]:
    """The training flow of a run."""
    if launch.processes > 1:
        from experiments import sharded

        return sharded.train
    if config.is_rl:
        from experiments import rl

        return rl.train
    from experiments import sft

    return sft.train


def load_data(config: RunConfig, tokenizer: Any) -> tuple[str, ...]:
    """Read the data before anything is written, so that bad data leaves nothing behind. Raises ConfigError.

    Returns what is to be said of it: rows left out, many examples cut.
    """
    from experiments.data import dataset, problems

    if config.is_rl:
        found = problems.load(config.data, config.rl.grader is not Grader.own)
        if config.rl.max_tool_calls:
            from experiments.episodes import check_tools

            check_tools(config, tokenizer)
        return found.notes
    return dataset.load(config.data, tokenizer).notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    multirun = [w for w in words if w in ("-m", "--multirun")]
    overrides = [w for w in words if w not in multirun]
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # as of every job: what a run needs was fetched before
    try:
        lines = expand(overrides) if multirun else [overrides]
        points = [parse(line) for line in lines]
        for config, _ in points:
            hub.check_model(config)
        prepare_process(max(launch.processes for _, launch in points))
        for config, launch in points:  # an impossible last point is said before the first one trains
            check(config, launch)
        for config, launch in points:
            _announce(config, execute(config, launch, _terminal_progress(config)))
    except (ConfigError, store.StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except _interrupted() as error:
        print(f"stopped: {error}; the same command goes on from there", file=sys.stderr)
        return RESUMABLE
    return 0


def _interrupted() -> type[BaseException]:
    from experiments.recorder import Interrupted

    return Interrupted


def _announce(config: RunConfig, summary: dict[str, Any]) -> None:
    found = said(config.headline, summary["metrics"][config.headline])
    value = "diverged" if summary["outcome"] == "diverged" else found
    print(f"{run_id(config)}: {value} at step {summary['step']}")


def _terminal_progress(config: RunConfig) -> Any:
    """Progress on one line with the time left; Ctrl-C and SIGTERM stop after the current step."""
    from experiments.recorder import Progress

    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, _frame: stop.append(signum))
    begun = time.monotonic()

    def on_step(step: int, steps: int, value: float | None) -> None:
        left_s = (time.monotonic() - begun) / step * (steps - step)
        if sys.stderr.isatty():
            print(f"\r{run_id(config)}: step {step}/{steps}, {left_s:.0f} s left ", end="", file=sys.stderr)
            if step == steps:
                print(file=sys.stderr)
        elif value is not None:
            found = said(config.headline, value)
            print(f"{run_id(config)}: step {step}/{steps}, {found}, {left_s:.0f} s left", file=sys.stderr)

    return Progress(on_step=on_step, should_stop=lambda: bool(stop))


if __name__ == "__main__":
    sys.exit(main())
