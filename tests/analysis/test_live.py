"""``make serve``: a store looked at again and again, shown without reloading, and nothing else given away."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from synthetic import run_id, write_run

from analysis.live import __main__ as command
from analysis.live import server
from analysis.live.view import Viewer, panel
from analysis.live.watch import Watch
from experiments import claim, manifests, store

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PROJECT = Path(__file__).resolve().parents[2]


def config(lr: float = 1e-3, steps: int = 100) -> dict[str, dict[str, object]]:
    method = {"kind": "lora", "rank": 4, "alpha": 32.0, "placement": "all", "unembed": False}
    names = {"model": {"name": "toy"}, "data": {"name": "sorting"}}
    return {**names, "method": method, "optim": {"lr": lr, "batch_size": 16, "steps": steps}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A study of four runs: done, diverged, one that goes on and one not begun."""
    root = tmp_path / "runs"
    ids = [write_run(root, 0, 1, 0, 0.0), write_run(root, 0, 6, 0, 0.0), "goes-on", "to-do"]
    manifest = {"title": "Loss", "settings": {}, "run_ids": ids, "configs": {"goes-on": config(), "to-do": config()}}
    manifests.write_study(root, "lr", "mini", manifest)
    return root


def seen(root: Path) -> Watch:
    watch = Watch(root)
    watch.look()
    return watch


# ---------------------------------------------------------------- reading


def test_progress_counts_runs_and_steps(root: Path) -> None:
    with claim.claim(root, "goes-on", config()) as writer:
        writer.append({"step": 0, "test/nll_nats": 2.0})
        writer.append({"step": 50, "test/nll_nats": 1.0})
        (study,) = Viewer(Watch(root)).look().progress
        assert (study.done, study.diverged, study.running, study.failed, study.todo) == (2, 1, 1, 0, 1)
        assert study.percent == 100 * 250 // 400
        writer.fail("ValueError: no", "traceback")
    (study,) = Viewer(Watch(root)).look().progress
    assert (study.done, study.running, study.failed, study.todo) == (2, 0, 1, 1)


def test_time_left_follows_the_steps_that_were_seen(root: Path) -> None:
    now = [0.0]
    viewer = Viewer(Watch(root), clock=lambda: now[0])
    with claim.claim(root, "goes-on", config()) as writer:
        assert viewer.look().progress[0].left == ""
        now[0] = 10.0
        writer.append({"step": 20})
        assert viewer.look().progress[0].left == "1 min 30 s"  # 180 of 400 steps are left at 2 a second
        now[0] = 1000.0  # and nothing more in the last ten minutes
        viewer.look()
        now[0] = 1010.0
        assert viewer.look().progress[0].left == ""


def test_a_curve_is_read_on_line_by_line(root: Path) -> None:
    watch = seen(root)
    with claim.claim(root, "goes-on", config()) as writer:
        writer.append({"step": 0, "test/nll_nats": 2.0})
        file = root / "goes-on" / "metrics.jsonl"
        with file.open("a") as half:
            half.write('{"step": 1, "test/nl')
        watch.look()
        curve = watch.runs["goes-on"].curve
        assert curve is not None and curve.points == [(0, 2.0)] and not watch.notes
        with file.open("a") as rest:
            rest.write('l_nats": 1.5}\n{"step": 2, "test/nll_nats": null}\n')
        watch.look()
        assert curve.points == [(0, 2.0), (1, 1.5)] and curve.step == 2
        longer = {"step": 0, "test/nll_nats": 3.0, "train/more": "x" * 500}
        store.write_atomic(file, json.dumps(longer) + "\n")  # resumed from a checkpoint
        watch.look()
        assert curve.points == [(0, 3.0)] and curve.step == 0


def test_what_has_ended_is_read_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = seen(root)
    read: list[str] = []
    real = store.read_run
    monkeypatch.setattr(store, "read_run", lambda path: read.append(path.name) or real(path))  # type: ignore[func-returns-value]
    watch.look()
    assert read == []
    os.utime(root / run_id(0, 1, 0) / "summary.json", (1, 1))  # it was written again
    watch.look()
    assert read == [run_id(0, 1, 0)]


