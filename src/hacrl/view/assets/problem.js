// All agents' replies to one problem, side by side.

import { badge, h, link, notice, number, signed } from "./dom.js";
import { get } from "./data.js";
import { runTabs } from "./run.js";
import { useBadge, verdict } from "./rollouts.js";

export async function problemView(params, page) {
  const { id } = params;
  const lacking = [["id", "name of the run"], ["step", "step"], ["problem", "id of the problem"]].filter(([key]) => !params[key]);
  if (lacking.length) throw new Error(`The link is incomplete: it lacks the ${lacking.map(([key, text]) => `${text} (${key}=…)`).join(" and the ")}. Open the problem from the list of rollouts.`);
  const data = await get("problem", { id, step: params.step, problem: params.problem });
  page.title(id, null, runTabs(id));
  const other = (problem, text) => problem ? h("a", { class: "button", href: link("problem", { id, step: data.step, problem }) }, text) : h("span", { class: "button off" }, text);
  const top = h("div", { class: "facts" },
    h("a", { href: link("rollouts", { id, step: data.step }) }, `step ${data.step}`),
    h("b", {}, data.problem), badge(data.task),
    data.place ? h("span", { class: "hint" }, `problem ${data.place[0]} of ${data.place[1]}`) : null,
    data.place ? [other(data.before, "← previous"), other(data.after, "next →")] : null);
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
    h("td", { class: "left" }, useBadge(use.use), use.why ? h("div", { class: "hint why" }, use.why) : null)));
  return h("article", { class: "reply card" + (params.reply === key ? " chosen" : ""), tabindex: "0", "data-row": "" },
    h("div", { class: "facts" }, h("span", { class: "hint" }, `#${reply.number}`), verdict(reply),
      h("span", { class: "hint" }, `${number(reply.tokens)} tokens, ${reply.finish.replaceAll("_", " ")}`)),
    h("pre", { class: "text" }, reply.reply_start ? h("span", { class: "hint" }, reply.reply_start) : null, reply.text || h("span", { class: "hint" }, "(no text)")),
    reply.detail ? h("p", { class: "detail" }, h("span", { class: "hint" }, "verifier: "), reply.detail) : null,
    h("table", { class: "uses" }, h("thead", {}, h("tr", {}, ["learner", "s", "advantage", "weight", ""].map((t, i) => h("th", { class: i === 0 || i === 4 ? "left" : null }, t)))), h("tbody", {}, rows)));
}
