"""Which engine makes a run: a matter of speed, not of what the run is."""

from __future__ import annotations

from pathlib import Path

from experiments import store
from experiments.checks import ConfigError
from experiments.config import Engine, LaunchConfig, RunConfig, run_id

PACKED_STATE = "arm.safetensors"
"""The file by which a checkpoint of the packed engine is known."""


def chosen(config: RunConfig, launch: LaunchConfig) -> Engine:
    """``trl`` or ``packed``. A begun run goes on with the engine that began it: they keep other checkpoints.
    In reinforcement learning both are TRL's, and the engine is what computes the policy.

    Raises ConfigError if ``launch.engine`` asks for one that cannot make the run.
    """
    root = Path(launch.root)
    begun = [path for path in store.checkpoints(root / run_id(config)) if store.is_sound(path)]
    if begun and not config.is_rl:
        return Engine.packed if (begun[-1] / PACKED_STATE).exists() else Engine.trl
    if launch.engine is Engine.trl or (launch.engine is Engine.auto and _slower_packed()):
        return Engine.trl
    from experiments.kernels import only_single
    from experiments.packed.session import refusal

    several = "several processes train it" if launch.processes > 1 else None
    reason = several or only_single(launch) or refusal(config, root / "cache")
    if reason is None:
        return Engine.packed
    if launch.engine is Engine.packed:
        raise ConfigError(f"launch.engine: 'packed' cannot make this run; {reason}")
    return Engine.trl


def _slower_packed() -> bool:
    """On a GPU a single run of any size worth having one keeps it busy, and TRL computes in bfloat16 there."""
    import torch

    return torch.cuda.is_available()
