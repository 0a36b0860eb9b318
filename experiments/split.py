"""How the batch of a run is split over processes and over steps of accumulation. No torch: a login node asks too."""

from __future__ import annotations

from experiments.checks import ConfigError
from experiments.config import LaunchConfig, MethodKind, RunConfig


def batch_split(config: RunConfig, launch: LaunchConfig) -> tuple[int, int]:
    """(sequences that one process takes at a time, how often until the batch is complete).

    The batch of the configuration is whole whatever the split. Raises ConfigError where it cannot be: the number of
    processes, and what one of them takes at a time, must divide it.
    """
    batch, processes = config.optim.batch_size, launch.processes
    if batch % processes:
        raise ConfigError(
            f"launch.processes: {processes} is not allowed; it must divide optim.batch_size ({batch}), "
            "which stays what it is"
        )
    share = batch // processes
    micro = launch.micro_batch_size or share
    if share % micro:
        of_each = f" / launch.processes ({share})" if processes > 1 else f" ({batch})"
        raise ConfigError(f"launch.micro_batch_size: {micro} is not allowed; it must divide optim.batch_size{of_each}")
    return micro, share // micro


def check_processes(config: RunConfig, launch: LaunchConfig) -> None:
    """Refuse what several processes cannot train. Raises ConfigError."""
    if launch.processes > 1:
        why = ""
        if config.is_rl:
            why = "reinforcement learning trains its policy on one device"
        elif config.method.kind is MethodKind.tiny:
            why = "method=tiny has numbers that all matrices share, which cannot be sharded"
        if why:
            raise ConfigError(f"launch.processes: {launch.processes} is not allowed; {why}")
    batch_split(config, launch)
