"use strict";
// Asks for the page's parts again and again, and replaces only those that changed.
const PAUSE_MS = 2000, MOST_LOST = 5;
const place = document.getElementById("live"), said = document.getElementById("said");
const shown = new Map();
let version = `"${place.dataset.version}"`, lost = 0;

function say(text) {
  if (said.textContent !== text) said.textContent = text;
}

function made(html) {
  const template = document.createElement("template");
  template.innerHTML = html.trim();
  return template.content.firstElementChild;
}

// What the reader has opened, focused or scrolled stays as it is.
function carryOver(old, fresh) {
  const opened = [...old.querySelectorAll("details")].map(details => details.open);
  [...fresh.querySelectorAll("details")].forEach((details, k) => { if (k in opened) details.open = opened[k]; });
  const focused = old.contains(document.activeElement) ? document.activeElement.id : "";
  const scrolled = [...old.querySelectorAll(".scroll, pre")].map(node => [node.scrollLeft, node.scrollTop]);
  old.replaceWith(fresh);
  [...fresh.querySelectorAll(".scroll, pre")].forEach((node, k) => {
    if (k in scrolled) [node.scrollLeft, node.scrollTop] = scrolled[k];
  });
  if (focused) document.getElementById(focused)?.focus({preventScroll: true});
}

function update(parts) {
  const old = new Map([...place.children].map(node => [node.dataset.key, node]));
  let before = null;
  for (const {key, html} of parts) {
    let node = old.get(key);
    old.delete(key);
    if (!node || shown.get(key) !== html) {
      const fresh = made(html);
      if (node) carryOver(node, fresh);
      node = fresh;
      shown.set(key, html);
    }
    const next = before ? before.nextElementSibling : place.firstElementChild;
    if (node !== next) place.insertBefore(node, next);
    before = node;
  }
  old.forEach((node, key) => { node.remove(); shown.delete(key); });
}

async function poll() {
  if (!document.hidden) {
    try {
      const reply = await fetch("/live.json", {headers: {"If-None-Match": version}, cache: "no-store"});
      if (reply.status === 200) {
        update(await reply.json());
        version = reply.headers.get("ETag");
      } else if (reply.status !== 304) {
        throw new Error(reply.statusText);
      }
      lost = 0;
      say("");
    } catch {
      lost += 1;
      say(lost < MOST_LOST ? "The server does not answer; asking again."
        : "The server has ended. Start it with make serve and reload this page.");
    }
  }
  if (lost < MOST_LOST) setTimeout(poll, PAUSE_MS * 2 ** Math.min(lost, 3));
}
setTimeout(poll, PAUSE_MS);
