"""Run several studies as one: ``python -m sweeps.studies [STUDY ...] --scale mini [launch.root=DIR]``.

A run that several studies share is trained once, and one pool works through all of them, so that no
core idles between studies. Default: every supervised study.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.config import ConfigError
from experiments.store import StoreError, ensure_root
from slurm.client import SlurmError
from slurm.cluster import choose
from sweeps.display import warn
from sweeps.grid import Point, Study, known_studies, load_study
from sweeps.launch import launch, launch_options
from sweeps.plan import print_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code, as ``sweeps.launch``."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.studies", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("words", nargs="*", metavar="STUDY", help=f"of: {', '.join(supervised())}; then overrides")
    launch_options(parser)
    options = parser.parse_intermixed_args(arguments)
    names = [word for word in options.words if "=" not in word] or supervised()
    overrides = [word for word in options.words if "=" in word]
    try:
        cluster = choose(options.cluster)
        studies = [load_study(name, options.scale, overrides) for name in names]
        together = union(studies)
        root = Path(together.launch.root)
        asked = sum(len(study.points) for study in studies)
        warn(f"{len(studies)} studies ask for {asked} runs; {asked - len(together.points)} are shared and run once")
        if options.dry:
            print_plan(together, root)
            return 0
        return launch(together, ensure_root(root), studies, cluster, options.detach)
    except (ConfigError, StoreError, SlurmError) as error:
        warn(f"error: {error}")
        return 2


def supervised() -> list[str]:
    """The studies that need no reinforcement learning."""
    return [name for name in known_studies() if not name.startswith("rl")]


def union(studies: Sequence[Study]) -> Study:
    """All runs of several studies, each once, as one study."""
    points: dict[str, Point] = {point.run_id: point for study in studies for point in study.points}
    return replace(studies[0], name=", ".join(study.name for study in studies), points=tuple(points.values()))


if __name__ == "__main__":
    sys.exit(main())
