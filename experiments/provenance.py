"""Where a result comes from: code, versions, hardware, command line."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from experiments import hub
from experiments.config import RunConfig, encode

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "numpy", "reasoning-gym")
MAX_DIFF_CHARS = 200_000


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""  # a release without its history is still a place to run from
    return done.stdout


@lru_cache(maxsize=1)
def _fixed() -> dict[str, Any]:
    diff = _git("diff", "HEAD", "--", ".", ":!*.safetensors")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "commit": _git("rev-parse", "HEAD").strip() or None,
        "diff": diff[:MAX_DIFF_CHARS],
        "diff_is_cut": len(diff) > MAX_DIFF_CHARS,
        "argv": sys.argv,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "host": socket.gethostname(),
        "user": os.environ.get("USER") or os.getuid(),  # a container may have no name for it
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def gpu_names() -> list[str]:
    """Names of the visible GPUs; empty on a CPU machine."""
    import torch  # only a process that trains asks

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def collect(**facts: Any) -> dict[str, Any]:
    """The provenance record of this process, with ``facts`` about the run added."""
    return {**_fixed(), "gpus": gpu_names(), "time_unix_s": time.time(), **facts}


def of_run(config: RunConfig, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance record of a run: its configuration, what trains it, and which commits of the hub it reads."""
    pinned = {str(piece): hub.commit(piece) for piece in sorted(hub.pieces(config))}
    return collect(config=encode(config), engine=dict(engine), hub=pinned)