def test_damaged_records_are_named_and_the_rest_is_shown(root: Path, forbid: Callable[[Path], None]) -> None:
    done, diverged = root / run_id(0, 1, 0), root / run_id(0, 6, 0)
    (done / "summary.json").write_text("{}")
    with (diverged / "metrics.jsonl").open("a") as file:
        file.write("no json\n")
    for name, text in (
        ("foreign", None),
        ("old", '{"format": 99}'),
        ("odd", json.dumps({"format": 1, "run_id": "odd"})),
    ):
        (root / name).mkdir()
        (root / name / ("config.json" if text else "notes.txt")).write_text(text or "")
    (root / "studies" / "rank-mini.json").write_text("{")
    with claim.claim(root, "bare", {}):
        pass
    view = Viewer(Watch(root)).look()
    notes = "\n".join(view.notes)
    for words in (
        "summary.json: damaged: outcome: missing",
        "metrics.jsonl is damaged after step",
        "foreign: no config.json",
        "newer version",
        "odd: config.json is not this run's",
        "rank-mini.json: damaged",
    ):
        assert notes.count(words) == 1, words
    assert view.progress[0].failed == 1 and view.progress[0].done == 1
    forbid(root)
    assert "permission denied" in Viewer(Watch(root)).look().notes[0]


def test_a_study_at_two_scales_has_two_blocks_of_curves(root: Path) -> None:
    manifests.write_study(root, "lr", "smol", {**manifests.read_study(root, "lr", "mini"), "scale": "smol"})
    parts = [(key, html) for key, html in server.blocks(Viewer(Watch(root)).look()) if key.startswith("curves")]
    assert [key for key, _ in parts] == ["curves-lr-mini", "curves-lr-smol"]
    for key, html in parts:
        assert f'id="{key}"' in html and ("(smol)" in html) == key.endswith("smol")


def test_a_store_that_is_not_there_yet_is_an_empty_page(tmp_path: Path) -> None:
    view = Viewer(Watch(tmp_path / "runs")).look()
    assert view.progress == () and view.notes == ()


def test_a_run_that_is_deleted_leaves_the_page(root: Path) -> None:
    watch = seen(root)
    (root / run_id(0, 1, 0)).rename(root.parent / "elsewhere")
    watch.look()
    assert set(watch.runs) == {run_id(0, 6, 0)}


def test_curves_stay_inside_their_axes(make_store: Callable[..., Path]) -> None:
    watch = seen(make_store(num_seeds=1))
    drawn = panel("toy", list(watch.runs.values()), {run.arm: "#000000" for run in watch.runs.values()})
    assert drawn is not None and drawn.num_lines == 21
    points = [tuple(map(float, p.split(","))) for line, _ in drawn.lines for p in line.split()]
    assert all(44 <= x <= 304 and 8 <= y <= 168 for x, y in points)
    assert min(y for _, y in points) == 8 and max(y for _, y in points) == 168


# ---------------------------------------------------------------- serving


