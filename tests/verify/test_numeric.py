"""Number formats, units, tolerances: the stated rules, one by one."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upswing.verify import verifier_from
from upswing.verify.numeric import Numeric, countdown


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1234", "1,234"),
        ("1234", "$1,234.00"),
        ("1234", "$1234$"),
        ("7.5", "The answer is 7.5."),
        ("5 km", "5 km."),
        ("1234567", "1,234,567"),
        ("1234", "1{,}234"),
        ("1/2", "0.5"),
        ("3.5", "7/2"),
        ("3.5", r"\frac{7}{2}"),
        ("-0.5", r"-\dfrac{1}{2}"),
        ("1000", "1e3"),
        ("0.001", "1E-3"),
        ("300000", r"3 \times 10^5"),
        ("300000", "3×10^{5}"),
        ("73", "Final Answer: **73**"),
        ("73", "The answer is 73."),
        ("73", r"\(73\)"),
        ("-5", "−5"),
        ("5", "+5"),
        (".5", "0.5"),
        ("0.5", "50%"),
        ("0.5", r"50\%"),
        ("50%", "50 percent"),
        ("5 km", "5000 m"),
        ("90 min", "1.5 h"),
        ("5 cm", r"5\text{ cm}"),
        ("5 m/s", "5 m/s"),
        ("5 apples", "5 apples"),
        ("$5", "5"),
        ("5", "€5"),
    ],
)
def test_the_same_number(gold, answer):
    assert Numeric()(answer, (gold,)) == 1


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1/3", "0.333"),
        ("1234", "1,23,4"),
        ("1234", "1.234"),
        ("1234", "1 234"),
        ("1234.5", "1.234,5"),
        ("12", "1 2"),
        ("0.5", "5"),
        ("5", "-5"),
        ("50", "50%"),
        ("5 km", "5"),
        ("5", "5 km"),
        ("5 km", "5 kg"),
        ("5 mW", "5 MW"),
        ("$5", "€5"),
        ("5", "5 or 6"),
        ("5", "5, 6"),
        ("5", "5 5"),
        ("5", "4+1"),
        ("5", "--5"),
        ("5", "00005"),
        ("123", "0,123"),
        ("5", "٥"),
        ("5", "５"),
        ("5", "five"),
        ("5", "5/0"),
        ("5", "1e999999999"),
        ("5", "9" * 100_000),
        ("5", "nan"),
        ("5", "inf"),
        ("5", "Infinity"),
        ("5", ""),
        ("5", None),
        ("5", "<think>5</think>"),
        ("5", "<think>5"),
        ("5", r"\boxed{5}"),
    ],
)
def test_another_number_or_none(gold, answer):
    assert Numeric()(answer, (gold,)) == 0


@pytest.mark.parametrize("gold", ["nan", "inf", "-inf", "see figure", "", "5/0", "1 2"])
@pytest.mark.parametrize("answer", ["nan", "inf", "see figure", "5", None])
def test_without_a_number_to_compare_with_there_is_no_score(gold, answer):
    score = Numeric()(answer, (gold,))
    assert score.value is None and "no accepted answer" in score.reason


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_fractions_are_compared_exactly(a, b):
    assert Numeric()(f"{a.numerator}/{a.denominator}", (str(b),)) == (a == b)


@pytest.mark.parametrize(
    ("args", "gold", "answer", "score"),
    [
        ({"tolerance": 0.1}, "1", "1.1", 1),  # the bound belongs to it, exactly
        ({"tolerance": 0.1}, "1", "1.1000001", 0),
        ({"tolerance": 0.1}, "1 km", "1100 m", 1),  # in the accepted answer's unit
        ({"tolerance": 0.1}, "1 km", "1101 m", 0),
        ({"relative": 0.01}, "200", "198", 1),
        ({"relative": 0.01}, "200", "197.9", 0),
        ({"relative": 0.01}, "-200", "-202", 1),
        ({"relative": 0.01}, "0", "0.001", 0),
        ({"relative": 0.01, "tolerance": 5}, "200", "205", 1),  # the larger of the two
        ({"tolerance": 1e9}, "5", "nan", 0),
        ({"decimal": ","}, "1234,5", "1.234,5", 1),
        ({"decimal": ","}, "1,234", "1234", 0),
        ({"units": {"mile": "1609.344 m"}}, "1 mile", "1.609344 km", 1),
        ({"answer_in": "boxed"}, "5", r"so \boxed{5}", 1),
        ({"many": True}, "-92.85, 61.5, 71.08", "['-92.85', '61.5', '71.08']", 1),
        ({"many": True}, "-92.85, 61.5, 71.08", "61.5, -92.85, 71.08", 0),
        ({"many": True}, "1 2 3", "1 2", 0),
        ({"many": True}, "1 2 3", "1 2 x", 0),
    ],
)
async def test_arguments(episode, args, gold, answer, score):
    assert (await verifier_from("numeric", args)(episode(answer, (gold,)))).value == score


TWO, MANY = {"numbers": [3, 7], "target": 21}, {"numbers": [1, 1, 2, 8], "target": 8}


@pytest.mark.parametrize(
    ("data", "answer", "score"),
    [
        (TWO, "3*7", 1),
        (TWO, "(7) × 3", 1),
        (TWO, "21", 0),
        (TWO, "3*7+0", 0),
        (TWO, "7*3*1", 0),
        (TWO, "3*7 = 21", 0),
        (TWO, "37", 0),
        (TWO, "__import__('os').system('true')", 0),
        (TWO, "(3,7)", 0),
        (TWO, "3**7", 0),
        (TWO, "0x3*7", 0),
        (TWO, "3*7 # three times seven", 0),
        ({"numbers": [10, 2], "target": 12}, "1_0+2", 0),
        (TWO, "3.0*7", 0),
        (TWO, "-3*-7", 0),
        (TWO, "(" * 150, 0),
        (TWO, "", 0),
        (TWO, None, 0),
        ({"numbers": [3, 7], "target": "3/7"}, "3/7", 1),
        ({"numbers": [3, 0], "target": 3}, "3/0", 0),
        (MANY, "8*2/(1+1)", 1),
        (MANY, "8*(2-1)", 0),  # not each of them
        (MANY, "8*1*1", 0),
        ({"numbers": [3]}, "3", None),
        ({}, "3", None),
    ],
)
def test_countdown(data, answer, score):
    found = countdown(answer, data)
    assert (found if isinstance(found, float) else found.value) == score


def test_fractions_stay_exact_in_countdown():
    assert countdown("8/(3-8/3)", {"numbers": [8, 3, 8, 3], "target": Fraction(24)}) == 1
