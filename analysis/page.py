"""The shell of an HTML page that needs nothing but itself: head, style, landmarks. The only importer of jinja2.

``page(title, body)`` is a whole document; ``render`` fills one of ``analysis/templates/``. Everything is escaped
unless ``render`` made it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclass(frozen=True)
class Link:
    """An entry of the page's contents; ``inner`` ones stand under the last that is not."""

    href: str
    text: str
    inner: bool = False


@dataclass(frozen=True)
class Column:
    """The head of a column; numbers are set to the right."""

    name: str
    numeric: bool = False


@dataclass(frozen=True)
class Table:
    """A table as text: the first cell of a row names it."""

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


@lru_cache(maxsize=1)
def _templates() -> Environment:
    return Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True)  # fmt: skip


def render(template: str, **values: Any) -> Markup:
    """A template filled in, safe to be put into another. Raises jinja2's errors for a value that is not given."""
    return Markup(_templates().get_template(template).render(**values))


def page(
    title: str, body: Markup, *, lead: str = "", contents: Sequence[Link] = (), script: str = "", live: bool = False
) -> str:
    """A whole document around ``body``, in the suite's style; it may load nothing from anywhere.

    Args:
        body: what ``render`` gives; a plain string is escaped.
        lead: a sentence under the title. contents: links beside the body.
        script: the name of the one script it may run. live: it may ask the server that it came from.
    """
    code = Markup((TEMPLATES / script).read_text()) if script else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = ["default-src 'none'", "style-src 'unsafe-inline'", "img-src data:", "base-uri 'none'",
              "form-action 'none'", *([f"script-src 'sha256-{digest}'"] if code else []),
              *(["connect-src 'self'"] if live else [])]  # fmt: skip
    style = Markup((TEMPLATES / "page.css").read_text())
    return str(render("page.html", title=title, body=body, lead=lead, contents=contents, script=code, style=style,
                      policy="; ".join(policy)))  # fmt: skip


def data_uri(kind: str, content: bytes) -> str:
    """``content`` inside the page, as a link or an image."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
