"""How good is the `math` verifier? False negatives and false positives beside plain math-verify.

    python benchmarks/verify_math.py --data DIR [--seed 0] [--altered 2000] [--misses 20]

DIR holds files NAME.jsonl or NAME.jsonl.gz, one JSON object a line with `id` and `answer`. Three
judges see the same replies:

    math     hacrl's verifier
    boxed    verify(parse("\\boxed{gold}"), parse(reply)) of math-verify
    plain    verify(parse(gold), parse(reply)) of math-verify

Checks: every gold against itself; altered answers, half right but written otherwise, half wrong but
near; eight workers on however few cores; poisoned expressions among good ones.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

from hacrl.types import Problem, Status, Verdict
from hacrl.verify import VerifierConfig, VerifierPool, count_statuses

Change = Callable[[str, random.Random], str | None]
JUDGES = {"math": "math", "boxed": "verify_math:Boxed", "plain": "verify_math:Plain"}


class Plain:
    """math-verify as its README shows it."""

    name, version, reward_range = "plain", "1", (0.0, 1.0)
    gold = "{}"

    def prepare(self) -> None:
        from math_verify import parse, verify

        verify(parse(r"$\frac{1}{2}$"), parse("so it is 0.5"))

    def judge(self, reply: str, problem: Problem) -> Verdict:
        from math_verify import parse, verify

        good = verify(parse(self.gold.replace("{}", problem.answer)), parse(reply))
        return Verdict(float(good), Status.OK if good else Status.WRONG)


class Boxed(Plain):
    """The same with the gold in a box."""

    name = "boxed"
    gold = r"\boxed{{}}"


# --- right, but written otherwise ---------------------------------------------------------------
NUMBER = r"(?<![\w.,\\{}^])-?\d+(?![\w.,\\{}^/:])"
FRACTION = re.compile(r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}")


def fraction_style(gold: str, draw: random.Random) -> str | None:
    """\\frac -> \\dfrac or \\tfrac"""
    if r"\frac" in gold:
        return gold.replace(r"\frac", draw.choice([r"\dfrac", r"\tfrac"]))
    return None


def spaces(gold: str, draw: random.Random) -> str | None:
    """white space around signs and commas"""
    if re.search(r"[A-Za-z]{4}|text|mbox|begin|,\\!|\d,\d{3}", gold):
        return None
    new = re.sub(r"\s*([+=])\s*", r" \1 ", gold).replace(",", r",\ ")
    return new if new != gold else None


def slash(gold: str, draw: random.Random) -> str | None:
    """\\frac{3}{4} -> 3/4"""
    match = FRACTION.fullmatch(gold)
    return f"{match[1]}{match[2]}/{match[3]}" if match else None


def decimal(gold: str, draw: random.Random) -> str | None:
    """a fraction whose decimal ends -> that decimal"""
    match = FRACTION.fullmatch(gold)
    if not match or int(match[3]) == 0:
        return None
    value = Fraction(int(match[2]), int(match[3]))
    for places in range(1, 7):
        if (value * 10**places).denominator == 1:
            return f"{match[1]}{float(value):.{places}f}"
    return None


def unreduced(gold: str, draw: random.Random) -> str | None:
    """\\frac{3}{4} -> \\frac{9}{12}"""
    match = FRACTION.fullmatch(gold)
    if not match:
        return None
    k = draw.randint(2, 5)
    return rf"{match[1]}\frac{{{int(match[2]) * k}}}{{{int(match[3]) * k}}}"


def mixed(gold: str, draw: random.Random) -> str | None:
    """\\frac{7}{4} -> 1\\frac{3}{4}"""
    match = FRACTION.fullmatch(gold)
    if not match or not int(match[3]) or int(match[2]) <= int(match[3]):
        return None
    whole, rest = divmod(int(match[2]), int(match[3]))
    return rf"{match[1]}{whole}\frac{{{rest}}}{{{match[3]}}}" if rest else None


def thousands(gold: str, draw: random.Random) -> str | None:
    """12345 -> 12,345"""
    if not re.fullmatch(r"-?\d{4,}", gold):
        return None
    return f"{int(gold):,}".replace(",", draw.choice([",", "{,}", r",\!", r"\,"]))


def point_zero(gold: str, draw: random.Random) -> str | None:
    """42 -> 42.0, 2.5 -> 2.50"""
    if re.fullmatch(r"-?\d+", gold):
        return gold + ".0"
    return gold + "0" if re.fullmatch(r"-?\d+\.\d+", gold) else None


def unit(gold: str, draw: random.Random) -> str | None:
    """42 -> 42 \\text{ cm}"""
    if re.fullmatch(r"-?\d+(\.\d+)?|\\frac\{\d+\}\{\d+\}|\d+\\pi|\d*\\sqrt\{\d+\}", gold):
        return gold + draw.choice([r"\text{ cm}", r" \text{ square units}", r"\mathrm{~m/s}",
                                   r"\text{ miles}", " degrees", r"^\circ", " dollars"])  # fmt: skip
    return None


def currency(gold: str, draw: random.Random) -> str | None:
    """42 -> \\$42"""
    return r"\$" + gold if re.fullmatch(r"\d+(\.\d+)?", gold) else None


def label(gold: str, draw: random.Random) -> str | None:
    """5 -> x = 5"""
    if re.search(r"[=<>,x:]|text|mbox|\\[gl]e|[A-Za-z]{4}", gold):
        return None
    return f"x = {gold}"


def no_label(gold: str, draw: random.Random) -> str | None:
    """x = 5 -> 5"""
    match = re.fullmatch(r"[A-Za-z](?:\([a-z]\))?\s*=\s*([^=,]+)", gold)
    return match[1] if match else None


def sized_brackets(gold: str, draw: random.Random) -> str | None:
    """( ) -> \\left( \\right), or the other way"""
    if r"\left(" in gold:
        return gold.replace(r"\left(", "(").replace(r"\right)", ")")
    if "(" in gold and gold.count("(") == gold.count(")") and "text" not in gold:
        return gold.replace("(", r"\left(").replace(")", r"\right)")
    return None


def _list(gold: str) -> list[str] | None:
    if re.search(r"text|mbox|[A-Za-z]{4}|\d,\\?!?\d{3}|=", gold):
        return None
    parts, depth, start = [], 0, 0
    for i, c in enumerate(gold):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(gold[start:i].strip())
            start = i + 1
    parts.append(gold[start:].strip())
    return parts if len(parts) > 1 and all(parts) else None


def permuted(gold: str, draw: random.Random) -> str | None:
    """1, 2, 3 -> 3, 1, 2"""
    parts = _list(gold)
    if not parts:
        return None
    new = draw.sample(parts, len(parts))
    return ", ".join(new) if new != parts else ", ".join(reversed(parts))


def braces(gold: str, draw: random.Random) -> str | None:
    """1, 2 -> \\{1, 2\\}"""
    parts = _list(gold)
    return rf"\{{{', '.join(parts)}\}}" if parts else None


def joined_by_and(gold: str, draw: random.Random) -> str | None:
    """1, 2 -> 1 \\text{ and } 2"""
    parts = _list(gold)
    if not parts:
        return None
    return ", ".join(parts[:-1]) + draw.choice([r" \text{ and } ", r"\text{ or }"]) + parts[-1]


def _terms(gold: str) -> list[str] | None:
    if re.search(r"[=<>,:]|text|mbox|\\(?:pm|cup|begin|le|ge|in)|[A-Za-z]{4}", gold):
        return None
    terms, depth, start = [], 0, 0
    for i, c in enumerate(gold):
        depth += (c in "([{") - (c in ")]}")
        if c in "+-" and depth == 0 and i > start and gold[:i].rstrip()[-1:] not in "^*/(":
            terms.append(gold[start:i].strip())
            start = i
    terms.append(gold[start:].strip())
    return terms if len(terms) > 1 and all(terms) else None


def reordered(gold: str, draw: random.Random) -> str | None:
    """a + b - c -> b - c + a"""
    terms = _terms(gold)
    if not terms:
        return None
    signed = [t if t[0] in "+-" else f"+{t}" for t in terms[1:] + terms[:1]]
    return " ".join(signed).removeprefix("+")


def power_of_ten(gold: str, draw: random.Random) -> str | None:
    """4.5e33 -> 4.5 \\times 10^{33}"""
    match = re.fullmatch(r"(-?[\d.]+)e(-?\d+)", gold)
    times = draw.choice([r"\times", r"\cdot"])
    return rf"{match[1]} {times} 10^{{{match[2]}}}" if match else None


def rewritten_words(gold: str, draw: random.Random) -> str | None:
    """\\text{Evelyn} -> Evelyn or evelyn"""
    match = re.fullmatch(r"\\(?:text|mbox)\{([A-Za-z ]+)\}", gold)
    if not match:
        return None
    return draw.choice([match[1], match[1].lower(), rf"\textbf{{{match[1]}}}"])


def other_matrix(gold: str, draw: random.Random) -> str | None:
    """pmatrix -> bmatrix"""
    return gold.replace("pmatrix", "bmatrix") if "pmatrix" in gold else None


def under_root(gold: str, draw: random.Random) -> str | None:
    """2\\sqrt{3} -> \\sqrt{12}"""
    match = re.fullmatch(r"(\d+)\s*\\sqrt\{(\d+)\}", gold)
    return rf"\sqrt{{{int(match[1]) ** 2 * int(match[2])}}}" if match else None


RIGHT: list[Change] = [
    fraction_style, spaces, slash, decimal, unreduced, mixed, thousands, point_zero, unit, currency,
    label, no_label, sized_brackets, permuted, braces, joined_by_and, reordered, power_of_ten,
    rewritten_words, other_matrix, under_root,
]  # fmt: skip


# --- wrong, but near ----------------------------------------------------------------------------
def other_digit(gold: str, draw: random.Random) -> str | None:
    """one digit changed"""
    places = [m.start() for m in re.finditer(r"(?<![_\d.e^{-])\d", gold) if "_" not in gold]
    if not places or "text" in gold:
        return None
    at = draw.choice(places)
    return gold[:at] + draw.choice([d for d in "123456789" if d != gold[at]]) + gold[at + 1 :]


def off_by_one(gold: str, draw: random.Random) -> str | None:
    """42 -> 43 or 41"""
    return str(int(gold) + draw.choice([-1, 1])) if re.fullmatch(r"-?\d+", gold) else None


def other_sign(gold: str, draw: random.Random) -> str | None:
    """5 -> -5"""
    if not re.fullmatch(r"-?(\d+(\.\d+)?|\\d?frac\{\d+\}\{\d+\}|\d*\\sqrt\{\d+\}|\d*\\pi)", gold):
        return None
    return (gold[1:] if gold[0] == "-" else f"-{gold}") if re.search(r"[1-9]", gold) else None


def upside_down(gold: str, draw: random.Random) -> str | None:
    """\\frac{3}{4} -> \\frac{4}{3}"""
    match = FRACTION.fullmatch(gold)
    if not match or match[2] == match[3] or int(match[2]) == 0:
        return None
    return rf"{match[1]}\frac{{{match[3]}}}{{{match[2]}}}"


def moved_point(gold: str, draw: random.Random) -> str | None:
    """42 -> 4.2, 1.5 -> 15"""
    if re.fullmatch(r"[1-9]\d+", gold):
        return f"{gold[:-1]}.{gold[-1]}"
    return str(float(gold) * 10) if re.fullmatch(r"[1-9]\d*\.\d+", gold) else None


def dropped(gold: str, draw: random.Random) -> str | None:
    """1, 2, 3 -> 1, 2"""
    parts = _list(gold)
    return ", ".join(parts[:-1]) if parts and len(set(parts)) == len(parts) else None


def added(gold: str, draw: random.Random) -> str | None:
    """1, 2 -> 1, 2, 77"""
    parts = _list(gold)
    return f"{gold}, 77" if parts and "(" not in gold else None


def other_brackets(gold: str, draw: random.Random) -> str | None:
    """[1, 2) -> (1, 2)"""
    if not re.fullmatch(r"\[[^()\[\]]*[)\]]|\([^()\[\]]*\]", gold):
        return None
    return ("(" if gold[0] == "[" else "[") + gold[1:]


def swapped(gold: str, draw: random.Random) -> str | None:
    """(1, 2) -> (2, 1)"""
    match = re.fullmatch(r"\(([^(),]+),([^(),]+)\)", gold)
    if not match or match[1].strip() == match[2].strip() or "infty" in gold:
        return None
    return f"({match[2].strip()}, {match[1].strip()})"


def other_exponent(gold: str, draw: random.Random) -> str | None:
    """4.5e33 -> 4.5e34, x^2 -> x^3"""
    match = re.fullmatch(r"(-?[\d.]+)e(-?\d+)", gold)
    if match:
        return f"{match[1]}e{int(match[2]) + draw.choice([-1, 1])}"
    powers = list(re.finditer(r"(?<=[a-z])\^\{?(\d)\}?", gold))
    if not powers:
        return None
    at = draw.choice(powers)
    return f"{gold[: at.start()]}^{int(at[1]) + 1}{gold[at.end() :]}"


def other_mantissa(gold: str, draw: random.Random) -> str | None:
    """1.6e-19 -> 1.8e-19"""
    match = re.fullmatch(r"(-?[\d.]+)e(-?\d+)", gold)
    return f"{float(match[1]) + draw.choice([0.2, 1.0]):.4g}e{match[2]}" if match else None


def other_variable(gold: str, draw: random.Random) -> str | None:
    """4x + 1 -> 4z + 1"""
    letters = re.findall(r"(?<![A-Za-z\\])[xyzntabk](?![A-Za-z(])", gold)
    if not letters or re.search(r"[=<>]|text|mbox|[\\A-Za-z]{5}", gold):
        return None
    new = draw.choice([c for c in "wvuq" if c not in gold])
    return re.sub(rf"(?<![A-Za-z\\]){draw.choice(letters)}(?![A-Za-z(])", new, gold)


def lost_letter(gold: str, draw: random.Random) -> str | None:
    """4t -> 4"""
    match = re.fullmatch(r"(\d+)\s*[a-z]", gold)
    return match[1] if match else None


def plus_minus(gold: str, draw: random.Random) -> str | None:
    """a + b -> a - b"""
    terms = _terms(gold)
    if not terms:
        return None
    last = terms[-1]
    if not last.strip("+-0 "):
        return None
    return " ".join(terms[:-1]) + (" - " if last[0] == "+" else " + ") + last[1:].strip()


def fewer_terms(gold: str, draw: random.Random) -> str | None:
    """a + b + c -> a + b"""
    terms = _terms(gold)
    return " ".join(terms[:-1]) if terms and terms[-1].strip("+-0 ") else None


def other_base(gold: str, draw: random.Random) -> str | None:
    """66_8 -> 66_9"""
    match = re.fullmatch(r"(\w+)_\{?(\d)\}?", gold)
    return f"{match[1]}_{int(match[2]) + 1}" if match else None


WRONG: list[Change] = [
    other_digit, off_by_one, other_sign, upside_down, moved_point, dropped, added, other_brackets,
    swapped, other_exponent, other_mantissa, other_variable, lost_letter, plus_minus, fewer_terms,
    other_base,
]  # fmt: skip

SENTENCES = [
    r"Adding up, we get the result. The final answer is $\boxed{{}}$.",
    r"Therefore \boxed{{}}",
    r"First $a=3$ and \boxed{7} is not it. So: \[ \boxed{{}} \] as wanted.",
    r"We try 12 and 15 in turn. The answer is ${}$.",
]
"""{} is the answer. The last has no box."""


# --- running -------------------------------------------------------------------------------------
def golds(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(set, id, answer) of all rows."""
    for path in sorted(folder.glob("*.jsonl*")):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            for row in map(json.loads, file):
                if "answer" in row:
                    yield path.name.split(".")[0], row["id"], row["answer"]


