"""The `math` verifier: how it finds answers in replies and compares them."""

import os
import subprocess
import sys
from pathlib import Path

import math_verify  # noqa: F401  (an extra for users, but the tests must not pass without it)
import pytest

from hacrl.types import Problem, Status, Verdict
from hacrl.verify import VerifierConfig, VerifierPool, make_verifier
from hacrl.verify.extract import final_answer
from hacrl.verify.latex import Shape, clean, shape, split, unlabel


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (r"first \boxed{1}, then \boxed{\frac{1}{2}} it is 7", r"\frac{1}{2}"),
        (r"\boxed{\text{a \} b}} end", r"\text{a \} b}"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"$\boxed{1}$, $\boxed{2}$ and $\boxed{3}$", "1, 2, 3"),
        (r"\boxed{1} is wrong. \boxed{2}", "2"),
        (r"\boxed{5} but cut short \boxed{\frac{1", "5"),
        (r"\boxed 7.", "7"),
        (r"\fbox{8}", "8"),
        ("The answer is 18 eggs.", "18 eggs"),
        ("The final answer is $\\frac{3}{4}$. I hope so 9.", r"\frac{3}{4}"),
        ("Answer: 3\nAnswer: 4 ", "4"),
        ("The answer is $x + y = 2$.", "x + y = 2"),
        ("**Answer:** 12", "12"),
        ("7 * 6 = 42\n#### 42", "42"),
        ("so $x = 2 + 3 = 5$ as wanted 1", "5"),
        (r"hence \[ y = 2x \] which", "2x"),
        ("we get 12 and then -1,300", "-1,300"),
        ("each $2, so she makes $18.", "18"),  # two amounts, no formula
        ("$720 + $270 = $990.00", "990.00"),
        ("500*$.50=$250", "250"),
        ("costs $5, so $x$ is $7$", "7"),
        ("The answer is: \\[\n16\n\\]", "16"),
        ("Answer: $$\n16\n$$ as 3 < 17", "16"),
        ("The answer is 16\n$17$", "16"),
        ("**Answer**: (3, 5)", "(3, 5)"),
        ("The answers are $2$, $3$, and $4$.", "2, 3, 4"),
        ("The answer is $5$, and $x=5$ is the only root.", "5"),
        ("The answer is $13$. $$13 = 6 + 7.$$", "13"),
        ("I do not know", None),
        ("", None),
    ],
)
def test_where_the_answer_is(reply: str, answer: str | None) -> None:
    assert final_answer(reply) == answer


def test_box_only() -> None:
    assert final_answer("The answer is 5", box_only=True) is None


@pytest.mark.parametrize(
    ("written", "cleaned"),
    [
        (r"$\dfrac12\text{ cm}^2$.", r"\frac{1}{2}"),
        (r"12,\!345", "12,345"),
        (r"4.5e33", r"4.5\times 10^{33}"),
        (r"\left(1,\,2\right)", "(1, 2)"),
        (r"45^\circ", "45"),
        (r"\$3.50", "3.50"),
        (r"3 \text{ or } 4", "3 , 4"),
        (r"4t", "4t"),
        (r"6m", "6m"),
        (r"8\pi\mbox{ square feet}", r"8\pi"),
        ("x = \\text{even}", r"x = \text{even}"),
    ],
)
def test_one_spelling(written: str, cleaned: str) -> None:
    assert clean(written) == cleaned


def test_shapes() -> None:
    assert shape("1,234") == Shape("one", ("1,234",))
    assert shape("1, 234") == Shape("list", ("1", "234"))
    assert shape(r"\{1,2\}") == Shape("list", ("1", "2"))
    assert shape("(1,2]") == Shape("tuple", ("1", "2"), "(]")
    assert shape("(1,2),(3,4)") == Shape("list", ("(1,2)", "(3,4)"))
    assert shape(r"(1,2)\cup(3,4)") == Shape("union", ("(1,2)", "(3,4)"))
    assert shape(r"1 \pm x") == Shape("list", ("1 + x", "1 - x"))
    assert shape("66_8") == Shape("base", ("66", "8"))
    assert split(r"f(a,b), \frac{1}{2}") == ("f(a,b)", r"\frac{1}{2}")
    assert unlabel("x = 2 + 3 = 5") == ("x", "5")
    assert unlabel("2x = 5") == ("", "2x = 5")


def judge(reference: str, answer: str, box: bool = True, **options: object) -> Verdict:
    verifier = make_verifier(VerifierConfig(kind="math", options=options))
    reply = rf"so it is \boxed{{{answer}}}." if box else answer
    return verifier.judge(reply, Problem("p", (), reference, "t"))


