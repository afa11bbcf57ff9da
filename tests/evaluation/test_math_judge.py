"""Mathematical answers: equal ones, hostile ones, and a judge that can be killed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from dreamer_jax.evaluation import benchmarks
from dreamer_jax.evaluation.math_judge import MathJudge
from tests.outside import SAMPLES

pytest.importorskip("math_verify", reason="extra `eval`")


@pytest.fixture(scope="module")
def judge():
    with MathJudge(seconds=5.0) as one:
        yield one


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\dfrac12", r"\frac{1}{2}", True),
        ("1,000", "1000", True),
        (r"10\%", "10", True),
        (r"\$5", "5", True),
        (r"5 \text{ cm}", "5", True),
        (r"x^2+2x+1", "(x+1)^2", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", True),
        (r"\{2, 1\}", r"\{1, 2\}", True),
        (r"\text{(B)}", r"\text{(B)}", True),
        ("3", "4", False),
        (r"(1,2)", r"(2,1)", False),
        ("x+1", "x-1", False),
        ("", "4", False),
        ("}{", "4", False),
        (r"\frac{1}{0}", "4", False),
    ],
)
def test_boxed_answers(judge, answer, gold, same):
    assert judge.boxed_is(f"so it is $\\boxed{{{answer}}}$.", gold) is same


def test_without_a_box(judge):
    assert not judge.boxed_is("The final answer is $\\frac{3}{2}$.", "1.5")
    assert judge.text_has("The final answer is $\\frac{3}{2}$.", "1.5")
    assert not judge.text_has("It is 7.", "1.5")
    assert not judge.text_has("", "1.5")


HOSTILE = [
    "9^{9^{9^{9}}}",
    "((((((((10!)!)!)!)!)!)!)!)",
    "\\frac{" * 5000,
    "1+" * 5000 + "1",
    "(" * 10_000,
    "$" * 10_000,
    "\\sqrt{" * 300 + "2" + "}" * 300,
    "x" * 10_000,
    "1 2 3 4 " * 1250,
    "\ud800\0",
]


@pytest.fixture(scope="module")
def impatient():
    with MathJudge(seconds=1.5) as one:
        yield one


@pytest.mark.slow_but("2", "4", "5", "7", "9")
@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_are_wrong_and_end(impatient, answer):
    began = time.perf_counter()
    assert impatient.boxed_is(f"\\boxed{{{answer}}}", "17") is False
    assert impatient.text_has(answer, "17") is False
    assert time.perf_counter() - began < 90  # twice 1.5 s, and starting a process twice, on a busy machine
    assert impatient.boxed_is("\\boxed{17.0}", "17")  # and the next one is judged again


def test_a_judge_that_hangs_is_replaced(judge):
    before = judge.timeouts
    with MathJudge(seconds=1.0) as quick:
        assert quick.boxed_is(r"\boxed{1/2}", "0.5")
        process = quick._process
        assert not quick.boxed_is(r"\boxed{((((9!)!)!)!)!}", "17")
        assert quick._process is not process
        assert quick.boxed_is(r"\boxed{1/2}", "0.5")
    assert judge.timeouts == before


def test_it_works_in_any_thread(judge):
    found = []
    thread = threading.Thread(target=lambda: found.append(judge.boxed_is(r"\boxed{2/4}", "0.5")))
    thread.start()
    thread.join(60)
    assert found == [True]


def test_no_process_is_left_behind():
    code = (
        "from dreamer_jax.evaluation.math_judge import MathJudge\n"
        "judge = MathJudge(); print(judge.boxed_is('\\\\boxed{2/4}', '0.5'), judge._process.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    right, pid = done.stdout.split()
    assert right == "True"
    deadline = time.monotonic() + 10  # its stdin is closed when the parent ends
    while time.monotonic() < deadline and _alive(int(pid)):
        time.sleep(0.05)
    assert not _alive(int(pid))


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_math_golds_are_right_against_themselves(judge):
    questions = benchmarks.math(SAMPLES, 0)
    assert len(questions) == 28
    wrong = [question for question in questions if not judge.boxed_is(f"\\boxed{{{question.gold}}}", question.gold)]
    assert not wrong
    # Equal texts are never handed to math-verify; alone it has to find the same.
    alone = [question for question in questions if not judge._same(*[f"\\boxed{{{question.gold}}}"] * 2)]
    assert not alone
