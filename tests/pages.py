"""What every page must be, seen by a browser: each function returns what is wrong, in words."""

from __future__ import annotations

from playwright.sync_api import Browser, Page

SIZES = {"phone": {"width": 360, "height": 800}, "desk": {"width": 1280, "height": 900}}

_LAYOUT = """() => {
  const wrong = [];
  const said = node => [node.tagName, node.id, node.className, node.textContent.slice(0, 30)].join(" ");
  const scrolls = node => { for (; node; node = node.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(node).overflowX) || getComputedStyle(node).clipPath !== "none")
      return true; };
  const seen = node => node.checkVisibility({opacityProperty: true}) && node.getClientRects().length;
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("the page scrolls sideways");
  for (const node of document.body.querySelectorAll("*:not(svg *)")) {
    if (!seen(node) || getComputedStyle(node).position === "absolute") continue;
    const box = node.getBoundingClientRect();
    if (box.width && (box.right > innerWidth + 1 || box.left < -1) && !scrolls(node.parentElement))
      wrong.push(said(node) + " leaves the window");
    const blocks = [...node.children].filter(child => seen(child) && !child.closest("svg") &&
      !["inline", "contents"].includes(getComputedStyle(child).display) &&
      ["static", "relative"].includes(getComputedStyle(child).position));
    blocks.forEach((a, k) => blocks.slice(k + 1, k + 4).forEach(b => {
      const p = a.getBoundingClientRect(), q = b.getBoundingClientRect();
      const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (across > 1 && down > 1) wrong.push(said(a) + " overlaps " + said(b));
    }));
  }
  return wrong;
}"""

_STRUCTURE = """() => {
  const wrong = [], all = selector => [...document.querySelectorAll(selector)];
  const levels = all("h1, h2, h3, h4, h5, h6").map(node => +node.tagName[1]);
  if (levels.filter(level => level === 1).length !== 1 || levels[0] !== 1) wrong.push("not one h1 that comes first");
  levels.forEach((level, k) => { if (level > (levels[k - 1] ?? level) + 1) wrong.push("a skip to level " + level); });
  if (document.documentElement.lang !== "en" || !document.title) wrong.push("no language or title");
  for (const mark of ["main", "header"]) if (all(mark).length !== 1) wrong.push("not one " + mark);
  all("nav, section").forEach(node => { if (!node.getAttribute("aria-label") && !node.getAttribute("aria-labelledby"))
    wrong.push("a landmark without a name"); });
  all("[aria-labelledby]").forEach(node => { if (!document.getElementById(node.getAttribute("aria-labelledby")))
    wrong.push("named by nothing: " + node.getAttribute("aria-labelledby")); });
  all("table").forEach(node => { if (!node.caption?.textContent.trim()) wrong.push("a table without a caption"); });
  all("th").forEach(node => { if (!node.scope) wrong.push("a th without a scope: " + node.textContent); });
  all("img").forEach(node => { if (!(node.alt.trim().length > 20)) wrong.push("an image without words");
    if (!node.naturalWidth) wrong.push("an empty image: " + node.alt); });
  all("svg:not([aria-hidden])").forEach(node => { if (!node.getAttribute("aria-label"))
    wrong.push("a drawing without words"); });
  const ids = all("[id]").map(node => node.id);
  if (new Set(ids).size !== ids.length) wrong.push("an id twice");
  all("a[href^='#']").forEach(node => { if (!document.getElementById(decodeURIComponent(node.hash.slice(1))))
    wrong.push("a link to nowhere: " + node.hash); });
  return wrong;
}"""

_CONTRAST = """() => {
  const light = ([r, g, b]) => { const [x, y, z] = [r, g, b].map(c => c / 255).map(
    c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4); return 0.2126 * x + 0.7152 * y + 0.0722 * z; };
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const ground = node => { for (; node; node = node.parentElement) {
    const found = parts(getComputedStyle(node).backgroundColor);
    if (found.length < 4 || found[3] === 1) return found; } return [255, 255, 255]; };
  const wrong = new Set(), walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let number = 0;
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || node.closest("script, style, svg") || !node.checkVisibility()) continue;
    const [a, b] = [light(parts(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    number += 1;
    if (ratio < 4.5) wrong.add(ratio.toFixed(1) + ": " + node.tagName + "." + node.className);
  }
  return number > 20 ? [...wrong] : ["only " + number + " texts were looked at"];
}"""

_FOCUS = """() => [...document.querySelectorAll("a[href], summary, input, [tabindex='0']")]
  .filter(node => node.checkVisibility())
  .map(node => { node.focus(); const shown = node.matches("input") ? node.nextElementSibling : node;
    const style = getComputedStyle(shown);
    return document.activeElement === node && style.outlineStyle === "solid" && parseFloat(style.outlineWidth) >= 2
      ? "" : "no visible focus: " + node.outerHTML.slice(0, 80); }).filter(Boolean)"""


def opened(browser: Browser, url: str, size: str = "desk", scheme: str = "light") -> tuple[Page, list[str]]:
    """(the page, what goes wrong on it from now on): messages, failed requests, anything from another place."""
    page = browser.new_page(viewport=SIZES[size], color_scheme=scheme)  # type: ignore[arg-type]
    wrong: list[str] = []
    own = url.partition("://")[0] + "://" + url.partition("://")[2].partition("/")[0]
    page.on("console", lambda message: wrong.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("requestfailed", lambda request: wrong.append(f"failed: {request.url:.80}"))
    page.on("request", lambda r: None if r.url.startswith((own, "data:")) else wrong.append(f"elsewhere: {r.url:.80}"))
    page.goto(url)
    return page, wrong


def layout(page: Page) -> list[str]:
    """Sideways scrolling, elements outside the window, siblings that overlap."""
    return list(page.evaluate(_LAYOUT))


def structure(page: Page) -> list[str]:
    """Headings, landmarks, captions, scopes, words for images, links to nowhere."""
    return list(page.evaluate(_STRUCTURE))


def contrast(page: Page) -> list[str]:
    """Text whose colour is too near its ground's (WCAG AA: 4.5)."""
    return list(page.evaluate(_CONTRAST))


def focus(page: Page) -> list[str]:
    """Whether the first Tab reaches the skip link, which leads to the content, and what shows no focus."""
    page.keyboard.press("Tab")
    skip = page.evaluate("document.activeElement.className + document.activeElement.getBoundingClientRect().left")
    wrong = [] if skip == "skip8" else [f"the first Tab reaches {skip}"]
    page.keyboard.press("Enter")
    if page.evaluate("document.activeElement.id") != "main":
        wrong.append("the skip link does not lead to the content")
    return wrong + list(page.evaluate(_FOCUS))
