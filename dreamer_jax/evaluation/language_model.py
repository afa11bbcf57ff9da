"""A model that reads and writes text: the inference engine with a tokenizer around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dreamer_jax.config.sections import Config
from dreamer_jax.data.tokenizers import Tokenizer, load_tokenizer
from dreamer_jax.errors import UserError

LONGEST_INPUT = 2048
"""Default of the most tokens a request takes, or the run's row length where that is more."""


class TokenEngine(Protocol):
    """What is asked of `inference.Engine`."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Any = None,
        *,
        stop_ids: Sequence[int],
        finished: Callable[[int, list[int]], bool] | None,
        batch_size: int,
    ) -> Sequence[Any]:
        """Continuations with `tokens` and `finish`, in order; greedy where `sampling` is None."""
        ...

    def score(self, rows: Sequence[Sequence[int]], batch_size: int) -> Sequence[Any]:
        """`logprobs` and `greedy`, each [n - 1], of rows of n tokens, in order."""
        ...


class Likelihood(NamedTuple):
    """Of a continuation given what stands before it.

    logprob: natural logarithm of its probability, summed over its tokens.
    greedy: whether greedy decoding would write it.
    """

    logprob: float
    greedy: bool


class Answer(NamedTuple):
    """A generated text, without the stop string, and why it ended: "stop" or "length"."""

    text: str
    finish: str


class LanguageModel:
    """Scores and continues texts. Every request begins with the begin-of-text token, as every document in training.

    Args:
        engine: see `TokenEngine`.
        tokenizer: of the run.
        max_length: most tokens of a request; a longer prompt loses its beginning.
        batch_size: rows computed at once.
    """

    def __init__(self, engine: TokenEngine, tokenizer: Tokenizer, max_length: int, batch_size: int = 16):
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.batch_size = batch_size
        self._engine = engine

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Likelihood of the second text of each pair after the first.

        The two are encoded together, then cut where the first ends when encoded alone; spaces at the end of the
        first belong to the second (both as the harness does).
        """
        return self.token_likelihoods([self._encode_pair(context, text) for context, text in pairs])

    def token_likelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Likelihood]:
        """As `likelihoods` of tokens: contexts of one token or more, as they are, and what follows them."""
        rows = [[*context, *text][-(self.max_length + 1) :] for context, text in pairs]
        found = self._engine.score(rows, batch_size=self.batch_size)
        results = []
        for (_, text), scores in zip(pairs, found, strict=True):
            own = slice(max(0, len(scores.logprobs) - len(text)), None)
            total = float(np.sum(scores.logprobs[own], dtype=np.float64))
            results.append(Likelihood(total, bool(np.all(scores.greedy[own]))))
        return results

    def generate(
        self, prompts: Sequence[str], stops: Sequence[str], max_tokens: int, sampling: Any = None
    ) -> list[Answer]:
        """Continuations up to the first stop string, the end of text or `max_tokens` tokens.

        Args:
            sampling: an `inference.Sampling`; None is greedy.
        """
        room = self.max_length - max_tokens
        if room < 2:
            raise UserError(f"{max_tokens} tokens to generate leave no room for a prompt within {self.max_length}")
        bos = self.tokenizer.bos
        rows = [[bos, *self.tokenizer.encode(prompt)[-(room - 1) :]] for prompt in prompts]
        # A stop string of n bytes lies within the last n tokens, or n - 1 earlier if it came inside a block of tokens.
        longest = max((len(stop.encode()) for stop in stops), default=0)
        seen = [0] * len(rows)

        def finished(row: int, tokens: list[int]) -> bool:
            text = self.tokenizer.decode(tokens[max(0, seen[row] - longest) :])
            seen[row] = len(tokens)
            return any(stop in text for stop in stops)

        found = self._engine.generate(
            rows,
            max_tokens,
            sampling,
            stop_ids=(self.tokenizer.eos,),
            finished=finished if stops else None,
            batch_size=self.batch_size,
        )
        return [_cut(self.tokenizer.decode(one.tokens), stops, one.finish) for one in found]

    def _encode_pair(self, context: str, text: str) -> tuple[list[int], list[int]]:
        kept = context.rstrip()
        text = context[len(kept) :] + text
        before = self.tokenizer.encode(kept) if kept else []
        together = self.tokenizer.encode(kept + text)
        return [self.tokenizer.bos, *before], together[len(before) :]


