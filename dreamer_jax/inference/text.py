"""Text in, text out: an engine with a tokenizer, stop strings, and text that can be shown while it grows."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dreamer_jax.data.tokenizers import Tokenizer, encode_pair, load_tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.inference.engine import Engine, Generated, Scores
from dreamer_jax.inference.growing import Growing, check_stop, find
from dreamer_jax.inference.sampling import Sampling
from dreamer_jax.inference.tracing import Trace, trace

if TYPE_CHECKING:
    from dreamer_jax.runs.models import TrainedModel

Prompt = str | Sequence[int]
"""A text, or tokens as they are."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A generated text.

    Attributes:
        text: without the prompt, cut before the stop string that was complete first.
        tokens: that were generated for it, those after a stop string included.
        finish: "stop": end of text or a stop string. "length": the limit of tokens. "failed": the logits after its last
            token are NaN or infinite, so that there is none to choose.
        mean_depth: depths that its tokens went through.
        steps: depth steps that followed one another for its tokens after the first.
        drafted, accepted: tokens that its sampler proposed, and those of them that stayed.
    """

    text: str
    tokens: list[int]
    finish: str
    mean_depth: float
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


def refuse_failed(texts: Sequence[Text]) -> None:
    """Say so where texts ended because there was no token to choose.

    Raises:
        UserError: some did.
    """
    if failed := [text for text in texts if text.finish == "failed"]:
        which = f"{len(failed)} of {len(texts)} texts: " if len(texts) > 1 else ""
        raise UserError(
            f"{which}after {len(failed[0].tokens)} tokens the model's logits are NaN or infinite: its weights are, or "
            "it overflows. Try --dtype float32, the depth that it was trained with, or an earlier checkpoint, such as "
            "RUN/checkpoints/STEP"
        )


class Likelihood(NamedTuple):
    """Of a continuation given what stands before it.

    logprob: natural logarithm of its probability, summed over its tokens.
    greedy: whether greedy decoding would write it.
    """

    logprob: float
    greedy: bool


class LanguageModel:
    """Continues and scores texts.

    Args:
        engine: of the model.
        tokenizer: the one the model was trained with. Every text begins with its begin-of-text token and ends with its
            end-of-text token, as the documents of training do; prompts that are tokens are taken as they are.
        max_length: most tokens of a request; a longer prompt loses its beginning. None for no limit.
        batch_size: rows computed at once.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, max_length: int | None = None, batch_size: int = 16):
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.batch_size = batch_size
        self._engine = engine

    @property
    def exits_early(self) -> bool:
        """Whether a token may stop before the last depth."""
        return self._engine.exits_early

    @property
    def drafts(self) -> bool:
        """Whether tokens are proposed before the full depth has decided."""
        return self._engine.sampler.drafts

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        max_tokens: int,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        numbers: Sequence[int] | None = None,
    ) -> list[Text]:
        """Continue prompts in batches.

        Args:
            prompts: any number of them; a text is one.
            max_tokens: most tokens a text gets.
            sampling: greedy by default.
            stop: strings that end a text.
            numbers: of the prompts, as of `Engine.generate`.
        """
        rows = self._rows(prompts, max_tokens)
        generated = self._engine.generate(
            rows,
            max_tokens,
            sampling,
            stop_ids=(self.tokenizer.eos,),
            finished=stopper(self.tokenizer, len(rows), stop),
            batch_size=self.batch_size,
            numbers=numbers,
        )
        return [self._text(row, stop) for row in generated]

    def stream(
        self,
        prompts: Sequence[Prompt] | str,
        max_tokens: int,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        block: int = 4,
    ) -> Iterator[list[Text]]:
        """Continue one batch of prompts and yield the texts as they grow: each begins with what it was before.

        What may still become a stop string or is half a character is held back until it is known.

        Args:
            prompts, max_tokens, sampling, stop: as of `generate`.
            block: tokens between two yields.
        """
        rows, ends = self._rows(prompts, max_tokens), (self.tokenizer.eos,)
        growing = [Growing(self.tokenizer, stop) for _ in rows]
        asked = stopper(self.tokenizer, len(rows), stop)
        for generated in self._engine.stream(rows, max_tokens, sampling, ends, asked, block):
            for row, text in zip(generated, growing, strict=True):
                text.add(row.tokens[text.tokens :])
                if row.finish != "length" or len(row.tokens) >= max_tokens:
                    text.end()
            yield [
                dataclasses.replace(self._text(row, ()), text=text.text, finish="stop" if text.stopped else row.finish)
                for row, text in zip(generated, growing, strict=True)
            ]

    def trace(
        self, prompt: Prompt, max_tokens: int, sampling: Sampling | None = None, stop: Sequence[str] = ()
    ) -> tuple[Text, Trace]:
        """Continue one prompt, and write down what the sampler did with each position; the arguments are those of
        `generate`, and the text is the same."""
        (row,) = self._rows([prompt], max_tokens)
        finished = stopper(self.tokenizer, 1, stop)
        found = trace(self._engine, row, max_tokens, sampling, (self.tokenizer.eos,), finished)
        return self._text(found.row, stop), found

    def score(self, rows: Sequence[Prompt] | str) -> list[Scores]:
        """Log-probabilities of every token of each row but the first, which for a text is begin-of-text."""
        return self._engine.score([self.encode(row) for row in _several(rows)], batch_size=self.batch_size)

    def likelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Likelihood]:
        """Likelihood of the second part of each pair of token lists after the first, which has one token or more.

        What is longer than `max_length` is cut as prompts are: its first token, and the end of the rest, stay; of a
        second part that doesn't fit by itself, only its end.
        """
        scored = self.score([self._row(*pair) for pair in pairs])
        results = []
        for (_, following), scores in zip(pairs, scored, strict=True):
            own = slice(max(0, len(scores.logprobs) - len(following)), None)
            total = float(np.sum(scores.logprobs[own], dtype=np.float64))
            results.append(Likelihood(total, bool(np.all(scores.greedy[own]))))
        return results

    def completion_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Likelihood of completions after their prompts, both encoded as in training."""
        encoded = (encode_pair(self.tokenizer, prompt, completion) for prompt, completion in pairs)
        return self.likelihoods([([self.tokenizer.bos, *prompt], text) for prompt, text in encoded])

    def cuts(self, prompt: Prompt, room: int) -> bool:
        """Whether a prompt loses its beginning where `room` tokens are to follow it within `max_length`."""
        return self.max_length is not None and len(self.encode(prompt)) > self.max_length - room

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt."""
        if isinstance(prompt, str):
            return [self.tokenizer.bos, *self.tokenizer.encode(prompt)]
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise UserError(
                f"{prompt!r} is neither a text nor a list of tokens; one prompt of tokens goes in as [[1, 2, 3]]"
            ) from None

    def _rows(self, prompts: Sequence[Prompt] | str, max_tokens: int) -> list[list[int]]:
        """Prompts that leave room for `max_tokens`, see `_shortened`."""
        rows = [self.encode(prompt) for prompt in _several(prompts)]
        if self.max_length is None:
            return rows
        room = self.max_length - max_tokens
        if room < 2:
            raise UserError(f"{max_tokens} tokens to generate leave no room for a prompt within {self.max_length}")
        return [_shortened(row, room) for row in rows]

    def _row(self, context: list[int], following: list[int]) -> list[int]:
        """What is read to score `following`; its last token is predicted, not read."""
        row = [*context, *following]
        if self.max_length is None:
            return row
        room = self.max_length + 1
        return _shortened(row, room) if len(following) <= self.max_length else row[-room:]

    def _text(self, row: Generated, stop: Sequence[str]) -> Text:
        text, finish = self.tokenizer.decode(row.tokens), row.finish
        if find(text, stop) is not None:  # which of them was complete first is known token by token
            growing = Growing(self.tokenizer, stop)
            growing.add(row.tokens)
            growing.end()
            text, finish = growing.text, "stop"
        depths = sum(row.depths) / len(row.depths) if row.depths else 0.0
        return Text(text, row.tokens, finish, depths, row.steps, row.drafted, row.accepted)


