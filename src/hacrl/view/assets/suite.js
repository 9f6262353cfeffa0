// A comparison of `hacrl compare`: verdicts, differences, learning curves, exchange rates, the report.

import { card, h, link, notice, number, score } from "./dom.js";
import { exported, get } from "./data.js";
import { lineChart } from "./chart.js";
import { exchangePlot, forestPlot } from "./plots.js";

/** The reported interval in points: both intervals together, or over problems only for one seed. */
function interval(difference) {
  const { seeds, crossed } = difference, points = (v) => (v === null ? null : 100 * v);
  if (seeds.count < 2) return { mean: points(crossed.mean), low: points(crossed.low), high: points(crossed.high) };
  return { mean: points(seeds.mean), low: points(Math.min(seeds.low, crossed.low)), high: points(Math.max(seeds.high, crossed.high)) };
}

function byAgent(rows) {
  const found = new Map();
  for (const row of rows) {
    const name = `${row.team} / ${row.agent}`;
    found.set(name, [...(found.get(name) || []), row]);
  }
  return found;
}

export async function suiteView(params, page) {
  const { results, report, base, runs } = await get("suite", { id: params.id || "" });
  page.title(results?.suite.replace(/\.toml$/, "") || params.id || "Comparison", report ? null : "not finished");
  if (!results) return { node: notice("This comparison has no report yet: `hacrl compare` writes it when a run is finished.") };
  const arms = [...new Set(results.rows.map((r) => r.arm))], color = (arm) => arms.indexOf(arm) % 8;
  const known = new Set(runs);  // a file has none: its links lead to folders
  const run = (path) => exported ? base + path : known.has(base + path) ? link("run", { id: base + path }) : "";
  // An agent that learns alone may have its runs in the folder of another team.
  const href = (row, seed) => run(row.files[row.seeds.indexOf(seed)].split("/").slice(0, 4).join("/"));
  const all = (row) => together(row.seeds.map((seed) => href(row, seed)));
  const plots = [...byAgent(results.rows)].map(([name, rows]) => h("section", {}, h("h3", {}, name),
    h("div", { class: "grid2" }, forest(rows, results, color, href), curves(rows, results, color, all))));
  const rates = results.rows.filter((r) => r.exchange).map((r) => ({ label: `${r.agent}, ${r.arm}`, color: color(r.arm), href: all(r), ...r.exchange }));
  const text = markdown(report || "", (path) => exported ? path : path.startsWith("runs/") ? run(path) : "");
  // The report begins with its title and the section of verdicts, which stands above the plots.
  const next = text.findIndex((node, i) => i > 1 && node.tagName === "H3");
  const verdicts = text.length ? text.slice(2, next) : h("ul", {}, results.verdicts.map((v) => h("li", {}, v)));
  const rest = text.slice(next);
  const missing = results.missing.length ? notice(`Not finished and not counted: ${results.missing.join(", ")}`, "warn") : null;
  const node = h("div", {}, missing,
    card("Verdicts", `against ${results.reference}; ${number(results.problems)} problems × ${results.replies} replies; seeds ${results.seeds.join(", ")}`,
      h("div", { class: "report" }, verdicts)),
    plots,
    rates.length ? exchangePlot("Exchange rate f", `rollouts alone that reach the same ${results.score}, as a multiple of own rollouts, with 95 % interval`, rates) : null,
    rest.length ? h("details", { class: "card report", open: true }, h("summary", {}, h("b", {}, "Report")), rest) : null);
  return { node };
}

function forest(rows, results, color, href) {
  const reference = rows.find((r) => r.arm === results.reference);
  const base = Object.fromEntries((reference?.seeds || []).map((seed, i) => [seed, reference.accuracies?.[i]]));
  const shown = rows.filter((r) => r.difference).map((r) => ({
    label: r.arm, color: color(r.arm), verdict: r.verdict, ...interval(r.difference),
    seeds: r.seeds.map((seed, i) => ({ seed, value: 100 * (r.accuracies?.[i] - base[seed]), href: href(r, seed) })).filter((x) => Number.isFinite(x.value)),
  }));
  if (!shown.length) return card("Difference", null, h("p", { class: "empty" }, "no arm to compare yet"));
  return forestPlot(`Difference to ${results.reference}`, `held-out ${results.score} in points, 95 % interval; dots: seeds, linked to their runs`, shown);
}

/** The address of those runs that have one: their overlay, or the first in a file, which has no overlay. */
function together(addresses) {
  const found = addresses.filter(Boolean);
  if (exported || found.length < 2) return found[0];
  return link("runs", { sel: found.map((a) => new URLSearchParams(a.slice("#run?".length)).get("id")).join("|") });
}

function curves(rows, results, color, all) {
  const format = (v) => score(v, results.score === "accuracy", 0);
  const chart = lineChart({ title: "Learning curves", hint: `held-out ${results.score} by own rollouts; band: lowest to highest seed`, points: true, format, xLabel: "own rollouts", height: 240, legend: true });
  chart.update(rows.map((r) => ({
    name: r.arm, color: color(r.arm), href: all(r),
    x: r.curve.map((b) => b.rollouts), y: r.curve.map((b) => b.mean), low: r.curve.map((b) => b.low), high: r.curve.map((b) => b.high),
  })));
  return chart;
}

// ---------------------------------------------------------------- the Markdown of the report: headings, paragraphs, lists, tables, links

/** Text with [text](path) as links. Only relative paths and addresses inside the page become links. */
function inline(text, address) {
  const parts = [];
  let last = 0;
  for (const found of text.matchAll(/\[([^\]]*)\]\(([^)\s]*)\)/g)) {
    parts.push(text.slice(last, found.index));
    const path = address(found[2]);
    parts.push(/^[\w.#][^:]*$/.test(path) ? h("a", { href: path }, found[1]) : found[1]);
    last = found.index + found[0].length;
  }
  return [...parts, text.slice(last)];
}

function cells(line) {
  return line.slice(1, -1).split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function grid(lines, address) {
  const right = cells(lines[1]).map((rule) => rule.endsWith(":"));
  const row = (tag) => (line) => h("tr", {}, cells(line).map((cell, i) => h(tag, { class: right[i] ? null : "left" }, inline(cell, address))));
  return h("div", { class: "wide" }, h("table", {}, h("thead", {}, row("th")(lines[0])), h("tbody", {}, lines.slice(2).map(row("td")))));
}

/** Elements of a text; `address(path)` may change the paths of links. */
function markdown(text, address) {
  const blocks = text.trim().split(/\n{2,}/);
  return blocks.map((block) => {
    const lines = block.split("\n");
    const heading = /^(#+) (.*)/.exec(lines[0]);
    if (heading) return h(`h${Math.min(4, heading[1].length + 1)}`, {}, heading[2]);
    if (lines[0].startsWith("|") && lines.length > 1) return grid(lines, address);
    if (lines[0].startsWith("- ")) return h("ul", {}, lines.map((line) => h("li", {}, inline(line.slice(2), address))));
    return h("p", {}, inline(lines.join(" "), address));
  });
}
