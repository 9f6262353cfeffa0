// The replies of a run: filters, full-text search, links; all replies to one problem. The address holds the whole state.

import { badge, h, link, notice, number, select, signed, table } from "./dom.js";
import { exported, get } from "./data.js";
import { runTabs } from "./run.js";

const REWARDS = [["", "any"], ["positive", "above 0"], ["zero", "0 or less"], ["none", "not judged"]];
const FINISHES = [["", "any"], ["stop", "stop"], ["length", "token limit"], ["not_attempted", "not attempted"], ["withheld", "withheld"]];
const USED = [["", "any"], ["used", "used"], ["clipped", "no gradient"], ["zero", "advantage 0"], ["none", "no sample"]];
const USE_NAMES = Object.fromEntries(USED.slice(1));

/** A badge of the verdict; with the reward where that is not the usual 1 or 0. */
function verdict(reply, withReward = true) {
  if (reply.reward === null) return badge(reply.status || "not judged", "warn");
  const right = reply.status === "ok", partly = !right && reply.reward > 0;
  const text = partly ? "partly right" : reply.status;
  const usual = reply.reward === (right ? 1 : 0);
  return badge(usual || !withReward ? text : `${text} ${number(reply.reward)}`, right ? "good" : partly ? "warn" : "bad");
}

function useBadge(use) {
  return badge(USE_NAMES[use], { used: "good", clipped: "warn" }[use] || "");
}

function progress(index) {
  if (!index || index.complete) return index?.error ? notice(index.error, "bad") : "";
  const bar = h("progress", { max: index.total, value: index.done });
  return h("p", { class: "notice", role: "status" }, bar, ` Indexing: ${number(index.done)} of ${number(index.total)} steps, newest first. The list grows until it is complete.`);
}

export async function rolloutsView(start, page) {
  const { id } = start;
  let params = start;  // the latest choice; the address follows it
  const run = await get("run", { id });
  const agents = run.agents.map((a) => a.name), learners = run.agents.filter((a) => a.learns).map((a) => a.name);
  const learner = () => params.learner || learners[0];
  const state = h("div"), list = h("div"), more = h("div", { class: "bar" }), count = h("p", { class: "hint" });
  page.title(run.id, run.path, runTabs(id));
  const set = (key) => (value) => {
    params = { ...params, [key]: value, offset: "" };
    list.setAttribute("aria-busy", "true");
    const asked = params;
    page.stay("rollouts", params, () => refresh().catch((error) => { if (asked === params) fail(error); }));
  };
  const load = (next) => { params = next; page.go("rollouts", params); };
  const steps = h("input", { type: "number", min: 1, max: run.steps, name: "step", value: params.step || "", placeholder: "all", onchange: (e) => set("step")(e.target.value) });
  const search = h("input", { type: "search", name: "search", value: params.q || "", placeholder: "words in replies and messages, then Enter", onchange: (e) => { set("q")(e.target.value); e.target.blur(); } });
  const form = h("div", { class: "bar filters" },
    h("label", { class: "field" }, h("span", {}, "step"), steps),
    select("author", params.author || "", [["", "any"], ...agents], set("author")),
    select("reward", params.reward || "", REWARDS, set("reward")),
    select("finish", params.finish || "", FINISHES, set("finish")),
    select("learner", learner(), learners, set("learner")),
    select("used", params.used || "", USED, set("used")),
    h("label", { class: "field grow" }, h("span", {}, "search (/)"), search),
    h("button", { type: "button", onclick: () => load({ id }) }, "clear"));
  let complete = false;

  async function refresh(event) {
    if (event?.index) state.replaceChildren(progress(event.index));
    if (event && complete && !(run.state === "running" && !params.offset)) return;
    const asked = params;
    const found = await get("rollouts", { ...asked, learner: learner() });
    if (asked !== params) return;  // a later choice has its own request
    list.removeAttribute("aria-busy");
    state.replaceChildren(progress(found.index), exported?.partial ? notice(exported.partial) : "");
    complete = !found.index || found.index.complete;
    const focused = document.activeElement?.getAttribute?.("href");
    const last = found.offset + found.rows.length;
    count.textContent = found.total ? `${number(found.offset + 1)} to ${number(last)} of ${number(found.total)} replies` : "";
    list.replaceChildren(found.rows.length ? rows(found.rows) : notice(complete ? "No reply matches." : "No reply matches yet."));
    more.replaceChildren(
      h("button", { type: "button", disabled: !found.offset, onclick: () => load({ ...params, offset: Math.max(0, found.offset - 50) || "" }) }, "← previous"),
      h("button", { type: "button", disabled: last >= found.total, onclick: () => load({ ...params, offset: last }) }, "next →"));
    if (focused) list.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
  }

  function fail(error) {
    list.removeAttribute("aria-busy");
    list.replaceChildren(notice(error.message, "bad"));
    count.textContent = "";
    more.replaceChildren();
  }

  function rows(found) {
    const address = (r) => link("problem", { id, step: r.step, problem: r.problem, reply: `${r.author}-${r.number}` });
    const open = (r) => (event) => {
      if (!event.target.closest("a") && getSelection().isCollapsed) location.hash = address(r);
    };
    return table([
      { title: "step", cell: (r) => r.step },
      { title: "problem", left: true, cell: (r) => h("a", { href: address(r), "data-row": "" }, r.problem) },
      { title: "author", left: true, cell: (r) => [h("i", { class: `key c${agents.indexOf(r.author) % 8}` }), `${r.author} `, h("span", { class: "hint" }, `#${r.number}`)] },
      { title: "verdict", left: true, cell: (r) => verdict(r, false) },
      { title: "reward", cell: (r) => number(r.reward) },
      { title: "tokens", cell: (r) => [number(r.tokens), r.finish === "length" ? h("span", { class: "hint", title: "reached the token limit" }, " ⤓") : ""] },
      { title: `for ${learner()}`, left: true, cell: (r) => r.uses[learner()] ? useBadge(r.uses[learner()]) : "" },
      { title: "reply", left: true, cell: (r) => h("span", { class: "preview" }, r.text.replace(/\n/g, " ⏎ ")) },
    ], found, { class: "replies", row: (r) => ({ onclick: open(r) }) });
  }

  await refresh();
  return { node: h("div", {}, form, state, count, list, more), refresh, pulse: (e) => e.index && refresh(e), watch: { id } };
}

