// Elements and text. Strings become text nodes only: replies are hostile text.

const SVG = "http://www.w3.org/2000/svg";
const CONTROL = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

/** The text with control characters as escapes, e.g. ESC as \x1b. */
export function visible(text) {
  return String(text).replace(CONTROL, (c) => {
    const code = c.charCodeAt(0);
    return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
  });
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return element;
}

/** An HTML element, e.g. h("a", { href: "#runs" }, "Runs"). */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** An address inside the page: #name?key=value, without empty values. */
export function link(name, params) {
  const kept = Object.entries(params || {}).filter(([, v]) => v !== "" && v !== null && v !== undefined);
  const query = new URLSearchParams(kept).toString();
  return "#" + name + (query ? "?" + query : "");
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return value.toLocaleString("en", { maximumSignificantDigits: digits, useGrouping: true }).replace(/^-/, "−");
}

export function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : (100 * value).toFixed(digits) + " %";
}

/** An evaluation's mean: an accuracy in percent, or a mean reward. */
export function score(value, right, digits = 1) {
  return right ? percent(value, digits) : number(value);
}

export function signed(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  return (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
}

/** e.g. "3 min ago" */
export function age(seconds) {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  }
  return seconds < 10 ? "now" : `${Math.floor(seconds)} s ago`;
}

/** A table: columns are { title, cell(row), left, hint }. */
export function table(columns, rows, options = {}) {
  const head = h("tr", {}, columns.map((c) =>
    h("th", { class: c.left ? "left" : null, title: c.hint, scope: "col" }, c.title)));
  const body = rows.map((row, i) => {
    const extra = options.row ? options.row(row, i) : {};
    return h("tr", extra, columns.map((c) => h("td", { class: c.left ? "left" : null }, c.cell(row, i))));
  });
  return h("div", { class: "wide" }, h("table", { class: options.class },
    h("thead", {}, head), h("tbody", {}, body)));
}

export function card(title, hint, ...children) {
  return h("section", { class: "card" }, h("h2", {}, title), hint ? h("p", { class: "hint" }, hint) : null, children);
}

export function select(label, value, options, change) {
  const items = options.map((o) => {
    const [key, text] = Array.isArray(o) ? o : [o, o];
    return h("option", { value: key, selected: String(key) === String(value) }, text);
  });
  return h("label", { class: "field" }, h("span", {}, label),
    h("select", { name: label, onchange: (event) => change(event.target.value) }, items));
}

export function badge(text, kind) {
  return h("span", { class: "badge " + (kind || "") }, text);
}

export function notice(text, kind) {
  return h("p", { class: "notice " + (kind || ""), role: kind === "bad" ? "alert" : "status" }, text);
}

/** A small name and its value. */
export function fact(name, value) {
  return h("span", {}, h("span", { class: "hint" }, name), " ", h("b", {}, value));
}
