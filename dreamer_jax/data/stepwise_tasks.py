"""Built-in tasks whose answers take as many dependent steps as they are difficult; tasks.py lists them.

induction  cabdacbdb>2=     a letter   p-hop induction heads (Sanford, Hsu and Telgarsky, 2024)
addition   34+81+70=        185        a sum of many numbers
problems   sentences        a digit    grade-school problems as graphs of dependencies (in the manner of iGSM; Ye et
                                       al., 2024)
permutations  knwe=      a letter   products in a group: its word problem (Barrington, 1989)
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator
from random import Random

from dreamer_jax.data.records import Record

LETTERS = "abcdefgh"
"""Of the induction."""
MODULUS = 7
"""That counts of problems are taken by. A prime: multiplying by 2..6 can be undone, so that no step hides another."""
NAMES = (
    *("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hope", "Ida", "Jack", "Kim", "Leo", "Mia", "Ned", "Olga"),
    *("Pam", "Quin", "Ruth", "Sam", "Tess", "Uma", "Vic", "Wes", "Xena", "Yuri", "Zoe"),
)
"""The people of problems."""
MOST_STEPS = len(NAMES) // 2 - 1
"""Of a problem: two chains of that many steps need all names."""
ELEMENTS = dict(zip(string.ascii_lowercase[2:], itertools.permutations(range(4)), strict=True))
"""The permutations of 0 to 3 in order, by their letters. With c to z both sides of the split hold every answer of
difficulty 1."""
LETTER_OF = {element: letter for letter, element in ELEMENTS.items()}


def induction(difficulty: int, stratum: int, rng: Random) -> Record:
    """p hops back through a text: each goes to the letter behind the last earlier place that has the present letter.

    Neighbours differ, or a hop would stay where it is. So the answer is never the letter that the last hop left, and
    one in four times it is the one before that. No letter is like another: the one that was reached is renamed to the
    one that the stratum asks for.
    """
    reached = None
    text = ""
    while reached is None:
        letters = [rng.choice(LETTERS)]
        while len(letters) < induction_letters(difficulty):
            letters.append(rng.choice(LETTERS.replace(letters[-1], "")))
        text = "".join(letters)
        reached = after_hops(text, difficulty)
    answer = LETTERS[stratum]
    swapped = str.maketrans(reached + answer, answer + reached)
    return Record(f"{text.translate(swapped)}>{difficulty}=", answer)


def induction_letters(difficulty: int) -> int:
    """A hop goes back seven letters on average; with so many it seldom runs out of them."""
    return 16 + 8 * difficulty


def after_hops(text: str, hops: int) -> str | None:
    """The letter that so many hops from the last one lead to; None if they run out of the text."""
    place = len(text) - 1
    for _ in range(hops):
        before = text.rfind(text[place], 0, place)
        if before < 0:
            return None
        place = before + 1
    return text[place]


def addition(difficulty: int, stratum: int, rng: Random) -> Record:
    """`difficulty` additions of numbers with two digits; the stratum is the last digit of the sum."""
    numbers = [rng.randrange(10, 100) for _ in range(difficulty)]
    numbers.append(10 * rng.randrange(1, 10) + (stratum - sum(numbers)) % 10)
    rng.shuffle(numbers)
    return Record("+".join(map(str, numbers)) + "=", str(sum(numbers)))


def addition_longest(difficulty: int) -> int:
    """The most characters."""
    return 3 * (difficulty + 1) + len(str(99 * (difficulty + 1)))


def problems(difficulty: int, stratum: int, rng: Random) -> Record:
    """What each person has depends on another one, and the last one's count is asked for.

    There are two chains of `difficulty` steps, alike in everything, and either's end may be asked for: the sentences
    have to be followed. A step may also add what an earlier person of its own chain has. Counts are modulo `MODULUS`.
    """
    names = rng.sample(NAMES, 2 * difficulty + 2)
    chains = names[: difficulty + 1], names[difficulty + 1 :]
    sentences, ends = [], []
    for chain in chains:
        while True:
            its, end = _chain(chain, rng)
            if end == stratum or ends:  # the first is asked for, the other ends anywhere
                break
        sentences += its
        ends.append(end)
    rng.shuffle(sentences)
    return Record(" ".join([*sentences, f"Count modulo {MODULUS}. {chains[0][-1]}?"]), str(ends[0]))


def _chain(names: list[str], rng: Random) -> tuple[list[str], int]:
    """(sentences, what the last person has)."""
    counts = [rng.randrange(MODULUS)]
    sentences = [f"{names[0]} has {counts[0]}."]
    for i, name in enumerate(names[1:]):
        before, number = names[i], rng.randrange(2, MODULUS)
        kind = rng.randrange(4 if i else 3)
        if kind == 0:
            sentences.append(f"{name} has {number} more than {before}.")
            counts.append(counts[i] + number)
        elif kind == 1:
            sentences.append(f"{name} has {number} fewer than {before}.")
            counts.append(counts[i] - number)
        elif kind == 2:
            sentences.append(f"{name} has {number} times as many as {before}.")
            counts.append(counts[i] * number)
        else:
            other = rng.randrange(i)
            pair = [before, names[other]]
            rng.shuffle(pair)
            sentences.append(f"{name} has as many as {pair[0]} and {pair[1]} together.")
            counts.append(counts[i] + counts[other])
        counts[-1] %= MODULUS
    return sentences, counts[-1]


def problems_longest(difficulty: int) -> int:
    """The most characters: names have up to four."""
    longest_sentence = len("Cleo has as many as Hope and Jack together. ")
    return 2 * (len("Cleo has 3. ") + difficulty * longest_sentence) + len("Count modulo 7. Cleo?3")


def permutations(difficulty: int, stratum: int, rng: Random) -> Record:
    """`difficulty` products of letters that stand for permutations; the last letter is what gives the answer."""
    letters = rng.choices(tuple(ELEMENTS), k=difficulty)
    *_, before = products("".join(letters))
    answer = tuple(ELEMENTS)[stratum]
    last = tuple(ELEMENTS[before].index(i) for i in ELEMENTS[answer])  # before * last = answer
    return Record("".join([*letters, LETTER_OF[last]]) + "=", answer)


def products(letters: str) -> Iterator[str]:
    """The product of the first letter, of the first two, and so on; (a * b)(i) is a(b(i))."""
    return itertools.accumulate(letters, lambda a, b: LETTER_OF[tuple(ELEMENTS[a][i] for i in ELEMENTS[b])])