def altered(rows: list[tuple[str, str, str]], changes: list[Change], count: int, seed: int):
    """`count` altered answers, as evenly over the kinds of change and the sets as they allow."""
    draw = random.Random(seed)
    kinds: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, _, gold in rows:
        for change in changes:
            if change(gold, random.Random(0)) not in (None, gold):
                kinds[change.__name__][name].append(gold)
    by_name = {change.__name__: change for change in changes}
    found, seen = [], set()
    order = sorted(kinds)
    for i in range(count * 50):
        if len(found) == count:
            break
        kind = order[i % len(order)]
        gold = draw.choice(kinds[kind][draw.choice(sorted(kinds[kind]))])
        new = by_name[kind](gold, draw)
        if new is None or new == gold or (gold, new) in seen:
            continue
        seen.add((gold, new))
        found.append((kind, gold, draw.choice(SENTENCES).replace("{}", new), new))
    return found


def judge(kind: str, pairs: list[tuple[str, str]], workers: int, timeout: float = 20.0):
    """Verdicts of (gold, reply) pairs and the seconds they took."""
    settings = VerifierConfig(kind=kind, workers=workers, timeout=timeout)
    with VerifierPool(settings) as pool:
        pool.wait_ready()
        began = time.monotonic()
        items = [(reply, Problem(str(i), (), gold, "m")) for i, (gold, reply) in enumerate(pairs)]
        return pool.judge_all(items), time.monotonic() - began


