// Line charts as SVG. They fill their container, and show values under the pointer or the arrow keys.

import { h, number, s, visible } from "./dom.js";

const LEFT = 46, RIGHT = 12, TOP = 10, BOTTOM = 26;

/** A round distance for about `count` values from low to high. */
function distance(low, high, count) {
  const raw = (high - low || 1) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= raw * 0.999);
}

/** About `count` round values from low to high. */
export function ticks(low, high, count) {
  const step = distance(low, high, count), found = [];
  // Multiples of the step: a sum of steps would miss 0 by a rounding error.
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)) + 0);
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

/** Axes, bands, lines and points as one SVG element, and what the pointer needs; null without values. */
function drawing(shown, options, width) {
  const height = options.height || 200, format = options.format || number;
  const drawn = shown.map((one) => thinned(one, options.stacked ? 200 : (width - LEFT - RIGHT) / 2, options.stacked));
  const range = ranges(drawn, options);
  if (!range) return null;
  const [x0, x1, y0, y1, step] = range;
  const px = (v) => LEFT + ((v - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
  const py = (v) => height - BOTTOM - ((v - y0) / (y1 - y0)) * (height - TOP - BOTTOM);
  const grid = ticks(y0, y1, (y1 - y0) / step).map((v) => s("g", { class: "grid" },
    s("line", { x1: LEFT, x2: width - RIGHT, y1: py(v), y2: py(v) }),
    s("text", { x: LEFT - 6, y: py(v) + 4, "text-anchor": "end" }, format(v))));
  const unit = options.xLabel ? null : s("text", { class: "axis", x: LEFT - 12, y: height - 8, "text-anchor": "end" }, "step");
  const below = ticks(x0, x1, Math.max(2, width / 110)).filter(Number.isInteger).map((v) =>
    s("text", { class: "axis", x: px(v), y: height - 8, "text-anchor": "middle" }, number(v)));
  const many = drawn.length > 3 && !options.stacked;  // their bands would hide one another
  const bands = drawn.filter((o) => o.low && !many).map((o) => s("path", { class: `band c${o.color}` + (options.stacked ? " solid" : ""), d: area(o, px, py) }));
  const lines = options.stacked ? [] : drawn.map((o) => s("path", { class: `line c${o.color}` + (o.dash ? ` dash${o.dash}` : ""), d: path(o.x, o.y, px, py) }));
  const dots = options.stacked ? [] : drawn.flatMap((o) => points(o, options, px, py, format));
  const cross = s("line", { class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, grid, unit, below, bands, cross, lines, dots,
    s("line", { class: "base", x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM }));
  const xs = [...new Set(drawn.flatMap((o) => o.x))].sort((a, b) => a - b);
  return { svg, px, cross, drawn, xs, width, format, at: null };
}

/** Ends of both axes and the distance of the ticks beside; null without values. */
function ranges(drawn, options) {
  let [x0, x1] = extent(drawn, (o) => [o.x]);
  let [y0, y1] = extent(drawn, (o) => [o.y, o.low, o.high]);
  if (!Number.isFinite(y0)) return null;
  if (options.zero) { y0 = Math.min(0, y0); y1 = y1 === 0 && y0 === 0 ? 1 : y1; }
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 1; y1 += Math.abs(y1) * 0.1 || 1; }
  const step = distance(y0, y1, 4);  // both ends are ticks
  y0 = Math.floor(y0 / step + 1e-9) * step;
  y1 = Math.ceil(y1 / step - 1e-9) * step;
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  return [x0, x1, y0, y1, step];
}

/** Points of a series that has few, linked where it has an address. */
function points(one, options, px, py, format) {
  if (one.x.length > 60 || (one.x.length > 1 && !options.points)) return [];
  return one.x.map((x, i) => {
    if (one.y[i] === null) return null;
    const dot = s("circle", { class: `dot c${one.color}`, cx: px(x), cy: py(one.y[i]), r: 3 });
    return one.href ? s("a", { href: one.href, "aria-label": `${one.name}, ${number(x)}: ${format(one.y[i])}` }, dot) : dot;
  });
}

/** The value of one series; a stacked one begins at the end of that below. */
function valueAt(one, options, i) {
  return options.stacked ? one.high[i] - one.low[i] : one.y[i];
}

/** Show the values at the x with this index in `tip`. */
function showValues(frame, tip, options, index) {
  frame.at = Math.max(0, Math.min(frame.xs.length - 1, index));
  const x = frame.xs[frame.at], left = frame.px(x);
  for (const [name, value] of [["x1", left], ["x2", left], ["visibility", "visible"]]) frame.cross.setAttribute(name, value);
  const rows = frame.drawn.map((o) => [o, o.x.indexOf(x)]).filter(([o, i]) => i >= 0 && o.y[i] !== null).map(([o, i]) => {
    const range = o.low && !options.stacked ? ` [${frame.format(o.low[i])}, ${frame.format(o.high[i])}]` : "";
    return h("div", {}, h("i", { class: `key c${o.color}` }), o.name, " ", h("b", {}, frame.format(valueAt(o, options, i))), range);
  });
  tip.replaceChildren(h("div", { class: "hint" }, `${options.xLabel || "step"} ${number(x)}`), ...rows);
  tip.hidden = false;
  const half = left > frame.width / 2;
  tip.style.left = half ? "auto" : `${left + 24}px`;
  tip.style.right = half ? `${frame.width - left + 8}px` : "auto";
}

/** Values under the pointer and by the arrow keys. `now()` is the present drawing. */
function follow(box, tip, options, now) {
  const leave = () => { tip.hidden = true; now()?.cross.setAttribute("visibility", "hidden"); };
  box.addEventListener("pointermove", (event) => {
    const frame = now();
    if (!frame) return;
    const at = event.clientX - box.getBoundingClientRect().left;
    let best = 0;
    frame.xs.forEach((x, i) => { if (Math.abs(frame.px(x) - at) < Math.abs(frame.px(frame.xs[best]) - at)) best = i; });
    showValues(frame, tip, options, best);
  });
  box.addEventListener("pointerleave", leave);
  box.addEventListener("blur", leave);
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], frame = now();
    if (!move || !frame) return;
    event.preventDefault();
    showValues(frame, tip, options, (frame.at ?? (move > 0 ? -1 : frame.xs.length)) + move);
  });
}

