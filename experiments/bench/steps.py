"""Training steps timed: K arms packed, as wide as pays, against the same arms one by one with PEFT and torch's AdamW.

``python -m experiments.bench.steps [--part grid|mixed|ratio]``, one thread, prints JSON. A step is a forward and a
backward pass and an AdamW step of every arm on its own batch, in fp32; every token carries loss, sequences are equally
long, so that neither the engine's head on labelled tokens only nor its rows without padding helps. Both sides are timed
in turn within each round. Times are the medians of the rounds, ratios the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import adapters, models
from experiments.compose import parse
from experiments.config import RunConfig
from experiments.packed import arms, width
from experiments.packed.decoder import Decoder
from experiments.packed.pack import Arm, Pack, kind
from experiments.packed.rows import Rows, lay_out
from experiments.run import prepare_process

WIDTHS, TOKENS, ARMS = (64, 256), (32, 128, 512, 2048), (1, 4, 16)
RANK = 16
MIXED = (1, 4, 16, 64, 256)
ROUNDS = 5
SEQUENCE = 32
LEAST_S = 0.2
"""Each side of a round is repeated for at least so long."""


@dataclass(frozen=True)
class Timed:
    """One setting. ``plain_s`` and ``ours_s``: seconds for a step of all arms; ``ratio``: plain over ours."""

    width: int
    tokens: int
    num_arms: int
    ranks: str
    pack: int
    b_half: float
    plain_s: float
    ours_s: float
    ratio: float
    peak_mib: float


class Bench:
    """One base model with what both sides need of it."""

    def __init__(self, hidden: int, cache: Path) -> None:
        self.cache, self.hidden = cache, hidden
        self.model = self.config(RANK).model
        self.decoder = Decoder(models.load_model(self.model, cache))

    def config(self, rank: int) -> RunConfig:
        """``rank`` 0 is full fine-tuning."""
        method = ["method=full"] if rank == 0 else ["method=lora", f"method.rank={rank}"]
        return parse(["scale=mini", f"model=mini-w{self.hidden}", "optim.lr=1e-4", *method])[0]

    def batch(self, tokens: int) -> list[dict]:
        """``tokens`` random tokens in sequences of SEQUENCE, all but the first of each labelled."""
        ids = np.random.default_rng(0).integers(3, 100, (tokens // SEQUENCE, SEQUENCE))
        return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids]

    def plain(self, rank: int, tokens: int) -> Callable[[], None]:
        """A step of one arm with PEFT and torch."""
        config = self.config(rank)
        model = adapters.attach(models.load_model(self.model, self.cache), config.method, config.seed).train()
        adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
        ids = torch.tensor([row["input_ids"] for row in self.batch(tokens)])

        def step() -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            adamw.step()
            adamw.zero_grad()

        return step

    def arm(self, rank: int) -> Arm:
        return arms.fresh(self.decoder, self.config(rank), self.cache)[0]

    def packed(self, ranks: Sequence[int], tokens: int, at_once: int) -> Callable[[], None]:
        """A step of one arm for each of ``ranks``, so many at once and these in turn."""
        examples = self.batch(tokens)
        packs: list[tuple[Pack, Rows]] = []
        members = [replace(self.arm(rank), name=str(k)) for k, rank in enumerate(ranks)]
        of = {arm.name: kind(arm.layout, tokens) for arm in members}
        for each in sorted(set(of.values())):  # as the engine groups them
            alike = [arm for arm in members if of[arm.name] == each]
            for at in range(0, len(alike), at_once):
                group = alike[at : at + at_once]
                packs.append((Pack(self.decoder, group, each.merged), lay_out([examples] * len(group))))

        def step() -> None:
            for pack, rows in packs:
                pack.accumulate(rows, rows.num_tokens)
                pack.step()

        return step


def seconds(step: Callable[[], None]) -> float:
    """Wall seconds of one call."""
    begun, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - begun) < LEAST_S or not calls:
        step()
        calls += 1
    return spent / calls


def rounds(*sides: Callable[[], None], num: int = ROUNDS) -> list[list[float]]:
    """Seconds of each side in each round, the sides in turn. Warmed first."""
    for side in sides:
        side()
    return [[seconds(side) for side in sides] for _ in range(num)]


def medians(found: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """(first side, second side, ratio of both)."""
    first, second = zip(*found, strict=True)
    ratio = statistics.median(a / b for a, b in found)
    return statistics.median(first), statistics.median(second), ratio


def grid(caches: Path) -> list[Timed]:
    """All settings of packing alone, with the width that the engine would choose."""
    made = []
    for hidden in WIDTHS:
        bench = Bench(hidden, caches)
        for tokens in TOKENS:
            arm = bench.arm(RANK)
            timing = width.measure(bench.decoder, arm, bench.batch(tokens), kind(arm.layout, tokens).merged)
            plain = bench.plain(RANK, tokens)
            for num in ARMS:
                at_once = timing.width(num)
                each = bench.packed([RANK] * num if at_once > 1 else [RANK], tokens, at_once)
                turns = 1 if at_once > 1 else num  # one by one: one arm's step stands for each
                found = [(num * a, turns * b) for a, b in rounds(plain, each)]
                a, b, ratio = medians(found)
                made.append(_row(bench, tokens, num, str(RANK), at_once, timing.b_half, a, b, ratio))
    return made


def mixed(caches: Path) -> list[Timed]:
    """Arms of ranks 1 to 256 in one pack (``ours_s``) against arms of their mean rank (``plain_s``), packed too."""
    bench, made = Bench(256, caches), []
    uniform = [round(sum(MIXED) / len(MIXED))] * len(MIXED)
    for tokens in (128, 512):
        found = rounds(*(bench.packed(ranks, tokens, len(MIXED)) for ranks in (uniform, MIXED)))
        a, b, ratio = medians(found)
        made.append(_row(bench, tokens, len(MIXED), ",".join(map(str, MIXED)), len(MIXED), 0.0, a, b, ratio))
    return made


def lora_share(caches: Path) -> list[dict]:
    """A LoRA step's share of a full fine-tuning step at width 128, rank 8, of this engine and of PEFT, beside what the
    FLOPs say: 2/3 + 2 R / N, summed over the matrices."""
    bench, rank, made = Bench(128, caches), 8, []
    shapes = models.empty_model(bench.model, caches)
    by_flops = 2 / 3 + adapters.num_trainable(shapes, bench.config(rank).method) / models.num_matrix_parameters(shapes)
    for tokens in (512, 2048):
        packs = [bench.packed([r], tokens, 1) for r in (rank, 0)]
        plains = [bench.plain(r, tokens) for r in (rank, 0)]
        found = rounds(*packs, *plains)
        ours, peft = ([row[k : k + 2] for row in found] for k in (0, 2))
        made.append({"width": 128, "rank": rank, "tokens": tokens, "by_flops": by_flops,
                     "ours": medians(ours)[2], "peft": medians(peft)[2],
                     "ours_lora_s": medians(ours)[0], "peft_lora_s": medians(peft)[0]})  # fmt: skip
    return made


def _row(bench: Bench, tokens: int, num: int, ranks: str, pack: int, b_half: float, plain: float, ours: float,
         ratio: float) -> Timed:  # fmt: skip
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = Timed(bench.hidden, tokens, num, ranks, pack, b_half, plain, ours, ratio, peak_mib)
    print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
    return row


def main() -> int:
    """Returns the exit code."""
    parts: dict[str, Callable[[Path], list[Any]]] = {"grid": grid, "mixed": mixed, "ratio": lora_share}
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.steps", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--part", choices=parts, action="append")
    options = parser.parse_args()
    prepare_process()
    with tempfile.TemporaryDirectory() as cache:
        made = {name: parts[name](Path(cache)) for name in options.part or parts}
    plain = {name: [row if isinstance(row, dict) else asdict(row) for row in rows] for name, rows in made.items()}
    print(json.dumps(plain))
    return 0


if __name__ == "__main__":
    sys.exit(main())
