"""``make report``: what the page says is what the results say, and any browser, screen or printer can show it."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from analysis.page import page as whole_page
from analysis.page import render
from analysis.report import __main__ as command
from analysis.report.fidelity import compare
from analysis.report.model import Report
from analysis.results import Results, from_reference
from analysis.verdict import REFERENCE_DIR
from experiments import manifests, store

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER = REFERENCE_DIR / "mini"


@pytest.fixture(scope="module")
def results() -> Results:
    return from_reference(FOLDER)


@pytest.fixture(scope="module")
def report() -> Report:
    return command.collect("mini", None)


@pytest.fixture(scope="module")
def file(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(command.html(report))
    return path


# ---------------------------------------------------------------- what it says


def test_report_has_every_committed_verdict_and_study(report: Report, results: Results) -> None:
    recorded = json.loads((FOLDER / "verdict.json").read_text())["claims"]
    assert [(c["claim"], c["verdict"]) for c in report.claims] == [(c["claim"], c["verdict"]) for c in recorded]
    assert {study.name for study in report.studies} == set(results.studies)
    assert sum(count for _, count in report.counts) == len(recorded)


def test_report_has_every_committed_figure_with_n_interval_and_scale(report: Report) -> None:
    committed = {f"figure-{path.stem}" for path in (FOLDER / "figures").glob("*.png")}
    figures = [figure for study in report.studies for figure in study.figures]
    assert {figure.id for figure in figures} == committed
    for figure in figures:
        assert re.search(r"\bn = \d", figure.note) and "mini scale" in figure.what
        assert re.search("interval|lowest (and|to) highest seed|SD|one mark per seed", figure.note)
        assert re.search("(against|along) .*Shown: .+; .+", figure.alt)


def test_report_figure_downloads_hold_the_rows_of_the_figure(report: Report, results: Results) -> None:
    for study in report.studies:
        expected = results.study(study.name)
        assert expected is not None
        for figure in study.figures:
            tables = {item.file.rpartition("-")[2]: (table_of(item.href), item.text) for item in figure.downloads}
            assert all(f"{len(table):,} row" in text for table, text in tables.values())
            runs = tables["runs.csv"][0]
            assert runs["run_id"].tolist() == expected.points["run_id"].tolist()
            assert runs["value"].sum() == pytest.approx(expected.runs["value"].sum())
    rank = next(figure for study in report.studies for figure in study.figures if figure.id == "figure-rank-rank")
    curves = table_of(rank.downloads[1].href)
    found = results.study("rank")
    assert found is not None
    held_out = found.curves["metric.test/nll_nats"].dropna()
    assert len(curves) == len(held_out) and curves["test/nll_nats"].sum() == pytest.approx(held_out.sum())


def table_of(href: str) -> pd.DataFrame:
    kind, _, content = href.partition(";base64,")
    assert kind == "data:text/csv"
    return pd.read_csv(io.BytesIO(base64.b64decode(content)))


def test_report_tells_how_runs_ended_and_what_they_took(report: Report, results: Results) -> None:
    for study in report.studies:
        expected = results.study(study.name)
        assert expected is not None and study.runs is not None
        diverged = int((expected.runs["outcome"] == "diverged").sum())
        ends = {"done": len(expected.runs) - diverged, "diverged": diverged, "failed": 0}
        assert dict(study.tally) == ends and len(study.runs.rows) == len(expected.points)
    facts = dict(report.cost)
    assert facts["finished runs"] == f"{len(results.outcomes):,}"
    assert facts["steps"] == f"{results.outcomes['step'].sum():,}"
    assert facts["completion tokens trained on"] == f"{results.curves['metric.train/num_tokens'].sum():,.0f}"
    assert report.flops is not None and dict(report.provenance)["runs"] == "906"


def word(points: pd.DataFrame, name: str) -> str:
    return next(kept.word for kept in compare(points) if kept.setting.name == name)


@pytest.mark.parametrize(
    ("setting", "column", "kept", "broken"),
    [
        ("alpha", "config.method.alpha", 32.0, 16.0),
        ("base models", "config.model.name", "llama-3.1-8b", "mini-w64"),
        ("supervised data", "config.data.name", "tulu3", "symbols"),
        ("passes over the data", "config.optim.steps", 1, 10**6),
        ("unembedding", "config.method.unembed", True, False),
        ("rank of experts", "config.method.expert_rank", "active", "total"),
        ("RL objective", "config.rl.scale_rewards", False, True),
        ("completions per problem", "config.rl.group_size", 32, 8),
    ],
)
def test_fidelity_is_read_off_the_configurations(
    results: Results, setting: str, column: str, kept: object, broken: object
) -> None:
    points = results.points
    if column == "config.rl.group_size":
        points = points[points[column] > 0]
    assert word(points.assign(**{column: kept}), setting) == "matches"  # type: ignore[arg-type]
    assert word(points.assign(**{column: broken}), setting) == "departs"  # type: ignore[arg-type]
    first = pd.Series([kept, broken] * len(points), dtype=object).iloc[: len(points)].set_axis(points.index)
    assert word(points.assign(**{column: first.infer_objects()}), setting) == "in part"


def test_fidelity_of_no_runs_claims_nothing(results: Results) -> None:
    assert {kept.word for kept in compare(results.points.iloc[:0])} == {"no such run"}


# ---------------------------------------------------------------- of one's own store


def with_provenance(root: Path) -> Path:
    """The store with what ``report`` needs beyond ``load``: each run's origin, and the settings of claims on LR*."""
    manifest = manifests.read_study(root, "lr", "mini")
    settings = {**manifest["settings"], "ratio_range": [5, 20], "rank_factor": 2}
    manifests.write_study(root, "lr", "mini", {**manifest, "settings": settings})
    for summary in root.glob("*/summary.json"):
        store.write_json(summary.parent / "provenance.json", {"commit": "0" * 40, "diff": "", "cpu": "any <b>CPU</b>"})
    return root


