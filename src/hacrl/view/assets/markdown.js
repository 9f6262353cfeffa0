// The Markdown that `hacrl compare` writes: headings, paragraphs, lists, tables and links. No HTML.

import { h } from "./dom.js";

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
export function markdown(text, address = (path) => path) {
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
