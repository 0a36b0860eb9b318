"""What a GPU makes of it, in at most eight minutes: ``make test-gpu``, or ``python -m experiments.bench.gpu [--tiny]``.

For a machine with one GPU and no network that has torch, transformers, PEFT and accelerate. Three parts, each in a
process of its own that is ended when its time is up: bf16 and each kernel against fp32, and packed arms against PEFT;
time, FLOP/s and memory of LoRA and full fine-tuning beside the plan; arms packed against arms alone and PEFT's. Prints
one table, whatever was reached, and writes it as Markdown and JSON. ``--tiny`` measures nothing of interest, in
seconds, on a CPU too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.bench.gpu_parts import PARTS, Row

SHARES = {"parity": 0.15, "training": 0.3, "packed": 0.55}
"""Of the time; what a part leaves goes to the next ones."""
LIMIT_S = 450.0
GRACE_S = 8.0
"""A step may be under way when the time is up; then the process is ended."""
COLUMNS = {"part": "part", "setting": "setting", "step_ms": "ms a step", "tflops": "TFLOP/s", "peak_gib": "peak GiB",
           "planned_gib": "planned GiB"}  # fmt: skip


def run_part(part: str, options: argparse.Namespace, seconds: float) -> list[Row]:
    """Rows of one part, also for what it did not come to."""
    words = [part, "--device", options.device, "--seconds", str(seconds), *(["--tiny"] if options.tiny else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.bench.gpu_parts", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    begun, told, said = time.monotonic(), list[str](), list[str]()
    streams = ((process.stdout, told.append), (process.stderr, said.append))
    readers = [threading.Thread(target=_read, args=pair, daemon=True) for pair in streams]
    for reader in readers:
        reader.start()
    killed = False
    try:
        process.wait(seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        killed = True
        process.kill()
        process.wait()
    in_time = time.monotonic() - begun < seconds
    for reader in readers:
        reader.join(GRACE_S)
    failed, why = not killed and (process.returncode != 0 or in_time), "out of time"
    if failed:
        last = next((line.strip() for line in reversed(said) if line.strip()), "no word")
        why = f"its process ended with code {process.returncode}: {last}"
    found = list(_parsed(told))
    names: list[str] = next((value for value in found if isinstance(value, list)), [part])
    rows = [value for value in found if isinstance(value, dict) and "setting" in value]
    missing = [name for name in names if name not in {row["setting"] for row in rows}]
    word = "failed" if failed else "skipped"
    return rows + [{"part": part, "setting": name, word: why} for name in missing]


def _read(stream: Any, take: Any) -> None:
    for line in stream:
        take(line)


def _parsed(lines: Sequence[str]) -> Iterator[Any]:
    """What lines of JSON say; a library may have printed others between them."""
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def table(rows: Sequence[Row], device: str) -> str:
    """The rows in Markdown."""
    lines = [f"{device}; torch {torch.__version__}", ""]
    lines.append("| " + " | ".join([*COLUMNS.values(), "finding"]) + " |")
    lines.append("|" + "---|" * (len(COLUMNS) + 1))
    for row in rows:
        cells = [_shown(row.get(name)) for name in COLUMNS]
        finding = row.get("finding", "")
        if "good" in row:
            finding += ": good" if row["good"] else ": TOO MUCH"
        for word in ("skipped", "failed"):
            finding = f"{word}: {row[word]}" if word in row else finding
        lines.append("| " + " | ".join([*cells, finding.replace("|", "/")]) + " |")
    counted = {word: sum(word in row for row in rows) for word in ("skipped", "failed")}
    measured = len(rows) - sum(counted.values())
    return "\n".join([*lines, "", f"{measured} measured, {counted['skipped']} skipped, {counted['failed']} failed", ""])


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value or "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if losses differ too much or something failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="directory of gpu.md and gpu.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that take seconds on a CPU")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="in all, about")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: no GPU is in sight; --tiny --device cpu tries the script without one", file=sys.stderr)
        return 2
    if options.device == "cpu" and not options.tiny:
        print("error: --device: 'cpu' is not allowed without --tiny; it would take hours", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU"
    begun, rows, left = time.monotonic(), [], 1.0
    for part in PARTS:
        remaining = max(0.0, options.seconds - (time.monotonic() - begun))
        found = run_part(part, options, remaining * SHARES[part] / left)
        left -= SHARES[part]
        rows += found
        print(f"{part}: {len(found)} settings, {time.monotonic() - begun:.0f} s so far", file=sys.stderr)
    text = table(rows, device)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.md").write_text(text)
    content = {"device": device, "torch": torch.__version__, "seconds": time.monotonic() - begun, "rows": rows}
    (options.out / "gpu.json").write_text(json.dumps(content, indent=1) + "\n")
    return int(any("failed" in row or row.get("good") is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
