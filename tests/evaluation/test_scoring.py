"""The rules on answers of every kind, and the standard errors against their definitions."""

from __future__ import annotations

import math
import statistics
import time

import numpy as np
import pytest

from dreamer_jax.evaluation import benchmarks
from dreamer_jax.evaluation.scoring import (
    chosen,
    flexible_number,
    last_boxed,
    mean,
    perplexity,
    same_number,
    strict_number,
)
from tests.outside import SAMPLES, sample

# answer, its strict number, its flexible number, whether each is right where the gold answer is "#### 1,250"
ANSWERS = [
    ("so it is\n#### 1250", "1250", "1250", True, True),
    ("#### 1,250", "1,250", "1,250", True, True),
    ("#### $1,250", None, "$1,250", False, True),
    ("#### 1250.", "1250.", "1250.", True, True),
    ("#### 1250.00", "1250.00", "1250.00", False, False),
    ("#### 1250 dollars", "1250", "1250", True, True),
    ("The answer is 1,250 apples.", None, "1,250", False, True),
    ("The answer is $\\boxed{1250}$", None, "1250", False, True),
    ("#### 1250\n\n#### 7", "1250", "7", True, False),
    ("#### 3\nno, 1250", "3", "1250", False, True),
    ("####1250", None, "1250", False, True),
    ("#### -1250", "-1250", "-1250", False, False),
    ("1 2 5 0", None, "0", False, False),
    ("1250..", None, "1250..", False, False),
    ("\\frac{2500}{2}", None, "2", False, False),
    ("#### 十", None, None, False, False),
    ("", None, None, False, False),
    ("#### ", None, None, False, False),
    ("no number at all...", None, "...", False, False),
    ("1250" * 2500, None, "1250" * 2500, False, False),
    ("#### " * 2000 + "1250", "1250", "1250", True, True),
    ("$" * 10_000, None, "$" * 10_000, False, False),
    ("-" * 10_000, None, None, False, False),
    ("\0#### 1250\ud800", "1250", "1250", True, True),
]


@pytest.mark.parametrize(("text", "strict", "flexible", "strict_right", "flexible_right"), ANSWERS)
def test_gsm8k_rules(text, strict, flexible, strict_right, flexible_right):
    began = time.perf_counter()
    assert strict_number(text) == strict
    assert flexible_number(text) == flexible
    gold = "half of 2,500 is\n#### 1,250"
    assert same_number(strict, gold) is strict_right
    assert same_number(flexible, gold) is flexible_right
    assert time.perf_counter() - began < 2


def test_gsm8k_golds_are_right_against_themselves():
    questions = benchmarks.gsm8k(SAMPLES, 0)
    assert len(questions) == 63
    for rule in (strict_number, flexible_number):
        assert all(same_number(rule(question.gold), question.gold) for question in questions)


BOXES = [
    (r"so $\boxed{2}$ and then $\boxed{3}$.", "3"),
    (r"$\boxed{\frac{1}{\sqrt{2}}}$", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{ x \mid x > \frac{1}{2} \right\}}", r"\left\{ x \mid x > \frac{1}{2} \right\}"),
    (r"it is $\boxed 2$.", "2"),
    (r"\boxed  {7}", "7"),
    ("\\boxed\n{3}", "3"),
    ("\\boxed\t{4}", "4"),
    ("\\boxed \n 5\n6", "5"),
    (r"\fbox{\text{(B)}}", r"\text{(B)}"),
    (r"\boxed{1} or \fbox{2}", "2"),
    (r"\boxed{a \\}", r"a \\"),
    (r"\boxed{}", ""),
    (r"\boxed{1", None),
    (r"\boxed{1 \boxed{2}", "2"),
    (r"\boxed", ""),
    ("no box", None),
    ("", None),
    (r"\boxed{" + "{" * 10_000, None),
]


@pytest.mark.parametrize(("text", "content"), BOXES)
def test_last_box(text, content):
    assert last_boxed(text) == content


def test_boxes_of_the_form_of_math_hold_the_answers():
    rows = sample("math/test")
    assert len(rows) == 28
    assert [last_boxed(row["solution"]) for row in rows] == [row["answer"] for row in rows]


def test_choice():
    assert chosen([-3.0, -1.0, -2.0]) == 1
    assert chosen([-3.0, -2.0, -2.0]) == 1  # the first of equals
    assert chosen([-3.0, -1.0, -2.0], [6, 1, 3]) == 0  # -0.5, -1, -0.67
    assert chosen([-3.0, -1.0], [3, 0]) == 0
    assert chosen([float("nan"), -1.0]) is None and chosen([-1.0, float("nan")], [1, 1]) is None


def test_mean_has_the_usual_standard_error():
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert mean(values) == pytest.approx((0.6, statistics.stdev(values) / math.sqrt(5)))
    assert math.isnan(mean([1.0]).error) and math.isnan(mean([]).value)


def test_perplexity_by_hand():
    # Two texts: 2 tokens of probability 1/2 and 1/8, 1 token of probability 1/4. Mean loss (1 + 3 + 2) / 3 bits.
    found = perplexity([math.log(1 / 16), math.log(1 / 4)], [2, 1])
    assert found.value == pytest.approx(4.0)
    assert found.error == pytest.approx(0.0, abs=1e-12)  # both texts have just this loss a token


def test_perplexity_error_of_three_texts_by_hand():
    # One token each, losses of 1, 2 and 3: mean 2, standard deviation 1, of the mean 1 / sqrt(3).
    found = perplexity([-1.0, -2.0, -3.0], [1, 1, 1])
    assert found == pytest.approx((math.exp(2), math.exp(2) / math.sqrt(3)))


def test_perplexity_error_is_what_other_samples_would_show():
    random = np.random.default_rng(0)

    def sample() -> tuple[np.ndarray, np.ndarray]:
        counts = random.integers(5, 50, 200)
        return -counts * random.gamma(4.0, 0.5, 200), counts

    found = [perplexity(*map(list, sample())) for _ in range(400)]
    spread = statistics.stdev(one.value for one in found)
    assert statistics.fmean(one.error for one in found) == pytest.approx(spread, rel=0.1)