@pytest.fixture
def served(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[server.Server]:
    monkeypatch.setattr(server, "AT_MOST_EVERY_S", 0.0)
    with server.Server(root, 0) as serving:
        threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield serving
        serving.shutdown()


def asked(serving: server.Server, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str | None]:
    connection = http.client.HTTPConnection(server.HOST, serving.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), reply.getheader("ETag")


def failed(root: Path, name: str = "goes-on") -> None:
    with claim.claim(root, name, config()) as writer:
        writer.append({"step": 0, "test/nll_nats": 2.0})
        writer.append({"step": 10, "test/nll_nats": 1.0})
        writer.fail("ValueError: <img src=x onerror=alert(1)>", "traceback")
    log = store.log_path(root, name)
    log.parent.mkdir(exist_ok=True)
    log.write_text("one\n" * 100 + "<script>alert(1)</script>\n")


def test_server_gives_logs_of_runs_and_nothing_else(served: server.Server, root: Path) -> None:
    failed(root)
    (root.parent / "secret").write_text("secret")
    (root / "logs" / "secret.log").write_text("secret")
    inside, outside = root / run_id(0, 1, 0), root / run_id(0, 6, 0)
    store.log_path(root, outside.name).symlink_to(root.parent / "secret")
    asked(served, "/live.json")
    status, text, _ = asked(served, "/log/goes-on")
    assert status == 200 and text.endswith("<script>alert(1)</script>\n")
    climbing = (
        "/log/../secret",
        "/log/..%2f..%2fsecret",
        "/log/%2e%2e/%2e%2e/secret",
        "/log//etc/passwd",
        "//etc/passwd",
    )
    others = ("/secret", "/log/secret", "/log/", "/log/goes-on%00", "/runs/goes-on/config.json")
    for path in (*climbing, *others, f"/log/{outside.name}", f"/log/{inside.name}"):
        status, text, _ = asked(served, path)
        assert status == 404 and "secret" not in text, path
    assert asked(served, "/", "POST")[0] == 501 and asked(served, "/log/goes-on", "DELETE")[0] == 501


def test_server_answers_under_its_own_names_only(served: server.Server) -> None:
    for host in ("evil.example", f"evil.example:{served.server_port}", "localhost.evil.example:80", ""):
        assert asked(served, "/", Host=host)[0] == 403, host
    for host in ("localhost", f"localhost:{served.server_port}", "127.0.0.1:9000", "[::1]:9000"):
        assert asked(served, "/", Host=host)[0] == 200, host
    assert served.server_address[0] == "127.0.0.1"


def test_server_says_when_nothing_has_changed(served: server.Server, root: Path) -> None:
    status, _, version = asked(served, "/live.json")
    assert status == 200 and version
    assert asked(served, "/live.json", **{"If-None-Match": version})[:2] == (304, "")
    failed(root)
    status, text, _ = asked(served, "/live.json", **{"If-None-Match": version})
    assert status == 200 and "&lt;script&gt;" in text and "<script" not in text and "<img" not in text


def test_server_writes_nothing(served: server.Server, root: Path) -> None:
    failed(root)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    for path in ("/", "/live.json", "/log/goes-on"):
        asked(served, path)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


@pytest.mark.parametrize("port", ["-1", "65536", "x", ""])
def test_serve_refuses_a_port_in_one_line(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([f"--port={port}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: port: ") and error.count("\n") == 1


def test_serve_says_that_a_port_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind((server.HOST, 0))
        other.listen()
        assert command.main(["--port", str(other.getsockname()[1])]) == 2
    error = capsys.readouterr().err
    assert "is taken; choose another: make serve PORT=" in error and error.count("\n") == 1


def test_serve_ends_cleanly_with_ctrl_c(root: Path) -> None:
    arguments = [sys.executable, "-m", "analysis.live", "--root", str(root), "--port", "0"]

    def heeds_ctrl_c() -> None:  # also where these tests run in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, cwd=PROJECT, preexec_fn=heeds_ctrl_c, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None and process.stderr is not None
        assert "http://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert process.stdout.read() == "ended\n" and process.stderr.read() == ""


# ---------------------------------------------------------------- in a browser


@pytest.mark.browser
@pytest.mark.parametrize(("size", "scheme"), [("phone", "dark"), ("desk", "light")])
def test_live_page_is_sound_in_a_browser(
    browser: Browser, served: server.Server, root: Path, size: str, scheme: str
) -> None:
    import pages

    failed(root)
    page, wrong = pages.opened(browser, f"http://127.0.0.1:{served.server_port}/", size, scheme)
    page.locator("article summary").click()
    assert pages.layout(page) == []
    assert pages.structure(page) == []
    assert pages.contrast(page) == []
    page.reload()
    assert pages.focus(page) == []
    assert wrong == []
    page.close()


@pytest.mark.browser
def test_live_page_changes_without_a_reload(browser: Browser, served: server.Server, root: Path) -> None:
    page = browser.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.clock.install()  # two seconds pass when the test says so
    page.goto(f"http://127.0.0.1:{served.server_port}/")
    page.evaluate("window.same = true")
    runs = page.locator("#curves-lr-mini summary")
    assert runs.inner_text() == "2 runs so far"

    failed(root)
    page.clock.run_for(2100)
    page.locator("#curves-lr-mini summary", has_text="3 runs so far").wait_for()
    log = page.locator("article.failure pre")
    assert not log.is_visible()
    page.locator("article.failure summary").click()
    assert log.inner_text().endswith("<script>alert(1)</script>") and len(log.inner_text().splitlines()) == 40
    page.evaluate("document.querySelector('article.failure').kept = true")

    failed(root, "to-do")
    page.clock.run_for(2100)
    page.locator("article.failure >> nth=1").wait_for()
    assert page.evaluate("document.querySelector('article.failure').kept")  # what did not change was not touched
    assert log.first.is_visible()
    store.log_path(root, "goes-on").write_text("another end\n")
    page.clock.run_for(2100)
    page.locator("article.failure pre", has_text="another end").wait_for()  # open as it was
    assert page.evaluate("window.same && document.activeElement.id") == "failure-goes-on"
    assert wrong == []

    served.shutdown()
    served.server_close()
    page.clock.run_for(2100)
    page.locator("#said", has_text="does not answer").wait_for()
    for _ in range(4):
        page.clock.run_for(20_000)
        page.evaluate("fetch('/live.json').catch(() => 0)")
    page.locator("#said", has_text="has ended").wait_for()
    tried = len(wrong)
    page.clock.run_for(600_000)
    page.evaluate("fetch('/live.json').catch(() => 0)")
    assert len(wrong) == tried + 1  # it asks no more by itself
    page.close()
