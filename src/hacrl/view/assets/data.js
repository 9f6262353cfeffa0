// Where data come from: the server, or the data embedded in an exported file.

const embedded = document.getElementById("data");
export const exported = embedded ? JSON.parse(embedded.textContent) : null;

function address(name, params) {
  return "/api/" + name + "?" + new URLSearchParams(Object.entries(params).filter(([, v]) => v !== "")).toString();
}

/** The answer of /api/NAME. An Error with one sentence if the server refuses. */
export async function get(name, params = {}) {
  if (exported) return fromFile(name, params);
  const response = await fetch(address(name, params));
  if (response.status === 401) throw new Error(await response.text());
  const value = await response.json().catch(() => ({ error: `the server answers ${response.status}` }));
  if (!response.ok) throw new Error(value.error || `the server answers ${response.status}`);
  return value;
}

/** Calls `changed(event)` now and on every change; returns a function that stops it. */
export function watch(params, changed) {
  if (exported) return () => {};
  const source = new EventSource(address("events", params));
  const light = (on) => document.body.classList.toggle("offline", !on);
  source.onmessage = (event) => { light(true); changed(JSON.parse(event.data)); };
  source.onerror = () => light(false);
  return () => source.close();
}

// ---------------------------------------------------------------- an exported file

function fromFile(name, params) {
  if (name === "rollouts") return filtered(params);
  if (name === "problem") {
    const found = exported.problems.find((p) => String(p.step) === params.step && p.problem === params.problem);
    if (!found) throw new Error("this file does not contain the problem");
    return found;
  }
  const found = exported.answers[name];
  if (found === undefined) throw new Error("this file does not contain it; open the run with `hacrl view`");
  return found;
}

/** The rows of a filtered list, from the problems in the file (as view/replies.py). */
function filtered(params) {
  const words = (params.q || "").toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [];
  for (const problem of exported.problems) {
    for (const reply of problem.replies) {
      const whole = (reply.reply_start || "") + reply.text;
      const text = (whole + " " + reply.detail).toLowerCase();
      const learner = params.learner || problem.learners[0];
      const uses = Object.fromEntries(Object.entries(reply.learners).map(([k, v]) => [k, v.use]));
      const kept = (!params.step || String(problem.step) === params.step)
        && (!params.problem || problem.problem === params.problem)
        && (!params.author || reply.author === params.author)
        && (!params.reward || matches(reply.reward, params.reward))
        && (!params.finish || reply.finish === params.finish)
        && (!params.used || uses[learner] === params.used)
        && words.every((word) => text.includes(word));
      if (kept) rows.push({ ...reply, step: problem.step, problem: problem.problem, uses, text: whole.slice(0, 200) });
    }
  }
  const offset = Number(params.offset || 0);
  return { rows: rows.slice(offset, offset + 50), total: rows.length, offset, index: null, partial: exported.partial };
}

function matches(reward, wanted) {
  if (wanted === "none") return reward === null;
  if (wanted === "positive") return reward !== null && reward > 0;
  return reward !== null && reward <= 0;
}
