"""Prepare a run to continue: choose the step to continue from, and repair damaged files.

Batches are rebuilt from the journals, snapshots from the batches, and best.json from the metrics.
Metrics after the checkpoint are measured again anyway; if older ones are damaged, an older checkpoint is
used.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping

from hacrl.config import Config
from hacrl.safe_text import plural
from hacrl.store.checkpoint import Checkpoints, newest_common
from hacrl.store.files import RESTORE, changed, steps_in
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory

Note = Callable[[str], None]


def first_step(run: RunDirectory, checkpoints: Mapping[str, Checkpoints], note: Note) -> int:
    """Return the newest step with checkpoints of all learners and all metrics up to it, 0 if there is
    none. Remove later metrics, and set later checkpoints aside."""
    rows, damage = run.intact_metrics()
    among = None
    if damage:
        last = rows[-1]["step"] - (rows[-1]["kind"] == "evaluation") if rows else 0
        among = range(last + 1)
    first = newest_common(checkpoints, note, among) or 0
    if damage:
        note(
            f"{damage}. Training continues from step {first + 1}; replies of finished steps are read "
            "from the journals."
        )
    elif not first and run.journalled():
        note(
            "there is no complete checkpoint yet: training starts again at step 1. Replies in the "
            "journals are not sampled again."
        )
    _forget_other_inputs(run, first, note)
    for own in checkpoints.values():
        # A later step whose metrics are gone must not count once all learners have saved it. Metrics are
        # removed last: a kill in between leaves no checkpoint without them.
        for place in own.set_aside(first):
            note(
                f"{place}, a later checkpoint, does not count; the next one of this agent replaces it."
            )
    run.rewind(first)
    for name, own in checkpoints.items():
        evaluations = run.metric_rows("evaluation", name)
        scores = {r["step"]: r["accuracy"] for r in evaluations if r["accuracy"] is not None}
        if error := own.repair_best(scores):
            note(f"{error}. This is done.")
    return first


def _forget_other_inputs(run: RunDirectory, first: int, note: Note) -> None:
    """Replies of a step belong to the weights that sampled it. After an accepted change of the inputs
    ("pending"), or if the run goes back to a step before one, the weights differ from then on, so later
    steps are sampled again."""
    content = run.fingerprint()
    changes = [entry for entry in content.get("history", ()) if entry.get("sampled_again")]
    after = [entry for entry in changes if entry["step"] > first]
    if after:
        note(
            f"the run goes back to a step before a change of its inputs: replies from step {first + 1} "
            "on are sampled again."
        )
    if after or any(entry.get("pending") for entry in changes):
        run.forget_from(first)
        for entry in changes:
            entry["step"] = min(entry["step"], first)
            entry.pop("pending", None)
        run.set_fingerprint(content)


def damaged_batches(
    config: Config, run: RunDirectory, pool: Pool, first: int, note: Note
) -> dict[str, list[int]]:
    """Return, by agent, the steps before `first` whose batch must be published again. Damaged snapshots
    are removed, also those of later steps with a damaged batch: the run closes these steps again. With
    late = "go_on" those before `first` are written again here, because not all agents may have taken
    part."""
    damaged: dict[str, list[int]] = defaultdict(list)
    reopened = []
    for step in range(max([first, *(step + 1 for step in steps_in(pool.folder))])):
        error = pool.damaged(step) if step < first or pool.closed(step) else None
        # Batches of other owners have no journal here. From `first` on, agents publish while others may
        # read already: they wait for one another only in an open step.
        checked = not error and pool.closed(step) and (config.hub or step >= first)
        if checked and not all(pool.whole(step, name) for name in pool.members(step)):
            error = changed(pool.folder, f"a batch of step {step + 1} is damaged", RESTORE)
        if error:
            pool.reopen(step)
            reopened.append(step)
        if error and config.runtime.late == "go_on" and step < first:
            members = took_part(config, run, step)
            lost = sorted({*members} - {*pool.arrived(step)})
            if lost or not members:
                reason = f"{error}. The batches of {', '.join(lost) or 'all'} are missing, too"
                raise changed(pool.folder, reason, RESTORE)
            pool.close(step, members)
            error = None
        if step < first:
            for name in [a.name for a in config.agents] if error else pool.members(step):
                if not pool.whole(step, name) and not pool.is_away(step):
                    damaged[name].append(step)
    count = len(reopened) + sum(map(len, damaged.values()))
    if count:
        step = min([*reopened, *(steps[0] for steps in damaged.values())])
        note(
            f"{pool.folder}: {plural(count, 'damaged or missing file')}, the first of step {step + 1}: "
            "written again from the journals."
        )
    return damaged


def took_part(config: Config, run: RunDirectory, step: int) -> list[str]:
    """The agents whose batches counted in a finished step: their metrics do not say absent."""
    rows = (row for row in run.metric_rows("train") if row["step"] == step)
    here = {row["agent"] for row in rows if not row.get("absent")}
    return [agent.name for agent in config.agents if agent.name in here]