def check_golds(rows: list[tuple[str, str, str]], workers: int, misses: int) -> None:
    print("\n## Golds against themselves (rows not OK)\n")
    unique = sorted({gold for _, _, gold in rows})
    pairs = [(gold, rf"So it is \boxed{{{gold}}}.") for gold in unique]
    good = {}
    for judge_name, kind in JUDGES.items():
        verdicts, seconds = judge(kind, pairs, workers)
        good[judge_name] = {g: v.status for g, v in zip(unique, verdicts, strict=True)}
        print(f"{judge_name}: {len(unique)} different golds in {seconds:.1f} s")
        if judge_name == "math":
            shown = [(g, v) for g, v in zip(unique, verdicts, strict=True) if v.status != Status.OK]
            for gold, verdict in shown[:misses]:
                print(f"   {verdict.status}: {gold!r}")
    print("\n| set | rows | math | boxed | plain |\n|---|---|---|---|---|")
    table = defaultdict(list)
    for name, _, gold in rows:
        table[name].append(gold)
    table["all"] = [gold for _, _, gold in rows]
    for name, answers in table.items():
        bad = [sum(good[j][g] != Status.OK for g in answers) for j in JUDGES]
        print(f"| {name} | {len(answers)} | " + " | ".join(map(str, bad)) + " |")


def check_altered(rows: list, count: int, seed: int, workers: int, misses: int) -> None:
    for title, changes, wanted in [
        ("Right but written otherwise: false negatives", RIGHT, True),
        ("Wrong but near: false positives", WRONG, False),
    ]:
        cases = altered(rows, changes, count // 2, seed)
        pairs = [(gold, reply) for _, gold, reply, _ in cases]
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
    pairs = [(gold, rf"\boxed{{{gold}}}") for _, _, gold in sample]
    for size in (workers, 8):
        verdicts, seconds = judge("math", pairs, size, timeout=5.0)
        print(f"1,000 golds, {size} workers: {seconds:.1f} s, {count_statuses(verdicts)}")
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
    rows = list(golds(options.data))
    if not rows:
        sys.exit(f"--data {options.data} holds no NAME.jsonl with answers")
    check_golds(rows, options.workers, options.misses)
    check_altered(rows, options.altered, options.seed, options.workers, options.misses)
    check_load(rows, options.workers)


if __name__ == "__main__":
    main()
