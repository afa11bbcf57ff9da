"""The results that the steps of a task's problem have, read from its text: what loops are supervised by.

A problem of k steps has results 1 to k, the last of which is the answer. A result is asked for at a place that has seen
all that it follows from: of expressions where they end, of others at the problem's last character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dreamer_jax.data import stepwise_tasks as stepwise


class Step(NamedTuple):
    """One result.

    Attributes:
        place: index of the character after which it is asked for.
        number: of the step, from 1; results of one number don't follow from each other.
        result: one character.
    """

    place: int
    number: int
    result: str


def steps_of(task: str, prompt: str) -> list[Step]:
    """The results of a problem, those of one place in order.

    Args:
        task: a name in STEPS.
        prompt: of an instance, as data/tasks.py writes it.
    """
    return list(STEPS[task](prompt))


def _boolean(prompt: str) -> Iterator[Step]:
    """Each pair of brackets, with its sign, where it ends: step n for the value of one that is nested n deep."""
    found: list[Step] = []

    def read(place: int) -> tuple[int, bool, int]:
        """(behind it, value, nesting) of what begins at a place."""
        if prompt[place] == "!":
            behind, value, nesting = read(place + 1)
            if nesting:
                found[-1] = found[-1]._replace(result="F" if value else "T")
            return behind, not value, nesting
        if prompt[place] != "(":
            return place + 1, prompt[place] == "T", 0
        middle, left, left_nesting = read(place + 1)
        end, right, right_nesting = read(middle + 1)
        value, nesting = (
            left and right if prompt[middle] == "&" else left or right,
            1 + max(left_nesting, right_nesting),
        )
        found.append(Step(end, nesting, "T" if value else "F"))
        return end + 1, value, nesting

    _, value, nesting = read(0)
    yield from found
    yield Step(len(prompt) - 1, nesting, "T" if value else "F")


def _arithmetic(prompt: str) -> Iterator[Step]:
    """What has come of the first n operations, where their bracket closes."""
    first = re.match(r"\(+(\d)", prompt)
    assert first is not None
    value, number = int(first[1]), 0
    for number, operation in enumerate(re.finditer(r"([+*-])(\d)\)", prompt), start=1):
        operand = int(operation[2])
        value = {"+": value + operand, "-": value - operand, "*": value * operand}[operation[1]] % stepwise.MODULUS
        yield Step(operation.end() - 1, number, str(value))
    yield Step(len(prompt) - 1, number, str(value))


def _induction(prompt: str) -> Iterator[Step]:
    """The letter that n hops lead to, at the end."""
    text, _, hops = prompt.rstrip("=").partition(">")
    for number in range(1, int(hops) + 1):
        letter = stepwise.after_hops(text, number)
        assert letter is not None
        yield Step(len(prompt) - 1, number, letter)


_SENTENCE = re.compile(
    r"(\w+) has (?:(\d) more than (\w+)|(\d) fewer than (\w+)|(\d) times as many as (\w+)|"
    r"as many as (\w+) and (\w+) together|(\d))\."
)


def _problems(prompt: str) -> Iterator[Step]:
    """What the n-th person of the chain that leads to the asked one has, at the end."""
    has: dict[str, Callable[[], int]] = {}
    needs: dict[str, tuple[str, ...]] = {}
    for name, more, a, fewer, b, times, c, one, other, count in _SENTENCE.findall(prompt):
        needs[name] = tuple(filter(None, (a, b, c, one, other)))
        if more:
            has[name] = lambda a=a, n=int(more): has[a]() + n
        elif fewer:
            has[name] = lambda b=b, n=int(fewer): has[b]() - n
        elif times:
            has[name] = lambda c=c, n=int(times): has[c]() * n
        elif one:
            has[name] = lambda one=one, other=other: has[one]() + has[other]()
        else:
            has[name] = lambda n=int(count): n

    def number(name: str) -> int:
        return 1 + max(map(number, needs[name])) if needs[name] else 0

    chain = [prompt.split()[-1].rstrip("?")]
    while needs[chain[-1]]:
        chain.append(max(needs[chain[-1]], key=number))
    for step, name in enumerate(reversed(chain[:-1]), start=1):
        yield Step(len(prompt) - 1, step, str(has[name]() % stepwise.MODULUS))


def _permutations(prompt: str) -> Iterator[Step]:
    """The product of the first n + 1 letters, at the last of them."""
    results = list(stepwise.products(prompt.rstrip("=")))
    for number, result in enumerate(results[1:], start=1):
        yield Step(number, number, result)
    yield Step(len(prompt) - 1, len(results) - 1, results[-1])


STEPS: dict[str, Callable[[str], Iterator[Step]]] = {
    "boolean": _boolean,
    "arithmetic": _arithmetic,
    "induction": _induction,
    "problems": _problems,
    "permutations": _permutations,
}
"""The tasks whose steps have results of one character. Sums have several, and a way through a graph may go wrong."""