class Place(NamedTuple):
    """Which model is evaluated, and where that is kept.

    folder: RUN/evaluation/step-N, with the depth and precision in its name where they aren't the run's.
    source: what identifies the model: step, tokens trained on, depth, precision.
    row_length: S of the run.
    """

    folder: Path
    source: dict[str, Any]
    row_length: int


def place_of(config: Config, directory: str, step: int, depth: int | None = None, dtype: str | None = None) -> Place:
    """Where an evaluation of a checkpoint belongs; a bucket's is kept in a folder of that name here."""
    depth, dtype = depth or config.model.depth, dtype or config.model.dtype
    name = f"step-{step}"
    name += f"-depth-{depth}" if depth != config.model.depth else ""
    name += f"-{dtype}" if dtype != config.model.dtype else ""
    tokens = step * config.training.batch_size * config.data.sequence_length
    source = {"step": step, "tokens": tokens, "depth": depth, "dtype": dtype}
    return Place(
        Path(directory.partition("://")[2] or directory) / "evaluation" / name, source, config.data.sequence_length
    )


def open_model(
    run: str,
    *,
    depth: int | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    max_length: int | None = None,
    batch_size: int = 16,
    mesh: Any = None,
) -> tuple[LanguageModel, Place]:
    """The model of a run directory, or of one checkpoint in it, and where its evaluation belongs.

    Args:
        run: as `training.checkpoints.load_run` takes it.
        depth: depths to apply, instead of the trained number.
        dtype: compute precision, instead of the run's.
        tokenizer: where its file is now, if not where the run's configuration says.
        max_length, batch_size: as of `LanguageModel`.
        mesh: a `jax.sharding.Mesh` of devices that share the work, as `inference.Engine` takes it; None for one.

    Raises:
        UserError: no such run, or a tokenizer other than the one the run was trained with.
    """
    from dreamer_jax.inference import Engine  # imports jax
    from dreamer_jax.runs.checkpoints import load_run

    trained = load_run(run)
    chosen = trained_tokenizer(tokenizer or trained.config.data.tokenizer, trained.meta["tokenizer"])
    length = max_length or max(LONGEST_INPUT, trained.config.data.sequence_length)
    model = LanguageModel(Engine.of(trained, depth=depth, dtype=dtype, mesh=mesh), chosen, length, batch_size)
    directory = re.sub(r"(^|/)checkpoints/[0-9]+$", "", run.rstrip("/")) or "."
    return model, place_of(trained.config, directory, trained.step, depth, dtype)


def load_language_model(run: str, **options: Any) -> LanguageModel:
    """The model alone; see `open_model`."""
    return open_model(run, **options)[0]


def trained_tokenizer(spec: str, fingerprint: str) -> Tokenizer:
    """The tokenizer that `spec` names, if it is the one with this fingerprint.

    Raises:
        UserError: it isn't there, or it is another one.
    """
    try:
        tokenizer = load_tokenizer(spec)
    except UserError as error:
        raise UserError(f"{error}. If the run's tokenizer was moved, name it with --tokenizer") from None
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"{spec} is not the tokenizer that the run was trained with; name that one with --tokenizer")
    return tokenizer


def rolling_windows(tokenizer: Tokenizer, text: str, length: int) -> list[tuple[list[int], list[int]]]:
    """(context, tokens to predict) of windows in which every token of a text is predicted once.

    The first window begins with the begin-of-text token. The others take up where the last one ended, given one
    token; the last window predicts only what is left and gets all the context that fits (as the harness does).

    Args:
        length: most tokens the model sees.
    """
    tokens = tokenizer.encode(text)
    padded = [tokenizer.bos, *tokens]  # padded[i] stands before tokens[i]
    windows = []
    for start in range(0, len(tokens), length):
        end = min(start + length, len(tokens))
        windows.append((padded[max(0, end - length) : start + 1], tokens[start:end]))
    return windows


def _cut(text: str, stops: Sequence[str], finish: str) -> Answer:
    found = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return Answer(text[: min(found)], "stop") if found else Answer(text, finish)
