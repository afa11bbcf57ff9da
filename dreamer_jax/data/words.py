"""Texts as numbers: word hashes, word n-grams, MinHash signatures, and what a text says in numbers and formulas.

All hashes are the same on every machine and in every process.
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Sequence
from itertools import chain

import numpy as np

SHINGLE = 3
"""Words in a shingle: long enough to keep order, short enough that one changed word costs three shingles only."""
BANDS, BAND_ROWS = 32, 4
"""128 MinHash values: texts of Jaccard similarity 0.7 share a band with probability 0.9998, of 0.3 with 0.23."""

_WORD = re.compile(r"[^\W_]+")
_TOKEN = re.compile(
    r"\\?[A-Za-z]+(?:['’](?i:s|t|re|ll|ve|d|m)\b)?(?:(?<=[A-Za-z]{2})-[A-Za-z]{2,})*"  # words, commands, variables
    r"|\d+(?:[.,]\d+)*"
    r"|[-+*/^=<>|%!_(){}\[\]#&@~]"
    r"|[^\x00-\x7f\s\d]+"  # see _signs
)
_PROSE = frozenset("’‘‚‛“”„‟«»‹›…–—―‐‑¡¿·•。、，．：；！？「」『』《》〈〉")
"""Punctuation of sentences, which copies of a text write in different ways."""
_EN_DASH_AS_MINUS = re.compile(r"(?<!\w)–(?=[\w(])")
_NUMBER_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion
    half third quarter twice double triple"""
_NUMBERS = {form: word for word in _NUMBER_WORDS.split() for form in (word, word.capitalize(), word.upper())}
_NOT_VARIABLES = frozenset("aAI")
_MULTIPLIER = 0x9E3779B97F4A7C15 | 1
_MASK = (1 << 64) - 1


class WordHashes(dict[str, int]):
    """Word -> 64-bit hash, computed once; forgotten when there are too many, as numbers never end."""

    LIMIT = 1_000_000

    def __missing__(self, word: str) -> int:
        if len(self) >= self.LIMIT:
            self.clear()
        value = int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
        self[word] = value
        return value

    def of(self, text: str) -> list[int]:
        """Hashes of the words of a text."""
        return list(map(self.__getitem__, words(text)))


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits: punctuation, symbols and spacing don't count."""
    return _WORD.findall(text.lower())


def formula_key(text: str) -> int:
    """64-bit hash of the numbers, operators, brackets, variables and LaTeX commands of a text, in their order.

    Two texts that differ in a sign, a number (also as an English word), a variable or a bracket have different keys;
    texts that differ in other words, of whatever script, have the same. A hyphen between letters is no sign, nor are
    the punctuation of sentences and the dollar signs around formulas.
    """
    found, text = [], _EN_DASH_AS_MINUS.sub("-", text)
    for match in _TOKEN.finditer(text):
        part = match[0]
        if not part[0].isascii() and not part[0].isdecimal():
            found += _signs(part)
        elif not part[0].isalpha():
            found.append(part)
        elif len(part) == 1:
            if part not in _NOT_VARIABLES and not _touches_letters(text, match.start(), match.end()):
                found.append(part)
        elif part in _NUMBERS:
            found.append(_NUMBERS[part])
        elif "-" in part:
            found += [_NUMBERS[half] for half in part.split("-") if half in _NUMBERS]
    return int.from_bytes(hashlib.blake2b(" ".join(found).encode("utf-8", "replace"), digest_size=8).digest(), "little")


def _signs(run: str) -> list[str]:
    """What is mathematics in characters beyond ASCII: all but words and the punctuation of sentences."""
    found = []
    for i, character in enumerate(run):
        # A Greek letter by itself is a variable, as in ASCII; so is what stands over a letter of ASCII, as in x̄.
        greek = "\u0391" <= character <= "\u03f6" and not _touches_letters(run, i, i + 1)
        over = i == 0 and unicodedata.category(character) == "Mn"
        if greek or over or _is_sign(character):
            found.append(character)
    return found


def _touches_letters(text: str, start: int, end: int) -> bool:
    """Whether what stands from start to end is a part of a longer word."""
    return text[start - 1 : start].isalpha() or text[end : end + 1].isalpha()


