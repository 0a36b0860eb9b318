"""Boundary to datasets: records of files and of the hub, converted one by one; what is malformed is named by line."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from datasets import load_dataset

from experiments import hub
from experiments.config import ConfigError, DataConfig, DataSource

T = TypeVar("T")
SHOWN = 5  # malformed rows that a message names
PATIENCE = 20  # malformed rows of a large set after which reading on would only take time


class Source(Protocol):
    """Records by number."""

    where: str

    def __len__(self) -> int: ...
    def get(self, number: int) -> object: ...
    def label(self, number: int) -> str: ...


class JsonLines:
    """One record a line; empty lines are none."""

    def __init__(self, path: str) -> None:
        self.where = path
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")  # not splitlines: U+2028 may stand in a text
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"data.path: {path!r} cannot be read; {reason}") from None
        self._lines = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def get(self, number: int) -> object:
        return json.loads(self._lines[number][1])

    def label(self, number: int) -> str:
        return f"line {self._lines[number][0]}"


class HubSplit:
    """A split of a data set of the hub: the pinned copy on this machine if there is one, else through the hub."""

    def __init__(self, path: str, subset: str, split: str, revision: str, columns: Sequence[str] = ()) -> None:
        self.where = f"{path} ({split})"
        local = hub.local(hub.Piece("dataset", path, revision or "main"))
        try:
            data: Any = load_dataset(str(local or path), subset or None, split=split,
                                     revision=None if local else revision or None)  # fmt: skip
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            how = f" ({hub.HOW})" if hub.HUB_ID.fullmatch(path) else ""
            raise ConfigError(f"data.path: {path!r} cannot be loaded; {reason}{how}") from None
        kept = [name for name in data.column_names if not columns or name in columns]
        self._data = data.select_columns(kept or data.column_names)  # else each row carries texts that nobody reads

    def __len__(self) -> int:
        return len(self._data)

    def get(self, number: int) -> object:
        return dict(self._data[number])

    def label(self, number: int) -> str:
        return f"row {number + 1}"


class Reader(Generic[T]):
    """``convert`` of the records of a source; those it refuses are kept in mind and left out.

    ``allowed`` is the share of malformed records that may be left out; ``expected`` says what a record looks like.
    """

    def __init__(self, source: Source, convert: Callable[[object], T], expected: str, allowed: float) -> None:
        self.source, self.convert, self.expected, self.allowed = source, convert, expected, allowed
        self.num_read = 0
        self.malformed: list[tuple[str, str]] = []

    def __call__(self, order: Iterable[int] | None = None) -> Iterator[T]:
        """The records in this order (default: as they stand). Raises ConfigError once too many are malformed."""
        patience = max(PATIENCE, self.allowed * len(self.source))
        for number in range(len(self.source)) if order is None else order:
            self.num_read += 1
            try:
                found = self.convert(self.source.get(number))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                if isinstance(error, ConfigError):
                    raise
                self.malformed.append((self.source.label(number), str(error)))
                if len(self.malformed) > patience and not isinstance(self.source, JsonLines):
                    self.check()
                continue
            yield found

    def check(self) -> None:
        """Raises ConfigError if more than the allowed share of what was read is malformed."""
        count = len(self.malformed)
        if count <= self.allowed * self.num_read:
            return
        label, reason = self.malformed[0]
        more = f"; {count} of {self.num_read} are malformed: {_shown(self.malformed)}" if count > 1 else ""
        share = math.ceil(1000 * count / self.num_read) / 1000
        hint = f"; data.max_malformed={share:g} leaves them out" if share < 1 else ""
        raise ConfigError(f"data.path: {self.source.where} {label}: {reason}; {self.expected}{more}{hint}")

    def left_out(self) -> str:
        """What was left out, in words; empty if nothing was."""
        if not self.malformed:
            return ""
        return (
            f"{self.source.where}: {len(self.malformed)} of {self.num_read} rows are malformed and were left out: "
            f"{_shown(self.malformed)}"
        )


def _shown(malformed: Sequence[tuple[str, str]]) -> str:
    labels = [label for label, _ in malformed[:SHOWN]]
    return ", ".join(labels) + (", ..." if len(malformed) > SHOWN else "")


def source_of(config: DataConfig, columns: Sequence[str], held_out: str | None = None) -> Source:
    """The records of a data set, or of a set that ``held_out`` names. Raises ConfigError if there are none."""
    path, subset, split, revision = parts(held_out) if held_out is not None else (
        config.path, config.subset, "train", config.revision)  # fmt: skip
    if config.source is DataSource.jsonl and held_out is None:
        check_pinned(config)
    found: Source = JsonLines(path) if config.source is DataSource.jsonl else HubSplit(
        path, subset, split, revision, columns)  # fmt: skip
    if not len(found):
        raise ConfigError(f"data.path: {found.where} is empty; it holds no example")
    return found


def digest(config: DataConfig) -> str:
    """First 12 hexadecimal digits of the SHA-256 of a JSONL set's bytes; where ``held_out`` names files, of the digests
    of all of them, so that no row can move from one to the other unseen. Raises ConfigError if one cannot be read."""
    found = []
    for path in (config.path, *(parts(name)[0] for name in config.held_out)):
        try:
            with Path(path).open("rb") as file:
                found.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise ConfigError(f"data.path: {path!r} cannot be read; {error.strerror}") from None
    return (found[0] if len(found) == 1 else hashlib.sha256(" ".join(found).encode()).hexdigest())[:12]


def check_pinned(config: DataConfig) -> None:
    """Raises ConfigError if a JSONL set is no longer the one that ``revision`` pins; an empty one pins none."""
    if not config.revision or (found := digest(config)) == config.revision:
        return
    files = " with ".join((config.path, *config.held_out))
    raise ConfigError(f"data.revision: {config.revision!r} is pinned, but {files} is {found!r}; bring the old file "
                      "back, or pin the new digest, which makes it another run")  # fmt: skip


def parts(name: str) -> tuple[str, str, str, str]:
    """(path, subset, split, revision) of ``path[#subset][:split][@revision]``."""
    found = re.fullmatch(r"([^#:@]+)(?:#([^:@]+))?(?::([^@]+))?(?:@(.+))?", name)
    if found is None:
        raise ConfigError(f"data.held_out: {name!r} is not allowed; write path[#subset][:split][@revision]")
    return found[1], found[2] or "", found[3] or "test", found[4] or ""
