"""The command on anybody's table: output, and one clear line for bad input."""

import json
from pathlib import Path

import pytest

from analysis.optimum_cli import main

FIXTURES = Path(__file__).parent / "fixtures"
GOOD = "lr,rank,nll\n1e-4,1,0.9\n3e-4,1,0.7\n1e-3,1,0.8\n1e-5,0,0.9\n3e-5,0,0.7\n1e-4,0,0.8\n"


@pytest.fixture
def write(tmp_path):
    def _write(text: str) -> str:
        (tmp_path / "table.csv").write_text(text)
        return str(tmp_path / "table.csv")

    return _write


def run(capsys, *arguments: str) -> tuple[int, list[dict], str]:
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    return code, [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_cli_prints_one_json_object_per_group(capsys, write):
    code, records, _ = run(capsys, write(GOOD), "--value", "nll", "--by", "rank", "--reference", "rank=0")
    assert code == 0
    assert [r["rank"] for r in records] == [0, 1]
    wanted = {"lr_star", "interval", "plateau", "best", "n", "verdict", "why", "ratio", "ratio_interval"}
    assert all(wanted <= set(r) for r in records)
    assert records[1]["ratio"] == pytest.approx(10, rel=0.02)
    assert records[0]["ratio"] is None


def test_cli_prints_one_line_per_group(capsys, write):
    assert main([write(GOOD), "--value", "nll", "--by", "rank"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(word in lines[0] for word in ("rank=0", "lr_star=", "verdict=decided"))


def test_cli_without_by_takes_the_whole_table(capsys, write):
    _, records, _ = run(capsys, write("rate,nll\n1e-4,3\n2e-4,1\n4e-4,2\n"), "--value", "nll", "--lr", "rate")
    assert len(records) == 1
    assert records[0]["n"] == 3


@pytest.mark.parametrize("word", ["", "nan", "inf", "diverged", "NaN", "-inf"])
def test_cli_takes_missing_values_for_diverged_runs(capsys, write, word):
    path = write(f"lr,nll\n1e-4,0.9\n2e-4,0.8\n4e-4,0.7\n8e-4,{word}\n")
    _, (record,), _ = run(capsys, path, "--value", "nll")
    assert record["lr_star"] is None
    assert "0.0008 diverged" in record["why"]
    assert record["interval"][1] == 8e-4


def test_cli_null_instead_of_a_number_when_undecided(capsys):
    table = str(FIXTURES / "tinker_sft_lora.csv")
    code, records, _ = run(capsys, table, "--value", "test_nll", "--by", "model,rank")
    assert code == 0  # one group has a single LR: undecided, not an error
    undecided = [r for r in records if r["model"].endswith("3.2-3B")]
    assert len(undecided) == 4
    assert all(r["lr_star"] is None and r["verdict"] == "undecided" for r in undecided)
    assert any("not a sweep" in r["why"] for r in records)


@pytest.mark.parametrize(
    ("text", "arguments", "parts"),
    [
        (GOOD, ["--value", "nlll"], ["'nlll'", "did you mean 'nll'?"]),
        (GOOD, ["--value", "nll", "--by", "rnk"], ["'rnk'", "did you mean 'rank'?"]),
        (GOOD, ["--value", "nll", "--seed", "zzzz"], ["'zzzz'", "columns there: lr, rank, nll"]),
        (GOOD.replace("3e-4", "-3e-4"), ["--value", "nll"], ["lr", "'-3e-4'", "line 3", "above 0"]),
        (GOOD.replace("3e-4", "0"), ["--value", "nll"], ["lr", "'0'", "line 3", "above 0"]),
        (GOOD.replace("0.8", "oops"), ["--value", "nll"], ["nll", "'oops'", "line 4", "not a number"]),
        (GOOD, ["--value", "nll", "--by", "rank", "--reference", "rank=7"], ["rank=7", "values there", "0, 1"]),
        (GOOD, ["--value", "nll", "--by", "rank", "--reference", "model=7"], ["'model=7'", "rank"]),
        ("lr,nll\n1e-4,1\n2e-4,2\n", ["--value", "nll"], ["lr", "2 different", "at least 3"]),
        ("lr,nll\n", ["--value", "nll"], ["no rows"]),
        ("", ["--value", "nll"], ["columns there: none"]),
        ("\x00\xff", ["--value", "nll"], ["error"]),
    ],
)
def test_cli_bad_input_is_one_line_and_exit_code_2(capsys, write, text, arguments, parts):
    assert main([write(text), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert all(part in captured.err for part in parts)


@pytest.mark.parametrize("options", [["missing.csv", "--value", "x"], [".", "--value", "x"]])
def test_cli_unreadable_file_is_one_line_and_exit_code_2(capsys, options):
    assert main(options) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("options", [["x.csv"], ["x.csv", "--value", "a", "--noise", "-1"], ["x.csv", "--what"]])
def test_cli_bad_option_is_one_line_and_exit_code_2(capsys, options):
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