@functools.cache
def _is_sign(character: str) -> bool:
    if unicodedata.category(character)[0] in "LM":  # letters and their marks, but for ℝ, ℵ, 𝑥 and superscripts
        mathematical = unicodedata.decomposition(character).startswith(("<font>", "<super>", "<sub>"))
        return mathematical or "\u2100" <= character <= "\u214f"
    return character not in _PROSE and unicodedata.category(character)[0] in "NPS"


def grams(hashes: np.ndarray, length: int) -> np.ndarray:
    """Hash of each run of `length` words: uint64 [n] -> [n - length + 1] (empty when there are too few)."""
    if len(hashes) < length:
        return np.zeros(0, np.uint64)
    n = len(hashes) - length + 1
    total = np.zeros(n, np.uint64)
    for i in range(length):
        total *= np.uint64(_MULTIPLIER)
        total += hashes[i : i + n]
    return mix(total)


def mix(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 that spreads every bit over all (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Grams:
    """The n-grams of many texts at once.

    Args:
        texts: word hashes of each text.
    """

    def __init__(self, texts: Sequence[Sequence[int]]):
        counts = np.array([len(text) for text in texts], np.int64)
        self._flat = np.fromiter(chain.from_iterable(texts), np.uint64, int(counts.sum()))
        self._owner = np.repeat(np.arange(len(texts)), counts)
        self._left = np.repeat(np.cumsum(counts), counts) - np.arange(len(self._flat))  # words to the text's end
        self._sums = np.zeros(len(self._flat), np.uint64)
        self._length = 0

    def of(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """N-grams of this length; lengths must be asked for in ascending order.

        Returns:
            (uint64 [m] hashes as `grams` has them, int64 [m] which text each is from, ascending); no n-gram spans
            two texts.
        """
        if length < self._length:
            raise ValueError("lengths must ascend")
        while self._length < length:
            usable = max(0, len(self._flat) - self._length)
            self._sums = self._sums[:usable] * np.uint64(_MULTIPLIER) + self._flat[self._length :]
            self._length += 1
        inside = self._left[: len(self._sums)] >= length
        return mix(self._sums[inside]), self._owner[: len(self._sums)][inside]


def _coefficients() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.PCG64(np.random.SeedSequence(20_260_421)).random_raw(2 * BANDS * BAND_ROWS)
    return random[::2] | np.uint64(1), random[1::2]


_A, _B = _coefficients()


def minhash(shingles: np.ndarray) -> np.ndarray:
    """MinHash signature uint64 [128] of a set of shingles, uint64 [n], n > 0.

    Two sets have the same value at a place with a probability close to their Jaccard similarity.
    """
    return (mix(shingles)[:, None] * _A + _B).min(axis=0)


def band_keys(texts: Sequence[Sequence[int]], formula_keys: Sequence[int]) -> np.ndarray:
    """Keys uint64 [n, BANDS] of which near duplicates share at least one.

    A key holds BAND_ROWS MinHash values and the formula key: texts with other numbers or formulas share none,
    however alike their words are.
    """
    shingles, owner = Grams(texts).of(SHINGLE)
    bounds = np.searchsorted(owner, np.arange(len(texts) + 1))
    signatures = np.empty((len(texts), BANDS * BAND_ROWS), np.uint64)
    for i, text in enumerate(texts):
        own = shingles[bounds[i] : bounds[i + 1]]
        if not len(own):  # fewer words than a shingle: the text as a whole
            own = grams(np.array([len(text), *text], np.uint64), len(text) + 1)
        signatures[i] = minhash(own)
    keys = np.zeros((len(texts), BANDS), np.uint64) + np.arange(BANDS, dtype=np.uint64)
    for row in range(BAND_ROWS):
        keys = mix(keys) + signatures[:, row::BAND_ROWS]
    return mix(mix(keys) + np.array(formula_keys, np.uint64)[:, None])


def shingle_set(text: str) -> set[tuple[str, ...]]:
    """The word 3-grams of a text; of one with fewer words, all of it."""
    found = words(text)
    return {tuple(found[i : i + SHINGLE]) for i in range(max(1, len(found) - SHINGLE + 1))}


def jaccard(a: set[tuple[str, ...]], b: set[tuple[str, ...]]) -> float:
    """Exact Jaccard similarity of the shingles of two texts."""
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared)
