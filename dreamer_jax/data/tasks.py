"""Built-in reasoning problems with a difficulty, written as short texts.

boolean       ((T&!F)|T)=            T or F               difficulty: nesting
arithmetic    ((3+4)*2)%7=           a digit              difficulty: operations
reachability  ca be df ae cf c>d?    yes or no            difficulty: hops

and those of stepwise_tasks.py: induction, addition, problems, permutations.

Answers are balanced at every difficulty, so guessing is right once in 2, 7, 2, 8, 7 and 24 times; of a sum, the last
digit is.

Training and held-out instances never coincide: a hash of the prompt puts each into one of HELDOUT_SHARE shares, one
of which is held out for every seed. So even a difficulty with a few dozen different prompts has some that no
training run ever sees.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from dreamer_jax.data import stepwise_tasks as stepwise
from dreamer_jax.data.records import Record

VERSION = 1
"""Goes into the fingerprint of the data; raised whenever the same seed would give other instances."""

HELDOUT_SHARE = 8
"""One in this many prompts is held out."""

MODULUS = 7
"""Of the arithmetic. A prime: multiplying by 1..6 can be undone, so that no operation hides what came before."""

_SPLIT_SALT = "dreamer split 153 "
"""Chosen so that both sides of the split hold every answer of difficulty 1, which has only 64 (boolean), 119
(arithmetic) and 576 (permutations) different prompts; a test counts them."""


@dataclass(frozen=True)
class Task:
    """A generator of problems.

    strata: kinds of instances that are drawn equally often; a kind fixes the answer (and what else could give it
        away), so that leaving out the other side of the split can't unbalance the answers.
    write: (difficulty, stratum, rng) -> an instance.
    longest: difficulty -> the most characters of prompt and completion together.
    hardest: the largest difficulty there is.
    """

    strata: int
    write: Callable[[int, int, Random], Record]
    longest: Callable[[int], int]
    hardest: int


def generate(task: str, difficulty: int, rng: Random) -> Record:
    """One instance of a task, of either side of the split.

    Args:
        task: a name in TASKS.
        difficulty: from 1 to TASKS[task].hardest.
        rng: where the choices come from; nothing else decides the instance.
    """
    return TASKS[task].write(difficulty, rng.randrange(TASKS[task].strata), rng)


def draw(task: str, difficulty: int, rng: Random, heldout: bool) -> Record:
    """One instance of one side of the split: see `generate`."""
    write = TASKS[task].write
    stratum = rng.randrange(TASKS[task].strata)
    while True:
        record = write(difficulty, stratum, rng)
        if is_heldout(record.prompt) == heldout:
            return record


def is_heldout(prompt: str) -> bool:
    """Whether the instance with this prompt is kept out of all training."""
    digest = hashlib.blake2b((_SPLIT_SALT + prompt).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELDOUT_SHARE == 0


def _boolean(difficulty: int, stratum: int, rng: Random) -> Record:
    """An expression whose operator and answer are given: strata are the four pairs of them."""
    value, conjunction = bool(stratum & 1), bool(stratum & 2)
    expression = _expression(difficulty, value, conjunction, rng)
    return Record(expression + "=", "T" if value else "F")


def _expression(depth: int, value: bool, conjunction: bool, rng: Random) -> str:
    """Text of an expression with this value; `conjunction` says whether it is an & or an |.

    One operand has depth - 1 nestings, the other one or two fewer than that, so that hard instances have no bare
    T or F near the top that would decide them.
    """
    negated = rng.random() < 0.25
    value ^= negated
    if depth == 0:
        text = "T" if value else "F"
    else:
        left, right = _operands(value, conjunction, rng)
        depths = [depth - 1, max(0, depth - 2 - rng.randrange(2))]
        if rng.random() < 0.5:
            depths.reverse()
        left_text = _expression(depths[0], left, rng.random() < 0.5, rng)
        right_text = _expression(depths[1], right, rng.random() < 0.5, rng)
        text = f"({left_text}{'&' if conjunction else '|'}{right_text})"
    return "!" + text if negated else text


def _operands(value: bool, conjunction: bool, rng: Random) -> tuple[bool, bool]:
    """Values of two operands that give `value`. Where several do, both operands deciding is rarer than either."""
    if value == conjunction:
        return value, value
    choice = rng.randrange(5)
    if choice == 4:
        return value, value
    return (value, not value) if choice < 2 else (not value, value)


def _boolean_longest(difficulty: int) -> int:
    shallower, operators = 0, 0
    for _ in range(difficulty):
        shallower, operators = operators, operators + shallower + 1
    operands = operators + 1
    # Two brackets and a sign for each operator, a letter for each operand, a ! before each of both, = and the answer.
    return 3 * operators + operands + (operators + operands) + 2


def _arithmetic(difficulty: int, stratum: int, rng: Random) -> Record:
    """A chain of operations modulo 7 that ends at the given answer, found by walking back from it."""
    value, steps = stratum, []
    for _ in range(difficulty):
        sign = rng.choice("+-*")
        operand = rng.randrange(2 if sign == "*" else 1, MODULUS)
        steps.append(f"{sign}{operand})")
        if sign == "+":
            value -= operand
        elif sign == "-":
            value += operand
        else:
            value *= pow(operand, -1, MODULUS)
    chain = "".join(reversed(steps))
    return Record(f"{'(' * difficulty}{value % MODULUS}{chain}%{MODULUS}=", str(stratum))


def _reachability(difficulty: int, stratum: int, rng: Random) -> Record:
    """Two paths alike in everything, and the question whether the start of one leads to the end of one.

    Both paths have `difficulty` edges, and the same place of both also leads to one shared dead end: the graph is
    connected, and the direction of its edges matters. The two ends differ in nothing but the path they are on.
    """
    nodes = rng.sample(string.ascii_lowercase, 2 * difficulty + 3)
    paths = nodes[: difficulty + 1], nodes[difficulty + 1 : -1]
    edges = [path[i] + path[i + 1] for path in paths for i in range(difficulty)]
    branch = rng.randrange(difficulty)
    edges += [path[branch] + nodes[-1] for path in paths]
    rng.shuffle(edges)
    end = paths[0 if stratum else 1][-1]
    return Record(f"{' '.join(edges)} {paths[0][0]}>{end}?", "yes" if stratum else "no")


TASKS: dict[str, Task] = {
    "boolean": Task(4, _boolean, _boolean_longest, 16),
    "arithmetic": Task(MODULUS, _arithmetic, lambda difficulty: 4 * difficulty + 5, 1000),
    "reachability": Task(2, _reachability, lambda difficulty: 6 * difficulty + 13, 11),
    "induction": Task(
        len(stepwise.LETTERS), stepwise.induction, lambda p: stepwise.induction_letters(p) + len(str(p)) + 3, 16
    ),
    "addition": Task(10, stepwise.addition, stepwise.addition_longest, 1000),
    "problems": Task(stepwise.MODULUS, stepwise.problems, stepwise.problems_longest, stepwise.MOST_STEPS),
    "permutations": Task(len(stepwise.ELEMENTS), stepwise.permutations, lambda difficulty: difficulty + 3, 1000),
}
"""The tasks by the name that data.task gives."""
