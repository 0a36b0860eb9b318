"""What the processes that train one run tell each other. One process alone gets back what it gives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def count() -> int:
    """How many processes train this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def index() -> int:
    """Which of them this one is; the first one speaks for all."""
    return dist.get_rank() if dist.is_initialized() else 0


def summed(*values: float) -> tuple[float, ...]:
    """Each value summed over the processes, in their order: the same to the last bit on every one."""
    if count() == 1:
        return values
    mine = torch.tensor(values, dtype=torch.float64, device=_device())
    everyones = [torch.empty_like(mine) for _ in range(count())]
    dist.all_gather(everyones, mine)
    return tuple(torch.stack(everyones).cpu().sum(0).tolist())


def agreed(*flags: bool) -> tuple[bool, ...]:
    """What the first process says of each: clocks and signals differ, what is done about them must not."""
    if count() == 1:
        return flags
    said = torch.tensor(flags, dtype=torch.uint8, device=_device())
    dist.broadcast(said, src=0)
    return tuple(bool(flag) for flag in said.tolist())


def wait_for_all() -> None:
    """Return when every process has come here."""
    agreed(False)
    summed(0.0)


def mine(items: list) -> list:
    """This process's share of what all of them hold; the shares are disjoint and together everything."""
    return items[index() :: count()]


def whole(tensor: Tensor) -> Tensor:
    """A parameter of which this process may hold a part only, gathered. All processes must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
