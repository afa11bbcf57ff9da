"""A text that grows token by token: what of it is certain, and which part of it is each token's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.errors import UserError

UNFINISHED = "\ufffd"
"""What a tokenizer makes of bytes that aren't a whole character (yet)."""
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so most tokens one is made of."""


class Growing:
    """The text of a row of tokens while it grows.

    Half a character at the end, and what may still become a stop string, is held back until it is known. However many
    tokens come at once, the text is what it is when they come one by one. Only the newest tokens are decoded again.

    Args:
        tokenizer: of the tokens.
        stop: strings that end the text, before them.
    Raises:
        UserError: a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        check_stop(stop)
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._whole, self._certain = "", 0
        self._ends: list[int] = []  # in `_whole`, of each token that is in it
        self._known: list[int] = []  # the same of the characters that it is part of
        # Some decoders look at what stands before a token, so the last tokens that are in `_whole` are kept.
        self._before: list[int] = []
        self._before_text = ""
        self._open: list[int] = []
        self.tokens = 0
        """That were taken in, those of the stop string included."""
        self.stopped = False
        """Whether a stop string was found; later tokens aren't taken in."""

    @property
    def text(self) -> str:
        """The part that can't change any more; after `end`, or a stop string, the whole text."""
        return self._whole[: self._certain]

    def add(self, tokens: Iterable[int]) -> None:
        """Take in further tokens, up to the one that completes a stop string."""
        for token in tokens:
            if self.stopped:
                return
            self.tokens += 1
            self._open.append(token)
            self._settle(self._whole_characters())

    def end(self) -> None:
        """Nothing follows: what was held back belongs to the text."""
        if not self.stopped:
            self._settle(len(self._open))
        if not self.stopped:
            self._certain = len(self._whole)

    def pieces(self, start: int = 0) -> list[str]:
        """The text of each token from the one with this number on, as far as all of it is certain.

        Of a character in several tokens the last one has it, and the others nothing. Tokens of the stop string have no
        piece, but for a part of one that stands before it.
        """
        found = []
        for number in range(start, len(self._ends)):
            begin = self._ends[number - 1] if number else 0
            if self._known[number] > self._certain and not (self.stopped and begin < self._certain):
                break
            found.append(self._whole[begin : min(self._ends[number], self._certain)])
        return found

    def _whole_characters(self) -> int:
        """How many of the open tokens end where a character ends, or where bytes that are none do."""
        count = len(self._open)
        text = self._tokenizer.decode(self._before + self._open)
        if not text.endswith(UNFINISHED):
            return count
        # A character may yet come of the last few tokens. Where the parts on both sides of a border read as they do
        # together, nothing that follows changes the first.
        for border in range(count - 1, max(0, count - LONGEST_CHARACTER), -1) if count > LONGEST_CHARACTER else ():
            first, second = self._before + self._open[:border], self._open[border:]
            if self._tokenizer.decode(first) + self._tokenizer.decode(second) == text:
                return border
        return 0

    def _settle(self, count: int) -> None:
        """Put so many of the open tokens into the text."""
        if not count:
            return
        before = len(self._whole)
        self._whole += self._tokenizer.decode(self._before + self._open[:count])[len(self._before_text) :]
        self._ends += [before] * (count - 1) + [len(self._whole)]
        self._known += [len(self._whole)] * count
        settled, self._open = self._open[:count], self._open[count:]
        # Special tokens have no text and aren't what stands before the next one. Twice: a first space may be dropped.
        if self._tokenizer.decode(settled * 2):
            self._before, self._before_text = settled, self._tokenizer.decode(settled)
        start = max(0, before - self._longest + 1)
        place = find(self._whole[start:], self._stop)
        if place is None:
            self._certain = len(self._whole) - _may_become(self._whole[start:], self._stop)
        else:
            self.stopped, self._certain = True, start + place


def check_stop(stop: Sequence[str]) -> None:
    """Refuse stop strings that can't be.

    Raises:
        UserError: one is empty, or no text; or they aren't several.
    """
    if isinstance(stop, str) or not isinstance(stop, Sequence) or not all(isinstance(each, str) for each in stop):
        raise UserError(f"stop {stop!r}: must be a list of texts")
    if not all(stop):
        raise UserError("a stop string is empty; it would end every text at once")
    try:
        "".join(stop).encode()
    except UnicodeEncodeError:
        raise UserError("a stop string isn't text in UTF-8; no text would ever hold it") from None


def find(text: str, stop: Sequence[str]) -> int | None:
    """Where the first stop string begins."""
    found = [place for place in (text.find(string) for string in stop) if place >= 0]
    return min(found, default=None)


def _may_become(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of a text that begin a stop string."""
    lengths = ((string, n) for string in stop for n in range(1, min(len(string), len(text) + 1)))
    return max((n for string, n in lengths if text.endswith(string[:n])), default=0)
