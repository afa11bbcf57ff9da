"""A fair study: members matched in cost, trained alike on every task with several seeds, and compared.

A study is a folder of ordinary runs, TASK/MEMBER/seedN, each of which `dreamer train` could have made from the
configuration that stands in configs/; and study.json, what came out of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

from dreamer_jax.config import LoadedConfig, load_config
from dreamer_jax.config.loading import Word
from dreamer_jax.errors import UserError
from dreamer_jax.evaluation.comparison import HELDOUT, accuracies
from dreamer_jax.families import build
from dreamer_jax.json_files import read_object
from dreamer_jax.runs.folders import write_atomically
from dreamer_jax.runs.metrics import read_metrics
from dreamer_jax.studies.depths import FILE as DEPTHS
from dreamer_jax.studies.depths import Kept, takes, usual_depths
from dreamer_jax.studies.difficulty import generated
from dreamer_jax.studies.entrants import Entrant, again, choosing, describe, entrants, warnings
from dreamer_jax.studies.expert_use import SETTINGS as COUNTED
from dreamer_jax.studies.jobs import Job, RunsFailed, run_jobs, trained
from dreamer_jax.studies.study_file import LOSS, TRIAL_SHARE, StudyFile, Sweep
from dreamer_jax.training.evaluation import kept_parts
from dreamer_jax.training.figures import heldout_curve

FILE = "study.json"
FIRST = 0
"""The seed that sweeps are made with."""

Result = dict[str, Any]


def conduct(
    study: StudyFile, words: Sequence[Word], folder: Path, at_once: int, say: Callable[[str], None]
) -> tuple[Result, int]:
    """Train and evaluate what isn't yet; returns what study.json holds, and the exit code of a study that was stopped.

    Raises:
        UserError: the folder holds another study; or runs failed, when all others have been made. In a sweep, and of
            several seeds that are begun, a run that diverges is only the worst.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} can't be made: {error.strerror or error}; name another folder with --out") from None
    every = entrants(study, words)
    for line in warnings(every, study.baseline):
        say(line)
    swept: dict[tuple[str, str], dict[str, float]] = {}
    if study.sweep:
        trials = [job for entrant in every for job in _trials(study, study.sweep, entrant, words, folder)]
        code, diverged = _try_out(trials, folder, at_once, say)
        if code:
            return {}, code
        for entrant in every:
            ends = swept[entrant.task.name, entrant.member.name] = _sweep_losses(study.sweep, entrant, folder, diverged)
            if ends:
                say(f"{entrant.task.name}/{entrant.member.name}: {study.sweep.key} {_best(study.sweep, ends)} was best")
        every = [_with_value(study, study.sweep, entrant, swept, words) for entrant in every]
    seeds, diverged = {}, set[str]()
    if study.tries > 1:
        tries = _in_turn(_tries(study, entrant, words, folder) for entrant in every)
        code, diverged = _try_out(tries, folder, at_once, say)
        if code:
            return {}, code
    for entrant in every:
        seeds[entrant.task.name, entrant.member.name] = _seeds(study, entrant, words, folder, diverged)
    runs = [
        _runs(study, entrant, seeds[key], folder, swept.get(key)) for key, entrant in zip(seeds, every, strict=True)
    ]
    code, failed = 0, None
    try:
        code = _finish(_in_turn(runs), folder, at_once, say)
    except RunsFailed as error:
        failed = error
    result = collect(study, every, swept, runs)
    write_atomically(folder / FILE, json.dumps(result, indent=1) + "\n")
    if failed:
        raise failed
    return result, code


def _in_turn(of_entrants: Iterable[Sequence[Job]]) -> list[Job]:
    """One seed of every member before the next: runs at once then compile different programs, and later seeds none."""
    return [job for jobs in zip(*of_entrants, strict=True) for job in jobs]


def _finish(jobs: Sequence[Job], folder: Path, at_once: int, say: Callable[[str], None]) -> int:
    missing = [job for job in jobs if not _complete(job)]
    if len(missing) < len(jobs):
        say(f"{len(jobs) - len(missing)} of {len(jobs)} runs are complete already")
    return run_jobs(missing, folder, at_once, say)


def _try_out(jobs: Sequence[Job], folder: Path, at_once: int, say: Callable[[str], None]) -> tuple[int, set[str]]:
    """Make short runs, of which the best are wanted; returns the exit code, and the names of those that diverged."""
    try:
        return _finish(jobs, folder, at_once, say), set()
    except RunsFailed as error:
        if error.others:
            raise
        return 0, error.diverged


