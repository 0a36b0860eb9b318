"""Measure the claims that need no sweep and write them to ``<root>/exact.json`` (about a minute).

C9 first update against rank, C21 invariance, C23 compute, C24 parameter counts. Fixed seeds: all but
the seconds come out the same each time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments import provenance, store
from experiments.exact import counts, first_step, flops, invariance


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a root that cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m experiments.exact", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--root", default="runs", help="the store, as in launch.root")
    root = Path(parser.parse_args(arguments).root)
    torch.set_num_threads(1)
    parts: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
        "C9": ("mean and variance of the first update", first_step.measure),
        "C21": ("invariance of the parametrisation", invariance.measure),
        "C23": ("multiply-adds and step time", flops.measure),
        "C24": ("parameter counts", counts.measure),
    }
    document: dict[str, Any] = {}
    try:
        store.ensure_root(root)
        for name, (title, measure) in parts.items():
            print(f"{name}: {title}", flush=True)
            begun = time.monotonic()
            document[name] = measure()
            print(f"{name}: done in {time.monotonic() - begun:.1f} s", flush=True)
        document["provenance"] = provenance.collect()
        store.write_json(root / "exact.json", document)
    except store.StoreError as error:
        print("error: " + str(error).replace("launch.root=DIR", "--root DIR"), file=sys.stderr)
        return 2
    print(f"wrote {root / 'exact.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
