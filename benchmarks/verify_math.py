"""Accuracy of the `math` verifier: false negatives and false positives beside plain math-verify.

    python benchmarks/verify_math.py --data DIR [--seed 0] [--altered 2000] [--misses 20]

DIR has files NAME.jsonl or NAME.jsonl.gz, one JSON object per line with `id` and `answer`. Three
judges see the same replies:

    math     hacrl's verifier
    boxed    verify(parse("\\boxed{reference}"), parse(reply)) of math-verify
    plain    verify(parse(reference), parse(reply)) of math-verify

Checks: every reference answer against itself; altered answers, half right in another notation, half
wrong but close; eight workers on any number of cores; expressions that never return among normal ones.
"""

import argparse
import gzip
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from altered_right import RIGHT, Change
from altered_wrong import WRONG

from hacrl.types import Problem, Status, Verdict
from hacrl.verify import VerifierConfig, VerifierPool, count_statuses

JUDGES = {"math": "math", "boxed": "verify_math:Boxed", "plain": "verify_math:Plain"}


class Plain:
    """math-verify as in its README."""

    name, version, reward_range = "plain", "1", (0.0, 1.0)
    reference = "{}"

    def prepare(self) -> None:
        from math_verify import parse, verify

        verify(parse(r"$\frac{1}{2}$"), parse("so it is 0.5"))

    def judge(self, reply: str, problem: Problem) -> Verdict:
        from math_verify import parse, verify

        good = verify(parse(self.reference.replace("{}", problem.answer)), parse(reply))
        return Verdict(float(good), Status.OK if good else Status.WRONG)


class Boxed(Plain):
    """The same with the reference answer in a box."""

    name = "boxed"
    reference = r"\boxed{{}}"


SENTENCES = [
    r"Adding up, we get the result. The final answer is $\boxed{{}}$.",
    r"Therefore \boxed{{}}",
    r"First $a=3$ and \boxed{7} is not it. So: \[ \boxed{{}} \] as wanted.",
    r"We try 12 and 15 in turn. The answer is ${}$.",
]
"""{} is the answer. The last has no box."""


