"""What is left behind of an attempt that an error ended."""

from __future__ import annotations

import contextlib
import traceback

from experiments.claim import Busy, RunWriter
from experiments.config import ConfigError
from experiments.recorder import Interrupted
from experiments.store import StoreError, is_disk_full


def recorded(error: BaseException, writer: RunWriter) -> BaseException:
    """Write failure.json, and return the error to raise: for a full disk one that says what to do.

    A request to stop, bad input and a run that another process writes are no failures and leave nothing.
    """
    if isinstance(error, Interrupted | ConfigError | Busy):
        return error
    detail = "".join(traceback.format_exception(error))
    with contextlib.suppress(StoreError):  # where the disk is full even this cannot be written
        writer.fail(f"{type(error).__name__}: {error}", detail)
    if not is_disk_full(error):
        return error
    full = StoreError(
        f"store: no space left in {writer.path.parent} while {writer.path.name} was written; "
        "free some space and run the same command again"
    )
    full.__cause__ = error
    return full
