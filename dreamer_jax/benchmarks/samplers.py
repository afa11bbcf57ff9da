"""A trained model with each sampler: speed, steps that follow one another, how far its texts are the same, accuracy."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from dreamer_jax.benchmarks.sampler_questions import Questions
from dreamer_jax.benchmarks.training import machine
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.families import build
from dreamer_jax.inference import (
    Adaptive,
    DiffusionForcing,
    Engine,
    FoldedModel,
    Generated,
    Lossless,
    Sampler,
    Sampling,
    Speculative,
    Static,
)
from dreamer_jax.inference.batches import bucket
from dreamer_jax.inference.samplers.criteria import CRITERIA
from dreamer_jax.inference.text import cut, stopper
from dreamer_jax.runs.models import with_cache

Measurement = dict[str, Any]


class Setting(NamedTuple):
    """One side of the comparison.

    Attributes:
        sampler: how tokens go through the depths.
        depth: L; None for the full depth.
        cache: the rule of `model.cache`; None for that of the run.
    """

    sampler: Sampler
    depth: int | None = None
    cache: str | None = None

    @property
    def label(self) -> str:
        """In tables: "lossless-guess_depth-2", "static, depth 4"."""
        more = [f"{name} {its}" for name, its in (("depth", self.depth), ("cache", self.cache)) if its is not None]
        return ", ".join([self.sampler.label, *more])

    def of(self, model: FoldedModel) -> Engine:
        """The engine.

        Raises:
            UserError: the model has no such depth or cache, or can't be used with the sampler.
        """
        family = model.family
        if self.cache is not None:
            family = build(with_cache(model.config, self.cache))
        depth = model.total_depth if self.depth is None else family.check_depth(self.depth)
        return Engine(model.replace(family=family, total_depth=depth), self.sampler)


@dataclass(frozen=True)
class Grid:
    """A setting over several values.

    Attributes:
        name: of the setting: "adaptive.threshold", "depth".
        points: (value, the values of other settings, what is measured) of each; those with the same others are a curve.
    """

    name: str
    points: tuple[tuple[str, str, Setting], ...]


def settings_for(depth: int) -> Iterator[Setting]:
    """What is compared of a model of L = `depth` if nothing is named: full depth first, then fewer, then each sampler,
    those that are known here at several settings."""
    parts = sorted({max(1, depth // share) for share in (8, 4, 2)} - {depth})
    yield Setting(Static())
    for part in parts:
        yield Setting(Static(), part)
    for name in CRITERIA:
        yield Setting(Adaptive(name))
    for part in parts:
        yield Setting(Speculative(4, part))
    for part in parts:
        yield Setting(Lossless(part))
    for part in parts:
        yield Setting(DiffusionForcing(part))
        yield Setting(DiffusionForcing(part, exit="fixed"))


@dataclass(frozen=True)
class Task:
    """What is generated.

    Attributes:
        questions: see there.
        batches: batch sizes; every one goes over all questions.
        tokens: most tokens of a text.
        rounds: how often each setting has its turn.
        sampling: how tokens are chosen.
    """

    questions: Questions
    batches: Sequence[int]
    tokens: int = 64
    rounds: int = 3
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise UserError(
                f"{self.tokens} tokens of a text are too few: the first comes of the prompt, so take 2 or more"
            )
        if max(self.batches) > len(self.questions.prompts):
            raise UserError(f"{len(self.questions.prompts)} prompts are too few for a batch of {max(self.batches)}")


def bench_samplers(
    model: FoldedModel, tokenizer: Tokenizer, settings: Sequence[Setting], task: Task, say: Callable[[str], None]
) -> Measurement:
    """Generate behind prompts with every setting that the model can be used with, all in turn.

    Args:
        model: see `fold`; its depth is the full one.
        tokenizer: its own.
        settings: the first one is what the others are compared with.
        task: what is generated.
        say: gets a line of progress now and then.

    Returns:
        `machine`; `tokens`, `questions` and `sampling` of the task; `refused`: label -> reason, where it doesn't fit
        into memory with the batch size; `batches`: for each batch size and label see `Side.summary`.
    """
    engines: dict[str, Engine] = {}
    refused: dict[str, str] = {}
    for setting in settings:
        try:
            engines[setting.label] = setting.of(model)
        except UserError as error:
            refused[setting.label] = str(error)
    asked = {"tokens": task.tokens, "questions": len(task.questions.prompts), "sampling": task.sampling.label}
    result: Measurement = {"machine": machine(), **asked, "refused": refused, "batches": {}}
    prompts = [[tokenizer.bos, *tokenizer.encode(prompt)] for prompt in task.questions.prompts]
    for batch in task.batches:
        sides = {label: Side(engine, tokenizer, prompts, batch, task) for label, engine in engines.items()}
        for label, side in list(sides.items()):
            try:
                side.compile()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or label == settings[0].label:
                    raise
                del sides[label]
                refused[f"{label}, batch {batch}"] = "it doesn't fit into memory"
                continue
            say(f"batch {batch}: {label} compiled")
        for number in range(task.rounds):
            for side in sides.values():
                side.measure()
            say(f"batch {batch}: round {number + 1} of {task.rounds}")
        full = next(iter(sides.values()))
        result["batches"][str(batch)] = {label: side.summary(full) for label, side in sides.items()}
    return result


class Side:
    """One setting at one batch size.

    Args:
        engine: of the setting.
        tokenizer: of the model.
        prompts: all of them, as tokens.
        batch: B.
        task: what is generated.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, prompts: Sequence[list[int]], batch: int, task: Task):
        self._engine, self._tokenizer, self._task = engine, tokenizer, task
        self._groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
        self._speeds: list[float] = []
        self._count = 0
        self.rows: list[Generated] = []
        """Of the first round, each as long as its text."""

    def compile(self) -> None:
        """Run each shape of programs once, so that nothing is compiled while time is taken."""
        tokens = self._task.tokens
        shapes = {tuple(bucket(len(prompt) + tokens) for prompt in group): group for group in self._groups}
        for group in shapes.values():
            self._generate(group, 0)

    def measure(self) -> None:
        """A round over all prompts."""
        rows: list[Generated] = []
        total = 0
        for number, group in enumerate(self._groups):
            seconds, count, its = self._generate(group, number * len(self._groups[0]))
            if count and len(group) == len(self._groups[0]):  # the last one may be smaller
                self._speeds.append(count / seconds)
            rows, total = rows + its, total + count
        self.rows, self._count = self.rows or rows, self._count or total

    def _generate(self, prompts: Sequence[list[int]], first: int) -> tuple[float, int, list[Generated]]:
        """Seconds for the tokens after those that come of the prompts (the first of every row), how many they are, and
        the rows."""
        task, tokenizer = self._task, self._tokenizer
        ends = (tokenizer.eos,) if task.questions.golds else ()
        found = stopper(tokenizer, len(prompts), task.questions.stops)
        numbers = range(first, first + len(prompts))
        stream = self._engine.stream(prompts, task.tokens, task.sampling, ends, found, numbers=numbers)
        rows = next(stream)
        before = sum(len(row.tokens) or row.finish == "stop" for row in rows)
        began = time.perf_counter()
        for rows in stream:  # noqa: B007 (the last ones are wanted)
            pass
        seconds = time.perf_counter() - began
        texts = [self._shortened(row) for row in rows]
        # A stop token was generated too, and isn't among a row's tokens.
        stopped = sum(row is text and row.finish == "stop" for row, text in zip(rows, texts, strict=True))
        return seconds, sum(len(row.tokens) for row in rows) + stopped - before, texts

    def _shortened(self, row: Generated) -> Generated:
        """The row up to the token that completes a stop string, if there is one."""
        stops = self._task.questions.stops
        text = self._tokenizer.decode(row.tokens)
        if cut(text, stops) == text:
            return row
        for count in range(1, len(row.tokens) + 1):
            text = self._tokenizer.decode(row.tokens[:count])
            if cut(text, stops) != text:
                return dataclasses.replace(row, tokens=row.tokens[:count])
        return row

    def summary(self, full: Side) -> Measurement:
        """Per token after a row's first: `steps` that follow one another; `work`, depth steps of all positions.
        `tokens_per_second`, the median over batches and rounds, and `speedup`, that over the one of full depth; all
        None where no text has a second token.
        `acceptance` of drafted tokens, None without; `agreement`, the share of the texts before the first token that
        isn't that of full depth. `accuracy`, by metric the mean and its standard error, None of a single text; {} where
        no answers are known."""
        rows, count = self.rows, self._count
        speed, full_speed = (statistics.median(its._speeds) if its._speeds else None for its in (self, full))
        drafted = sum(row.drafted for row in rows)
        same = [_agreement(row.tokens, its.tokens) for row, its in zip(rows, full.rows, strict=True)]
        stops, decode = self._task.questions.stops, self._tokenizer.decode
        accuracy = self._task.questions.accuracy([cut(decode(row.tokens), stops) for row in rows])
        return {
            "tokens_per_second": speed,
            "speedup": speed / full_speed if speed and full_speed else None,
            "steps": sum(row.steps for row in rows) / count if count else None,
            "work": sum(row.work for row in rows) / count if count else None,
            "acceptance": sum(row.accepted for row in rows) / drafted if drafted else None,
            "agreement": statistics.mean(same),
            "accuracy": {
                name: {"value": value, "error": None if math.isnan(error) else error}
                for name, (value, error) in accuracy.items()
            },
        }


def _agreement(a: Sequence[int], b: Sequence[int]) -> float:
    """The share of the longer text before the first token that differs."""
    common = next((i for i, (one, two) in enumerate(zip(a, b, strict=False)) if one != two), min(len(a), len(b)))
    longest = max(len(a), len(b))
    return common / longest if longest else 1.0