/**
 * A chart of lines. options: title (a text or a function), hint, format, height, zero (the axis starts at
 * 0), points, stacked, legend, xLabel, empty. Its update(series) takes
 * [{ name, color, dash, x, y, low, high, href }].
 */
export function lineChart(options) {
  const hidden = new Set();
  const title = () => (typeof options.title === "function" ? options.title() : options.title);
  const box = h("div", { class: "plot", tabindex: "0", role: "img" });
  const legend = h("div", { class: "legend" }), tip = h("div", { class: "tip", hidden: true }), caption = h("b", {}, title());
  const figure = h("figure", { class: "chart card" },
    h("figcaption", {}, caption, options.hint ? h("span", { class: "hint" }, options.hint) : null), box, tip, legend);
  let series = [], frame = null;

  function draw() {
    frame = drawing(series.filter((one) => !hidden.has(one.name)), options, Math.max(240, box.clientWidth || 500));
    box.replaceChildren(frame ? frame.svg : h("p", { class: "empty" }, options.empty || "no value yet"));
    if (!frame) return box.removeAttribute("aria-label");
    const last = frame.drawn.map((o) => `${o.name} ${frame.format(valueAt(o, options, o.y.length - 1))}`).join(", ");
    box.setAttribute("aria-label", visible(`${title()}. Last values: ${last}`));
  }

  function toggle(one, button) {
    hidden.has(one.name) ? hidden.delete(one.name) : hidden.add(one.name);
    button.setAttribute("aria-pressed", String(!hidden.has(one.name)));
    draw();
  }

  figure.update = (next) => {
    caption.textContent = visible(title());
    series = options.stacked ? stacked(next) : next;
    const entries = series.length < 2 && !options.legend ? [] : series;
    legend.replaceChildren(...entries.map((one) => h("button", {
      type: "button", title: "show or hide", "aria-pressed": String(!hidden.has(one.name)), onclick: (event) => toggle(one, event.currentTarget),
    }, h("i", { class: `key c${one.color}` + (one.dash ? ` dash${one.dash}` : "") }), one.name)));
    draw();
  };
  follow(box, tip, options, () => frame);
  new ResizeObserver(draw).observe(box);
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
