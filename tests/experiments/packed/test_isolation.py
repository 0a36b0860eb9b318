"""Gates 4, 5 and 6: an arm's numbers are bitwise its own, whatever its companions do and wherever it stands.

Companions of one data order, and of ranks that are padded alike (up to 8, or above), leave an arm's losses bitwise
as they are alone. Other ones change the shapes of its products, and with them the rounding and nothing else.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from single import Base, batches, gradient_of, packed_losses
from torch import Tensor

from experiments.config import RunConfig
from experiments.packed.adamw import AdamW
from experiments.packed.pack import Arm, Pack
from experiments.packed.rows import lay_out

STEPS = 8
FORMS = ["factored", "merged", "full"]


def runs(base: Base, form: str) -> list[RunConfig]:
    """Five arms that differ in whatever a pack may mix."""
    if form == "full":
        return [base.run(0, lr=lr, eps=eps) for lr, eps in
                ((1e-3, 1e-8), (3e-3, 1e-6), (1e-2, 1e-8), (3e-4, 1e-8), (1e-3, 1e-4))]  # fmt: skip
    return [base.run(4), base.run(4, lr=1e-3, init=1), base.run(8, "mlp", alpha=8.0),
            base.run(2, "attn", unembed=True), base.run(5, unembed=True, lr=3e-3)]  # fmt: skip


def losses(pack: Pack, steps: int = STEPS) -> dict[str, Tensor]:
    """Every arm's losses; all see the same data."""
    found = packed_losses(pack, [[batch] * len(pack.arms) for batch in batches(steps)])
    return dict(zip(pack.arms, found.unbind(1), strict=True))