def _complete(job: Job) -> bool:
    """Whether a run has all its steps, and was evaluated where that is asked for.

    Raises:
        UserError: as of `trained`.
    """
    return trained(job.loaded) and (not job.depths or _evaluated(job))


def _evaluated(job: Job) -> bool:
    """Whether all that is asked for is known of a run's last step: the study's file may ask for more than it did."""
    config = job.loaded.config
    kept = Kept(job.run / DEPTHS, config.training.steps)
    usual = job.depths == "usual"
    asked = set(map(str, usual_depths(build(config.model)))) if usual else set(job.depths.split(","))
    answered = kept.part("difficulty", {"instances": job.instances}) if job.instances else {}
    places = {place.rpartition("/")[2] for place in answered}
    known = asked <= kept.part("depths").keys() and (asked <= places or not job.instances)
    return known and "gini" in kept.part("experts", COUNTED)


def _job(entrant: Entrant, folder: Path, name: str, seed: int, depths: str) -> Job:
    name = f"{entrant.task.name}/{entrant.member.name}/{name}"
    config = entrant.loaded.config
    run = dataclasses.replace(config.run, dir=str(folder / name), seed=seed)
    return Job(name, LoadedConfig(dataclasses.replace(config, run=run), entrant.loaded.origins), depths)


def _runs(
    study: StudyFile, entrant: Entrant, seeds: Sequence[int], folder: Path, swept: dict[str, float] | None
) -> list[Job]:
    """The whole runs. That of the first seed is the best of the sweep, if it had all tokens."""
    depths = "usual"
    if study.depths is not None:  # a layered member is evaluated at those that it has
        family = build(entrant.loaded.config.model)
        asked = sorted({*study.depths, family.depth})  # its own too, which may be another than the others'
        depths = ",".join(str(depth) for depth in asked if takes(family, depth))
    instances = study.instances if generated(entrant.loaded.config) else 0
    made = {FIRST: f"sweep-{_best(study.sweep, swept)}"} if swept and study.sweep and study.sweep.share == 1 else {}
    jobs = [_job(entrant, folder, made.get(seed, f"seed{seed}"), seed, depths) for seed in seeds]
    return [dataclasses.replace(job, instances=instances) for job in jobs]


def _tries(study: StudyFile, entrant: Entrant, words: Sequence[Word], folder: Path) -> list[Job]:
    """The short runs of all seeds that are begun."""
    tried = again(study, entrant, words, TRIAL_SHARE)
    return [_job(tried, folder, f"try{seed}", seed, "") for seed in range(study.seeds * study.tries)]


def _seeds(
    study: StudyFile, entrant: Entrant, words: Sequence[Word], folder: Path, diverged: Container[str]
) -> list[int]:
    """The seeds that are made whole: of each `tries` the one that had the lowest held-out loss."""
    if study.tries == 1:
        return list(study.run_seeds)
    tries = _tries(study, entrant, words, folder)
    ends = [math.inf if job.name in diverged else _last_loss(job.run) for job in tries]
    groups = (range(first, first + study.tries) for first in range(0, len(ends), study.tries))
    return [min(group, key=lambda seed: ends[seed]) for group in groups]


def _trials(study: StudyFile, sweep: Sweep, entrant: Entrant, words: Sequence[Word], folder: Path) -> list[Job]:
    """The short runs that try the values of a sweep; none where its value is given."""
    found = []
    for value in sweep.values if sweep.share else ():
        tried = again(study, choosing(entrant, sweep, value), words, sweep.share)
        found.append(_job(tried, folder, f"sweep-{value}", FIRST, ""))
    return found


def _with_value(
    study: StudyFile,
    sweep: Sweep,
    entrant: Entrant,
    swept: dict[tuple[str, str], dict[str, float]],
    words: Sequence[Word],
) -> Entrant:
    value = _best(sweep, swept[entrant.task.name, entrant.member.name])
    return again(study, choosing(entrant, sweep, value), words)


def _best(sweep: Sweep, swept: dict[str, float]) -> str:
    """The value whose run ended with the lowest held-out loss, which short runs differ in before accuracies do; where
    nothing was tried, the only one."""
    return min(swept, key=lambda value: swept[value]) if swept else sweep.values[0]