def _several(prompts: Sequence[Prompt] | str) -> Sequence[Prompt]:
    return [prompts] if isinstance(prompts, str) else prompts


def _shortened(row: list[int], room: int) -> list[int]:
    """The first token (begin-of-text, or what stands first) and as many of the last as there is room for: 2 or more."""
    return row if len(row) <= room else [row[0], *row[len(row) - room + 1 :]]


def tokenizer_of(trained: TrainedModel, spec: str | None = None) -> Tokenizer:
    """The tokenizer that a model was trained with.

    Args:
        trained: the model.
        spec: where its file is now, if not where the run's configuration says.
    Raises:
        UserError: it isn't there, or it is another one.
    """
    spec = spec or trained.config.data.tokenizer
    try:
        tokenizer = load_tokenizer(spec)
    except UserError as error:
        raise UserError(f"{error}. If the run's tokenizer was moved, say where it is: --tokenizer FILE") from None
    if tokenizer.fingerprint != trained.meta.get("tokenizer"):
        raise UserError(f"{spec} is not the tokenizer the run was trained with; name that one: --tokenizer FILE")
    return tokenizer


def stopper(tokenizer: Tokenizer, rows: int, stop: Sequence[str]) -> Callable[[int, list[int]], bool] | None:
    """Tells whether a row holds a stop string by now (`batches.Finished`); None if there are none.

    Raises:
        UserError: a stop string is empty.
    """
    check_stop(stop)
    if not stop:
        return None
    # A stop string of n bytes lies within the last n tokens, or n - 1 earlier if it came inside a block of tokens.
    longest = max(len(string.encode()) for string in stop)
    seen = [0] * rows

    def finished(row: int, tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens[max(0, seen[row] - longest) :])
        seen[row] = len(tokens)
        return cut(text, stop) != text

    return finished


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string."""
    return text[: find(text, stop)]
