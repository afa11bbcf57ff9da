"""Tasks through a model: in batches, with progress, resumable, ending in numbers with standard errors."""

from __future__ import annotations

import datetime
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamer_jax.errors import UserError
from dreamer_jax.evaluation.comparison import read_results
from dreamer_jax.evaluation.records import Records, alone
from dreamer_jax.evaluation.scoring import Estimate
from dreamer_jax.evaluation.tasks import TASKS, Settings, Task
from dreamer_jax.runs.folders import write_atomically

if TYPE_CHECKING:
    from dreamer_jax.inference import LanguageModel

CHUNK = 4
"""Batches of a model between two writings of records."""
MEANT = {"items": "other questions or texts, or another --max-tokens, --window or way of drawing tokens"}
"""How a refusal of records says that a part of what they answer is another."""

Results = dict[str, dict[str, Any]]
"""Label of a task -> `questions`, `shots`, `cut` (prompts that lost their beginning), `metrics` and `subjects`, as
results.json holds it."""


def choose_tasks(names: str, key: str = "--tasks") -> list[Task]:
    """The tasks that a list with commas names, each once.

    Args:
        names: the list.
        key: where it stands, for messages.
    Raises:
        UserError: a name isn't one, or there is none.
    """
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in chosen if name not in TASKS]
    if unknown or not chosen:
        problem = f"'{unknown[0]}' is not a task" if unknown else "no task is named"
        raise UserError(f"{key}: {problem}; choose from {', '.join(TASKS)}")
    return [TASKS[name] for name in chosen]


def evaluate(
    model: LanguageModel,
    tasks: Sequence[Task],
    settings: Settings,
    folder: Path,
    source: Mapping[str, Any],
    row_length: int,
    *,
    limit: int | None = None,
    fresh: bool = False,
    renew: bool = False,
    say: Callable[[str], None] = print,
) -> Results:
    """Evaluate a model and write `LABEL.jsonl` (a record a line) and `results.json` into the folder.

    What the folder already holds of the same evaluation is not computed again, so an interrupted one goes on, and one
    with a limit can be extended. Other tasks may be evaluated into it by other processes at the same time.

    Args:
        model: see `opening.open_model`.
        tasks: see `choose_tasks`.
        settings: what is asked and how.
        folder: where records and results go.
        source: what is evaluated (run, checkpoint step, depth, ...); records are used again only for an equal one.
        row_length: S of the run, the window of the task ppl.
        limit: only the first questions (windows) of each task.
        fresh: discard earlier records.
        renew: discard records of another evaluation, and wait for one of the same task; both are refused otherwise.
        say: gets lines of progress.

    Returns:
        The results of these tasks.

    Raises:
        UserError: the folder can't be used, holds another evaluation, or another process is at the same task.
    """
    results: Results = {}
    asked = [(task, label_of(task, settings), task.items(settings, model.tokenizer, row_length)) for task in tasks]
    for task, label, items in asked:  # all of them are there before the first is answered
        identity = {**source, "task": label, "max_length": model.max_length, "items": task.identity(items, settings)}
        path = folder / f"{label}.jsonl"
        with alone(path, say if renew else None):
            records = Records(path, identity, fresh, renew, MEANT)
            wanted = spread([getattr(item, "subject", "") for item in items], limit)
            results[label] = _evaluate(task, label, items, wanted, records, settings, model, say)
        replace = len(records.done) <= len(wanted)
        kept = _write(folder / "results.json", dict(source), label, results[label], replace)
        if kept:
            say(f"{label}: results.json keeps the numbers over {kept:,} that are already there")
    return results


