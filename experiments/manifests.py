"""Which runs a study is made of, as the store keeps it: ``<root>/studies/<study>-<scale>.json``.

A run does not know its studies (they share runs); a manifest is how the analysis can name what is missing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.store import (
    FORMAT,
    NewerStore,
    StoreError,
    check_format,
    exists,
    explained,
    read_json,
    with_fields,
    write_json,
)

MAX_NAME = 120
"""Characters of a study's name; a file name holds 255, and a temporary one is longer."""


def _study_path(root: Path, study: str, scale: str) -> Path:
    return root / "studies" / f"{study}-{scale}.json"


def study_name(study: str, overrides: Sequence[str]) -> str:
    """The name of a study whose runs are overridden: ``lr+optim.steps=50``, whatever the order; safe as a file name.

    ``launch.*`` changes no run, hence no name. A short hash tells apart what had to be shortened or respelt.
    """
    science = sorted((o for o in overrides if not o.startswith("launch.")), key=lambda o: o.partition("=")[0])
    name = "+".join([study, *(re.sub(r"[^A-Za-z0-9=._-]", "_", override) for override in science)])
    exact = "+".join([study, *science])
    if name == exact and len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 9]}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def write_study(root: Path, study: str, scale: str, manifest: Mapping[str, Any]) -> None:
    """Record which runs a study is made of, so that the analysis can name what is missing.

    A damaged manifest is replaced. Raises NewerStore for a newer version's, StoreError for one that cannot be read.
    """
    path = _study_path(root, study, scale)
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    if exists(path):
        try:
            check_format(path, read_json(path))
        except StoreError as error:
            if isinstance(error, NewerStore) or isinstance(error.__cause__, OSError):
                raise
    write_json(path, {"format": FORMAT, "study": study, "scale": scale, **manifest})


def read_study(root: Path, study: str, scale: str) -> dict[str, Any]:
    """The manifest of a study. Raises StoreError naming the known ones if it was never launched."""
    path = _study_path(root, study, scale)
    if not exists(path):
        known = ", ".join(f"{name} ({s})" for name, s in list_studies(root)) or "none yet"
        raise StoreError(f"study: {study!r} at scale {scale!r} is not in {root}; launched so far: {known}")
    document = read_json(path)
    check_format(path, document)
    return with_fields(path, document, title=str, settings=dict, run_ids=list)


def list_studies(root: Path) -> list[tuple[str, str]]:
    """(study, scale) of every manifest in the store. Raises StoreError if they cannot be listed."""
    directory = root / "studies"
    with explained(directory):
        files = sorted(directory.iterdir()) if directory.exists() else []
    pairs = (p.stem.rpartition("-") for p in files if p.suffix == ".json" and not p.name.startswith("."))
    return [(study, scale) for study, _, scale in pairs]