def test_report_of_a_store_names_what_failed_or_is_missing(
    make_store: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root = with_provenance(make_store(num_seeds=2))
    failed, partial = root / "toy-r0-lr0-s0", root / "toy-r0-lr1-s0"
    for run in (failed, partial):
        (run / "summary.json").unlink()
    store.write_json(failed / "failure.json", {"cause": "ValueError: <script>alert(1)</script>"})
    assert command.main(["--root", str(root)]) == 0
    assert str(root / "report.html") in capsys.readouterr().out
    text = (root / "report.html").read_text()
    assert "34 done, 6 diverged, 1 failed, 1 partial" in " ".join(text.split())
    assert "ValueError: &lt;script&gt;alert(1)&lt;/script&gt;" in text and "any &lt;b&gt;CPU" in text
    assert "<script" not in text and "not run" in text
    runs = table_of(re.findall(r'href="(data:text/csv[^"]*)"', text)[-1])
    assert len(runs) == 42 and runs.loc[runs["value"].isna(), "run_id"].isin({failed.name, partial.name}).sum() == 2


def test_report_of_a_study_without_a_finished_run_says_so(make_store: Callable[..., Path]) -> None:
    root = with_provenance(make_store(num_seeds=1))
    for summary in root.glob("*/summary.json"):
        summary.unlink()
    (study,) = command.collect("mini", root).studies
    assert study.note == "none of its 21 runs is finished yet" and not study.figures


@pytest.mark.parametrize("arguments", [["--root", "nothing"], ["--scale", "nope"], ["--root", "empty"]])
def test_report_of_nothing_is_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_page_escapes_what_render_did_not_make() -> None:
    shell = whole_page("<b>", render("live_notes.html", view={"notes": ["<i>"]}), lead="<u>")
    assert "&lt;b&gt;" in shell and "&lt;i&gt;" in shell and "&lt;u&gt;" in shell
    assert "&lt;p&gt;" in whole_page("t", "<p>")  # type: ignore[arg-type]


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def views(browser: Browser, file: Path) -> Iterator[dict[tuple[str, str], tuple[Page, list[str]]]]:
    import pages

    kinds = [("phone", "light"), ("desk", "dark")]
    yield {kind: pages.opened(browser, f"file://{file}", *kind) for kind in kinds}


@pytest.mark.browser
@pytest.mark.parametrize("size", ["phone", "desk"])
def test_report_is_sound_in_a_browser(
    views: dict[tuple[str, str], tuple[Page, list[str]]], file: Path, size: str
) -> None:
    import pages

    page, wrong = next(view for (of, _), view in views.items() if of == size)
    assert pages.layout(page) == []
    assert pages.structure(page) == []
    assert pages.contrast(page) == []
    assert page.locator("figure img").count() == len(list((FOLDER / "figures").glob("*.png")))
    assert pages.focus(page) == []
    assert wrong == []


@pytest.mark.browser
def test_report_shows_the_verdicts_of_one_kind_without_a_script(
    views: dict[tuple[str, str], tuple[Page, list[str]]], file: Path, report: Report
) -> None:
    page, _ = views["desk", "dark"]
    rows = page.locator("#verdicts tbody tr:visible")
    for kind, count in report.counts:
        page.locator(f"#only-{kind}").check()
        assert rows.count() == count and set(rows.locator(".chip").all_text_contents()) == {kind}
    page.goto(f"file://{file}#claim-C3")  # a link to a row that the choice hides shows it
    assert page.locator("#claim-C3").is_visible()
    page.locator("#only-all").check()
    assert rows.count() == len(report.claims) and "<script" not in file.read_text()


@pytest.mark.browser
def test_report_is_whole_on_paper(views: dict[tuple[str, str], tuple[Page, list[str]]], report: Report) -> None:
    import pages

    page, _ = views["desk", "dark"]
    page.locator("#only-undecided").check()
    page.emulate_media(media="print", color_scheme="light")
    page.set_viewport_size({"width": 700, "height": 1000})  # A4 less its margins
    hidden = """() => [...document.querySelectorAll("main h2, main h3, main p, main tr, main img, main dd, figcaption")]
      .filter(n => !n.closest(".links") && !n.checkVisibility({contentVisibilityAuto: true}))
      .map(n => n.outerHTML.slice(0, 90))"""
    assert page.evaluate(hidden) == []
    assert not page.locator("nav").is_visible() and not page.locator(".tally").is_visible()
    address = """getComputedStyle(document.querySelector("a[href^='https']"), "::after").content"""
    assert "https://" in page.evaluate(address)
    assert page.evaluate("getComputedStyle(document.querySelector('#study-lr')).breakBefore") == "page"
    assert pages.contrast(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.emulate_media(media="screen", color_scheme="dark")
    page.set_viewport_size(pages.SIZES["desk"])  # type: ignore[arg-type]


@pytest.mark.browser
def test_report_gives_its_data_away(
    views: dict[tuple[str, str], tuple[Page, list[str]]], report: Report, tmp_path: Path
) -> None:
    page, _ = views["desk", "dark"]
    with page.expect_download() as download:
        page.locator("#figure-lr-lr a.download").first.click()
    download.value.save_as(tmp_path / "given.csv")
    given = pd.read_csv(tmp_path / "given.csv")
    assert download.value.suggested_filename == "lr-lr-runs.csv" and len(given) == 105


@pytest.mark.browser
def test_the_browser_checks_can_fail(browser: Browser, file: Path, report: Report, tmp_path: Path) -> None:
    """Each check is seen to see what it is for."""
    import pages

    small = replace(report, studies=report.studies[-1:])
    text = command.html(small)
    spoilt = (
        text.replace("<h3>What it asks</h3>", '<h4>What it asks</h4><div style="width: 200vw">wide</div>')
        .replace('<caption id="versions-caption">', '<caption id="versions-caption" hidden></caption><caption>')
        .replace("--muted: #a9b2bb", "--muted: #3a3f44")
        .replace("outline: 3px solid var(--focus)", "outline: 0")
        .replace(".facts { display: grid;", ".facts dt { margin-bottom: -2rem; } .facts { display: grid;")
        .replace('<img src="', '<img src="data:image/png;base64,AAAA" alt="" data-was="')
    )
    path = tmp_path / "spoilt.html"
    path.write_text(spoilt)
    page, _ = pages.opened(browser, f"file://{path}", "phone", "dark")
    layout, structure = " ".join(pages.layout(page)), " ".join(pages.structure(page))
    assert "sideways" in layout and "leaves the window" in layout and "overlaps" in layout
    assert "a skip to level 4" in structure and "an empty image" in structure and "without a caption" in structure
    assert pages.contrast(page) and pages.focus(page)
