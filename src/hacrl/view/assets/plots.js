// Intervals as SVG: differences to a reference (forest plot), and exchange rates.

import { h, number, s, signed } from "./dom.js";
import { ticks } from "./chart.js";

const ROW = 30, LABEL = 190, VERDICT = 90, TOP = 8, BOTTOM = 34;

/** A figure that is drawn again when its width changes. */
function figure(title, hint, draw) {
  const box = h("div", { class: "plot" });
  new ResizeObserver(() => box.replaceChildren(draw(Math.max(320, box.clientWidth)))).observe(box);
  return h("figure", { class: "card" }, h("figcaption", {}, h("b", {}, title), h("span", { class: "hint" }, hint)), box);
}

function linked(href, label, mark) {
  return href ? s("a", { href, "aria-label": label }, s("title", {}, label), mark) : mark;
}

/**
 * Differences with their 95 % intervals, in points. rows: { label, color, mean, low, high, verdict,
 * seeds: [{ value, seed, href }] }; a low or high of null has no end.
 */
export function forestPlot(title, hint, rows) {
  const all = rows.flatMap((r) => [r.mean, r.low, r.high, ...r.seeds.map((x) => x.value)]).filter((v) => v !== null);
  let low = Math.min(0, ...all), high = Math.max(0, ...all);
  const pad = (high - low) * 0.06 || 1;
  [low, high] = [low - pad, high + pad];
  return figure(title, hint, (width) => {
    const label = Math.min(LABEL, width * 0.3), height = TOP + rows.length * ROW + BOTTOM;
    const px = (v) => label + ((v - low) / (high - low)) * (width - label - VERDICT);
    const bottom = height - BOTTOM;
    const grid = ticks(low, high, (width - label - VERDICT) / 60).map((v) => s("g", { class: "grid" },
      s("line", { x1: px(v), x2: px(v), y1: TOP, y2: bottom }), s("text", { x: px(v), y: bottom + 15, "text-anchor": "middle" }, v === 0 ? "0" : signed(v, Number.isInteger(v) ? 0 : 1))));
    const lines = rows.map((row, i) => {
      const y = TOP + i * ROW + ROW / 2, color = `c${row.color}`;
      const text = `${row.label}: ${signed(row.mean, 1)} [${signed(row.low, 1)}, ${signed(row.high, 1)}], ${row.verdict}`;
      return s("g", { role: "img", "aria-label": text }, s("title", {}, text),
        s("text", { class: "strong", x: label - 8, y: y + 4, "text-anchor": "end" }, row.label),
        row.low !== null && row.high !== null ? s("line", { class: `line ${color}`, x1: px(row.low), x2: px(row.high), y1: y, y2: y }) : null,
        s("rect", { class: `mean ${color}`, x: px(row.mean) - 5, y: y - 5, width: 10, height: 10, transform: `rotate(45 ${px(row.mean)} ${y})` }),
        row.seeds.map((x) => linked(x.href, `seed ${x.seed}: ${signed(x.value, 1)}`, s("circle", { class: `dot seed ${color}`, cx: px(x.value), cy: y, r: 3.5 }))),
        s("text", { x: width - VERDICT + 10, y: y + 4, class: row.verdict === "open" ? "" : "strong" }, row.verdict));
    });
    return s("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, grid,
      s("line", { class: "base", x1: px(0), x2: px(0), y1: TOP, y2: bottom }), lines,
      s("text", { x: (label + width - VERDICT) / 2, y: height - 4, "text-anchor": "middle" }, "points"));
  });
}

/**
 * Exchange rates f on a log2 axis. rows: { label, color, href, f, low, high, n, multiples, flat, text }. Null is
 * beyond the curve of learning alone, 0 before it.
 */
export function exchangePlot(title, hint, rows) {
  const ends = rows.flatMap((r) => [r.n, r.multiples[0], r.multiples[r.multiples.length - 1]]);
  const low = Math.log2(Math.min(...ends)) - 0.3, high = Math.log2(Math.max(...ends)) + 0.3;
  return figure(title, hint, (width) => {
    const label = Math.min(LABEL, width * 0.3), height = TOP + rows.length * ROW + BOTTOM, bottom = height - BOTTOM;
    const px = (v) => label + ((Math.log2(v) - low) / (high - low)) * (width - label - VERDICT - 40);
    const grid = [];
    for (let k = Math.ceil(low); k <= high; k++) {
      grid.push(s("g", { class: "grid" }, s("line", { x1: px(2 ** k), x2: px(2 ** k), y1: TOP, y2: bottom }), s("text", { x: px(2 ** k), y: bottom + 15, "text-anchor": "middle" }, number(2 ** k))));
    }
    const lines = rows.map((row, i) => {
      const y = TOP + i * ROW + ROW / 2, first = row.multiples[0], last = row.multiples[row.multiples.length - 1];
      const at = (v) => px(v === null ? last : v === 0 ? first : Math.min(Math.max(v, first), last));
      const name = linked(row.href, `runs of ${row.label}`, s("text", { class: "strong", x: label - 8, y: y + 4, "text-anchor": "end" }, row.label));
      const parity = s("line", { class: "parity", x1: px(row.n), x2: px(row.n), y1: y - 9, y2: y + 9 });
      if (row.flat) return s("g", {}, name, parity, s("text", { x: px(first), y: y + 4 }, "not identifiable"));
      const arrow = (x, way) => s("path", { class: `head c${row.color}`, d: `M${x + way * 7} ${y}l${-way * 7} -4v8z` });
      return s("g", { role: "img", "aria-label": `${row.label}: f = ${row.text}` }, s("title", {}, `f = ${row.text}, n = ${number(row.n)}`), name, parity,
        s("line", { class: `line c${row.color}`, x1: at(row.low), x2: at(row.high), y1: y, y2: y }),
        row.high === null ? arrow(at(null), 1) : null, row.low === 0 ? arrow(at(0), -1) : null,
        linked(row.href, `runs of ${row.label}`, s("circle", { class: `dot c${row.color}`, cx: at(row.f), cy: y, r: 4.5 })),
        s("text", { x: width - VERDICT - 28, y: y + 4 }, row.text));
    });
    return s("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, grid, lines,
      s("text", { x: (label + width - VERDICT) / 2, y: height - 4, "text-anchor": "middle" }, "f; upright line: n"));
  });
}
