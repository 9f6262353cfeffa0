// The team of a hub: members, arrivals in the open step, changes of the team, recorded proofs.

import { badge, card, fact, h, notice, number, table } from "./dom.js";
import { get } from "./data.js";

export async function hubView(params, page) {
  const node = h("div");

  async function refresh() {
    const data = await get("hub");
    page.title(`Team ${data.name}`, data.url);
    const present = data.members.filter((m) => m.state === "member" || m.state.includes("from step"));
    const here = (m) => data.arrived.includes(m.name);
    const done = data.open > data.steps;
    node.replaceChildren(
      h("div", { class: "facts" }, badge(done ? "all steps closed" : `step ${data.open} of ${data.steps} is open`, done ? "calm" : "good"),
        fact("arrived", `${data.arrived.length} of ${present.length}`), fact("deadline", data.deadline ? `${data.deadline} s` : "none"), fact("hub", data.url), fact("team id", data.team.slice(0, 16) + "…")),
      data.proofs ? notice(`${number(data.proofs)} recorded proofs that a member signed two batches for one step.`, "bad") : "",
      table([
        { title: "member", left: true, cell: (m) => m.name },
        { title: "publishes", left: true, cell: (m) => m.publish },
        { title: "state", left: true, cell: (m) => badge(m.state, m.state === "member" ? "good" : m.state.startsWith("joins") ? "calm" : "bad") },
        { title: "since step", left: true, cell: (m) => m.since },
        { title: done ? "last step" : `step ${data.open}`, left: true, cell: (m) => (here(m) ? badge("arrived", "good") : present.includes(m) && !done ? badge("waiting", "warn") : "") },
        { title: "public key", left: true, cell: (m) => h("code", {}, m.key.slice(0, 16) + "…") },
      ], data.members),
      card("Changes of the team", "signed amendments, oldest first", data.amendments.length ? table([
        { title: "#", cell: (a) => a.number }, { title: "change", left: true, cell: (a) => a.kind }, { title: "member", left: true, cell: (a) => a.member },
        { title: "from step", cell: (a) => a.step }, { title: "signed by", left: true, cell: (a) => a.signer },
      ], data.amendments) : h("p", { class: "hint" }, "none")),
      h("p", { class: "hint" }, "Quarantine is each member's own decision: the page of a member's run shows it under “Who teaches whom”."));
  }

  await refresh();
  return { node, refresh, watch: {} };
}
