// Who teaches whom: what became of each source's samples under each learner, and over time.

import { badge, h, notice, number, percent, select, signed } from "./dom.js";
import { get } from "./data.js";
import { lineChart } from "./chart.js";
import { runTabs } from "./run.js";

const OVER_TIME = [["used", "used, fraction of samples with advantage A ≠ 0"], ["effective", "effective samples (fraction)"], ["weight", "weight"], ["ratio", "ratio s"], ["kept", "samples kept"], ["dropped", "replies dropped"], ["gain", "first-order gain"]];
const PARTS = [["used", "used", "u0"], ["clipped", "no gradient (clipped or below the floor)", "u1"], ["zero", "advantage 0", "u2"], ["left_out", "no sample", "u3"]];

/** A bar of the four things that can happen to a reply. */
function bar(pair) {
  if (!pair.counted || !pair.offered) return "";
  const parts = PARTS.filter(([key]) => pair[key]).map(([key, text, style]) => {
    const part = h("i", { class: style, title: `${text}: ${number(pair[key])} of ${number(pair.offered)}` });
    part.style.flexGrow = pair[key];
    return part;
  });
  return h("div", { class: "parts", role: "img", "aria-label": PARTS.map(([key, text]) => `${text} ${pair[key]}`).join(", ") }, parts);
}

function cell(pair, own) {
  const rows = [
    ["offered", number(pair.offered)],
    pair.counted ? ["used", [h("b", {}, number(pair.used)), ` (${percent(pair.used / pair.offered, 0)} of offered)`]] : ["used", [h("b", {}, percent(pair.fraction, 0)), " of A ≠ 0"]],
    ["dropped", number(pair.dropped)],
    own ? null : ["weight", number(pair.weight)],
    own ? null : ["effective", percent(pair.effective, 0)],
    ["ratio s", number(pair.ratio)],
    pair.gain ? ["gain", [h("b", {}, `${signed(100 * pair.gain.mean)}`), ` ±${(100 * pair.gain.se).toFixed(2)} pts`]] : null,
  ].filter(Boolean);
  const reasons = Object.entries(pair.reasons).map(([why, n]) => `${why.replaceAll("_", " ")} ${number(n)}`).join(", ");
  return h("div", { class: "cell" + (own ? " own" : "") }, pair.quarantined ? badge("in quarantine", "bad") : null, bar(pair),
    h("dl", {}, rows.map(([k, v]) => [h("dt", {}, k), h("dd", {}, v)])),
    reasons ? h("p", { class: "hint" }, "dropped: ", reasons) : null);
}

export async function teachView(params, page) {
  const id = params.id, metric = params.metric || "used";
  const matrix = h("div"), charts = h("div", { class: "grid2" }), state = h("div");
  const drawn = new Map();

  async function refresh() {
    const data = await get("teach", { id });
    page.title(id, null, runTabs(id));
    const { done, total, complete } = data.index;
    state.replaceChildren(complete ? "" : notice(`Counting samples: ${done} of ${total} steps.`));
    const pair = (learner, source) => data.pairs.find((p) => p.learner === learner && p.source === source);
    matrix.replaceChildren(h("div", { class: "wide" }, h("table", { class: "matrix" },
      h("thead", {}, h("tr", {}, h("th", { class: "left" }, "learner ↓   source →"), data.sources.map((x) => h("th", { class: "left" }, x)))),
      h("tbody", {}, data.learners.map((learner) => h("tr", {}, h("th", { class: "left", scope: "row" }, learner),
        data.sources.map((source) => h("td", { class: "left" }, cell(pair(learner, source), learner === source)))))))));
    for (const learner of data.learners) {
      if (!drawn.has(learner)) {
        const chart = lineChart({ title: learner, hint: `${OVER_TIME.find(([key]) => key === metric)[1]}, by source`, zero: metric !== "gain" && metric !== "ratio", format: ["used", "effective"].includes(metric) ? (v) => percent(v, 0) : undefined, points: metric === "gain", legend: true, empty: metric === "gain" ? "no gain was measured: set diagnostics.every" : undefined });
        drawn.set(learner, chart);
        charts.append(chart);
      }
      drawn.get(learner).update(data.sources.map((source, color) => line(pair(learner, source), metric, data.x, color % 8)).filter(Boolean));
    }
  }

  await refresh();
  const legend = h("p", { class: "hint key-line" }, PARTS.map(([, text, style]) => [h("i", { class: "box " + style }), text, "  "]));
  const choose = h("div", { class: "bar" }, select("over time", metric, OVER_TIME, (value) => page.go("teach", { id, metric: value })));
  return { node: h("div", {}, state, matrix, legend, choose, charts), refresh, watch: { id } };
}

function line(pair, metric, x, color) {
  const y = pair.series[metric];
  if (!y) return null;
  if (metric !== "gain") return { name: pair.source, color, x, y };
  const at = x.map((_, i) => i).filter((i) => y[i] !== null), se = pair.series.gain_se || [];
  const end = (way) => at.map((i) => (se[i] == null ? null : y[i] + way * 1.96 * se[i]));
  return { name: pair.source, color, x: at.map((i) => x[i]), y: at.map((i) => y[i]), low: end(-1), high: end(1) };
}