// ---------------------------------------------------------------- one problem

/** All agents' replies to one problem, side by side. */
export async function problemView(params, page) {
  const { id } = params;
  const data = await get("problem", { id, step: params.step || "", problem: params.problem || "" });
  page.title(id, null, runTabs(id));
  const other = (problem, text) => problem ? h("a", { class: "button", href: link("problem", { id, step: data.step, problem }) }, text) : h("span", { class: "button off" }, text);
  const top = h("div", { class: "facts" },
    h("a", { href: link("rollouts", { id, step: data.step }) }, `step ${data.step}`),
    h("b", {}, data.problem), badge(data.task),
    h("span", { class: "hint" }, `problem ${data.place[0]} of ${data.place[1]}`),
    other(data.before, "← previous"), other(data.after, "next →"));
  const question = h("section", { class: "card" },
    data.question === null ? h("p", { class: "hint" }, "The question is not shown", data.missing ? `: ${data.missing}` : ".")
      : [h("pre", { class: "text" }, data.question), h("p", {}, h("span", { class: "hint" }, "answer "), h("b", {}, data.answer))]);
  const columns = data.agents.filter((a) => data.replies.some((r) => r.author === a)).map((agent) => {
    const mine = data.replies.filter((r) => r.author === agent);
    const judged = mine.filter((r) => r.reward !== null);
    const mean = judged.length ? judged.reduce((a, r) => a + r.reward, 0) / judged.length : null;
    return h("section", { class: "column", "aria-label": agent },
      h("h2", {}, h("i", { class: `key c${data.agents.indexOf(agent) % 8}` }), agent, h("span", { class: "hint" }, ` mean reward ${number(mean)}`)),
      mine.map((reply) => replyCard(reply, data, params)));
  });
  const node = h("div", {}, top, data.stored ? null : notice("This run stores no samples of the step (log.samples = false): advantages and weights are not known."),
    question, h("div", { class: "side" }, columns));
  queueMicrotask(() => setTimeout(() => node.querySelector(".chosen")?.scrollIntoView({ block: "center" })));
  return { node };
}

function replyCard(reply, data, params) {
  const key = `${reply.author}-${reply.number}`;
  const rows = Object.entries(reply.learners).map(([learner, use]) => h("tr", {},
    h("td", { class: "left" }, learner),
    h("td", {}, number(use.ratio)),
    h("td", {}, use.advantage === undefined ? "–" : signed(use.advantage)),
    h("td", {}, number(use.weight)),
    h("td", { class: "left" }, use.use ? useBadge(use.use) : null, use.why ? h("div", { class: "hint why" }, use.why) : null)));
  return h("article", { class: "reply card" + (params.reply === key ? " chosen" : ""), tabindex: "0", "data-row": "" },
    h("div", { class: "facts" }, h("span", { class: "hint" }, `#${reply.number}`), verdict(reply),
      h("span", { class: "hint" }, `${number(reply.tokens)} tokens, ${reply.finish.replaceAll("_", " ")}`)),
    h("pre", { class: "text" }, reply.reply_start ? h("span", { class: "hint" }, reply.reply_start) : null, reply.text || h("span", { class: "hint" }, "(no text)")),
    reply.detail ? h("p", { class: "detail" }, h("span", { class: "hint" }, "verifier: "), reply.detail) : null,
    h("table", { class: "uses" }, h("thead", {}, h("tr", {}, ["learner", "s", "advantage", "weight", ""].map((t, i) => h("th", { class: i === 0 || i === 4 ? "left" : null }, t)))), h("tbody", {}, rows)));
}