def _evaluate(
    task: Task,
    label: str,
    items: Sequence[Any],
    wanted: Sequence[int],
    records: Records,
    settings: Settings,
    model: LanguageModel,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The result of one task over the wanted items; the records get what they lack."""
    cut = {i for i in wanted if task.cut(items[i], settings, model)}
    if cut:
        say(
            f"{label}: {len(cut):,} of {len(wanted):,} prompts are longer than --max-length {model.max_length:,} "
            "leaves room for, and lose their beginning"
        )
    # Earlier versions marked none, and left out begin-of-text before choices.
    for i in [i for i in wanted if i in records.done and ("cut" in records.done[i]) != (i in cut)]:
        del records.done[i]
    _answer(task, label, items, wanted, cut, records, settings, model, say)
    try:
        return _result(task, settings, [records.done[i] for i in wanted], len(cut))
    except (KeyError, TypeError, ValueError) as error:  # a line that somebody has changed
        problem = f"a record of {label} has no {error}" if isinstance(error, KeyError) else f"{label}: {error}"
        raise UserError(f"{problem}: move the file of its records away, or start anew with --fresh") from None


def spread(subjects: Sequence[str], limit: int | None) -> list[int]:
    """The numbers of so many questions, in order: as many of each subject, the first ones, as far as it has them. Files
    of benchmarks hold one subject after the other, so that the first questions would be of one alone. With a larger
    limit there are the same and others."""
    taken: Counter[str] = Counter()
    places = []
    for number, subject in enumerate(subjects):
        places.append((taken[subject], number))
        taken[subject] += 1
    return sorted(number for _, number in sorted(places)[:limit])


def label_of(task: Task, settings: Settings) -> str:
    """How a task is called in files and tables: gsm8k, gsm8k-5shot, ppl, ppl-shakespeare (of a file of that name)."""
    if task.name == "ppl":
        return f"ppl-{Path(Path(settings.text).name.removesuffix('.gz')).stem}" if settings.text else "ppl"
    return f"{task.name}-{settings.shots}shot" if settings.shots else task.name


def _answer(
    task: Task,
    label: str,
    items: Sequence[Any],
    wanted: Sequence[int],
    cut: Container[int],
    records: Records,
    settings: Settings,
    model: LanguageModel,
    say: Callable[[str], None],
) -> None:
    missing = [i for i in wanted if i not in records.done]
    if len(missing) < len(wanted):
        say(f"{label}: {len(wanted) - len(missing):,} of {len(wanted):,} are already there")
    if not missing:
        return
    missing.sort(key=lambda i: -task.size(items[i]))  # the longest first: what is left goes faster than it seems
    amount = CHUNK * model.batch_size
    progress = _Progress(label, len(wanted), len(wanted) - len(missing), say)
    with task.answerer(settings, model) as answer:
        for first in range(0, len(missing), amount):
            part = missing[first : first + amount]
            found = answer([items[i] for i in part])
            records.add([record | ({"cut": True} if record["index"] in cut else {}) for record in found])
            progress.done(len(part), last=first + amount >= len(missing))


class _Progress:
    """A line now and then: how far, how long still."""

    EVERY = 10.0

    def __init__(self, label: str, total: int, before: int, say: Callable[[str], None]):
        self._label, self._total, self._count, self._before, self._say = label, total, before, before, say
        self._began = self._said = time.perf_counter()

    def done(self, amount: int, last: bool) -> None:
        self._count += amount
        now = time.perf_counter()
        if now - self._said < self.EVERY and not last:
            return
        self._said = now
        spent = now - self._began
        left = spent / (self._count - self._before) * (self._total - self._count)
        state = f"in {_clock(spent)}" if last else f"eta {_clock(left)}"
        self._say(f"{self._label}: {self._count:,}/{self._total:,} {self._count / self._total:4.0%}  {state}")


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _result(task: Task, settings: Settings, records: Sequence[dict[str, Any]], cut: int) -> dict[str, Any]:
    result: dict[str, Any] = {"task": task.name, "questions": len(records)}
    if task.name != "ppl":
        result |= {"shots": settings.shots, "cut": cut}
    result["metrics"] = _numbers(task.estimates(records))
    subjects = sorted({record.get("subject", "") for record in records} - {""})
    if subjects:
        result["subjects"] = {
            subject: _numbers(task.estimates([record for record in records if record["subject"] == subject]))
            for subject in subjects
        }
    return result


def _numbers(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    return {
        name: {"value": value, "standard_error": None if math.isnan(error) else error}
        for name, (value, error) in estimates.items()
    }


def _write(path: Path, source: dict[str, Any], label: str, result: dict[str, Any], replace: bool) -> int:
    """Add a result to those that the file has of the same source. One over more questions stays, unless it is to be
    replaced; returns how many it is over then, else 0."""
    with alone(path.parent, lambda _: None):  # another process may add another task's
        known: Results = {}
        if path.is_file():
            content = read_results(path)
            known = content["tasks"] if content["source"] == source else {}
        its = known.get(label)
        before = its.get("questions", 0) if isinstance(its, dict) else 0
        if before > result["questions"] and not replace:
            return before
        write_atomically(path, json.dumps({"source": source, "tasks": known | {label: result}}, indent=1) + "\n")
        return 0
