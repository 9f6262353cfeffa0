// Line charts as SVG. They fill their container, and show values under the pointer or the arrow keys.

import { h, number, s, visible } from "./dom.js";

const LEFT = 46, RIGHT = 12, TOP = 10, BOTTOM = 26;

/** About `count` round values from low to high. */
export function ticks(low, high, count) {
  const span = high - low || 1;
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= raw * 0.999);
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Number(v.toPrecision(12)));
  return found;
}

/** Means, lowest and highest values of equal parts, where there are more points than pixels. */
function thinned(series, most, means) {
  const { x, y } = series;
  const size = Math.ceil(x.length / most);
  if (size <= 1) return series;
  const out = { ...series, x: [], y: [], low: [], high: [] };
  for (let i = 0; i < x.length; i += size) {
    const part = [];
    for (let j = i; j < Math.min(i + size, x.length); j++) if (y[j] !== null) part.push(j);
    if (!part.length) continue;
    const ys = part.map((j) => y[j]);
    out.x.push(x[part[part.length >> 1]]);
    out.y.push(mean(ys));
    const lows = series.low ? part.map((j) => series.low[j]) : ys, highs = series.high ? part.map((j) => series.high[j]) : ys;
    out.low.push(means ? mean(lows) : Math.min(...lows));
    out.high.push(means ? mean(highs) : Math.max(...highs));
  }
  return out;
}

function mean(values) {
  return values.reduce((a, b) => a + b, 0) / values.length;
}

function extent(all, pick) {
  let low = Infinity, high = -Infinity;
  for (const one of all) {
    for (const list of pick(one)) {
      for (const v of list || []) if (v !== null && Number.isFinite(v)) { low = Math.min(low, v); high = Math.max(high, v); }
    }
  }
  return [low, high];
}

/** A path through the points; a missing value interrupts it. */
function path(xs, ys, px, py) {
  let text = "", pen = false;
  for (let i = 0; i < xs.length; i++) {
    if (ys[i] === null || ys[i] === undefined) { pen = false; continue; }
    text += (pen ? "L" : "M") + px(xs[i]).toFixed(1) + " " + py(ys[i]).toFixed(1);
    pen = true;
  }
  return text;
}

function area(one, px, py) {
  const at = one.x.map((_, i) => i).filter((i) => one.low[i] !== null && one.high[i] !== null);
  if (!at.length) return "";
  const up = at.map((i) => `${px(one.x[i]).toFixed(1)} ${py(one.high[i]).toFixed(1)}`);
  const down = at.reverse().map((i) => `${px(one.x[i]).toFixed(1)} ${py(one.low[i]).toFixed(1)}`);
  return "M" + up.join("L") + "L" + down.join("L") + "Z";
}

/**
 * A chart of lines. options: title, hint, format, zero (axis starts at 0), top (least upper end),
 * points, stacked, xLabel. Its update(series) takes [{ name, color, dash, x, y, low, high, href }].
 */
