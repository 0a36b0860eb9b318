"""The Slurm commands, each bounded in time and at most one a second; nothing else here starts them.

Plain commands and not a library that pickles functions: a task is a line of text in a run list, which survives
a requeue, an upgrade of Python and a changed checkout, and there is nothing beside the run directory to go stale.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence

from slurm.states import Job, parse_sacct, parse_squeue

GAP_S = 1.0
"""Between the starts of two calls: a shared controller serves everybody."""
QUEUE_FORMAT = "%F|%K|%T|%r|%j"
DOWN = ("Unable to contact slurm controller", "Connection refused", "timed out", "Connection timed out",
        "Zero Bytes were transmitted", "Unable to establish controller", "backup controller",
        "Transport endpoint is not connected", "Connection reset", "Broken pipe")  # fmt: skip
NOT_SET_UP = ("Could not establish a configuration source", "Unable to read", "fatal: Unable to process config")


class SlurmError(Exception):
    """Slurm refused; the message is its reason, in one line."""


class SlurmDown(SlurmError):
    """The controller or the accounting did not answer in time. What was asked may have happened."""


class Client:
    """Calls as the user who runs this process. ``call_s`` bounds each of them."""

    def __init__(self, call_s: float = 30.0) -> None:
        self.call_s = call_s
        self.num_calls = 0
        self._last = -GAP_S

    def is_configured(self) -> bool:
        """Whether this machine belongs to a cluster (its controller may be down all the same)."""
        try:
            self.config()
        except SlurmDown:
            return True
        except SlurmError:
            return False
        return True

    def config(self) -> dict[str, str]:
        """The controller's settings."""
        lines = (line.partition("=") for line in self._run(["scontrol", "show", "config"]).splitlines())
        return {key.strip(): value.strip() for key, separator, value in lines if separator}

    def submit(self, options: Sequence[str], script: str) -> int:
        """Queue a batch script; returns the job id. After SlurmDown the job may be queued nevertheless."""
        return int(self._run(["sbatch", "--parsable", *options], script).strip().partition(";")[0])

    def test(self, options: Sequence[str], script: str) -> None:
        """Ask whether Slurm would take this job. Raises SlurmError with its reason if not."""
        self._run(["sbatch", "--test-only", *options], script)

    def queue(self) -> dict[str, Job]:
        """What the controller knows of this user's array jobs, by name, ended ones included.

        A question cannot be refused: whatever goes wrong, in words of any version, is SlurmDown.
        """
        arguments = ["-h", "-r", "-t", "all", "-u", str(os.getuid()), "-o", QUEUE_FORMAT]
        try:
            return parse_squeue(self._run(["squeue", *arguments]))
        except SlurmError as error:
            raise SlurmDown(str(error)) from None

    def account(self, job_ids: Iterable[int]) -> dict[str, Job]:
        """What the accounting remembers of these array jobs, the newest record of each element."""
        ids = ",".join(str(i) for i in sorted(set(job_ids)))
        return parse_sacct(self._run(["sacct", "-n", "-X", "-P", "-j", ids, "-o", "JobID,State,ExitCode,JobName%200"]))

    def cancel(self, elements: Sequence[str]) -> None:
        """Cancel jobs (``44``) or elements (``44_3``); those that have ended are no error."""
        try:
            self._run(["scancel", "--quiet", *elements])
        except SlurmDown:
            raise
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                raise

    def requeue(self, element: str) -> None:
        """Put a running element back into the queue."""
        self._run(["scontrol", "requeue", element])

    def _run(self, command: list[str], text: str = "") -> str:
        if shutil.which(command[0]) is None:
            raise SlurmError(f"{command[0]}: not found on this machine")
        wait_s = self._last + GAP_S - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        self._last = time.monotonic()
        self.num_calls += 1
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=self.call_s, check=False)
        except subprocess.TimeoutExpired:
            raise SlurmDown(f"{command[0]}: no answer within {self.call_s:g} s") from None
        if done.returncode == 0:
            return done.stdout
        reason = _reason(done.stderr) or f"exit code {done.returncode}"
        if any(words in done.stderr for words in DOWN) and not any(words in done.stderr for words in NOT_SET_UP):
            raise SlurmDown(f"{command[0]}: {reason}")
        raise SlurmError(f"{command[0]}: {reason}")


def _reason(stderr: str) -> str:
    """The last telling line of what a command said, without its own name in front."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1].partition("error: ")[2] or lines[-1] if lines else ""
