"""One GPU for each local worker, on a machine whose driver is played by a script."""

from __future__ import annotations

import os
import queue
import time
from pathlib import Path

import pytest
import torch

from experiments.config import LaunchConfig
from experiments.run import prepare_process
from sweeps import pool
from sweeps.devices import device_gib, devices, pinned
from sweeps.search.quote import room_gib


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs an ``nvidia-smi`` that prints a text and ends with a code."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(text: str, code: int = 0) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {code}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_devices_are_the_drivers(driver) -> None:
    driver("0\\n1\\n2\\n")
    assert devices() == ("0", "1", "2")
    assert [pinned(k, devices())["CUDA_VISIBLE_DEVICES"] for k in range(4)] == ["0", "1", "2", "0"]


def test_runs_of_several_processes_take_as_many_devices(driver) -> None:
    driver("0\\n1\\n2\\n3\\n4\\n")
    assert [pinned(k, devices(), 2)["CUDA_VISIBLE_DEVICES"] for k in range(3)] == ["0,1", "2,3", "0,1"]
    assert pinned(1, devices(), 8)["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4"  # too few: the run says so
    assert pool.num_workers(LaunchConfig(processes=2), 100) == 2 and pool.num_workers(LaunchConfig(processes=8), 9) == 1


def test_broken_driver_is_no_device(driver) -> None:
    driver("NVIDIA-SMI has failed", code=9)
    assert devices() == () and pinned(0, devices()) == {}


def test_memory_is_that_of_the_smallest_device(driver) -> None:
    driver("81559\\n40960\\n")
    assert device_gib() == 40.0 and room_gib(LaunchConfig(processes=2), 100) == 80.0


@pytest.mark.parametrize("text", ["[N/A]\\n", "81559\\n[Not Supported]\\n", "", "'; exec sleep 60; printf '"])
def test_memory_that_the_driver_does_not_tell_is_unknown(driver, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sweeps.devices.PATIENCE_S", 0.3)
    driver(text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert devices() and device_gib() is None and room_gib(LaunchConfig(), 100) is None


def test_memory_without_a_driver_or_meminfo_is_unknown(monkeypatch: pytest.MonkeyPatch, forbid, tmp_path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert room_gib(LaunchConfig(), 100) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (room_gib(LaunchConfig(), 100) or 0) > 0
    forbid(Path("/proc/meminfo"))
    assert room_gib(LaunchConfig(), 100) is None


@pytest.mark.parametrize(("given", "found"), [("2,3", ("2", "3")), ("", ()), ("-1", ()), ("GPU-8a1b", ("GPU-8a1b",))])
def test_what_is_visible_already_bounds_it(driver, monkeypatch: pytest.MonkeyPatch, given: str, found: tuple) -> None:
    driver("0\\n1\\n2\\n3\\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert devices() == found


def test_as_many_workers_as_devices(driver) -> None:
    driver("0\\n1\\n2\\n3\\n4\\n")
    assert pool.num_workers(LaunchConfig(), 100) == 5
    assert pool.num_workers(LaunchConfig(), 3) == 3 and pool.num_workers(LaunchConfig(workers=2), 100) == 2


def test_worker_is_started_with_its_device_alone(driver, tmp_path: Path) -> None:
    driver("0\\n1\\n")
    started = pool._Pool([], LaunchConfig(root=str(tmp_path)), lambda event: None)
    assert isinstance(started.inbox, queue.SimpleQueue)
    worker = started._start(1)
    try:
        environment: list[bytes] = []
        until = time.monotonic() + 10
        while len(environment) < 2 and time.monotonic() < until:  # it is empty at the moment of the exec
            environment = Path(f"/proc/{worker.process.pid}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=1" in environment and b"OMP_NUM_THREADS=1" in environment
    finally:
        worker.process.kill()
        worker.process.wait()


@pytest.mark.parametrize(
    ("num", "given", "processes", "left"),
    [
        (4, None, 1, "0"),
        (2, "2,3", 1, "2"),
        (2, "GPU-8a1b,GPU-9", 1, "GPU-8a1b"),
        (1, "3", 1, "3"),
        (0, "", 1, ""),
        (0, None, 1, None),
        (4, None, 2, "0,1"),
        (3, "5,6,7", 2, "5,6"),
        (2, "5,6", 2, "5,6"),
        (2, None, 2, None),
    ],
)
def test_process_that_trains_sees_as_many_devices_as_it_has_processes(
    monkeypatch: pytest.MonkeyPatch, num: int, given: str | None, processes: int, left: str | None
) -> None:
    """Over several the Trainer would split, and so enlarge, each batch; one that starts processes has one for each."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given or "")
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
    prepare_process(processes)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == left