export function lineChart(options) {
  const hidden = new Set();
  const box = h("div", { class: "plot", tabindex: "0", role: "img" });
  const legend = h("div", { class: "legend" });
  const tip = h("div", { class: "tip", hidden: true });
  const figure = h("figure", { class: "chart card" },
    h("figcaption", {}, h("b", {}, options.title), options.hint ? h("span", { class: "hint" }, options.hint) : null),
    box, tip, legend);
  let series = [], frame = null;

  function draw() {
    const width = Math.max(240, box.clientWidth || 500), height = options.height || 200;
    const shown = series.filter((one) => !hidden.has(one.name));
    const drawn = shown.map((one) => thinned(one, options.stacked ? 200 : (width - LEFT - RIGHT) / 2, options.stacked));
    let [x0, x1] = extent(drawn, (o) => [o.x]);
    let [y0, y1] = extent(drawn, (o) => [o.y, o.low, o.high]);
    if (!Number.isFinite(y0)) {
      frame = null;
      box.replaceChildren(h("p", { class: "empty" }, options.empty || "no value yet"));
      return;
    }
    if (options.zero) { y0 = Math.min(0, y0); y1 = y1 === 0 && y0 === 0 ? (options.top ?? 1) : y1; }
    if (options.top !== undefined) y1 = Math.max(y1, options.top);
    if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 1; y1 += Math.abs(y1) * 0.1 || 1; }
    if (!options.zero) { const pad = (y1 - y0) * 0.06; y0 -= pad; y1 += pad; }
    if (x0 === x1) { x0 -= 1; x1 += 1; }
    const px = (v) => LEFT + ((v - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
    const py = (v) => height - BOTTOM - ((v - y0) / (y1 - y0)) * (height - TOP - BOTTOM);
    const format = options.format || number;
    const grid = ticks(y0, y1, 4).map((v) => s("g", { class: "grid" },
      s("line", { x1: LEFT, x2: width - RIGHT, y1: py(v), y2: py(v) }),
      s("text", { x: LEFT - 6, y: py(v) + 4, "text-anchor": "end" }, format(v))));
    const below = ticks(x0, x1, Math.max(2, width / 110)).filter(options.fractions ? () => true : Number.isInteger).map((v) =>
      s("text", { class: "axis", x: px(v), y: height - 8, "text-anchor": "middle" }, number(v)));
    const many = drawn.length > 4 && !options.stacked;  // their bands would hide one another
    const bands = drawn.filter((o) => o.low && !many).map((o) => s("path", { class: `band c${o.color}` + (options.stacked ? " solid" : ""), d: area(o, px, py) }));
    const lines = options.stacked ? [] : drawn.map((o) => s("path", { class: `line c${o.color}` + (o.dash ? ` dash${o.dash}` : ""), d: path(o.x, o.y, px, py) }));
    const dots = drawn.flatMap((o) => o.x.map((x, i) => {
      const alone = o.x.length === 1 || options.points;
      if (!alone || o.y[i] === null || o.x.length > 60 || options.stacked) return null;
      const dot = s("circle", { class: `dot c${o.color}`, cx: px(x), cy: py(o.y[i]), r: 3 });
      return o.href ? s("a", { href: o.href, "aria-label": `${o.name}, ${number(x)}: ${format(o.y[i])}` }, dot) : dot;
    }));
    const cross = s("line", { class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
    box.replaceChildren(s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
      grid, below, bands, cross, lines, dots,
      s("line", { class: "base", x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM })));
    const last = drawn.map((o) => `${o.name} ${format(o.y[o.y.length - 1])}`).join(", ");
    box.setAttribute("aria-label", visible(`${options.title}. Last values: ${last}`));
    frame = { px, cross, drawn, xs: [...new Set(drawn.flatMap((o) => o.x))].sort((a, b) => a - b), width, format, at: null };
  }

  function point(index) {
    if (!frame || !frame.xs.length) return;
    frame.at = Math.max(0, Math.min(frame.xs.length - 1, index));
    const x = frame.xs[frame.at], left = frame.px(x);
    frame.cross.setAttribute("x1", left);
    frame.cross.setAttribute("x2", left);
    frame.cross.setAttribute("visibility", "visible");
    const rows = frame.drawn.map((o) => [o, o.x.indexOf(x)]).filter(([o, i]) => i >= 0 && o.y[i] !== null).map(([o, i]) => {
      const range = o.low && !options.stacked ? ` [${frame.format(o.low[i])}, ${frame.format(o.high[i])}]` : "";
      const value = options.stacked ? o.high[i] - o.low[i] : o.y[i];
      return h("div", {}, h("i", { class: `key c${o.color}` }), o.name, " ", h("b", {}, frame.format(value)), range);
    });
    tip.replaceChildren(h("div", { class: "hint" }, `${options.xLabel || "step"} ${number(x)}`), ...rows);
    tip.hidden = false;
    const half = left > frame.width / 2;
    tip.style.left = half ? "auto" : `${left + 24}px`;
    tip.style.right = half ? `${frame.width - left + 8}px` : "auto";
  }

  function leave() {
    tip.hidden = true;
    if (frame) frame.cross.setAttribute("visibility", "hidden");
  }

  box.addEventListener("pointermove", (event) => {
    if (!frame) return;
    const at = event.clientX - box.getBoundingClientRect().left;
    let best = 0;
    frame.xs.forEach((x, i) => { if (Math.abs(frame.px(x) - at) < Math.abs(frame.px(frame.xs[best]) - at)) best = i; });
    point(best);
  });
  box.addEventListener("pointerleave", leave);
  box.addEventListener("blur", leave);
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !frame) return;
    event.preventDefault();
    point((frame.at ?? (move > 0 ? -1 : frame.xs.length)) + move);
  });
  new ResizeObserver(draw).observe(box);

  figure.update = (next) => {
    series = options.stacked ? stacked(next) : next;
    legend.replaceChildren(...(series.length < 2 && !options.legend ? [] : series.map((one) =>
      h("button", {
        type: "button", "aria-pressed": String(!hidden.has(one.name)), title: "show or hide",
        onclick: (event) => {
          hidden.has(one.name) ? hidden.delete(one.name) : hidden.add(one.name);
          event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(one.name)));
          draw();
        },
      }, h("i", { class: `key c${one.color}` + (one.dash ? ` dash${one.dash}` : "") }), one.name))));
    draw();
  };
  return figure;
}

/** Each series on top of those before it. */
function stacked(series) {
  let below = null;
  return series.map((one) => {
    const low = below || one.y.map(() => 0);
    const high = one.y.map((v, i) => low[i] + (v || 0));
    below = high;
    return { ...one, y: high, low, high };
  });
}
