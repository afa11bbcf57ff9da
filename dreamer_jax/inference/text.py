"""Text in, text out: an engine with a tokenizer, stop strings, and text that can be shown while it grows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dreamer_jax.errors import UserError
from dreamer_jax.inference.engine import Engine, Generated
from dreamer_jax.inference.sampling import Sampling

if TYPE_CHECKING:
    from dreamer_jax.data import Tokenizer

UNFINISHED = "�"
"""What a tokenizer makes of bytes that aren't a whole character (yet)."""
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so most tokens one is made of."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A generated text.

    Attributes:
        text: without the prompt, cut before the first stop string.
        tokens: how many were generated for it, those after a stop string included.
        finish: "stop": end of text or a stop string. "length": the limit of tokens.
        mean_depth: depths that its tokens went through.
    """

    text: str
    tokens: int
    finish: str
    mean_depth: float


class Writer:
    """Continues texts.

    Args:
        engine: of the model.
        tokenizer: the one the model was trained with. Every prompt begins with its begin-of-text token and a text
            ends with its end-of-text token, as the documents of training do.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        self._engine, self._tokenizer = engine, tokenizer

    def write(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        batch_size: int = 16,
        first_number: int = 0,
    ) -> list[Text]:
        """Continue prompts in batches.

        Args:
            prompts: any number of texts.
            max_tokens, sampling, batch_size, first_number: as of `Engine.generate`.
            stop: strings that end a text.
        """
        _check(stop)
        rows = [self.encode(prompt) for prompt in prompts]
        ends = (self._tokenizer.eos,)

        def finished(row: int, tokens: list[int]) -> bool:
            return _find(self._tokenizer.decode(tokens), stop) is not None

        asked = finished if stop else None
        generated = self._engine.generate(rows, max_tokens, sampling, ends, asked, batch_size, first_number)
        return [self._text(row, stop) for row in generated]

    def stream(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        block: int = 4,
    ) -> Iterator[list[Text]]:
        """Continue one batch of prompts and yield the texts as they grow: each begins with what it was before.

        What may still become a stop string or is half a character is held back until it is known.

        Args:
            block: tokens between two yields.
        """
        _check(stop)
        rows = [self.encode(prompt) for prompt in prompts]

        def finished(row: int, tokens: list[int]) -> bool:
            return _find(self._tokenizer.decode(tokens), stop) is not None

        for generated in self._engine.stream(
            rows, max_tokens, sampling, (self._tokenizer.eos,), finished if stop else None, block
        ):
            latest = [self._text(row, stop) for row in generated]
            growing = [row.finish == "length" and len(row.tokens) < max_tokens for row in generated]
            yield [
                dataclasses.replace(text, text=_settled(text.text, stop)) if grows else text
                for text, grows in zip(latest, growing, strict=True)
            ]

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt."""
        return [self._tokenizer.bos, *self._tokenizer.encode(prompt)]

    def _text(self, row: Generated, stop: Sequence[str]) -> Text:
        text = self._tokenizer.decode(row.tokens)
        end = _find(text, stop)
        depths = sum(row.depths) / len(row.depths) if row.depths else 0.0
        return Text(text[:end], len(row.tokens), row.finish if end is None else "stop", depths)


def _check(stop: Sequence[str]) -> None:
    if not all(stop):
        raise UserError("a stop string is empty; it would end every text at once")


def _find(text: str, stop: Sequence[str]) -> int | None:
    """Where the first stop string begins."""
    found = [place for place in (text.find(string) for string in stop) if place >= 0]
    return min(found, default=None)


def _settled(text: str, stop: Sequence[str]) -> str:
    """The part of a growing text that can't change any more."""
    end = len(text)
    while end > max(0, len(text) - LONGEST_CHARACTER) and text[end - 1] == UNFINISHED:
        end -= 1
    text = text[:end]
    held = max((n for string in stop for n in range(1, len(string)) if text.endswith(string[:n])), default=0)
    return text[: len(text) - held]
