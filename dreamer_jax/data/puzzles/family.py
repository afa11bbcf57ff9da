"""Family relations in shuffled sentences: is Ann the sibling of Eve? (section 4.3)

A chain of k links leads from one person to another: up to parents u times, then down to children k - u times, where u
is anything that leaves both at most three generations apart. For k > 3 that is up and then down always, as in the
paper. For k of 2 and 3 it includes chains that go one way: without them two persons two links apart were always
siblings, and the relation in the question would be the answer. One link may be a sibling. Every link is a sentence,
voiced either way:

    Bob is the parent of Ann .       or       Ann is the child of Bob .

(or always the first, with `voices: parent`), and the sentences are shuffled among others that lead nowhere. The last
sentence is the question, whose relation is the true one or another with an even difference of generations.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

_NAMES = (
    "Ann Bob Cara Dan Eve Finn Gail Hugo Iris Jack Kate Leo Mia Ned Olga Paul Rosa Sam Tess Uma "
    "Vera Will Xena Yuri Zoe Adam Beth Carl Dora Eric Fay Glen Hana Ivan Jane Kurt Lena Mark Nina Otto"
)
NAMES: tuple[str, ...] = tuple(_NAMES.split())
RELATIONS = {
    3: "great-grandchild",
    2: "grandchild",
    1: "child",
    0: "sibling",
    -1: "parent",
    -2: "grandparent",
    -3: "great-grandparent",
}
"""Generations from the first person up to the second -> what the first one is of the second."""
TOKENS = ("[PAD]", *NAMES, *RELATIONS.values(), "is", "the", "of", ".", "?")
SIBLINGS = 0.1
"""Share of the chains, from depth 3, with a sibling in them."""
SENTENCE = 7
"""Tokens of a sentence."""


class Family(NamedTuple):
    """A family and a question.

    Attributes:
        facts: (first person, generations up to the second, second person), shuffled.
        question: likewise; whether it holds is the label.
        tokens: of all sentences.
    """

    facts: list[tuple[str, int, str]]
    question: tuple[str, int, str]
    tokens: list[str]


SPARE = 2
"""Names that a family needs beyond one for each sentence."""


class Style(NamedTuple):
    """How families are written.

    Attributes:
        facts: sentences before the question.
        names: how many of `NAMES` there are.
        both: whether a link is said either way; otherwise always from the parent.
    """

    facts: int
    names: int = len(NAMES)
    both: bool = True


def longest(facts: int) -> int:
    """Tokens of the sentences and the question."""
    return SENTENCE * (facts + 1)


def write(depth: int, label: bool, style: Style, contradicted: bool, rng: Random) -> Family:
    """A family.

    Args:
        depth: k, from 1 to the number of sentences.
        label: whether the question's relation is true.
        style: see there.
        contradicted: a sentence says the opposite of a link, if there is room for one.
        rng: where the choices come from.
    """
    steps = _chain(depth, rng)
    names: list[str] = rng.sample(NAMES[: style.names], style.names)
    people = names[: depth + 1]
    links = list(zip(people, steps, people[1:], strict=False))
    others = style.facts - depth
    if contradicted and others:
        first, up, second = rng.choice([link for link in links if link[1]])
        links.append((first, -up, second))
        others -= 1
    links += _dead_ends(people, names[depth + 1 :], others, rng)
    rng.shuffle(links)
    voiced = [_voiced(link, style.both, rng) for link in links]
    up = sum(steps)
    if not label:
        up = rng.choice([other for other in RELATIONS if other != up and (other - up) % 2 == 0])
    question = (people[0], up, people[-1])
    words = [word for fact in voiced for word in (*_words(fact), ".")]
    return Family(voiced, question, [*words, *_words(question), "?"])


def _voiced(link: tuple[str, int, str], both: bool, rng: Random) -> tuple[str, int, str]:
    """The link, or the same from its other end; a sibling is said either way always."""
    first, up, second = link
    turned = rng.random() < 0.5 if both or not up else up > 0
    return (second, -up, first) if turned else link


def _chain(depth: int, rng: Random) -> list[int]:
    """Generations up of every link: 1 to a parent, then -1 to a child, 0 to a sibling."""
    sibling = depth > 2 and rng.random() < SIBLINGS
    moves = depth - sibling
    ups = rng.choice([up for up in range(moves + 1) if abs(2 * up - moves) <= 3])
    steps = [1] * ups + [-1] * (moves - ups)
    if sibling:
        steps.insert(rng.randint(0, moves), 0)
    return steps


def _dead_ends(people: list[str], names: list[str], count: int, rng: Random) -> list[tuple[str, int, str]]:
    """Facts about people who are not in the chain: half of them are each of somebody in the chain, the others of a
    family of their own."""
    attached, unused = count // 2, iter(names)
    found = [(next(unused), rng.choice((1, -1)), rng.choice(people)) for _ in range(attached)]
    strangers = [next(unused)]
    for _ in range(count - attached):
        strangers.append(next(unused))
        found.append((strangers[-1], rng.choice((1, -1)), rng.choice(strangers[:-1])))
    return found


def _words(fact: tuple[str, int, str]) -> list[str]:
    """A sentence without its end."""
    first, up, second = fact
    return [first, "is", "the", RELATIONS[up], "of", second]
