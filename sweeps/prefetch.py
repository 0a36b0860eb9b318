"""Fetch what studies need of the hub: ``python -m sweeps.prefetch [STUDY|all] --scale paper``, or ``make prefetch``.

Run it where there is a network, with ``HF_HOME`` on a file system that all nodes see. Each model and data set is pinned
to the commit that its revision has at the first fetch; the runs read those copies and ask the hub nothing. A second
call fetches only what is missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from experiments import hub
from experiments.config import ConfigError, DataConfig, DataSource, RunConfig
from sweeps.display import warn
from sweeps.grid import known_studies, load_study


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all is there, 1 some could not be fetched, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.prefetch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("study", nargs="?", default="all", help=f"one of: {', '.join(known_studies())}; or all")
    parser.add_argument("--scale", default="paper", help="mini, smol or paper")
    parser.add_argument("overrides", nargs="*", help="as for sweeps.launch, e.g. data=no-robots")
    options = parser.parse_intermixed_args(arguments)
    try:
        configs = _configs(options.study, options.scale, options.overrides)
        wanted = sorted(set().union(*map(hub.pieces, configs)))
        lacking = hub.missing(configs)
    except ConfigError as error:
        warn(f"error: {error}")
        return 2
    print(f"{len(wanted)} models and data sets, {len(lacking)} to fetch, into {hub.cache_dir()}")
    failed = 0
    for piece in wanted:
        try:
            commit = hub.fetch(piece) if piece in lacking else hub.commit(piece)
            print(f"{piece}: commit {commit}", flush=True)
        except ConfigError as error:
            failed += 1
            warn(f"error: {error}")
    failed += _prepare({config.data: config for config in configs})
    return 1 if failed else 0


def _configs(study: str, scale: str, overrides: Sequence[str]) -> list[RunConfig]:
    """Every run of the study, or of all studies that have the scale. Raises ConfigError if there is none."""
    if study != "all":
        return [point.config for point in load_study(study, scale, overrides).points]
    configs: list[RunConfig] = []
    refused: ConfigError | None = None
    for name in known_studies():
        try:
            configs += [point.config for point in load_study(name, scale, overrides).points]
        except ConfigError as error:  # of a study without this scale
            refused = error
    if refused and not configs:
        raise refused
    return configs


def _prepare(sets: dict[DataConfig, RunConfig]) -> int:
    """Let the library convert every data set now, once, and not in each job. Returns how many cannot be read."""
    from experiments.data import records

    names = {
        (data.path, data.subset, data.revision, name): (data, name)
        for data in sets if data.source is DataSource.hub for name in (None, *data.held_out)
    }  # fmt: skip
    failed = 0
    for data, name in names.values():
        if any(piece.kind == "dataset" for piece in hub.missing([sets[data]])):
            continue  # said already
        try:
            source = records.source_of(data, (), name)
            print(f"{source.where}: {len(source):,} rows", flush=True)
        except ConfigError as error:
            failed += 1
            warn(f"error: {error}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