def references(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(set, id, answer) of all rows."""
    for path in sorted(folder.glob("*.jsonl*")):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            for row in map(json.loads, file):
                if "answer" in row:
                    yield path.name.split(".")[0], row["id"], row["answer"]


def altered(rows: list[tuple[str, str, str]], changes: list[Change], count: int, seed: int):
    """`count` altered answers, spread evenly over the kinds of change and the sets."""
    draw = random.Random(seed)
    kinds: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, _, reference in rows:
        for change in changes:
            if change(reference, random.Random(0)) not in (None, reference):
                kinds[change.__name__][name].append(reference)
    by_name = {change.__name__: change for change in changes}
    found, seen = [], set()
    order = sorted(kinds)
    for i in range(count * 50):
        if len(found) == count:
            break
        kind = order[i % len(order)]
        reference = draw.choice(kinds[kind][draw.choice(sorted(kinds[kind]))])
        new = by_name[kind](reference, draw)
        if new is None or new == reference or (reference, new) in seen:
            continue
        seen.add((reference, new))
        found.append((kind, reference, draw.choice(SENTENCES).replace("{}", new), new))
    return found


def judge(kind: str, pairs: list[tuple[str, str]], workers: int, timeout: float = 20.0):
    """Verdicts of (reference, reply) pairs and the seconds they took."""
    settings = VerifierConfig(kind=kind, workers=workers, timeout=timeout)
    with VerifierPool(settings) as pool:
        pool.wait_ready()
        began = time.monotonic()
        items = [
            (reply, Problem(str(i), (), reference, "m"))
            for i, (reference, reply) in enumerate(pairs)
        ]
        return pool.judge_all(items), time.monotonic() - began


def check_referencess(rows: list[tuple[str, str, str]], workers: int, misses: int) -> None:
    print("\n## Reference answers against themselves (rows not OK)\n")
    unique = sorted({reference for _, _, reference in rows})
    pairs = [(reference, rf"So it is \boxed{{{reference}}}.") for reference in unique]
    good = {}
    for judge_name, kind in JUDGES.items():
        verdicts, seconds = judge(kind, pairs, workers)
        good[judge_name] = {g: v.status for g, v in zip(unique, verdicts, strict=True)}
        print(f"{judge_name}: {len(unique)} different references in {seconds:.1f} s")
        if judge_name == "math":
            shown = [(g, v) for g, v in zip(unique, verdicts, strict=True) if v.status != Status.OK]
            for reference, verdict in shown[:misses]:
                print(f"   {verdict.status}: {reference!r}")
    print("\n| set | rows | math | boxed | plain |\n|---|---|---|---|---|")
    table = defaultdict(list)
    for name, _, reference in rows:
        table[name].append(reference)
    table["all"] = [reference for _, _, reference in rows]
    for name, answers in table.items():
        bad = [sum(good[j][g] != Status.OK for g in answers) for j in JUDGES]
        print(f"| {name} | {len(answers)} | " + " | ".join(map(str, bad)) + " |")


def check_altered(rows: list, count: int, seed: int, workers: int, misses: int) -> None:
    for title, changes, wanted in [
        ("Right in another notation: false negatives", RIGHT, True),
        ("Wrong but close: false positives", WRONG, False),
    ]:
        cases = altered(rows, changes, count // 2, seed)
        pairs = [(reference, reply) for _, reference, reply, _ in cases]
        verdicts = {name: judge(kind, pairs, workers)[0] for name, kind in JUDGES.items()}
        missed = {
            name: [i for i, v in enumerate(found) if (v.status == Status.OK) != wanted]
            for name, found in verdicts.items()
        }
        print(f"\n## {title}\n\n| change | cases | math | boxed | plain |\n|---|---|---|---|---|")
        kinds = Counter(case[0] for case in cases)
        docs = {change.__name__: (change.__doc__ or "").strip() for change in changes}
        for kind in [change.__name__ for change in changes if change.__name__ in kinds]:
            bad = [sum(cases[i][0] == kind for i in missed[name]) for name in JUDGES]
            print(f"| {docs[kind]} | {kinds[kind]} | " + " | ".join(map(str, bad)) + " |")
        bad = [f"{len(missed[n])} ({100 * len(missed[n]) / len(cases):.1f} %)" for n in JUDGES]
        print(f"| **all** | {len(cases)} | " + " | ".join(bad) + " |")
        print("\nmath, statuses:", count_statuses(verdicts["math"]))
        for i in missed["math"][:misses]:
            print(f"   {cases[i][0]}: {cases[i][1]!r} <- {cases[i][3]!r} {verdicts['math'][i]}")


POISON = [
    r"9^{9^{9^{9^{9}}}}",
    r"\frac{(10^{10})!}{(10^{9})!}",
    r"\sum_{k=1}^{10^{12}} \frac{1}{k^{2}+\sin k}",
    r"(1+x)^{10^{9}}-(1+x)^{10^{9}-1}",
]


def check_load(rows: list, workers: int) -> None:
    print("\n## Load\n")
    sample = random.Random(0).sample(rows, 1000)
    pairs = [(reference, rf"\boxed{{{reference}}}") for _, _, reference in sample]
    for size in (workers, 8):
        verdicts, seconds = judge("math", pairs, size, timeout=5.0)
        print(f"1,000 references, {size} workers: {seconds:.1f} s, {count_statuses(verdicts)}")
    for poison in POISON:
        pairs = [("x+1", rf"\boxed{{x + {i % 3}}}") for i in range(200)]
        pairs[60] = ("x+1", rf"\boxed{{{poison}}}")
        verdicts, seconds = judge("math", pairs, workers, timeout=2.0)
        others = all(
            (v.status == Status.OK) == (i % 3 == 1) for i, v in enumerate(verdicts) if i != 60
        )
        print(f"poison {poison}: {verdicts[60].status}, others right: {others}, {seconds:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--altered", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--misses", type=int, default=20, help="how many of math's misses to print")
    options = parser.parse_args()
    rows = list(references(options.data))
    if not rows:
        sys.exit(f"--data {options.data} holds no NAME.jsonl with answers")
    check_referencess(rows, options.workers, options.misses)
    check_altered(rows, options.altered, options.seed, options.workers, options.misses)
    check_load(rows, options.workers)


if __name__ == "__main__":
    main()
