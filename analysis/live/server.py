"""The live page's server: this machine only, three addresses, nothing that writes.

``/`` is the page, ``/live.json`` its parts as they are now, ``/log/<run>`` the end of a run's log as plain text.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from analysis.live.view import View, Viewer
from analysis.live.watch import Watch
from analysis.page import page, render

HOST = "127.0.0.1"
LOCAL = ("localhost", "127.0.0.1", "[::1]")
AT_MOST_EVERY_S = 1.0
"""However many windows ask, the store is looked at no more often."""


class Live:
    """The parts of the page, made at most once in ``AT_MOST_EVERY_S``."""

    def __init__(self, root: Path) -> None:
        self.watch = Watch(root)
        self.viewer = Viewer(self.watch)
        self._lock = threading.Lock()
        self._made_at = -AT_MOST_EVERY_S
        self._blocks: list[tuple[str, str]] = []

    def blocks(self) -> list[tuple[str, str]]:
        """(key, HTML) of each part, in order."""
        with self._lock:
            if time.monotonic() - self._made_at >= AT_MOST_EVERY_S:
                self._blocks = blocks(self.viewer.look())
                self._made_at = time.monotonic()
            return self._blocks

    def log(self, run_id: str) -> str | None:
        """The end of a run's log, or None."""
        with self._lock:
            return self.watch.log(run_id)


def blocks(view: View) -> list[tuple[str, str]]:
    """The parts of a view. A part is replaced on the page only when its HTML changes."""
    parts = [("progress", render("live_progress.html", view=view))]
    parts += [(c.key, render("live_curves.html", curves=c)) for c in view.curves]
    parts.append(("failures", render("live_failures.html", view=view)))
    parts += [(f"failure-{f.run_id}", render("live_failure.html", failure=f)) for f in view.failures]
    return [*parts, ("notes", render("live_notes.html", view=view))]


def document(live: Live) -> str:
    """The page as it is first sent; it is whole without its script."""
    parts = live.blocks()
    body = render("live.html", blocks=parts, version=_version(parts))
    return page("Runs, live", body, lead=f"What stands in {live.watch.root} now. The page keeps itself up to date.",
                script="live.js", live=True)  # fmt: skip


def _version(parts: list[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class Handler(BaseHTTPRequestHandler):
    """Answers GET, for this machine's own names only (a page of another site cannot ask under its name)."""

    server: Server

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.headers.get("Host", "").rpartition(":")[0] not in LOCAL and self.headers.get("Host") not in LOCAL:
            self._send(HTTPStatus.FORBIDDEN, "only as localhost\n")
        elif path == "/":
            self._send(HTTPStatus.OK, document(self.server.live), "text/html")
        elif path == "/live.json":
            self._send_blocks()
        elif path.startswith("/log/") and (text := self.server.live.log(path.removeprefix("/log/"))) is not None:
            self._send(HTTPStatus.OK, text)
        else:
            self._send(HTTPStatus.NOT_FOUND, "there is no such page\n")

    def _send_blocks(self) -> None:
        parts = self.server.live.blocks()
        version = f'"{_version(parts)}"'
        if self.headers.get("If-None-Match") == version:
            self._send(HTTPStatus.NOT_MODIFIED, "", etag=version)
            return
        text = json.dumps([{"key": key, "html": html} for key, html in parts])
        self._send(HTTPStatus.OK, text, "application/json", etag=version)

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain", etag: str = "") -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line each."""


class Server(ThreadingHTTPServer):
    """Serves one store until it is shut down. Raises OSError if the port is taken."""

    daemon_threads = True

    def __init__(self, root: Path, port: int) -> None:
        self.live = Live(root)
        super().__init__((HOST, port), Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A window that was closed while it was answered is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]