# A reference answer, then answers that equal it (SAME) or do not (DIFFERENT).
SAME = [
    (r"\frac{3}{4}", "0.75", "6/8"),
    (r"\frac{7}{4}", r"1\frac{3}{4}"),
    ("12345", "12,345", r"12{,}345.0"),
    ("-1./3", r"-\frac13"),
    (r"\frac{1}{3}", "0.333333"),
    ("4.5e33", r"4.5 \times 10^{33}", r"45 \cdot 10^{32}"),
    ("10^{-5}", "1e-5"),
    ("8", r"8\%"),
    ("0.08", r"8\%"),
    (r"8 \%", "8%"),
    ("10", r"10\text{ cm}^2", "10 m"),
    (r"10\text{ cm}", "10"),
    ("18", "18 eggs a day"),
    (r"\$3.60", "3.60"),
    (r"60^\circ", "60", r"\frac{180^\circ}{3}", r"{60^\circ}"),
    (r"\sin{30^\circ}", r"\sin(30^{\circ})"),
    ("5", r"5^{th}", r"{5^\text{th}}"),
    ("5", "x = 5"),
    ("x=5", "5"),
    ("f(x)=2 x", "2x"),
    ("(x,y)=(1,2)", "(1,2)"),
    ("x=1,y=2", "y=2, x=1"),
    ("1,2,3", "3, 1, 2"),
    ("1,2", r"\{2, 1\}", r"1 \text{ and } 2"),
    ("2,-2", r"\pm 2"),
    (r"1+\sqrt{2},1-\sqrt{2}", r"1 \pm \sqrt2"),
    ("(1, 2)", r"\left(1,2\right)"),
    ("(3,0),(-3,1)", "(-3,1), (3,0)"),
    (r"(-\infty,-5)\cup(7,\infty)", r"(7,\infty) \cup (-\infty, -5)"),
    (r"(-\infty,5]", r"x \le 5"),
    ("k \\geqslant 2", r"k \ge 2"),
    (r"\begin{pmatrix} 1 \\ 1/2 \end{pmatrix}", r"\begin{bmatrix}1\\0.5\end{bmatrix}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1,2)"),
    ("66_8", "66_{8}", "66"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(C)}", "C"),
    (r"\text{June 20}", "June 20"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("x^2-1", "(x-1)(x+1)"),
    (r"\sin^2 t", r"1-\cos^2 t"),
    (r"\frac{a b}{2}", r"\frac12 ba"),
    ("2RC+R+C", "R + C + 2CR"),
    (r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", r"\frac{E_1+2E_2}{3}"),
    ("-8-8 \\sqrt{3} i", r"-8(1+i\sqrt{3})"),
    ("x + y + z = 0", "x+y=-z"),
    ("0.5x", r"\frac{x}{2}"),
    ("6.6e-34x", r"6.6\times10^{-34} x"),
    (r"\frac{100!}{2^{50}}", r"100! \cdot 2^{-50}"),
    (r"\left\lfloor\frac{2 n}{3}\right\rfloor+1", r"1+\lfloor 2n/3 \rfloor"),
    ("np.arcsin(10/13)", r"\arcsin\frac{10}{13}"),
    ("9:24", r"9:24\text{ p.m.}"),
    ("1:4", "2:8"),
    (r"\frac{2}{3}", "0.666667", "0.666666"),
    ("6", r"\text{6}", r"\mathbf{6}", r"\text{6 cm}", "6 cm²", "€6", "6¢"),
    (r"\sqrt{12}", "√12", "2√3"),
    ("12", "12cm²", "12cm^2"),
    (r"\sqrt{2}", "1.414214", "1.41421356"),  # 1.41421356237...
    ("1.414214", r"\sqrt{2}"),
    (r"2\pi", "6.283185"),  # 6.28318530...
    ("x^{12}", "x¹²"),
    (r"\frac{5}{2}", "2½"),
    (r"\emptyset", r"\varnothing", "∅"),
    (r"\langle 1,2 \rangle", "(1,2)", "⟨1, 2⟩"),
    (r"50\%", "50", "50 percent", "0.5"),
    ("0.5", r"50\text{ percent}", r"\frac{1}{2} = 0.5", r"\frac{1}{2}\text{ or }0.5"),
    (r"\frac{1}{2}", r"\\frac{1}{2}"),
]
DIFFERENT = [
    ("5", r"2x \in (1,2)", r"1 \in \{5\}"),
    (r"\frac{3}{4}", r"\frac{4}{3}"),
    (r"\frac{1}{3}", "0.33", "0.333334"),
    ("1.6e-19", "1.8e-19", "1.6e-20"),
    ("6.6e-34x", "6.7e-34x"),
    ("4.5e33", "4.5e32"),
    ("4t", "4"),
    ("4", "4t"),
    ("a+b+c", "a+d", "a+b"),
    ("2RC+R+C", "2rc+r+c"),
    (r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", r"\frac{2}{3}"),
    ("8", "-8"),
    ("0.5", "50"),
    ("x=5", "y=5"),
    ("1,2,3", "1,2"),
    ("1,2", "1,2,2"),
    ("(1,2)", "(2,1)"),
    ("[1,2)", "(1,2)"),
    ("[1,2]", "1,2"),
    ("66_8", "66_9"),
    (r"\text{Evelyn}", "Carla"),
    (r"\text{(C)}", "D"),
    ("2\\pi", "2"),
    ("x^2-1", "(x-1)^2"),
    ("|x|", "x"),
    ("x + y + z = 0", "x+y+z=1"),
    (r"(-\infty,5]", r"x < 5"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix} 1&3 \\ 2&4 \end{bmatrix}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(2,1)"),
    ("9:24", "3:8"),
    ("12345", "12,346"),
    ("6", r"\text{7}", r"\text{7 cm}", "6 = 7", "6 or 7", "6²", "√6"),
    (r"50\%", "5", "0.05"),
    (r"\sqrt{2}", "1.414", "1.414215", "-1.414214"),
    (r"\sqrt{-2}", "1.414214"),
    ("i", "1.000000"),
    ("x", "-x", "x!", "|x|"),  # a letter is no word between signs
    ("y=x", "y=-x"),
    ("(a,b)", "(a,-b)"),
    ("42", r"\text{forty}", r"\frac{(}{)}"),
]


@pytest.mark.parametrize(("reference", "answer"), [(g, a) for g, *more in SAME for a in more])
def test_equal_in_another_notation(reference: str, answer: str) -> None:
    assert judge(reference, answer).status is Status.OK


@pytest.mark.parametrize(("reference", "answer"), [(g, a) for g, *more in DIFFERENT for a in more])
def test_close_but_different(reference: str, answer: str) -> None:
    assert judge(reference, answer).status is Status.WRONG


def test_tolerance() -> None:
    """|4.46e33 - 4.5e33| / 4.5e33 = 0.0089; |4.4 - 4.5| / 4.5 = 0.022; sqrt(3)/2 = 0.8660."""
    assert judge("4.5e33", "4.46e33").status is Status.WRONG
    assert judge("4.5e33", "4.46e33", tolerance=0.01).status is Status.OK
    assert judge("4.5e33", "4.4e33", tolerance=0.01).status is Status.WRONG
    assert judge(r"\frac{\sqrt{3}}{2}", "0.866", tolerance=0.01).status is Status.OK
    assert judge(r"\frac{\sqrt{3}}{2}", "0.9", tolerance=0.01).status is Status.WRONG


def test_a_sentence_in_a_loop_is_wrong_in_time() -> None:
    """2,500 times "The answer is " is one long answer."""
    with VerifierPool(VerifierConfig(kind="math", workers=1, timeout=2.0)) as pool:
        items = [(start * 2500, Problem("p", (), "5", "t")) for start in ("The answer is ", "(")]
        items[1] = (rf"\boxed{{{items[1][0]}x{')' * 2500}}}", items[1][1])
        assert [v.status for v in pool.judge_all(items)] == [Status.WRONG] * 2


def test_statuses() -> None:
    assert judge("5", "I give up", box=False).status is Status.UNPARSED
    assert judge("5", "the answer is 5", box=False, box_only=True).status is Status.UNPARSED
    assert judge("5", "").status is Status.UNPARSED
    assert judge("5", "", box=False).status is Status.UNPARSED
    # An unreadable reference answer is ERROR for every reply.
    for reply in ("5", r"\frac{(", "t(0,4]"):
        assert judge("t(0,4]", reply).status is Status.ERROR


def test_poison_costs_one_time_out_and_nothing_else() -> None:
    poison = r"\boxed{9^{9^{9^{9^{9}}}}}"
    items = [(rf"\boxed{{x + {i % 3}}}", Problem("p", (), "x+1", "t")) for i in range(60)]
    items[20] = (poison, items[20][1])
    with VerifierPool(VerifierConfig(kind="math", workers=2, timeout=5.0)) as pool:
        verdicts = pool.judge_all(items)
    assert verdicts[20].status is Status.TIMEOUT
    for i, verdict in enumerate(verdicts):
        if i != 20:
            assert verdict.status is (Status.OK if i % 3 == 1 else Status.WRONG)


def run_python(code: str, *paths: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *filter(None, sys.path)])}
    return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)


def test_without_the_extra(tmp_path: Path) -> None:
    """Without math-verify the error names the package to install, also from the worker."""
    (tmp_path / "math_verify.py").write_text("raise ImportError('not installed')")
    code = (
        "from hacrl.verify import VerifierConfig, VerifierPool\n"
        "for workers in (0, 1):\n"
        "    try:\n"
        "        VerifierPool(VerifierConfig(kind='math', workers=workers)).label\n"
        "    except ValueError as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    lines = run_python(code, str(tmp_path)).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("UserError") and "pip install 'hacrl[math]'" in line


def test_nothing_heavy_in_the_trainer() -> None:
    """Making a config and a pool imports neither torch nor sympy into the trainer's process."""
    code = (
        "import sys\n"
        "from hacrl.verify import VerifierConfig, VerifierPool\n"
        "with VerifierPool(VerifierConfig(kind='math', workers=1)) as pool:\n"
        "    assert pool.label == 'math/2'\n"
        "print(sorted({'torch', 'sympy', 'math_verify', 'transformers'} & set(sys.modules)))\n"
    )
    assert run_python(code).strip() == "[]"
