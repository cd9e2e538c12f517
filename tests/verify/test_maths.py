r"""Equivalence: what math-verify sees, without what it lets through, and never a hang."""

import asyncio
import time

import pytest

from upswing.verify import maths, verifier_from
from upswing.verify.maths import Math, equivalent, parse
from upswing.verify.worker import Overrun, Workers

SAME = [
    (r"\frac{1}{2}", r"\frac{1}{2}"),
    ("1024", "2^{10}"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("6", "6"),
    ("1000", "1e3"),
    ("-5", "−5"),
    ("0.5", r"\frac12"),
    ("2.50", "5/2"),
    ("50%", r"\frac{1}{2}"),
    ("10000", r"10\,000"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    ("sqrt(3)/2", r"\frac{\sqrt{3}}{2}"),
    ("pi/2", r"$\frac{\pi}{2}$"),
    (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"),
    (r"2-\frac{1}{\mathrm{e}}", "2-e^{-1}"),
    ("-1", r"e^{i\pi}"),
    ("5", "(1+2i)(1-2i)"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\sin^2 x", r"1-\cos^2 x"),
    ("5", "x=5"),
    ("x=5", "5"),
    ("x=5", "x=10/2=5"),
    ("1/2", r"x=\frac12=0.5"),
    ("x=y=2", "x=y=2"),
    ("y=2x+1", "2x-y+1=0"),
    ("x<5", "5>x"),
    ("x<5", "2x<10"),
    ("1<x<3", "1<x<3"),
    ("(3,1)", r"\left(3, 1\right)"),
    ("(0.5,1]", r"(\frac12,1]"),
    (r"(-\infty,3)\cup(5,\infty)", r"(5,\infty)\cup(-\infty,3)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&\frac{4}{2}\\3&4\end{pmatrix}"),
    ("1 and 2", "2, 1"),
    (r"\pm 3", "3,-3"),
    (r"\infty", r"\infty"),
    (r"\emptyset", r"\varnothing"),
    (r"\text{yes}", r"\text{yes}"),
    ("90", r"90^\circ"),
]
DIFFERENT = [
    (r"\frac{1}{3}", r"\frac{1}{2}"),
    (r"\frac{1}{1001!}", r"\frac{1}{1004!}"),
    (r"\frac{1}{2^{90}}", r"\frac{1}{2^{91}}"),
    (r"(\frac{1}{2^{90}},0)", r"(\frac{1}{2^{91}},0)"),
    (r"2 - \frac{1}{\mathrm{e}}", r"2 + \frac{1}{\mathrm{e}}"),
    ("2*x-5*y+8=0", "2x + 7y - 1=0"),
    ("6", r"6\sqrt(3)"),
    ("1/3", "0.333"),
    ("1/3", "0.333333333333"),
    (r"\sqrt{2}", "1.41421356237"),
    (r"\sqrt{2}", r"\sqrt{2}+10^{-50}"),
    ("9", "9%"),
    ("12", "1 2"),
    ("3", "1 2"),
    ("15", r"7 \; 8"),
    ("15", r"7 \quad 8"),
    ("56", "7~8"),
    ("12345", r"1\,2345"),
    ("5", "2+2=5"),
    ("5", "5 or 6"),
    ("5", "5, 6"),
    ("5", "7 or so, 5"),
    ("(2,1)", "(3,1)"),
    ("(2^3,1)", "(2^3,2)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "(1,2,3)"),
    ("x=5", "y=5"),
    ("x^2=-1", "x^2=-4"),
    ("x=5", "x=5 x=5"),
    ("x=5", "x=5x=5"),
    ("x=0", "x=0x=0"),
    ("x=5", "x=4=5"),
    ("y=2x+1", "y=2x+1 y=2x+1"),
    ("x<1", "x<0.5<1.5"),
    ("x<5", "x>5"),
    ("x<5", r"x\le 5"),
    ("1<x<3", "1<x<4"),
    ("x^2", "X^2"),
    ("x", "y"),
    (r"\infty", r"-\infty"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\text{yes}", r"\text{no}"),
    ("0", "nan"),
    ("5", r"\frac{5}{0}"),
    ("5", "see figure"),
    ("5", "5 because it is"),
    ("5", ""),
    ("1", r"\boxed{1}"),
    ("5", "5" * 2000),
]


@pytest.mark.parametrize(("gold", "answer", "same"), [(*p, True) for p in SAME] + [(*p, False) for p in DIFFERENT])
def test_equivalence(gold, answer, same):
    assert equivalent([gold], answer) is same


@pytest.mark.parametrize("gold", ["see figure", "yes", "", "nan", r"\frac{1}{0}", "5)", "12 34"])
@pytest.mark.parametrize("answer", [r"64/400", "see figure", ""])
def test_a_gold_that_is_no_mathematics_can_not_be_scored(gold, answer):
    assert equivalent([gold], answer) is None
    assert equivalent([gold, "64/400"], answer) is (answer == "64/400")


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_what_math_verify_sees_is_seen(gold, answer):
    """Parity: of the pairs that ours accepts, math-verify refuses only formats that it doesn't read."""
    from math_verify import LatexExtractionConfig, verify
    from math_verify import parse as theirs

    known = {"1e3", "−5", "(1+2i)(1-2i)", r"e^{i\pi}", r"\frac{\sqrt{3}}{2}", r"$\frac{\pi}{2}$", "2-e^{-1}", "2x<10"}
    known |= {r"x=\frac12=0.5", r"\varnothing", "5", r"\text{yes}", r"10\,000"}
    sides = [theirs(f"${x.strip('$')}$", [LatexExtractionConfig()], parsing_timeout=5) for x in (gold, answer)]
    assert verify(*sides) or answer in known


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        (r"\frac{1}{3}", r"\boxed{\frac{1}{2}}", 0),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{2}}", 1),
        ("1024", r"\boxed{2^{10}}", 1),
        (r"\{1,2\}", r"\boxed{\{1,2\}}", 1),
        ("7", r"\boxed {7}", 1),
        ("42", r"\fbox{42}", 1),
        ("9", r"So \boxed{9}. Final: \boxed{", 0),
        ("9", r"\boxed{}", 0),
        ("9", "I mention 9 somewhere but give no final answer", 0),
        ("9", r"\boxed{9} or \boxed{8}", 0),
        ("9", None, 0),
        ("see figure", r"\boxed{64/400}", None),
        ("see figure", None, None),
    ],
)
async def test_boxed_answers(episode, gold, text, score):
    assert (await verifier_from("math", {"answer_in": "boxed"})(episode(text, (gold,)))).value == score


async def test_many_at_once_hang_and_the_good_ones_among_them_are_judged(episode):
    """Power towers and factorials: 0 (no score would be the agent's to choose), and every worker is free again."""
    towers = [r"9^{9^{9^{9}}}", r"10^{10^{10}}", r"(10^{100})!"]
    check = verifier_from("math", {"timeout_s": 0.5})
    await check(episode("5", ("5",)))  # a worker is up
    started = time.perf_counter()
    answers = [towers[i % 3] if i % 2 else "5" for i in range(8)]
    scores = await asyncio.gather(*(check(episode(answer, ("5",))) for answer in answers))
    assert [score.value for score in scores] == [float(answer == "5") for answer in answers]
    assert time.perf_counter() - started < 30
    assert "no verdict within 0.5 s" in scores[1].reason
    assert (await check(episode(r"\frac{10}{2}", ("5",)))).value == 1
    assert (await check(episode("5", (towers[0],)))).value is None  # the task's fault


async def test_what_sympy_can_not_compare_is_not_equal(monkeypatch):
    def fail(*_):
        raise TypeError("cannot determine truth value of Relational")

    monkeypatch.setattr(maths, "same", fail)
    assert maths.equivalent(["5"], "5") is False and maths.equivalent(["see figure"], "5") is None


def test_another_event_loop_is_as_good():
    assert [asyncio.run(Math()(r"\frac{1}{3}", (r"\frac{1}{3}",))) for _ in range(2)] == [1.0, 1.0]


async def test_what_happens_in_a_worker_stays_there():
    loads = Workers("json:loads")
    assert await loads.call(5.0, s="[1, 2]") == [1, 2]
    with pytest.raises(RuntimeError, match="JSONDecodeError"):
        await loads.call(5.0, s="[")
    assert await loads.call(5.0, s="{}") == {}
    with pytest.raises(Overrun, match=r"0\.2 s"):
        await Workers("upswing.verify.forms:matches").call(0.2, pattern="(a+)+b", text="a" * 60)
    with pytest.raises(Overrun, match="MemoryError"):
        await Workers("numpy:ones").call(10.0, shape=1 << 30)
    with pytest.raises(Overrun, match="died"):
        await Workers("os:_exit").call(1.0, status=3)


def test_parsing_is_all_or_nothing():
    assert parse("2 - 1)") is None and parse("(5") is None and parse("6 sqrt") is None
