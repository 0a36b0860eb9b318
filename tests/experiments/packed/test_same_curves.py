"""Gate 3: packed curves stay as close to single ones as a single run stays to itself with its batch rows reversed."""

from __future__ import annotations

import pytest
import torch
from single import Base, batches, packed_losses, single_losses

from experiments.packed.pack import Pack

STEPS = 30
FLOOR = 1e-6
CHAOTIC = 1e-3
"""In nats. An arm that a rounding error moves this far has no curve to be equal to; gates 1 and 2 judge it."""


def runs(base: Base, form: str) -> list:
    if form == "full":
        return [base.run(0, lr=lr) for lr in (1e-4, 1e-3, 3e-1)]
    return [base.run(1, lr=1e-4), base.run(4, "mlp", lr=1e-3), base.run(8, "attn", lr=3e-3, unembed=True),
            base.run(16, lr=1e-3, weight_decay=0.1, max_grad_norm=0.5), base.run(16, lr=3e-1)]  # fmt: skip


@pytest.mark.parametrize("form", ["factored", "merged", "full"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_curves_are_within_the_single_runs_own_envelope(bases: dict[str, Base], name: str, form: str) -> None:
    base, data = bases[name], batches(STEPS)
    pack = Pack(base.decoder, [base.arm(config) for config in runs(base, form)], form == "merged")
    members = list(pack.members)
    found = packed_losses(pack, [[batch] * len(members) for batch in data])
    envelopes = []
    for k, arm in enumerate(members):
        single = torch.tensor(single_losses(base, arm, data))
        reversed_ = torch.tensor(single_losses(base, arm, [batch[::-1] for batch in data]))
        envelope = (single - reversed_).abs().cummax(0).values
        envelopes.append(float(envelope[-1]))
        if envelopes[-1] <= CHAOTIC:
            assert ((found[:, k] - single).abs() <= 5 * envelope + FLOOR).all(), arm.name
            assert single[-1] != single[0]
    assert [value > CHAOTIC for value in envelopes] == [arm.config.optim.lr == 3e-1 for arm in members]
