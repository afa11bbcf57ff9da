"""What samplers are measured on: prompts, and how answers are judged where the right ones are known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dreamer_jax.errors import UserError
from dreamer_jax.evaluation import scoring
from dreamer_jax.evaluation.scoring import Estimate
from dreamer_jax.evaluation.tasks import TASKS, Generation, Settings

Grade = Callable[[str, str], Mapping[str, Any]]
"""(text, right answer) -> a number for each metric."""


@contextlib.contextmanager
def exactly() -> Iterator[Grade]:
    """The metric `exact`: whether the text is the right answer, but for space around it."""
    yield lambda text, gold: {"exact": int(text.strip() == gold.strip())}


@dataclass(frozen=True)
class Questions:
    """Prompts, and what is known of their answers.

    Attributes:
        prompts: texts.
        golds: the right answers; none where they aren't known. Texts end at end-of-text then, or at a stop string, as
            those of `dreamer eval` do, and otherwise at the limit alone.
        stops: strings that end a text.
        metrics: names of the numbers that `grader` gives.
        grader: opens what judges.
        max_tokens: of a text, where the answers' benchmark has a limit.
    """

    prompts: Sequence[str]
    golds: Sequence[str] = ()
    stops: Sequence[str] = ()
    metrics: tuple[str, ...] = ("exact",)
    grader: Callable[[], contextlib.AbstractContextManager[Grade]] = exactly
    max_tokens: int | None = None

    def first(self, count: int) -> Questions:
        """The first ones."""
        own = self.prompts[:count], self.golds[:count]
        return Questions(*own, self.stops, self.metrics, self.grader, self.max_tokens)

    def accuracy(self, texts: Sequence[str]) -> dict[str, Estimate]:
        """Means of the metrics over texts, one for each prompt; {} where no answers are known."""
        if not self.golds:
            return {}
        with self.grader() as grade:
            grades = [grade(text, gold) for text, gold in zip(texts, self.golds, strict=True)]
        return {name: scoring.mean([float(each[name]) for each in grades]) for name in self.metrics}


def of_records(records: Sequence[tuple[Mapping[str, Any], str]], stops: Sequence[str] = ()) -> Questions:
    """Records and their prompts; where each has a text in `prompt` and one in `answer`, those are the right answers."""
    known = all(isinstance(record.get(name), str) for record, _ in records for name in ("prompt", "answer"))
    golds = [str(record["answer"]) for record, _ in records] if known else []
    return Questions([prompt for _, prompt in records], golds, stops)


def of_task(name: str, data: str, shots: int, space_in_prompt: bool) -> Questions:
    """The questions of a benchmark of `dreamer eval` that is answered in texts.

    Args:
        name: of the benchmark.
        data, shots, space_in_prompt: as of `evaluation.Settings`.

    Raises:
        UserError: there is no such benchmark, or its files are missing.
    """
    written = {name: task for name, task in TASKS.items() if isinstance(task, Generation)}
    if name not in written:
        raise UserError(f"--task {name}: must be one that is answered in texts: {', '.join(written)}")
    task = written[name]
    # No tokenizer and no row length: only texts without questions are cut by them.
    asked = task.items(Settings(data, shots, space_in_prompt=space_in_prompt), None, 0)  # type: ignore[arg-type]
    prompts, golds = [one.prompt for one in asked], [one.gold for one in asked]
    return Questions(prompts, golds, task.stops, task.metrics, task.grader, task.max_tokens)
