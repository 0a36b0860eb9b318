"""The claims that need no sweep, each as an exact test: C9, C21, C23, C24."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from experiments import store
from experiments.config import OptimConfig
from experiments.exact import __main__ as command
from experiments.exact import counts, first_step, flops, invariance

# ---------------------------------------------------------------- C9: the first step

OPTIM = OptimConfig(lr=1e-3)


@pytest.mark.parametrize("ideal", [False, True])
@pytest.mark.parametrize("rank", [1, 4])
def test_first_update_is_the_closed_form(rank: int, ideal: bool) -> None:
    """-lr (alpha / r) sum_i phi(s G a_i) a_i^T, and A has not moved; G from the bare layer."""
    generator = torch.Generator().manual_seed(3)
    layer = first_step.random_layer(12, 8, 10, generator)
    a = first_step.initial_a(5, rank, 12, generator)
    weight = layer.weight_OI.clone().requires_grad_()
    F.cross_entropy(layer.inputs_TI @ weight.T, layer.labels_T).backward()
    grad_b = 32.0 / rank * weight.grad @ a.mT
    step = grad_b.sign() if ideal else grad_b / (grad_b.abs() + OPTIM.eps)
    found, moved = first_step.first_update(layer, a, 32.0, OPTIM, ideal)
    torch.testing.assert_close(found, -OPTIM.lr * 32.0 / rank * step @ a, rtol=1e-9, atol=1e-15)
    assert moved == 0.0


@pytest.fixture(scope="module")
def c9() -> dict:
    return first_step.measure(num_inits=500, num_bootstrap=200)


@pytest.mark.parametrize("form", ["adam", "ideal"])
def test_mean_first_update_does_not_depend_on_the_rank(c9: dict, form: str) -> None:
    found = c9[form]
    low, high = found["mean_squared_z_null_95"]
    assert 0.8 < low < 1 < high < 1.2
    assert low <= found["mean_squared_z"] <= high
    *others, reference = found["ranks"]
    for row in others:
        error = (row["along_gradient_se"] ** 2 + reference["along_gradient_se"] ** 2) ** 0.5
        assert abs(row["along_gradient"] - reference["along_gradient"]) < 3 * error
        assert error < 0.02 * reference["along_gradient"]
    assert all(row["relative_difference_of_means"] < 1e-3 for row in c9["adam_against_ideal"])


@pytest.mark.parametrize("form", ["adam", "ideal"])
def test_variance_of_the_first_update_falls_as_one_over_the_rank(c9: dict, form: str) -> None:
    low, high = c9[form]["variance_slope_95"]
    assert low < c9[form]["variance_slope"] < high
    assert high - low < 0.02
    assert c9[form]["variance_slope"] == pytest.approx(-1, abs=0.01)


def test_statistics_see_a_mean_that_depends_on_the_rank() -> None:
    """The same numbers on updates with 2 % more mean at rank 4, and with a variance that does not fall."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    noise = {r: torch.randn(4000, 6, 5, dtype=torch.float64, generator=generator) for r in (1, 4, 16)}
    updates = {r: -gradient * (1.02 if r == 4 else 1) + 0.1 * noise[r] for r in noise}
    found = first_step.compare(updates, gradient, 200, generator)
    by_rank = {row["rank"]: row for row in found["ranks"]}
    assert by_rank[1]["mean_squared_z"] < by_rank[1]["mean_squared_z_null_95"][1]
    assert by_rank[4]["mean_squared_z"] > 10 * by_rank[4]["mean_squared_z_null_95"][1]
    assert found["variance_slope"] == pytest.approx(0, abs=0.05)


# ---------------------------------------------------------------- C21: invariance


@pytest.fixture(scope="module")
def c21() -> dict:
    return invariance.measure()


def test_invariance_is_exact_with_the_corrected_eps(c21: dict) -> None:
    first, last = c21["loss_first_and_last"]
    assert last < 0.5 * first  # the runs learn something
    assert c21["largest"]["corrected_eps"]["weights"] < 1e-12
    assert c21["largest"]["corrected_eps"]["losses"] < 1e-12


def test_one_shared_eps_is_enough_only_for_equal_factors(c21: dict) -> None:
    assert {case["p"] == case["q"] for case in c21["cases"]} == {True, False}
    for case in c21["cases"]:
        equal = case["p"] == case["q"]
        assert case["shared_eps"]["weights"] < 1e-12 if equal else case["shared_eps"]["weights"] > 1e-3


def test_eps_of_the_suite_left_alone_breaks_it_a_little(c21: dict) -> None:
    assert c21["smallest"]["suite_eps"]["weights"] > 1e-8
    assert c21["largest"]["suite_eps"]["weights"] < 1e-3


