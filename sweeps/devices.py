"""The accelerators of this machine, shared out to the workers; found without torch, which the workers import."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
PATIENCE_S = 30.0


def devices() -> tuple[str, ...]:
    """Names of the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` takes them; none without a driver."""
    given = os.environ.get(VISIBLE)
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip() not in ("", "-1"))
    return tuple(_asked("index") or ())


def device_gib() -> float | None:
    """Memory of the smallest GPU here; None where the driver does not tell it."""
    try:
        return min(map(float, _asked("memory.total") or ()), default=0.0) / 1024 or None
    except ValueError:  # "[N/A]": what it shares with the host, or a part of a GPU
        return None


def _asked(what: str) -> list[str] | None:
    """What the driver says of each GPU, in its own units; None if there is none or it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        asked = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.split() if found.returncode == 0 else None


def pinned(number: int, found: Sequence[str], each: int = 1) -> dict[str, str]:
    """Environment of worker ``number``: it sees ``each`` devices and no other's. Workers beyond their number share."""
    if not found:
        return {}
    first = number % max(1, len(found) // each) * each
    return {VISIBLE: ",".join(found[first : first + each])}