def _sweep_losses(sweep: Sweep, entrant: Entrant, folder: Path, diverged: Container[str]) -> dict[str, float]:
    """Held-out loss at the end of each run of a sweep that has one; empty where its value is given.

    Raises:
        UserError: all have diverged.
    """
    tried = sweep.values if sweep.share else ()
    jobs = {value: _job(entrant, folder, f"sweep-{value}", FIRST, "") for value in tried}
    ends = {value: _last_loss(job.run) for value, job in jobs.items() if job.name not in diverged}
    if jobs and not ends:
        member = f"{entrant.task.name}/{entrant.member.name}"
        raise UserError(f"{member} diverged at every {sweep.key} of the sweep, {', '.join(jobs)}; give it other values")
    return ends


def _last_loss(run: Path) -> float:
    loss = curves(run)[LOSS]
    return loss[-1][1] if loss else math.inf


def curves(run: Path) -> dict[str, list[tuple[float, float]]]:
    """What a run was measured by over its tokens: held-out loss, and accuracies by name."""
    config = load_config(run / "config.yaml").config
    heldout = {LOSS: heldout_curve(run, config), HELDOUT: heldout_curve(run, config, "exact_match")}
    return {**accuracies(run, config, read_metrics(run)), **heldout}  # an accuracy of zero is one here


def collect(
    study: StudyFile,
    every: Sequence[Entrant],
    swept: dict[tuple[str, str], dict[str, float]],
    runs: Sequence[Sequence[Job]],
) -> Result:
    """What study.json holds: costs of all members, and what their complete runs were measured by."""
    tasks: dict[str, Any] = {}
    for task in study.tasks:
        tasks[task.name] = {"tokens": task.tokens, "metric": task.metric, "members": {}}
    for entrant, jobs in zip(every, runs, strict=True):
        about = describe(entrant)
        key = (entrant.task.name, entrant.member.name)
        if study.sweep:
            about["chosen"] = {study.sweep.key: _best(study.sweep, swept[key])}
            ends = {value: loss if math.isfinite(loss) else None for value, loss in swept[key].items()}  # for JSON
            about |= {"swept": ends} if ends else {}
        metric = entrant.task.metric
        about["seeds"] = {str(job.loaded.config.run.seed): measured(job.run, metric) for job in jobs if _complete(job)}
        tasks[entrant.task.name]["members"][entrant.member.name] = about
    return {"study": study.path.name, "baseline": study.baseline, "tasks": tasks}


def measured(run: Path, metric: str) -> Result:
    """What a complete run was measured by; the task's metric also over parts of the held-out rows."""
    metrics = read_metrics(run)
    rates = [its["time/tokens_per_second"] for its in metrics if "time/tokens_per_second" in its]
    if not rates:
        raise UserError(f"{run}: its metrics.jsonl has no records of training; remove the run, and it is made again")
    at_depths = read_object(run / DEPTHS)
    by_depth, answered = at_depths["depths"], at_depths.get("difficulty", {}).get("found", {})
    return {
        "curves": {name: [list(point) for point in curve] for name, curve in curves(run).items() if curve},
        "tokens_per_second": round(statistics.median(rates), 1),
        "by_depth": {depth: its["loss"] for depth, its in by_depth.items()},
        **({"by_difficulty": {place: round(share, 4) for place, share in answered.items()}} if answered else {}),
        "gini": at_depths["experts"]["found"]["gini"],
        "gini_tokens": COUNTED["tokens"],
        "parts": _parts(run, metric),
    }


def _parts(run: Path, metric: str) -> list[list[list[float]]]:
    """For each evaluation, sums of loss and targets, or of right answers and answers, over parts of what is held out:
    [T, 2, P]; empty where a metric isn't one of held-out rows."""
    names = {LOSS: ("loss", "targets"), HELDOUT: ("exact", "answers")}.get(metric)
    if not names:
        return []
    # A run that went on from a checkpoint keeps what it measured behind it, at steps that may not come again.
    kept = {step: parts for step, parts in kept_parts(run).items() if parts.keys() >= {*names}}
    value = "heldout/loss" if metric == LOSS else "heldout/exact_match"
    steps = dict.fromkeys(int(its["step"]) for its in read_metrics(run) if value in its)
    return [[kept[step][name] for name in names] for step in steps] if steps.keys() <= kept.keys() else []
