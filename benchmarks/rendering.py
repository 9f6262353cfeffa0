"""The rendering law over real tokenizers and real solutions, every ordered pair.

    python benchmarks/rendering.py --data DATA --tokenizers QWEN3 LLAMA3_2 GEMMA3 ...

DATA has math_train.jsonl.gz and gsm8k_train.jsonl.gz (fields question and solution). Each folder
has a tokenizer.json and its config; without a chat template the template "plain" is used. The
source's reply is a published solution, encoded by the source's tokenizer. The learner's sample is made
as in training, then decoded by transformers and compared with prompt, text and end token.

Prints markdown: for every pair the fraction kept, the drops by reason, and the learner's tokens per
token of the source; then the ratios as a matrix and the time per sample.
"""

import argparse
import gzip
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hacrl.algorithms import Needs
from hacrl.text.render import Renderer, RenderSettings, load_tokenizer
from hacrl.training.samples import SampleMaker, SampleReport
from hacrl.types import (
    Finish,
    Group,
    Message,
    Problem,
    Sampling,
    Status,
    Trajectory,
    Turn,
    Verdict,
)

FILES = ("math_train.jsonl.gz", "gsm8k_train.jsonl.gz")


def read_rows(data: Path, count: int) -> list[dict[str, str]]:
    """`count` solutions, half from each file, evenly spread over it."""
    chosen = []
    for name in FILES:
        with gzip.open(data / name, "rt", encoding="utf-8") as lines:
            rows = [row for row in map(json.loads, lines) if row.get("solution")]
        part = count // len(FILES)
        chosen += [rows[i * len(rows) // part] for i in range(part)]
    return chosen


def name_of(folder: Path) -> str:
    return folder.parent.name if folder.name in ("models", "tokenizer") else folder.name


def write(
    name: str, renderer: Renderer, problems: dict[str, Problem], rows: Sequence[dict[str, str]]
) -> tuple[list[Group], Counter[str]]:
    """The solutions as if this source had sampled them, one group per problem."""
    lost: Counter[str] = Counter()
    groups = []
    for row in rows:
        prompt = renderer.prompt(problems[row["id"]].messages)
        ids = renderer.continuation(prompt, row["solution"])
        if ids is None:
            lost["the source cannot write it"] += 1
            continue
        text, shareable = renderer.text(prompt, (*ids, renderer.end_ids[0]))
        assert text == row["solution"]
        trajectory = Trajectory(
            problem_id=row["id"],
            task="math",
            agent=name,
            index=0,
            step=0,
            policy_version=0,
            turns=(Turn("assistant", text, True),),
            finish=Finish.STOP,
            mean_logprob=-1.0,
            num_tokens=len(ids) + 1,
            verdict=Verdict(1.0, Status.OK),
            verifier="published",
            sampling=Sampling(1.0, 4096),
            shareable=shareable,
        )
        groups.append(Group(row["id"], "math", (trajectory,)))
    return groups, lost


def check_law(
    groups: Sequence[Group], problems: dict[str, Problem], renderer: Renderer, learner: str
) -> SampleReport:
    """The samples of one pair; each is decoded without code of hacrl and compared."""
    maker = SampleMaker(renderer, learner, Needs("logprob"), 1024, 4096)
    samples, report = maker.make(groups, [], problems)
    texts = {g.problem_id: g.trajectories[0].text for g in groups}
    decode = renderer.tokenizer.backend_tokenizer.decode
    end = decode([report.end_token], skip_special_tokens=False)
    for sample in samples:
        prompt = sample.token_ids[: -sample.num_reply_tokens]
        expected = decode(list(prompt), skip_special_tokens=False) + texts[sample.problem_id] + end
        assert decode(list(sample.token_ids), skip_special_tokens=False) == expected, sample
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizers", nargs="+", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--count", type=int, default=500)
    args = parser.parse_args()

    rows = read_rows(args.data, args.count)
    problems = {
        r["id"]: Problem(r["id"], (Message("user", r["question"]),), "", "math") for r in rows
    }
    team: dict[str, Renderer] = {}
    for folder in args.tokenizers:
        tokenizer = load_tokenizer(folder)
        settings = RenderSettings(template=None if tokenizer.chat_template else "plain")
        team[name_of(folder)] = Renderer(tokenizer, settings)
    written = {name: write(name, r, problems, rows) for name, r in team.items()}

    print(f"{len(rows)} solutions, {len(team)} tokenizers, {len(team) * (len(team) - 1)} pairs\n")
    print("| source | learner | kept | drops | learner's tokens per source token |")
    print("|---|---|---|---|---|")
    ratios: dict[tuple[str, str], float] = {}
    seconds: Counter[str] = Counter()
    for source, (groups, lost) in written.items():
        for learner, renderer in team.items():
            if learner == source:
                continue
            start = time.perf_counter()
            report = check_law(groups, problems, renderer, learner)
            seconds[learner] += time.perf_counter() - start  # type: ignore[assignment]
            ratio = ratios[source, learner] = report.metrics()[f"samples/token_ratio/{source}"]
            drops = lost + Counter({str(why): n for (_, why), n in report.drops.items()})
            named = ", ".join(f"{why} {n}" for why, n in sorted(drops.items())) or "none"
            kept = 100 * report.kept[source] / len(rows)
            print(f"| {source} | {learner} | {kept:.1f} % | {named} | {ratio:.3f} |")

    print("\nLearner's tokens per source token (rows: source, columns: learner)\n")
    print("| |" + "".join(f" {name} |" for name in team))
    print("|---|" + "---|" * len(team))
    for source in team:
        cells = (f" {ratios[source, x]:.2f} |" if x != source else " |" for x in team)
        print(f"| {source} |" + "".join(cells))
    per_view = {n: 1000 * s / (len(rows) * (len(team) - 1)) for n, s in seconds.items()}
    print("\nMilliseconds per sample, check included: ", end="")
    print(", ".join(f"{n} {ms:.2f}" for n, ms in per_view.items()))


if __name__ == "__main__":
    main()
