"""exact, number, choice and function: tables of replies with their verdicts, worked by hand."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.errors import UserError
from hacrl.types import Message, Problem, Status, Verdict
from hacrl.verify import VerifierConfig, VerifierPool, count_statuses, make_verifier
from hacrl.verify.number import misread, numbers_in


def judge(kind: str, reply: str, answer: str, **options: object) -> Verdict:
    verifier = make_verifier(VerifierConfig(kind=kind, options=options))
    return verifier.judge(reply, Problem("p", (), answer, "t"))


def test_a_number_that_is_read_as_another_is_named() -> None:
    """Worked solutions are not named: their last number is meant."""
    wrong = {"3,5": "5", "1 000": "000", "10^6": "6", "2024-01-15": "15"}
    wrong |= {"-$1,200": "1,200", "- 5": "5", "\u20135": "5", "1 1/2": "1/2"}
    for answer, read in wrong.items():
        assert f"misreads 1 reference answer: {answer!r} as {read}." in misread(
            ["42", f" {answer} "]
        )
    plain = ["42", "-7", "3.5", "1,234,567.25", "3/4", "6e23", "5 kg", "2+3=5\n#### 5", "a"]
    plain += ["-1,234.50", "\u22123", "$-5", "-3/4", "-5.", "$18"]
    assert misread(plain) == ""


@pytest.mark.parametrize(
    ("reply", "answer", "status"),
    [
        (" 42\n", "42 ", "ok"),
        ("42.", "42", "wrong"),
        ("Paris", "paris", "wrong"),
        ("  ", "42", "unparsed"),
    ],
)
def test_exact(reply: str, answer: str, status: str) -> None:
    assert judge("exact", reply, answer).status == status


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("17 + 25 = 42.", ["17", "25", "42"]),
        ("1,234.50 and 12,345,678", ["1234.5", "12345678"]),
        ("1,23 or 1,2345", ["1", "23", "1", "2345"]),
        ("-7, +3, \u22125", ["-7", "3", "-5"]),
        ("5-3 and 5 - 3 and x-3", ["5", "3", "5", "3", "3"]),  # an operation, not a sign
        ("x=-3, (-4)", ["-3", "-4"]),
        ("3/4, -1/2, 10/4", ["3/4", "-1/2", "5/2"]),
        ("3/0 then 8", ["8"]),
        ("-1/-2", ["1/2"]),
        (".5 and 0.25", ["1/2", "1/4"]),
        ("wait...42", ["42"]),
        ("version 1.2.3", ["1.2"]),
        ("6.02e23, 1E-3, 2e", [str(602 * 10**21), "1/1000", "2"]),
        ("$18, 50%, 5kg, 3rd", ["18", "50", "5", "3"]),
        ("x2 H2O", []),
        ("it is 5.", ["5"]),
        ("no number", []),
        ("**1,200**", ["1200"]),
        ("答案是42。", ["42"]),
        ("7" * 1001 + " 5", ["5"]),
    ],
)
def test_what_a_number_is(text: str, numbers: list[str]) -> None:
    assert list(numbers_in(text)) == [Fraction(n) for n in numbers]


@pytest.mark.parametrize(
    ("reply", "answer", "options", "status"),
    [
        ("17 + 25 = 42.", "42", {}, "ok"),
        ("17 + 25 = 42.", "17", {"which": "first"}, "ok"),
        ("17 + 25 = 42.", "17", {}, "wrong"),
        ("42.0", "42", {}, "ok"),
        ("6/8", "0.75", {}, "ok"),
        ("1,000", "1000", {}, "ok"),
        ("-42", "42", {}, "wrong"),
        ("0.333333", "1/3", {}, "wrong"),  # exact
        ("0.333333", "1/3", {"tolerance": 1e-5}, "ok"),
        ("99", "100", {"tolerance": 0.01}, "ok"),  # |99 - 100| = 1 <= 0.01 * 100
        ("98.9", "100", {"tolerance": 0.01}, "wrong"),
        ("forty-two", "42", {}, "unparsed"),
        ("42", "forty-two", {}, "error"),
        ("42", "#### 42", {}, "ok"),
        ("1e999 / 1e999", "1", {}, "wrong"),  # the last number is 1e999
    ],
)
def test_number(reply: str, answer: str, options: dict[str, object], status: str) -> None:
    assert judge("number", reply, answer, **options).status == status


@given(st.fractions(max_denominator=10**6), st.text(alphabet="ab =\n", max_size=20))
@settings(max_examples=200, deadline=None)
def test_number_finds_what_was_written(value: Fraction, before: str) -> None:
    assert list(numbers_in(f"{before} {value}.")) == [value]


@pytest.mark.parametrize("text", ["1,111" * 2000, "1/" * 5000, "9" * 100_000, ".1" * 5000])
def test_number_is_quick_on_hostile_text(text: str) -> None:
    list(numbers_in(text))  # a quadratic search would take minutes on the third


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        (r"The answer is A. \boxed{B}", "B"),  # rule 1 before rule 2
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{\textbf{D}}", "D"),
        (r"\boxed{B. Paris}", "B"),
        (r"\boxed{A} no, \boxed{E}", "E"),
        ("The answer is (B), not (C).", "B"),  # rule 2 before rule 5
        ("Answer: c", "C"),
        ("I choose option D because A is false", "D"),  # rule 3
        ("The answer is C. Option A is wrong, and so is option D.", "C"),  # rule 2 before rule 3
        ("The answer is option C", "C"),
        ("**Answer**: C. A and B are wrong.", "C"),
        ("The answer is 'C'. A is not.", "C"),
        ("The answer is “C”, not A.", "C"),
        ("answer: C's value", None),
        ("the answer is **E**", "E"),
        ("To answer a question like this, look at the map. (C)", "C"),  # an article
        ("The best choice is a balanced diet, so (C).", "C"),
        ("The answer is A because it is", "A"),
        ("answer: a", "A"),
        ("Some thoughts about C.\nB", "B"),  # rule 4
        ("**D**", "D"),
        ("A. Rome\nlater: (C)", "C"),  # rule 5 before rule 6
        ("(A) or rather (C)", "C"),  # rule 5
        ("B) Paris, and E is wrong", "B"),  # rule 6 before rule 7
        ("It must be D then", "D"),  # rule 7
        ("A dog barks", None),  # an article
        ("So A", "A"),
        ("Because I say so", None),
        ("F", None),
        ("", None),
        ("I'd say Ba", None),
    ],
)
def test_choice(reply: str, letter: str | None) -> None:
    verdict = judge("choice", reply, "(b)")
    if letter is None:
        assert verdict.status is Status.UNPARSED
    else:
        assert verdict.detail == letter
        assert verdict.status is (Status.OK if letter == "B" else Status.WRONG)


def test_choice_is_quick_on_white_space() -> None:
    """A search that tries every split of the run among its parts would take minutes."""
    assert judge("choice", "The answer is" + "\n" * 4000, "B").status is Status.UNPARSED


def test_choice_letters() -> None:
    assert judge("choice", "answer: G", "G", letters="ABCDEFGHIJ").status is Status.OK
    assert judge("choice", "B", "Paris").status is Status.ERROR


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def judge_by(function: str, *items: tuple[str, Problem], workers: int = 0) -> list[Verdict]:
    """Verdicts of a function of bad_verifiers.py."""
    options = {"path": f"bad_verifiers:{function}"}
    settings = VerifierConfig(kind="function", options=options, timeout=60, workers=workers)
    with VerifierPool(settings) as pool:
        assert pool.label == f"function(bad_verifiers:{function})/1"
        return pool.judge_all(items)


@pytest.mark.usefixtures("importable")
def test_function() -> None:
    """score: 1 if equal; None for "none"; the columns it gets are the row's but for the named."""
    row = Problem("p", (), "42", "t", {"level": 3, "tags": ["a"]})
    rich = Problem("p", (), "42", "t", {"bonus": 0.5})
    items = [("42", row), ("41", row), ("none", row), ("columns", row), ("0", rich), ("42", rich)]
    verdicts = judge_by("score", *items, workers=1)
    # 0.5 is partial credit, 1.5 is outside [0, 1]
    statuses = ["ok", "wrong", "error", "ok", "wrong", "error"]
    assert [v.status.value for v in verdicts] == statuses
    assert [v.reward for v in verdicts] == [1.0, 0.0, 0.0, 1.0, 0.5, 0.0]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_may_change_its_columns(workers: int) -> None:
    """The next call gets those of the file: one tag, and one that the function adds."""
    problem = Problem("p", (), "42", "t", {"tags": ["a"]})
    verdicts = judge_by("grows", *[("42", problem)] * 3, workers=workers)
    assert [v.reward for v in verdicts] == [0.5] * 3


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("name", ["plain", "by_name", "trl_by_name"])
def test_a_function_gets_the_columns_that_it_names(name: str) -> None:
    """Question and answer also come under their names in the file: a default in the signature must
    not hide that the column exists."""
    asked = {"problem": "6 * 7?", "solution": 42}
    message = Message("user", "Calculate 6 * 7?")
    problem = Problem("p", (message,), "42", "t", {"completion": "trap"}, asked=asked)
    verdicts = judge_by(name, ("42", problem), ("41", problem))
    assert [v.status.value for v in verdicts] == ["ok", "wrong"]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("name", "reply", "status", "detail"),
    [
        ("trl", "42", "ok", "1"),
        ("trl", "41", "wrong", "0"),
        ("trl_messages", "42", "error", "completions and prompts are lists of plain text"),
        ("trl_number", "42", "error", "returned 1.0, not a list of one reward"),
    ],
)
def test_reward_functions_of_trl_are_accepted(
    name: str, reply: str, status: str, detail: str
) -> None:
    """FIRST_HOUR 2: f(completions, **columns) -> [reward]."""
    columns = {"level": 1, "tags": ["a"]}
    problem = Problem("p", (Message("user", "how many?"),), "42", "t", columns)
    (verdict,) = judge_by(name, (reply, problem))
    assert verdict.status.value == status and detail in verdict.detail


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("-1", ["reward -1 is outside verifier.options.reward_range = [0, 1]", "(r + 1) / 2"]),
        ("17.0", ["reward 17 is outside verifier.options.reward_range", "the largest reward"]),
        ("float('nan')", ["reward nan is outside", "return a finite number"]),
        ("'yes'", ["returned 'yes', not a number"]),
        ("[1.0]", ["returned [1.0], not a number"]),
        ("None", ["returned None: not judged"]),
        ("1 / 0", ["ZeroDivisionError"]),
    ],
)
def test_a_wrong_reward_is_named_with_the_way_out(reply: str, words: list[str]) -> None:
    """FIRST_HOUR 1 and 2: value, field and fix."""
    (verdict,) = judge_by("echo", (reply, Problem("p", (), "42", "t")))
    assert not verdict.judged and all(w in verdict.detail for w in words), verdict.detail


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(("name", "lacking"), [("needs_city", "'city'"), ("trl", "'level'")])
def test_a_column_that_the_function_needs_is_named(name: str, lacking: str) -> None:
    """Not the whole TypeError, but the name and the columns that there are."""
    (verdict,) = judge_by(name, ("42", Problem("p", (), "42", "t", {"country": "France"})))
    assert not verdict.judged
    assert f"needs {lacking}, which is no column of the row" in verdict.detail
    assert "answer, " in verdict.detail and "country" in verdict.detail


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("bad_verifiers.py:score", "without .py: bad_verifiers:score"),
        ("nowhere:f", "nowhere"),
        ("bad_verifiers:NOT_CALLABLE", "int"),
        ("bad_verifiers", "path"),
    ],
)
def test_function_that_is_not_there(path: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_verifier(VerifierConfig(kind="function", options={"path": path}))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": "nubmer"}, "unknown: choose one of exact, number"),
        ({"kind": "number", "options": {"which": "middle"}}, "which"),
        ({"kind": "number", "options": {"whcih": "last"}}, "whcih: unknown option; options: which"),
        ({"kind": "number", "options": {"tolerance": -0.1}}, "tolerance: .* greater than"),
        ({"kind": "choice", "options": {"letters": "abcd"}}, "letters: .*got 'abcd'"),
        ({"kind": "function"}, "path"),
        ({"kind": "function", "options": {"path": "a:b", "reward_range": [1, 0]}}, "reward_range"),
        ({"kind": "exact", "timeout": 0}, "timeout"),
        ({"kind": "exact", "workers": -1}, "workers"),
        ({"kind": "exact", "which": "last"}, "which"),
    ],
)
def test_bad_settings_are_named(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VerifierConfig.model_validate(given)


def test_counts() -> None:
    verdicts = [Verdict(1, Status.OK), Verdict(0, Status.WRONG), Verdict(0, Status.WRONG)]
    expected = {"ok": 1, "wrong": 2, "unparsed": 0, "timeout": 0, "error": 0}
    assert count_statuses(verdicts) == expected
