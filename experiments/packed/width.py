"""How many arms to train at once: as many as pay, measured before the first step.

A step of K arms with b tokens each takes tau + K w b: tau is what a step costs whatever it computes on. Timed at
K = 1 and K = 2 this gives the gain S(K) = K (tau + w b) / (tau + K w b) over training in turn; b_half = tau / w is
the number of tokens at which many arms are twice as fast as in turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.packed.decoder import Decoder
from experiments.packed.pack import Arm, Pack
from experiments.packed.rows import lay_out

WIDTHS = (1, 2, 4, 8, 16)
LEAST_GAIN = 1.1
"""Below this, arms are trained in turn."""
ENOUGH = 0.9
"""A width is wide enough when it gives this share of the widest one's gain; more only takes memory."""
REPEATS = 3


@dataclass(frozen=True)
class Timing:
    """tau in seconds, w in seconds per token, measured on ``num_tokens`` tokens per arm and step."""

    tau_s: float
    per_token_s: float
    num_tokens: int

    @property
    def b_half(self) -> float:
        return self.tau_s / self.per_token_s

    def gain(self, width: int) -> float:
        """Predicted S(width)."""
        work_s = self.per_token_s * self.num_tokens
        return width * (self.tau_s + work_s) / (self.tau_s + width * work_s)

    def width(self, num_arms: int) -> int:
        """The narrowest pack that gets ENOUGH of what is to be had; 1 if packing does not pay."""
        allowed = [k for k in WIDTHS if k <= max(1, num_arms)]
        best = max(self.gain(k) for k in allowed)
        if best < LEAST_GAIN:
            return 1
        return next(k for k in allowed if self.gain(k) >= ENOUGH * best)


def measure(decoder: Decoder, arm: Arm, examples: Sequence[dict], merged: bool) -> Timing:
    """Time steps of one and of two copies of ``arm`` on these examples. Takes a few steps' time."""
    step_s = [min(_steps_s(decoder, arm, examples, merged, width)) for width in (1, 2)]
    tau_s = max(2 * step_s[0] - step_s[1], 0.0)
    num_tokens = sum(len(row["input_ids"]) for row in examples)
    return Timing(tau_s, max(step_s[0] - tau_s, 1e-9) / num_tokens, num_tokens)


def _steps_s(decoder: Decoder, arm: Arm, examples: Sequence[dict], merged: bool, width: int) -> list[float]:
    pack = Pack(decoder, [replace(arm, name=str(k)) for k in range(width)], merged)
    found = []
    for _ in range(REPEATS + 1):  # the first is for warming up
        begun = time.thread_time()
        rows = lay_out([examples] * width)
        pack.accumulate(rows, rows.num_tokens)
        pack.step()
        found.append(time.thread_time() - begun)
    return found[1:]