def packed(base: Base, configs: list[RunConfig], form: str) -> Pack:
    return Pack(base.decoder, [base.arm(config) for config in configs], form == "merged")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_an_arm_that_is_not_finite_changes_no_other(llama: Base, form: str, bad: float) -> None:
    sound, spoilt = packed(llama, runs(llama, form), form), packed(llama, runs(llama, form), form)
    for pack in (sound, spoilt):
        losses(pack, 2)
    victim = spoilt.arms[1]
    for values in spoilt.stack.views(spoilt.stack.theta, 1):
        values.fill_(bad)
    spoilt.refresh()
    found = [losses(sound), losses(spoilt)]
    assert not found[1][victim].isfinite().all()
    for name in set(sound.arms) - {victim}:
        assert torch.equal(found[0][name], found[1][name]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_an_arm_is_the_same_in_any_company_and_alone(bases: dict[str, Base], name: str, form: str) -> None:
    base = bases[name]
    configs = runs(base, form)
    together = losses(packed(base, configs, form))
    turned = losses(packed(base, configs[::-1], form))
    first = [replace(config, optim=replace(config.optim, lr=1.0)) for config in configs[1:]]
    replaced = losses(packed(base, [configs[0], *first], form))
    for arm, values in together.items():
        assert torch.equal(turned[arm], values), arm
    assert torch.equal(*(found[packed(base, configs[:1], form).arms[0]] for found in (together, replaced)))
    for config in configs:
        ((arm, alone),) = losses(packed(base, [config], form)).items()
        assert torch.equal(alone, together[arm]), arm


@pytest.mark.parametrize("ranks", [(1, 3, 8), (12, 16, 32)])
def test_padded_ranks_change_no_bit(llama: Base, ranks: tuple[int, ...]) -> None:
    configs = [llama.run(rank) for rank in ranks]
    together = losses(packed(llama, configs, "factored"))
    for config in configs:
        ((arm, alone),) = losses(packed(llama, [config], "factored")).items()
        assert torch.equal(alone, together[arm]), arm


def test_companions_of_other_shapes_change_rounding_only(llama: Base) -> None:
    """Longer data of another order, a rank far above: the numbers stay within rounding of those alone."""
    configs = [llama.run(4, lr=1e-3), llama.run(32, lr=1e-3)]
    data = list(zip(batches(STEPS), batches(STEPS, seed=1, count=4), strict=True))
    pack = packed(llama, configs, "factored")
    assert pack.members[0].config == configs[0]
    alone = packed_losses(packed(llama, configs[:1], "factored"), [step[:1] for step in data])
    torch.testing.assert_close(packed_losses(pack, data)[:, 0], alone[:, 0], rtol=1e-6, atol=0)


def rescaled(base: Base, rank: int, p: float, q: float) -> Arm:
    """The arm whose A is p times larger and whose B shall grow q times faster."""
    arm = base.arm(base.run(rank, alpha=32.0 / (p * q)))
    for slot in arm.layout.slots:
        slot.of(arm.theta[None]).mul_(p if slot.name.endswith("lora_A") else q)
    return arm


def of_factor(whole: AdamW, factor: int, by: float) -> AdamW:
    """The part of an arm's optimizer that has its As (0) or Bs (1), in units ``by`` times smaller."""
    own = (values[factor::2] for values in (whole.theta, whole.grad, whole.m, whole.v))
    scaled = whole.settings._replace(lr=whole.settings.lr * by, eps=whole.settings.eps / by)
    return AdamW(scaled, *own, num_steps=whole.num_steps)


@pytest.mark.parametrize("form", ["factored", "merged"])
@pytest.mark.parametrize("rank", [4, 16])
def test_power_of_two_rescalings_are_bitwise_one_arm(llama: Base, form: str, rank: int) -> None:
    """Four hyperparameters, two degrees of freedom (post): the others are the same arm in other units."""
    units = [(1, 1), (2, 1), (1, 0.5), (4, 8), (0.25, 1)]
    drawn = {arm.name: (arm, by) for arm, by in ((rescaled(llama, rank, *by), by) for by in units)}
    assert len(drawn) == len(units)
    pack = Pack(llama.decoder, [arm for arm, _ in drawn.values()], form == "merged")
    pack.optimizers = [of_factor(whole, factor, by) for whole, name in zip(pack.optimizers, pack.arms, strict=True)
                       for factor, by in enumerate(drawn[name][1])]  # fmt: skip
    found = losses(pack, 40)
    first, *others = found.values()
    assert len(found) == 5 and first[-1] != first[0]
    assert all(torch.equal(first, other) for other in others)


def test_padding_stays_exactly_zero(llama: Base) -> None:
    """Padded ranks and matrices that an arm does not adapt, in values and moments."""
    pack = packed(llama, [llama.run(2, "attn"), llama.run(5, "mlp", weight_decay=0.1), llama.run(16)], "factored")
    stack = pack.stack
    for batch in batches(12):
        rows = lay_out([batch] * 3)
        pack.accumulate(rows, rows.num_tokens)
        pack.step()
    used = {name: torch.zeros_like(tensor) for name, tensor in stack.theta.items()}
    for k in range(3):
        for view in stack.views(used, k):
            view.fill_(1.0)
    for name, mask in used.items():
        assert bool((mask == 0).any()), "nothing is padded here"
        for values in (stack.theta[name], stack.m[name], stack.v[name]):
            assert values[mask == 1].any() and not values[mask == 0].any()


def test_padding_rows_reach_neither_loss_nor_gradient(llama: Base) -> None:
    """Beside an arm with longer data most of the short one's rows are padding: other tokens there change nothing."""
    short, long = batches(1)[0][:2], batches(1, seed=3)[0][:2]
    found = []
    for token in (0, 77):
        pack = packed(llama, [llama.run(4), llama.run(4, init=1)], "factored")
        rows = lay_out([short, [{key: value * 2 for key, value in row.items()} for row in long]])
        rows.ids.view(-1)[rows.padding] = token
        loss = pack.accumulate(rows, rows.num_tokens)
        assert len(rows.padding) > 20
        found.append((loss, *(gradient_of(pack, name) for name in pack.arms)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
