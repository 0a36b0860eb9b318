"""Boundary to the hub: what runs need of it, where that lies on this machine, and which commit it is pinned to.

``make prefetch`` fetches once, where there is a network, into the hub's own cache; ``pins.json`` in it names the
commit of every piece. Runs then read the pinned copies and ask the hub nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.checks import ConfigError
from experiments.config import DataSource, ModelSource, RunConfig

PINS = "pins.json"
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
"""Of a model: configuration, tokenizer and weights; not the same weights in other formats."""
HOW = "make prefetch SCALE=paper fetches what studies need, where there is a network"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, order=True)
class Piece:
    """A model or a data set at a revision: a branch, a tag or a commit."""

    kind: str  # "model" or "dataset"
    path: str
    revision: str

    def __str__(self) -> str:
        return f"{self.kind} {self.path}@{self.revision}"

    @property
    def folder(self) -> str:
        """Its folder in the hub's cache."""
        return f"{self.kind}s--{self.path.replace('/', '--')}"


def cache_dir() -> Path:
    """The hub's cache: ``HF_HUB_CACHE``, else ``$HF_HOME/hub``, else in the home directory."""
    from huggingface_hub import constants

    return Path(os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE)


def pieces(config: RunConfig) -> set[Piece]:
    """What a run needs of the hub; a path of this machine is none of it."""
    found = set()
    if config.model.source is ModelSource.hub:
        found.add(Piece("model", config.model.path, config.model.revision))
    if config.data.source is DataSource.hub:
        found.add(Piece("dataset", config.data.path, config.data.revision or "main"))
        for name in config.data.held_out:
            path, _, revision = name.partition("@")
            found.add(Piece("dataset", re.split("[#:]", path)[0], revision or "main"))
    return {piece for piece in found if HUB_ID.fullmatch(piece.path) and not Path(piece.path).is_dir()}


def pins() -> dict[str, dict[str, Any]]:
    """Commit and files of every piece that was fetched, by its name. Raises ConfigError for a file that is none."""
    path = cache_dir() / PINS
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove it and run make prefetch again") from None
    return found


def commit(piece: Piece) -> str | None:
    """The commit that a piece is pinned to, None if it was not fetched."""
    return pins().get(str(piece), {}).get("commit")


def local(piece: Piece) -> Path | None:
    """Where the pinned copy lies, None if it was not fetched or lacks a file."""
    pin = pins().get(str(piece))
    if pin is None:
        return None
    directory = cache_dir() / piece.folder / "snapshots" / pin["commit"]
    return directory if all((directory / name).exists() for name in pin["files"]) else None


def missing(configs: Iterable[RunConfig]) -> list[Piece]:
    """The pieces that these runs need and this machine lacks."""
    return sorted(piece for piece in set().union(*map(pieces, configs)) if local(piece) is None)


def require(configs: Iterable[RunConfig], command: str) -> None:
    """Raises ConfigError naming what is missing and the command that fetches it. Asks the hub nothing."""
    lacking = missing(configs)
    if lacking:
        names = ", ".join(map(str, lacking))
        raise ConfigError(
            f"hub: not in {cache_dir()}: {names}; fetch them once where there is a network, with {command} "
            "(HF_HOME names the cache, HF_TOKEN opens gated models)"
        )


def check_model(config: RunConfig) -> None:
    """Say at once what a run lacks whose model is not here at all. Raises ConfigError.

    Libraries would take seconds to be loaded before they find out, or a minute to give up a network that is not there.
    A model in the cache that was not prefetched is theirs to judge.
    """
    from huggingface_hub import constants  # reads HF_HUB_OFFLINE (1, ON, YES or TRUE) once, for the libraries too

    wanted = [piece for piece in pieces(config) if piece.kind == "model"]
    if constants.HF_HUB_OFFLINE and any(not (cache_dir() / piece.folder).exists() for piece in wanted):
        require([config], "make prefetch SCALE=paper")


def fetch(piece: Piece) -> str:
    """Download a piece at the commit it is pinned to, or pin it to the one its revision has now; returns the commit.

    Files that are there already are not downloaded again. Raises ConfigError in one line if the hub refuses.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        found = commit(piece) or HfApi().repo_info(piece.path, repo_type=piece.kind, revision=piece.revision).sha
        directory = Path(snapshot_download(
            piece.path, repo_type=piece.kind, revision=found, cache_dir=cache_dir(),
            allow_patterns=list(MODEL_FILES) if piece.kind == "model" else None,
            ignore_patterns=["original/*"] if piece.kind == "model" else None,
        ))  # fmt: skip
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"hub: {piece} cannot be fetched; {reason}") from None
    files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    if not files:
        raise ConfigError(f"hub: {piece} holds no file")
    _pin(piece, {"commit": directory.name, "files": files})
    return directory.name


def _pin(piece: Piece, pin: dict[str, Any]) -> None:
    """Add one piece to the pins. Another prefetch may be adding its own: one after the other, so that none is lost."""
    path = cache_dir() / PINS
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # dropped with the file, however this process ends
        content = {**pins(), str(piece): pin}
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        partial.replace(path)
