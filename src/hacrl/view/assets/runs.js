// The runs of a folder, and several runs in one chart.

import { age, badge, card, h, link, notice, score, select, table } from "./dom.js";
import { get } from "./data.js";
import { lineChart } from "./chart.js";

const OVERLAYS = [["accuracy", "held-out accuracy or reward"], ["reward", "training reward"], ["loss", "loss"], ["peers/used", "peers' samples used"], ["reply_tokens", "reply tokens"]];

export function stateBadge(state) {
  return badge(state, { running: "good", finished: "calm", stopped: "warn", failed: "bad" }[state]);
}

/** First and last accuracy of an agent, e.g. "24.4 → 52.5 %". */
function change(points, right) {
  if (!points || !points.length) return "–";
  const first = points[0], last = points[points.length - 1];
  const before = score(first[1], right);
  return points.length > 1 ? `${before.replace(" %", "")} → ${score(last[1], right)}` : before;
}

export async function runsView(params, page) {
  const chosen = new Set((params.sel || "").split("|").filter(Boolean));
  const metric = params.metric || "accuracy";
  const list = h("div"), overlay = h("div"), suites = h("div");
  let right = true;  // whether every drawn run has accuracies; else they are mean rewards
  const chart = lineChart({ title: "Selected runs", hint: OVERLAYS.find(([k]) => k === metric)?.[1] || metric, points: metric === "accuracy", format: metric === "accuracy" ? (v) => score(v, right, 0) : undefined, height: 260 });

  /** What is ticked now, which the address may not have yet. */
  const ticked = () => ({ ...params, sel: [...chosen].join("|") });

  function choose(id, on) {
    on ? chosen.add(id) : chosen.delete(id);
    page.go("runs", ticked());
  }

  function columns(now, noted) {
    return [
      { title: "", left: true, cell: (r) => r.error || r.pending ? "" : h("input", { type: "checkbox", "aria-label": `show ${r.id} in the chart`, checked: chosen.has(r.id), onchange: (e) => choose(r.id, e.target.checked) }) },
      { title: "run", left: true, cell: (r) => r.error ? h("span", { class: "name" }, r.id) : h("a", { class: "name", href: link("run", { id: r.id }), "data-row": "" }, r.id) },
      { title: "state", left: true, cell: (r) => r.pending ? badge("reading") : r.error ? badge("not readable", "bad") : stateBadge(r.state) },
      { title: "step", cell: (r) => r.error || r.pending ? "" : `${r.done} / ${r.steps}` },
      { title: "algorithm", left: true, cell: (r) => r.algorithm || "" },
      { title: "held-out", left: true, hint: "accuracy, or mean reward: first → last evaluation", cell: (r) => r.error ? h("span", { class: "hint why" }, r.error) : (r.agents || []).map((a) => h("div", { class: "pair" }, h("span", { class: "hint" }, a), " ", change(r.accuracy[a], r.right))) },
      noted ? { title: "notes", cell: (r) => r.notes || "" } : null,
      { title: "changed", cell: (r) => r.changed ? age(now - r.changed) : "" },
    ].filter(Boolean);
  }

  async function refresh() {
    const found = await get("runs");
    page.title("Runs", found.root);
    found.runs.sort((a, b) => (b.changed || 0) - (a.changed || 0));
    list.replaceChildren(found.runs.length ? table(columns(found.now, found.runs.some((r) => r.notes)), found.runs) : notice("This folder holds no run yet."));
    suites.replaceChildren(...(found.suites.length ? [card("Comparisons", null,
      h("ul", {}, found.suites.map((id) => h("li", {}, h("a", { href: link("suite", { id }), "data-row": "" }, id)))))] : []));
    if (found.runs.some((r) => r.pending)) setTimeout(() => list.isConnected && refresh().catch(page.fail), 300);
    await drawOverlay(found.runs.filter((r) => chosen.has(r.id) && r.agents));
  }

  async function drawOverlay(runs) {
    if (!runs.length) return overlay.replaceChildren(h("p", { class: "hint" }, "Tick runs to draw them in one chart."));
    const series = [];
    right = runs.every((run) => run.right);
    for (const [color, run] of runs.entries()) {
      const got = metric === "accuracy" ? null : await get("series", { id: run.id, metric });
      run.agents.forEach((agent, dash) => {
        const name = runs.length > 1 ? `${run.id}: ${agent}` : agent;
        const style = { name, color: (runs.length > 1 ? color : dash) % 8, dash: runs.length > 1 ? dash % 4 : 0, href: link("run", { id: run.id }) };
        if (got) { if (got.agents[agent]) series.push({ ...style, x: got.x, y: got.agents[agent] }); return; }
        const points = run.accuracy[agent] || [];
        if (points.length) series.push({ ...style, x: points.map((p) => p[0]), y: points.map((p) => p[1]), low: points.map((p) => p[2]), high: points.map((p) => p[3]) });
      });
    }
    const pick = select("metric", metric, OVERLAYS, (value) => page.go("runs", { ...ticked(), metric: value }));
    const clear = h("button", { type: "button", onclick: () => page.go("runs", { ...params, sel: "" }) }, "clear");
    overlay.replaceChildren(h("div", { class: "bar" }, pick, clear), chart);
    chart.update(series);
  }

  await refresh();
  return { node: h("div", {}, overlay, list, suites), refresh, watch: {} };
}
