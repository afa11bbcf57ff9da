"""The members of a study on its tasks, as they enter it: configured, and matched in cost to the baseline."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from dreamer_jax.budget import analytic, matching
from dreamer_jax.config import Config, LoadedConfig
from dreamer_jax.config.loading import Word
from dreamer_jax.errors import UserError
from dreamer_jax.families import build
from dreamer_jax.studies.study_file import Member, StudyFile, Sweep, Task
from dreamer_jax.training.work import work_of

GRANULARITIES = (8, 4, 2, 1)
"""What the sizes that matching searches are multiples of: the first that comes close enough."""
CLOSE = 1.0
"""Percent."""


class Entrant(NamedTuple):
    """A member on a task, with the costs it was given.

    Attributes:
        task, member: of the file.
        loaded: the configuration of its runs, but for run.dir and run.seed.
        match: how it was matched; None for the baseline, and where nothing is asked for.
        chosen: the value that a sweep tries, or has found best for it, behind the command line's settings.
    """

    task: Task
    member: Member
    loaded: LoadedConfig
    match: matching.Match | None
    chosen: tuple[Word, ...] = ()


def entrants(study: StudyFile, words: Sequence[Word]) -> list[Entrant]:
    """Every member that is asked for on every task, matched to the baseline of that task.

    Raises:
        UserError: one can't be matched; `match: none` leaves a member as it is. Or a sweep would change what it costs.
    """
    found: list[Entrant] = []
    baseline = next(member for member in study.members if member.name == study.baseline)
    for task in study.tasks:
        target = study.configuration(task, baseline, words).config
        for member in study.members:
            if study.asked and member.name not in study.asked:
                continue
            loaded = study.configuration(task, member, words)
            if member is baseline or member.match == "none":
                found.append(Entrant(task, member, loaded, None))
                continue
            try:
                matched = _match(loaded.config, target, member.match)
            except UserError as error:
                raise UserError(f"{study.path}: members.{member.name}: {error}") from None
            changed = dataclasses.replace(loaded.config, model=matched.family.config)
            found.append(Entrant(task, member, LoadedConfig(changed, loaded.origins), matched))
    if study.sweep and study.sweep.share:
        _check_costs(study, study.sweep, found, words)
    return found


def _check_costs(study: StudyFile, sweep: Sweep, every: Sequence[Entrant], words: Sequence[Word]) -> None:
    """What a sweep tries may not change costs that are to be equal, or be what matching sets."""
    for entrant in every:
        if entrant.member.match == "none":
            continue
        knobs = {f"model.{knob.key}" for knob in entrant.match.family.knobs()} if entrant.match else set()
        for value in sweep.values:
            tried = again(study, choosing(entrant, sweep, value), words)
            if sweep.key in knobs or _cost(tried.loaded.config) != _cost(entrant.loaded.config):
                member = f"{entrant.task.name}/{entrant.member.name}"
                raise UserError(
                    f"{study.path}: sweep: {sweep.key} {value} isn't for {member}, whose costs are "
                    f"those of {study.baseline}; make a member of each value, or let all have `match: none`"
                )


def _cost(config: Config) -> tuple[int, float]:
    """Parameters, and FLOPs per token of the text."""
    its = matching.cost(build(config.model), config.data.places)
    return its.params, config.data.copies * its.flops_per_token


def _match(config: Config, target: Config, hold: matching.Hold) -> matching.Match:
    """The model with the baseline's cost, of the coarsest sizes that come as close as `CLOSE`, or else of any size."""
    model, baseline = build(config.model), build(target.model)
    goal = matching.target_of(baseline, model, target.data.places)
    copies = target.data.copies, config.data.copies
    if copies[0] != copies[1] and goal.flops_per_token is not None:
        goal = dataclasses.replace(goal, flops_per_token=goal.flops_per_token * copies[0] / copies[1])
    context = config.data.places
    found = None
    for granularity in GRANULARITIES:
        found = matching.match(model, goal, context, granularity, hold)
        if not _far(found, hold):
            break
    assert found is not None
    return found


def _far(found: matching.Match, hold: matching.Hold) -> dict[str, float]:
    """The gaps of more than `CLOSE`, in percent, of what is asked for and the family's sizes can change."""
    moved = {knob.moves for knob in found.family.knobs()} & set(matching.HOLDS[hold])
    return {name: gap for name, gap in found.gaps_percent.items() if name in moved and abs(gap) > CLOSE}


def warnings(every: Sequence[Entrant], baseline: str) -> list[str]:
    """A line for each member that couldn't be given the baseline's cost, or whose runs end in their warm-up."""
    found = []
    for entrant in every:
        member, training = f"{entrant.task.name}/{entrant.member.name}", entrant.loaded.config.training
        if training.steps < training.warmup_steps:
            steps = f"{training.steps} of training.warmup_steps {training.warmup_steps}"
            found.append(f"{member} never has its learning rate: its runs end in their warm-up, after {steps}")
        hold = entrant.member.match
        far = _far(entrant.match, hold) if entrant.match and hold != "none" else {}
        gaps = [f"{gap:+.1f} % {matching.TITLES[name]}" for name, gap in far.items()]
        if gaps:
            found.append(f"{member} isn't of {baseline}'s cost: {', '.join(gaps)}, as near as its sizes come")
    return found


def again(study: StudyFile, entrant: Entrant, words: Sequence[Word], share: float = 1.0) -> Entrant:
    """An entrant with other settings than those of its model's costs, which stay."""
    loaded = study.configuration(entrant.task, entrant.member, [*words, *entrant.chosen], share)
    model = loaded.config.model
    if entrant.match:
        knobs = {knob.key: getattr(entrant.loaded.config.model, knob.key) for knob in entrant.match.family.knobs()}
        model = dataclasses.replace(model, **knobs)
    return entrant._replace(loaded=LoadedConfig(dataclasses.replace(loaded.config, model=model), loaded.origins))


def choosing(entrant: Entrant, sweep: Sweep, value: str) -> Entrant:
    """An entrant with a value of a sweep, for `again`."""
    return entrant._replace(chosen=(Word(sweep.key, value, origin=sweep.origin),))


def describe(entrant: Entrant) -> dict[str, Any]:
    """What a member is and costs, before anything is trained."""
    config = entrant.loaded.config
    family, length, copies = build(config.model), config.data.places, config.data.copies
    cost = matching.cost(family, length)
    about: dict[str, Any] = {
        "headline": family.headline(),
        "depth": family.depth,
        "parameters": cost.params,
        "flops_per_token": round(copies * cost.flops_per_token),
        "training_flops_per_token": round(copies * analytic.training_flops(family, length, work_of(config))[0]),
        "memory_bytes": cost.memory_bytes,
        "tokens": config.training.steps * config.training.batch_size * config.data.sequence_length,
    }
    if entrant.match:
        about["matched"] = {knob.key: getattr(config.model, knob.key) for knob in family.knobs()}
        about["gaps_percent"] = {name: round(gap, 3) for name, gap in entrant.match.gaps_percent.items()}
    return about