@pytest.mark.parametrize("control", ["weight_decay", "clipping"])
def test_negative_controls_break_the_invariance(c21: dict, control: str) -> None:
    assert c21["smallest"][control]["weights"] > 1e-3
    assert 0 < c21["clipped_share_of_steps"] < 1


# ---------------------------------------------------------------- C23: compute


@pytest.mark.parametrize(("width", "rank"), [(64, 1), (64, 48), (1024, 171), (4096, 256)])
def test_layer_costs_what_the_post_counts(width: int, rank: int) -> None:
    row = flops.layer_row(width, rank)
    assert row["full_madds_per_token"] == 3 * width**2
    assert row["lora_madds_per_token"] == 2 * width**2 + 6 * width * rank
    assert row["closed_form_ratio"] == pytest.approx(2 / 3 + 2 * rank / width, rel=1e-12)
    assert row["ratio"] == pytest.approx(row["closed_form_ratio"], rel=1e-12)
    assert row["full_madds_per_token_as_first_layer"] == 2 * width**2
    assert row["lora_madds_per_token_as_first_layer"] == width**2 + 5 * width * rank


def test_model_costs_the_closed_form_less_the_first_layers_input() -> None:
    found = flops.model_row("mini-w64", ranks=(16,), num_repeats=flops.MIN_REPEATS)
    full, lora = found["arms"]
    assert full["flops"] == full["flops_reaching_embedding"] == full["closed_form_flops"]
    assert lora["flops_reaching_embedding"] == lora["closed_form_flops"]
    skipped = 3 * (64 * 64 + 16 * 64)  # query, key and value: W and A each
    assert lora["closed_form_flops"] - lora["flops"] == 2 * found["num_tokens"] * skipped
    assert lora["flops_ratio_to_full"] == lora["flops"] / full["flops"]
    for arm in (full, lora):
        assert arm["other_flops"] < 1e-3 * arm["flops"]
        for clock in ("step_s", "step_cpu_s"):
            low, high = arm[f"{clock}_median_95"]
            assert 0 < low <= arm[f"{clock}_median"] <= high


def test_interval_of_the_median_is_by_order_statistics() -> None:
    assert flops.median_interval(range(1, 21)) == [6, 15]  # tabulated: ranks 6 and 15 of 20
    assert flops.median_interval([3, 1, 2, 6, 5, 4]) == [1, 6]


def test_too_few_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match="num_repeats: 5 is not allowed; at least 6"):
        flops.step_seconds([], torch.zeros(1, 2, dtype=torch.int64), OPTIM, 5)


# ---------------------------------------------------------------- C24: parameter counts


def test_counts_are_the_posts() -> None:
    """The post's table in billions, to the digits it gives, and the lab's per-rank counts by hand."""
    found = counts.measure()
    rows = {(row["placement"], row["rank"]): row for row in found["rows"]}
    in_billions = {key: row["with_unembedding"] / 1e9 for key, row in rows.items()}
    assert in_billions["mlp", 256] == pytest.approx(0.487, abs=5e-4)
    assert in_billions["attn", 256] == pytest.approx(0.252, abs=5e-4)
    assert in_billions["all", 256] == pytest.approx(0.705, abs=5e-4)
    assert in_billions["mlp", 128] == pytest.approx(0.243, abs=5e-4)
    assert rows["all", 1]["with_unembedding"] == 2_753_792
    per_rank = {"mlp": 1_769_472, "attn": 851_968, "all": 1_769_472 + 851_968}
    for (placement, rank), row in rows.items():
        assert row["without_unembedding"] == rank * per_rank[placement]
        assert row["with_unembedding"] == rank * (per_rank[placement] + 4096 + 128256)
        assert row["with_unembedding_peft"] == row["with_unembedding"]
        assert row["without_unembedding_peft"] == row["without_unembedding"]
    assert found["num_parameters"] == 8_030_261_248


# ---------------------------------------------------------------- the command


def test_command_writes_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for module in (first_step, invariance, flops, counts):
        monkeypatch.setattr(module, "measure", lambda name=module.__name__: {"from": name})
    assert command.main(["--root", str(tmp_path / "new")]) == 0
    document = store.read_json(tmp_path / "new" / "exact.json")
    assert set(document) == {"C9", "C21", "C23", "C24", "provenance"}
    assert document["C21"] == {"from": "experiments.exact.invariance"}
    found = document["provenance"]["versions"]["torch"]  # the local part (+cpu) is not in every wheel's metadata
    assert found.partition("+")[0] == torch.__version__.partition("+")[0]
    assert "C23" in capsys.readouterr().out


def test_root_that_cannot_be_written_is_one_line_and_exit_2(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("in the way")
    assert command.main(["--root", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--root DIR" in error


def test_measurements_are_plain_json(c9: dict, c21: dict) -> None:
    assert json.loads(json.dumps([c9, c21], allow_nan=False)) == [c9, c21]
