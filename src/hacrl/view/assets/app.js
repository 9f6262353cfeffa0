// The page: header, addresses, theme, keyboard, live updates.

import { h, link, notice } from "./dom.js";
import { exported, get, watch } from "./data.js";
import { runsView } from "./runs.js";
import { runView } from "./run.js";
import { teachView } from "./teach.js";
import { problemView, rolloutsView } from "./rollouts.js";
import { suiteView } from "./suite.js";
import { hubView } from "./hub.js";

const VIEWS = { runs: runsView, run: runView, teach: teachView, rollouts: rolloutsView, problem: problemView, suite: suiteView, hub: hubView };
const KEYS = [["/", "search"], ["j, k", "next, previous entry"], ["Enter", "open it"], ["1, 2, 3", "tabs of a run"], ["g", "list of runs"], ["t", "light or dark"], ["← →", "values of a chart"], ["?", "this list"]];

const header = h("header"), main = h("main", { id: "main", tabindex: "-1" }), help = h("dialog", { class: "card" });
let stop = () => {}, turn = 0, tabs = [], loading = false, shown = "";

function theme(value) {
  document.documentElement.dataset.theme = value;
  try { localStorage.setItem("hacrl-theme", value); } catch { /* a page without storage */ }
}

function switchTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  theme(now === "dark" ? "light" : "dark");
}

function parse() {
  const [name, query] = location.hash.slice(1).split(/\?(.*)/s);
  return [name, Object.fromEntries(new URLSearchParams(query || ""))];
}

const page = {
  /** Change the address; an equal one is drawn again. */
  go(name, params, replace = false) {
    const target = link(name, params);
    if (target === location.hash) return show();
    if (replace) { history.replaceState(null, "", target); return show(); }
    location.hash = target;
  },
  /** Change the address and keep the present view, which calls `redraw` itself. While another address is
   * being loaded the view is built again instead. */
  stay(name, params, redraw) {
    if (loading) return page.go(name, params);
    location.hash = link(name, params);
    shown = location.hash;
    return redraw();
  },
  title(text, hint, found = []) {
    document.title = `${text} · hacrl`;
    tabs = found;
    const [name] = parse();
    const home = exported ? exported.start : "#";
    header.replaceChildren(
      h("a", { class: "skip", href: "#main", onclick: (e) => { e.preventDefault(); main.focus(); } }, "to the content"),
      h("a", { class: "mark", href: home }, "hacrl"),
      h("h1", { title: hint }, text),
      h("nav", { "aria-label": "views of the run" }, found.map((t) => h("a", { href: t.href, "aria-current": t.name === name || (t.name === "rollouts" && name === "problem") ? "page" : null }, t.text))),
      h("span", { class: "space" }),
      exported ? h("span", { class: "hint" }, "exported file") : h("span", { class: "live", title: "live updates" }, h("i"), "live"),
      h("button", { type: "button", title: "light or dark (t)", "aria-label": "light or dark", onclick: switchTheme }, "◐"),
      h("button", { type: "button", title: "keys (?)", "aria-label": "keys", onclick: () => help.showModal() }, "?"));
  },
  fail(error) {
    main.replaceChildren(notice(error.message || String(error), "bad"));
  },
};

async function show() {
  const mine = ++turn;
  let [name, params] = parse();
  loading = true;
  shown = location.hash;
  stop();
  stop = () => {};
  try {
    if (!VIEWS[name]) {
      if (exported) return location.replace(exported.start);
      const start = await get("start");
      return location.replace(link(start.kind, { id: start.id }));
    }
    main.setAttribute("aria-busy", "true");
    const view = await VIEWS[name](params, page);
    if (mine !== turn) return;
    main.replaceChildren(view.node);
    stop = view.watch ? live(view) : () => {};
  } catch (error) {
    if (mine !== turn) return;
    if (!header.childElementCount) page.title("hacrl");
    page.fail(error);
  } finally {
    if (mine === turn) {
      loading = false;
      main.removeAttribute("aria-busy");
    }
  }
}

/** Refresh a view on every change, one request at a time. The first event is the present state. */
function live(view) {
  let first = true, busy = false, again = null;
  async function run(event) {
    if (busy) { again = event; return; }
    busy = true;
    try { await view.refresh(event); } catch (error) { main.prepend(notice(error.message, "bad")); }
    busy = false;
    if (again) { const next = again; again = null; setTimeout(() => run(next), 300); }
  }
  return watch(view.watch, (event) => { if (first) { first = false; view.pulse?.(event); return; } run(event); });
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName || "");
  if (event.key === "Escape" && typing) return document.activeElement.blur();
  if (typing) return;
  const rows = [...main.querySelectorAll("[data-row]")];
  const at = rows.indexOf(document.activeElement);
  const actions = {
    "/": () => main.querySelector("input[type=search]")?.focus(),
    j: () => rows[Math.min(rows.length - 1, at + 1)]?.focus(),
    k: () => rows[Math.max(0, at - 1)]?.focus(),
    t: switchTheme,
    g: () => { if (!exported) location.hash = "#runs"; },
    "?": () => help.showModal(),
    1: () => tabs[0] && (location.hash = tabs[0].href),
    2: () => tabs[1] && (location.hash = tabs[1].href),
    3: () => tabs[2] && (location.hash = tabs[2].href),
  };
  if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
}

try { const kept = localStorage.getItem("hacrl-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* no storage */ }
help.append(h("h2", {}, "Keys"), h("dl", {}, KEYS.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])),
  h("form", { method: "dialog" }, h("button", {}, "close")));
help.querySelector("form").addEventListener("submit", (event) => { event.preventDefault(); help.close(); });
document.getElementById("app").replaceChildren(header, main, help);
addEventListener("hashchange", () => { if (location.hash !== shown) show(); });
document.addEventListener("keydown", keys);
show();
