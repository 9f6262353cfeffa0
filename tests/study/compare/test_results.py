"""Numbers and verdicts from hand-made agent runs."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from team import member, team

from hacrl.config import parse_config
from hacrl.errors import UserError
from hacrl.statistics import Estimate
from hacrl.study.compare.finished import FinishedRuns, model_digests
from hacrl.study.compare.reading import AgentRun, Point, mean_metrics
from hacrl.study.compare.report import as_json, render, render_page, verdicts
from hacrl.study.compare.results import Difference, Results, difference, make_rows
from hacrl.study.compare.suite import Run, Suite

LENGTH = {"kind": "function", "options": {"path": "rewards:length"}}
CONFIG = parse_config(team(member("ant", "wren"), member("bee", "wren", learn=False), steps=9))


def agent_run(arm: str, seed: int, *scores: float, **fields: Any) -> AgentRun:
    """An agent that starts at 0.2 and ends at the mean of these scores, one for each problem."""
    run = Run("pair", arm, seed, Path("out/runs/pair", arm, f"seed-{seed}"), CONFIG)
    curve = (Point(0, 0, 0.0, 0.2), Point(2, 100, 8.0, sum(scores) / len(scores)))
    by_problem = {f"p{i}": score for i, score in enumerate(scores)}
    return AgentRun(
        run, "ant", curve, by_problem, **{"updates": 4, "metrics": {"peers/used": 0.5}} | fields
    )


def results(*agent_runs: AgentRun, reference: str = "alone") -> Results:
    arms = dict.fromkeys(r.run.arm for r in agent_runs)
    tables = {"base": {}, "seeds": [1], "reference": reference, "arms": [{"name": a} for a in arms]}
    suite = Suite.model_validate(tables)
    rows = make_rows(suite, agent_runs, reference, Path("out"))
    return Results(suite, reference, (), tuple(rows), (), 4, 1, {})


def test_differences_are_paired_by_seed_and_problem() -> None:
    """Seed 1: (1,1,0,1) - (0,1,0,1) = mean 1/4; seed 2: (1,1,1,1) - (0,1,1,0) = 1/2; seed 3 has no
    partner. Mean 3/8; deviation sqrt(1/32) = 0.176777, half 12.7062 x 0.176777 / sqrt(2) = 1.58828."""
    scores = {1: (1, 1, 0, 1), 2: (1, 1, 1, 1), 3: (0,)}
    mine = [agent_run("team", seed, *values) for seed, values in scores.items()]
    theirs = [agent_run("alone", 2, 0, 1, 1, 0), agent_run("alone", 1, 0, 1, 0, 1)]
    found = difference(mine, theirs)
    assert found.seeds.mean == pytest.approx(0.375)
    assert found.seeds.high == pytest.approx(0.375 + 1.58828, abs=1e-4)
    assert found.seeds.count == 2
    assert (found.above, found.below) == (2, 0)
    assert difference(mine, [agent_run("alone", 9, 1)]) is None
    found = difference([agent_run("team", 1, 1, 1, 1)], [agent_run("alone", 1, 0, 1)])
    assert found.seeds.mean == 0.5  # p2 is in one of the two only


def test_the_interval_of_a_mean_reward_is_not_cut_at_1() -> None:
    """Rewards up to 1.2: 1.05 and 1.15, mean 1.1, half 12.7062 x 0.05."""
    runs = [agent_run("team", seed, score) for seed, score in ((1, 1.05), (2, 1.15))]
    [accuracy] = results(*runs, reference="team").rows
    assert accuracy.after.high == 1.0  # of an accuracy
    reward = parse_config(CONFIG.model_dump() | {"verifier": LENGTH})
    runs = [replace(r, run=replace(r.run, config=reward)) for r in runs]
    [row] = results(*runs, reference="team").rows
    assert row.after.low == pytest.approx(1.1 - 0.63531, abs=1e-5)
    assert row.after.high == pytest.approx(1.1 + 0.63531, abs=1e-5)


def test_replies_that_are_not_judged_are_in_the_report() -> None:
    """FIRST_HOUR 1: counts over the seeds beside the accuracy, and the first message."""
    runs = [agent_run("team", seed, 1, 0, failure="f failed on 1 of 4") for seed in (1, 2)]
    runs = [replace(r, curve=(r.curve[0], replace(r.last, judged=(3, 1)))) for r in runs]
    text = render(results(*runs, agent_run("alone", 1, 0, 1)))
    assert "50.0 [50.0, 50.0] (of 6 judged, 2 not) |" in text or "50.0±0.0 (of 6 judged" in text
    assert "pair / ant, team, last evaluation: f failed on 1 of 4. These replies are" in text
    assert text.count("judged,") == 1  # not beside arms whose replies were all judged


@pytest.mark.parametrize(("used", "reported"), [(0.003, True), (0.06, False)])
def test_an_arm_that_used_almost_no_peers_is_reported(used: float, reported: bool) -> None:
    team = agent_run("team", 1, 1, 1, metrics={"peers/used": used})
    text = render(results(team, agent_run("alone", 1, 0, 1, metrics={})))
    assert ("ant (pair) under team used 0.3 % of its peers' samples" in text) == reported


@pytest.mark.parametrize(
    ("t", "crossed", "corrected", "verdict"),
    [
        ((0.01, 0.05), (0.02, 0.04), 0.05, "better"),
        ((-0.05, -0.01), (-0.04, -0.02), 0.01, "worse"),
        ((0.01, 0.05), (0.02, 0.04), 0.06, "open"),  # not after the correction
        ((-0.001, 0.05), (0.02, 0.04), 0.01, "open"),  # the interval over seeds contains zero
        ((0.01, 0.05), (0.0, 0.04), 0.01, "open"),  # the interval over problems contains zero
        ((0.0, 0.05), (0.02, 0.04), 0.01, "open"),  # zero on the edge is inside
    ],
)
def test_nothing_is_better_if_its_interval_contains_zero(
    t: tuple[float, float], crossed: tuple[float, float], corrected: float, verdict: str
) -> None:
    mean = sum(t) / 2
    seeds, problems = Estimate(mean, *t, 3, "t"), Estimate(mean, *crossed, 3, "crossed bootstrap")
    assert Difference(seeds, problems, 2, 1, p=0.01, corrected=corrected).verdict == verdict


def seeds(arm: str, *gains: int) -> list[AgentRun]:
    """40 problems, of which 20 + gain are right."""
    return [
        agent_run(arm, seed, *(float(i < 20 + gain) for i in range(40)))
        for seed, gain in enumerate(gains, start=1)
    ]


def test_the_sentence_of_each_agent() -> None:
    """Over alone (20 of 40 right) team gains 9, 10, 11 of 40: mean 25 points, deviation 2.5, t over
    seeds: half 4.302653 x 2.5 / sqrt(3) = 6.2, t = 17.3, p = 0.0033, times three arms 0.01. Over
    problems the difference is 1 for a quarter of 40, so the bootstrap reaches further: about 1.96
    sqrt(1/4 x 3/4 / 40) = 13.4. near gains 1, -1, 0: t alone gives [-6.2, +6.2]."""
    found = results(
        *seeds("alone", 0, 0, 0),
        *seeds("near", 1, -1, 0),
        *seeds("team", 9, 10, 11),
        *seeds("worst", -9, -10, -11),
    )
    [sentence] = verdicts(found)
    assert sentence == (
        "ant (pair) against alone: better: team +25.0; worse: worst -25.0; open: near +0.0."
    )
    assert found.rows[1].difference.interval.low == pytest.approx(-0.062, abs=1e-3)
    corrected = {r.arm: r.difference.corrected for r in found.rows if r.difference}
    assert corrected["team"] == pytest.approx(0.00995, abs=2e-4)
    assert corrected["near"] == 1.0


def test_the_correction_takes_a_win_back() -> None:
    """Gains 10, 8, 12: t = 10 / (2 / sqrt(3)) = 8.66, 1 - 8.66 / sqrt(2 + 75) = 0.0131: a win alone,
    but five such arms against one reference need 0.0131 x 5 = 0.065."""
    one = results(*seeds("alone", 0, 0, 0), *seeds("team", 10, 8, 12))
    assert "better: team +25.0." in next(verdicts(one))
    many = [r for n in range(5) for r in seeds(f"team{n}", 10, 8, 12)]
    five = results(*seeds("alone", 0, 0, 0), *many)
    assert all(r.difference.verdict == "open" for r in five.rows if r.difference)
    assert "open: team0 +25.0*, team1 +25.0*" in next(verdicts(five))
    assert "for all 5 comparisons" in render(five)


def test_an_effect_on_few_problems_is_not_certain_because_the_seeds_agree() -> None:
    """Every seed gains the first of two problems: no spread over seeds, so t has p = 0. Means of
    resampled problems go from 0 to 1, a deviation of 1 / (2 x 1.96) around 0.5: p = 0.05."""
    mine = [agent_run("team", seed, 1, 0) for seed in range(8)]
    found = difference(mine, [agent_run("alone", seed, 0, 0) for seed in range(8)])
    assert found.seeds.low == 0.5 and (found.crossed.low, found.crossed.high) == (0, 1)
    assert found.p == pytest.approx(0.05)


def test_a_comparison_of_lent_runs_counts_once() -> None:
    """Three teams have the same two runs of ant, which learns alone: p needs no correction."""
    runs = [*seeds("alone", 0, 0, 0), *seeds("team", 10, 8, 12)]
    lent = [replace(r, run=replace(r.run, team=team)) for team in "bc" for r in runs]
    found = results(*runs, *lent)
    assert found.comparisons == 1 and "for all 1 comparisons" in render(found)
    assert {r.difference.verdict for r in found.rows if r.difference} == {"better"}
    assert len([r for r in found.rows if r.difference]) == 3


def test_the_settings_of_teams_and_of_single_agents_are_in_the_report() -> None:
    found = results(*seeds("alone", 0, 0), *seeds("team", 1, 2))
    tables = {"teams": [{"name": "pair", "agents": [{"name": "ant", "learning_rate": 0.5}]}]}
    tables |= {"base": {}, "seeds": [1], "reference": "alone", "overrides": ["steps=9"]}
    arms = [{"name": "alone"}, {"name": "team", "agents": {"ant": {"api_key": "hunter2"}}}]
    text = render(replace(found, suite=Suite.model_validate(tables | {"arms": arms})))
    assert "\nAll runs: steps=9\n" in text and "\nArm alone: the base config\n" in text
    assert '\nTeam pair: { name = "ant", learning_rate = 0.5 }\n' in text
    assert "\nArm team: agents.ant={ api_key = *** }\n" in text


def test_one_seed_has_an_interval_over_problems_and_no_verdict() -> None:
    """20 of 40 problems are gained: bootstrap half width about 1.96 sqrt(1/4 / 40) = 15.5 points."""
    found = results(*seeds("alone", 0), *seeds("team", 20))
    assert next(verdicts(found)) == "ant (pair) against alone: open: team +50.0."
    assert re.search(r"\+50\.0 \[\+3\d\.\d, \+6\d\.\d\]", render(found))
    assert found.comparisons == 0
    row = as_json(found)["rows"][1]
    assert row["verdict"] == "open" and row["difference"]["seeds"]["low"] is None
    json.dumps(as_json(found), allow_nan=False)


def test_curves() -> None:
    """The seeds end at 0.5 and 0.45."""
    [row] = results(*seeds("alone", 0, -2)).rows
    assert [(band.step, band.rollouts) for band in row.curve] == [(0, 0), (2, 100)]
    last = row.curve[-1]
    assert (last.mean, last.low, last.high) == pytest.approx((0.475, 0.45, 0.5))
    assert row.files[0] == "runs/pair/alone/seed-1/evaluation/step-000002/ant"


def test_html_is_escaped_and_paths_in_markdown_are_relative() -> None:
    found = results(*seeds("alone", 0, 0), *seeds("team", 1, 2))
    found.suite._path = Path("<script>alert(1)</script>.toml")
    text = render_page(found)
    assert "<script>" not in text and "Comparison: script&gt;" in text
    assert "\\u003cscript\\u003ealert(1)" in text
    assert "(../../runs/pair/team/seed-2)" in render(found, "../../")


def test_secrets_do_not_reach_the_reports() -> None:
    """FAULTS D12: `compare ... pool.url=...:secret@` wrote the password into reports."""
    found = results(*seeds("alone", 0, 0), *seeds("team", 1, 2))
    changes = ("sampler.options.api_key=hunter2", "task.train=https://me:hunter2@host/data")
    found = replace(found, changes=changes)
    found.suite.arms[0].overrides.append("sampler.options.api_key=hunter2")
    quoted = replace(found, changes=("task.prompt={question} =",), options=("--out", "a b"))
    command = "Command: hacrl compare suite.toml 'task.prompt={question} =' --out 'a b'\n"
    assert command in render(quoted)
    texts = [render_page(found), render(found), json.dumps(as_json(found))]
    for text in texts:
        assert "hunter2" not in text and "https://***@host/data" in text


def test_runs_of_another_team_are_linked_where_they_are() -> None:
    run = agent_run("alone", 1, 0, 1)
    text = render(results(replace(run, run=replace(run.run, team="three"))), "../")
    assert "three / ant / alone: [seed 1](../runs/pair/alone/seed-1)" in text
    assert "| three / ant | alone | 100 | 4 |  | 1 |" in text  # no time of another team
    assert "| 100 | 4 | 8.0 s | 1 |" in render(results(run))


def test_metrics_are_means_over_steps() -> None:
    """Effective fraction 6/12 and 2/8: mean 0.375. Null values do not count; other metrics are not
    shown."""
    forwarded = {"peers/effective_samples": 6.0, "peers/forwarded": 12}
    rows = [
        {"peers/used": 0.5, **forwarded, "ratio/bee": 0.9},
        {"peers/used": None, **forwarded, "ratio/bee": 0.7},
        {"ratio/bee/short": 0.1, "loss": 3.0},
    ]
    rows[1] |= {"peers/effective_samples": 2.0, "peers/forwarded": 8}
    found = mean_metrics(rows)
    assert set(found) == {"peers/used", "peers/effective_fraction", "ratio/bee"}
    assert found["peers/used"] == 0.5
    assert found["peers/effective_fraction"] == pytest.approx(0.375)
    assert found["ratio/bee"] == pytest.approx(0.8)


def test_theory_checks_are_means_over_checks_then_over_seeds() -> None:
    """Seed 1: gains 0.01 and 0.03, mean 0.02; seed 2: 0.04 and 0.04. Mean 0.03, deviation
    0.02 / sqrt(2), half 12.7062 x 0.01. A seed without checks does not count."""
    gains = {1: (0.01, 0.03), 2: (0.04, 0.04), 3: ()}
    runs = [
        agent_run(
            "hacpo", seed, 0.4, checks=[{"step": 1, "diagnostics/gain/bee": g} for g in found]
        )
        for seed, found in gains.items()
    ]
    [row] = results(*runs, reference="hacpo").rows
    assert set(row.theory) == {"gain/bee"} and row.theory["gain/bee"].count == 2
    assert row.theory["gain/bee"].mean == pytest.approx(0.03)
    assert row.theory["gain/bee"].high == pytest.approx(0.03 + 0.127062, abs=1e-5)


def test_kept_runs_from_other_files_of_a_model_are_refused(tmp_path: Path) -> None:
    """Folders a and b have equal files; c has another tokenizer. The file also has a run from before
    models were kept."""
    runs, rows = {}, [{"run": "pair/gspo/seed-0"}]
    for seed, (place, tokenizer) in enumerate(("a1", "b1", "c2"), start=1):
        folder = tmp_path / place / "final"
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text(tokenizer)
        agents = [{**member("ant"), "model": str(folder)}, member("bee", "wren", learn=False)]
        config = parse_config(team(*agents, steps=9))
        runs[place] = Run("pair", "gspo", seed, tmp_path / "out" / place, config)
    path = tmp_path / "runs.jsonl"
    rows.append({"run": runs["a"].name, "models": model_digests(runs["a"])})
    path.write_text("\n".join(map(json.dumps, rows)))
    FinishedRuns(path).check_models([runs["b"]])
    message = r"seed-1 and pair/gspo/seed-3 have different files of the model pair/ant/final"
    with pytest.raises(UserError, match=message):
        FinishedRuns(path).check_models([runs["c"]])
    rows.append({"run": runs["c"].name, "models": model_digests(runs["c"])})
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=message):
        FinishedRuns(path)
