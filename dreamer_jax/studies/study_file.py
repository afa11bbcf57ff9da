"""The file of a study: models that are trained alike, on which tasks, and what is compared.

Beside sections of a configuration (and `base:`), which all runs share, it has the keys of `StudyFile`. A task and a
member are named groups of sections too: a run's configuration is what all runs share, then its task's, then its
member's, then the command line's.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from dreamer_jax.config import LoadedConfig
from dreamer_jax.config.files import Line, at, describe, entries, parse, read_sections, scalar, text_of
from dreamer_jax.config.keys import INTEGERS, SECTIONS, values_of
from dreamer_jax.config.loading import COMMAND_LINE, Setting, Word, build, settings_of
from dreamer_jax.config.sections import Config
from dreamer_jax.configs import find
from dreamer_jax.errors import ConfigError, UserError
from dreamer_jax.evaluation.comparison import HEADLINES, HELDOUT

Matching = Literal["both", "flops", "params", "none"]
LOSS = "loss"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
TRIAL_SHARE = 0.25
"""Of the tokens, after which the best of several first seeds goes on: 25 of 100 billion in section 4.1 of the paper."""
QUICK_SHARE = 16
"""A quick study has so many times fewer tokens."""
SCHEDULES = ("training.warmup_steps", "training.cooldown_steps", "recurrence.curriculum_steps")
"""What a run on a share of the tokens has that share of, too."""

Node = yaml.Node
Pairs = Sequence[tuple[str, Node, Node]]

OF_THE_STUDY = {"training.steps": "`tokens`", "run.dir": "--out", "run.seed": "`seeds`"}
"""Settings of a run that the study makes itself -> what says them."""


@dataclass(frozen=True)
class Sweep:
    """A setting that every member tries first, for a share of the tokens with the first seed; its best value goes on.

    Attributes:
        key: the setting, such as training.learning_rate.
        values: what is tried.
        share: of the tokens; 0 where nothing is tried, because the command line gives the value.
        origin: who gives the values, as messages say.
    """

    key: str
    values: tuple[str, ...]
    share: float
    origin: str = COMMAND_LINE


@dataclass(frozen=True)
class Task:
    """What members are trained on.

    Attributes:
        name: of its folder.
        tokens: of each run, rounded up to whole steps.
        metric: `loss`, held-out loss in nats per token; or the name of an accuracy that runs record: `held-out`, exact
            match, or a benchmark such as gsm8k.
        lines: its sections.
    """

    name: str
    tokens: int
    metric: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Member:
    """A model of a study.

    Attributes:
        name: of its folder.
        match: which costs of the baseline it is given by `dreamer match`: FLOPs per token, parameters, both or none. A
            dense model, whose costs move together, gets the FLOPs.
        lines: its sections.
    """

    name: str
    match: Matching
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class StudyFile:
    """A study as its file has it.

    Attributes:
        path: the file.
        baseline: the member that others are compared with.
        seeds: runs of each member on each task, with seeds from 0.
        tries: seeds that are begun for each of those runs, up to `TRIAL_SHARE` of the tokens; the one with the lowest
            held-out loss there is made whole.
        depths: at which the trained models are evaluated; None: powers of two up to four times the trained one.
        instances: of each difficulty of a generated task, which trained models answer at every depth; 0: they don't.
        sweep: what every member tries first, if anything.
        tasks, members: in the order of the file.
        lines: the sections that all share.
        shortened: so many times fewer tokens than the file says is what its tasks have.
        asked: names of the members that are trained; empty for all.
        asked_seeds: seeds of the runs in place of those from 0; empty for those.
    """

    path: Path
    baseline: str
    seeds: int
    tries: int
    depths: tuple[int, ...] | None
    instances: int
    sweep: Sweep | None
    tasks: tuple[Task, ...]
    members: tuple[Member, ...]
    lines: tuple[Line, ...]
    shortened: int = 1
    asked: tuple[str, ...] = ()
    asked_seeds: tuple[int, ...] = ()

    @property
    def run_seeds(self) -> tuple[int, ...]:
        """Seeds of the runs of each member on each task; where there are `tries`, it is their number that counts."""
        return self.asked_seeds or tuple(range(self.seeds))

    def configuration(self, task: Task, member: Member, words: Sequence[Word], share: float = 1.0) -> LoadedConfig:
        """The configuration of a member's runs on a task, but for run.dir, run.seed and what matching changes.

        Args:
            words: settings of the command line.
            share: of the task's tokens.
        """
        lines = [*self.lines, *task.lines, *member.lines]
        lines.sort(key=lambda line: line.path == self.path)  # a base's first: its rows aren't the task's
        settings = settings_of([*lines, *words])
        for key, instead in OF_THE_STUDY.items():
            origin = settings[key].origin if key in settings else ""
            # The command refuses the others by itself; and those of a base are its own runs'.
            given = (f"{self.path}:", COMMAND_LINE) if key == "training.steps" else f"{self.path}:"
            if origin.startswith(given):
                raise ConfigError(f"{origin}: {key}: a study has {instead} in its place", key)
        defaults = values_of(Config())

        def of(key: str) -> Any:
            return settings[key].value if key in settings else defaults[key]

        step = of("training.batch_size") * of("data.sequence_length")
        steps = max(1, math.ceil(share * task.tokens / step))
        found = {**settings, "training.steps": Setting(steps, f"{self.path}: tokens of {task.name}")}
        part = share / self.shortened
        for key in SCHEDULES if part < 1 else ():
            origin = settings[key].origin if key in settings else "the default"
            found[key] = Setting(math.floor(part * of(key)), f"{origin}, for {part:.3g} of the tokens")
        loaded = build(found)
        asked = [name.strip() for name in loaded.config.evaluation.tasks.split(",")]
        if task.metric not in (LOSS, HELDOUT) and task.metric.partition("-")[0] not in asked:
            problem = f"metric {task.metric} is no benchmark of evaluation.tasks, which runs score while they train"
            raise ConfigError(f"{self.path}: tasks.{task.name}: {problem}", "evaluation.tasks")
        return loaded


def read_study(word: str | Path) -> StudyFile:
    """A study from its YAML file.

    Args:
        word: the file, or the name of a study of the package.

    Raises:
        ConfigError: anything that is wrong, with the file and line.
    """
    path = find(word, "study")
    root = parse(text_of(path), path)
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected keys such as 'members:'")
    found = entries(path, root, prefix="")
    own = {name: value for name, _, value in found if name in KEYS}
    for name, key, _ in found:
        if name not in (*KEYS, *SECTIONS, "base"):
            raise ConfigError(f"{at(path, key)}: unknown key '{name}'; a study has {', '.join(KEYS)} and sections")
    for name in ("baseline", "members", "tasks"):
        if name not in own:
            raise ConfigError(f"{path}: '{name}:' is missing; docs/studies.md has an example")
    match = _match(path, own["match"]) if "match" in own else "both"
    members = tuple(_member(path, name, value, match) for name, value in _named(path, "members", own["members"]))
    tasks = tuple(_task(path, name, value) for name, value in _named(path, "tasks", own["tasks"]))
    baseline = scalar(path, "baseline", own["baseline"], str)
    names = [member.name for member in members]
    if baseline not in names:
        raise ConfigError(f"{at(path, own['baseline'])}: baseline: there is no member '{baseline}'{_near(names)}")
    return StudyFile(
        path,
        baseline,
        _positive(path, "seeds", own["seeds"]) if "seeds" in own else 1,
        _positive(path, "tries", own["tries"]) if "tries" in own else 1,
        _depths(path, own["depths"]) if "depths" in own else None,
        _positive(path, "instances", own["instances"], least=0) if "instances" in own else 0,
        _sweep(path, own["sweep"]) if "sweep" in own else None,
        tasks,
        members,
        tuple(read_sections(path, [entry for entry in found if entry[0] not in KEYS])),
    )


KEYS = ("baseline", "seeds", "tries", "depths", "instances", "match", "sweep", "tasks", "members")


def _near(names: Sequence[str]) -> str:
    return f"; there are {', '.join(names)}"


def _named(path: Path, what: str, node: Node) -> list[tuple[str, Pairs]]:
    """(name, entries) of the tasks or members."""
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise ConfigError(f"{at(path, node)}: {what}: expected names with sections below them, got {describe(node)}")
    found = []
    for name, key, value in entries(path, node, prefix=f"{what}."):
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{at(path, key)}: {what}: '{name}' can't be the name of a folder; use letters and digits"
            )
        if isinstance(value, yaml.ScalarNode) and not value.value:
            found.append((name, []))
        elif isinstance(value, yaml.MappingNode):
            found.append((name, entries(path, value, prefix=f"{what}.{name}.")))
        else:
            raise ConfigError(f"{at(path, value)}: {what}.{name}: expected sections, got {describe(value)}")
    return found


def _parts(path: Path, where: str, pairs: Pairs, keys: tuple[str, ...]) -> tuple[dict[str, Node], tuple[Line, ...]]:
    """(values of a group's own keys, its sections)."""
    for name, key, _ in pairs:
        if name not in (*keys, *SECTIONS, "base"):
            known = f"{', '.join(keys)} and sections such as model"
            raise ConfigError(f"{at(path, key)}: {where}: unknown key '{name}'; it has {known}")
    own = {name: value for name, _, value in pairs if name in keys}
    return own, tuple(read_sections(path, [pair for pair in pairs if pair[0] not in keys]))


def _member(path: Path, name: str, pairs: Pairs, match: Matching) -> Member:
    own, lines = _parts(path, f"members.{name}", pairs, ("match",))
    return Member(name, _match(path, own["match"]) if "match" in own else match, lines)


def _task(path: Path, name: str, pairs: Pairs) -> Task:
    own, lines = _parts(path, f"tasks.{name}", pairs, ("tokens", "metric"))
    if "tokens" not in own:
        raise ConfigError(f"{path}: tasks.{name}: 'tokens:' is missing: how many a run is trained on")
    metric = scalar(path, "metric", own["metric"], str) if "metric" in own else LOSS
    known = (LOSS, HELDOUT, *HEADLINES)
    if metric not in known and metric.partition("-")[0] not in HEADLINES:
        raise ConfigError(f"{at(path, own['metric'])}: metric: '{metric}' is none of {', '.join(known)}")
    return Task(name, _positive(path, "tokens", own["tokens"]), metric, lines)


def _match(path: Path, node: Node) -> Matching:
    value = scalar(path, "match", node, str)
    for known in get_args(Matching):
        if value == known:
            return known
    raise ConfigError(f"{at(path, node)}: match: '{value}' is none of {', '.join(get_args(Matching))}")


def _positive(path: Path, key: str, node: Node, least: int = 1) -> int:
    value = scalar(path, key, node, int)
    if value < least:
        raise ConfigError(f"{at(path, node)}: {key}: {value}: must be {least} or more")
    return value


def _depths(path: Path, node: Node) -> tuple[int, ...]:
    depths = scalar(path, "depths", node, INTEGERS)
    if min(depths, default=1) < 1:
        raise ConfigError(f"{at(path, node)}: depths: {min(depths)}: must be 1 or more")
    return depths


def _as_number(written: str) -> float | str:
    try:
        return float(written)
    except ValueError:
        return written


def _sweep(path: Path, node: Node) -> Sweep:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{at(path, node)}: sweep: expected key, values and share, got {describe(node)}")
    own = {name: value for name, _, value in entries(path, node, prefix="sweep.")}
    for name in sorted(own.keys() ^ {"key", "values", "share"}):
        problem = f"unknown key '{name}'; it has" if name in own else f"'{name}:' is missing; it needs"
        raise ConfigError(f"{at(path, node)}: sweep: {problem} key, values and share")
    values = own["values"]
    scalars = isinstance(values, yaml.SequenceNode) and all(isinstance(its, yaml.ScalarNode) for its in values.value)
    if not scalars or not values.value:
        raise ConfigError(f"{at(path, values)}: sweep.values: expected a list such as [1e-3, 2e-3]")
    twice = [value for value, count in Counter(_as_number(its.value) for its in values.value).items() if count > 1]
    if twice:
        raise ConfigError(f"{at(path, values)}: sweep.values: {twice[0]} stands there twice")
    share = scalar(path, "sweep.share", own["share"], float)
    if not 0 < share <= 1:
        raise ConfigError(f"{at(path, own['share'])}: sweep.share: {share}: must be above 0 and at most 1")
    key, origin = scalar(path, "sweep.key", own["key"], str), f"{at(path, own['key'])}: sweep"
    return Sweep(key, tuple(its.value for its in values.value), share, origin)


def quick(study: StudyFile) -> StudyFile:
    """The study with one seed, `QUICK_SHARE` times fewer tokens, and two values of its sweep: does it work?"""
    tasks = tuple(replace(task, tokens=math.ceil(task.tokens / QUICK_SHARE)) for task in study.tasks)
    sweep = study.sweep and replace(study.sweep, values=study.sweep.values[:2])
    asked = study.asked_seeds[:1]
    return replace(study, seeds=1, tries=1, asked_seeds=asked, tasks=tasks, sweep=sweep, shortened=QUICK_SHARE)


def only(
    study: StudyFile, tasks: Sequence[str] = (), members: Sequence[str] = (), seeds: Sequence[int] = ()
) -> StudyFile:
    """The study with some of its tasks, some of its members trained, and these seeds; all where none is named.

    Seeds needn't be among the file's: a study is given more of them so.

    Raises:
        UserError: it has none of such a name, or chooses its seeds itself.
    """
    if seeds and study.tries > 1:
        raise UserError(f"{study.path}: with `tries` the study chooses its seeds; leave --seeds out")
    for kind, names, every in (("task", tasks, study.tasks), ("member", members, study.members)):
        have = [its.name for its in every]
        for name in names:
            if name not in have:
                raise UserError(f"{study.path}: there is no {kind} {name}; the study has {', '.join(have)}")
    kept = tuple(task for task in study.tasks if not tasks or task.name in tasks)
    return replace(study, tasks=kept, asked=tuple(members), asked_seeds=tuple(dict.fromkeys(seeds)))


def settled(study: StudyFile, words: Sequence[Word]) -> StudyFile:
    """The study with nothing tried, where the command line gives the value of the key that it sweeps."""
    sweep = study.sweep
    if sweep is None:
        return study
    given = [word.written for word in words if word.key == sweep.key and word.written]
    return replace(study, sweep=Sweep(sweep.key, tuple(given[-1:]), share=0.0)) if given else study
