// One run: curves, seconds by phase, notes. Everything moves while the run trains.

import { age, fact, h, link, number, percent, score, select, table } from "./dom.js";
import { exported, get } from "./data.js";
import { lineChart } from "./chart.js";
import { stateBadge } from "./runs.js";

const CHARTS = [
  ["reward", { title: "Training reward", hint: "mean over the step's own replies", zero: true }],
  ["loss", { title: "Loss", hint: "mean over the step's updates" }],
  ["ratios", { title: "Ratio s of peers' samples", hint: "learner ← source; 1: the learner finds the reply as likely as its author" }],
  ["own/ratio", { title: "Ratio of own samples", hint: "1 at the first update of a step" }],
  ["peers/used", { title: "Peers' samples used", hint: "fraction with a gradient, of samples with advantage A ≠ 0", format: (v) => percent(v, 0), zero: true }],
  ["grad_norm", { title: "Gradient norm", hint: "before clipping", zero: true }],
  ["reply_tokens", { title: "Reply length", hint: "mean tokens", zero: true }],
  ["truncated", { title: "Replies that reached the token limit", format: (v) => percent(v, 0), zero: true }],
];

export function runTabs(id) {
  return [["run", "Curves"], ["teach", "Who teaches whom"], ["rollouts", "Rollouts"]].map(([name, text]) => ({ name, text, href: link(name, { id }) }));
}

export async function runView(params, page) {
  const id = params.id;
  const facts = h("div", { class: "facts" }), notes = h("div"), scores = h("div");
  let right = true;
  const accuracy = lineChart({ title: () => (right ? "Held-out accuracy" : "Mean held-out reward"), hint: "with 95 % interval", points: true, format: (v) => score(v, right, 0), height: 240, legend: true });
  const phases = lineChart({ title: "Seconds by phase", hint: "all agents, each step", stacked: true, zero: true, height: 240 });
  const charts = CHARTS.map(([key, options]) => [key, lineChart(options)]);
  const other = lineChart({ title: params.metric || "", empty: "choose a metric to draw it" });
  other.classList.add("whole");
  const picker = h("div", { class: "bar" });

  function lines(data, values, x) {
    return Object.entries(values).map(([name, y]) => {
      const learner = name.split(" ← ")[0], source = name.split(" ← ")[1];
      const place = data.agents.findIndex((a) => a.name === learner);
      const peers = data.agents.filter((a) => a.name !== learner);
      const dash = source ? Math.max(0, peers.findIndex((a) => a.name === source)) % 4 : 0;
      return { name, color: Math.max(0, place) % 8, dash, x, y };
    });
  }

  async function refresh() {
    const data = await get("run", { id });
    page.title(data.id, data.path, runTabs(id));
    right = data.right;
    facts.replaceChildren(stateBadge(data.state), fact("step", `${data.done} of ${data.steps}`), fact("algorithm", data.algorithm),
      fact("task", data.task), fact("seed", data.seed), fact("rollouts", number(data.rollouts)), fact("changed", exported ? new Date(1000 * data.changed).toISOString().slice(0, 16).replace("T", " ") + " UTC" : age(data.now - data.changed)));
    accuracy.update(data.agents.filter((a) => data.accuracy[a.name]).map((a) => {
      const points = data.accuracy[a.name], place = data.agents.indexOf(a);
      return { name: a.name, color: place % 8, x: points.map((p) => p[0]), y: points.map((p) => p[1]), low: points.map((p) => p[2]), high: points.map((p) => p[3]) };
    }));
    phases.update(Object.entries(data.phases).map(([name, y], i) => ({ name, color: i % 8, x: data.x, y })));
    for (const [key, chart] of charts) {
      const values = key === "ratios" ? data.ratios : data.series[key];
      chart.hidden = !Object.keys(values).length && key !== "reward" && key !== "loss";
      chart.update(lines(data, values, data.x));
    }
    notes.replaceChildren(noteList(data));
    scores.replaceChildren(scoreTable(data));
    await drawOther(data);
  }

  async function drawOther(data) {
    other.hidden = exported || !data.metrics.length;
    if (other.hidden) return;
    picker.replaceChildren(select("another metric", params.metric || "", [["", "choose"], ...data.metrics], (metric) => page.go("run", { ...params, metric })));
    if (!params.metric) return other.update([]);
    const got = await get("series", { id, metric: params.metric });
    other.update(lines(data, got.agents, got.x));
  }

  await refresh();
  other.prepend(picker);
  const grid = h("div", { class: "grid2" }, accuracy, phases, charts.map(([, chart]) => chart), other);
  return { node: h("div", {}, facts, notes, scores, grid), refresh, watch: { id } };
}

function noteList(data) {
  if (!data.notes.length) return "";
  const items = [...data.notes].reverse().map(([step, text]) =>
    h("li", {}, h("span", { class: "hint" }, step ? `after step ${step}` : "at the start"), " ", text));
  return h("details", { class: "card notes", open: data.notes.length < 4 },
    h("summary", {}, h("b", {}, data.notes.length === 1 ? "1 note" : `${data.notes.length} notes`)), h("ul", {}, items));
}

function scoreTable(data) {
  const plain = (v) => score(v, data.right).replace(" %", "");
  const range = (p) => p ? [h("b", {}, score(p[1], data.right)), h("span", { class: "hint below" }, ` [${plain(p[2])}, ${plain(p[3])}]`)] : "–";
  const points = (a) => data.accuracy[a.name] || [];
  const last = (a, key) => { const v = data.series[key]?.[a.name]; return v ? v[v.length - 1] : null; };
  return table([
    { title: "agent", left: true, cell: (a) => [h("i", { class: `key c${data.agents.indexOf(a) % 8}` }), a.name, a.learns ? "" : " (frozen)", h("span", { class: "hint" }, ` ${a.model || ""}`)] },
    { title: "before", cell: (a) => range(points(a)[0]) },
    { title: "last", cell: (a) => range(points(a).length > 1 ? points(a)[points(a).length - 1] : null) },
    { title: "reward", cell: (a) => number(last(a, "reward")) },
    { title: "peers used (last step, of A ≠ 0)", cell: (a) => percent(last(a, "peers/used"), 0) },
    { title: "reply tokens", cell: (a) => number(last(a, "reply_tokens")) },
  ], data.agents);
}
