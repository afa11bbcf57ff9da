"""Fragile nested expressions: what is the value of ((!T&(F|!F))|T)? (section 4.2)

An expression of depth k is a spine, because full trees of depth 14 would have 2^14 leaves:

    E(0) = T or F,    E(k) = (E(k-1) op s) or (s op E(k-1)),    a "!" before either operand half of the time

and s is a leaf. Mostly s leaves the value of E(k-1) open (T of &, F of |): the value then hangs on the whole spine, and
one leaf or "!" anywhere turns it over. Now and then it decides (F of &, T of |). Without that the value would be a
parity of counts, "!" and "T" and "&" together, which the order of the tokens has no part in.
"""

from __future__ import annotations

from random import Random

TOKENS = ("[PAD]", "[CLS]", "(", ")", "!", "&", "|", "T", "F")
DECIDING = 0.15
"""Share d of the leaves that decide the value of their operator. It is a compromise: the outermost operator and its
leaf alone give the value in 1/2 + d/2 of the cases, 0.575 (the paper's models have 0.54 to 0.59 after one step), and
the parity of all counts in 1/2 + (1 - d)^k / 2, at depth 8 in 0.64, at depth 14 in 0.55."""


def longest(depth: int) -> int:
    """Tokens of the longest expression of a depth, with the one before it that is read out."""
    return 6 * depth + 3


def write(depth: int, value: bool, rng: Random) -> list[str]:
    """The tokens of an expression with this value.

    A fair coin says whether there is a "!" before an operand, so both values are equally likely whatever is inside. The
    outermost "!" is therefore chosen to give the value that is asked for: no expression has to be drawn again, and each
    is as likely as it would be if others were thrown away.
    """
    inner = rng.random() < 0.5
    tokens = ["T" if inner else "F"]
    for _ in range(depth):
        if rng.random() < 0.5:
            tokens.insert(0, "!")
            inner = not inner
        conjunction = rng.random() < 0.5
        leaf = conjunction != (rng.random() < DECIDING)
        written = ["T" if leaf else "F"] if rng.random() < 0.5 else ["!", "F" if leaf else "T"]
        operator = "&" if conjunction else "|"
        both = [*tokens, operator, *written] if rng.random() < 0.5 else [*written, operator, *tokens]
        tokens = ["(", *both, ")"]
        inner = (inner and leaf) if conjunction else (inner or leaf)
    return tokens if inner == value else ["!", *tokens]
