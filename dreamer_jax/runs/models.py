"""What a run has learned: the weights of a checkpoint, or the average of several."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from dreamer_jax.config import Config
from dreamer_jax.config.keys import convert
from dreamer_jax.config.loading import load_text
from dreamer_jax.errors import UserError, whole
from dreamer_jax.families import KNOWLEDGE, Family, build
from dreamer_jax.runs.array_files import read_tree
from dreamer_jax.runs.checkpoints import FINGERPRINTS, warn
from dreamer_jax.runs.folders import config_of_run, folder_of, not_a_run, path_of, run_and_step
from dreamer_jax.runs.integrity import problem_of
from dreamer_jax.runs.knowledge import read_embeddings
from dreamer_jax.runs.step_folders import StepFolders


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """What a run has learned.

    Attributes:
        config: the run's configuration.
        step: optimizer steps done.
        params: float32 parameters.
        model_state: the model's own, by collection, such as balancing biases.
        meta: what the checkpoint says of its data: `tokenizer` and `data` fingerprints.
    """

    config: Config
    step: int
    params: Any
    model_state: dict[str, Any]
    meta: dict[str, str]

    @property
    def family(self) -> Family:
        """The model."""
        return build(self.config.model)

    @functools.cached_property
    def digest(self) -> str:
        """Of the weights: a run that went back comes to the same step with other ones."""
        return digest((self.params, self.model_state))


@dataclasses.dataclass(frozen=True)
class Located:
    """A checkpoint that is as it was written.

    Attributes:
        directory: the run directory.
        config: the run's configuration, with the model's as the checkpoint has it.
        step: the checkpoint.
    """

    directory: epath.Path
    config: Config
    step: int

    @property
    def folders(self) -> StepFolders:
        """The run's checkpoints."""
        return StepFolders(self.directory)

    def item(self, name: str) -> epath.Path:
        """The folder of an item, such as `params`."""
        return self.folders[self.step] / name

    @property
    def meta(self) -> dict[str, str]:
        """What identifies data and tokenizer."""
        with self.folders.reading(self.step):
            return fingerprints(self.folders.meta(self.step))


def load_run(path: str | Path, step: int | None = None, average: int = 1) -> TrainedModel:
    """The model of a run directory, or of one checkpoint step in it (`runs/name/checkpoints/500`).

    The optimizer's state is not read. Arrays lie on the default device.

    Args:
        path: see above.
        step: the checkpoint; by default the newest good one.
        average: the parameters are the mean of so many checkpoints, that one and those before it.
    Raises:
        UserError: if there is no run, no good checkpoint, not the step asked for, or not so many to average,
            or if it is removed meanwhile.
    """
    found = locate_run(path, step)
    params, model_state = nn.meta.unbox(build(found.config.model).shapes)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def like(shapes: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), shapes)

    steps = averaged_steps(found, average)
    total = None
    with found.folders.reading(*steps):
        for one in steps:
            own = read_tree(found.folders[one] / "params", like(params))
            total = own if total is None else _add(total, own)
        own = {name: read_tree(found.item(name), like(shapes)) for name, shapes in model_state.items()}
    mean = total if len(steps) == 1 else jax.tree.map(lambda leaf: leaf / len(steps), total)
    return TrainedModel(found.config, found.step, mean, own, found.meta)


def changed(
    trained: TrainedModel, dtype: str | None = None, cache: str | None = None, knowledge: str | None = None
) -> TrainedModel:
    """The model in another compute precision, with another rule of its cache, or with other texts to attend to.

    Raises:
        UserError: there is no such precision; its family has no such rules, or none of this name; it attends to no
            texts, or the file of their embeddings doesn't fit.
    """
    model, own = trained.config.model, trained.model_state
    if knowledge is not None:
        texts = read_embeddings(knowledge, model, number=False)
        model, own = dataclasses.replace(model, pa_slots=len(texts)), {**own, KNOWLEDGE: {"texts": jnp.asarray(texts)}}
    if cache is not None:
        model = with_cache(model, cache)
    if dtype is not None:
        model = dataclasses.replace(model, dtype=convert(get_type_hints(type(model))["dtype"], "dtype", str(dtype)))
    return dataclasses.replace(trained, config=dataclasses.replace(trained.config, model=model), model_state=own)


def with_cache(model: Any, rule: str) -> Any:
    """The section `model` with another rule of its cache.

    Raises:
        UserError: its family has no such rules, or none of this name.
    """
    if not hasattr(model, "cache"):
        raise UserError(f"cache: models of the family {model.family} have one rule, and '{rule}' can't be chosen")
    return dataclasses.replace(model, cache=convert(get_type_hints(type(model))["cache"], "model.cache", rule))


@functools.partial(jax.jit, donate_argnums=0)
def _add(total: Any, own: Any) -> Any:
    return jax.tree.map(jnp.add, total, own)


def averaged_steps(found: Located, count: int) -> list[int]:
    """The checkpoint and the `count` - 1 complete ones before it, newest first.

    Raises:
        UserError: there are not so many of the same model, or one of them is damaged.
    """
    count = whole(count, "average", 1)
    steps = [step for step in reversed(found.folders.complete()) if step <= found.step][:count]
    if count == 1:
        return [found.step]
    if len(steps) < count:
        kept = found.config.checkpoint.keep
        raise UserError(
            f"an average of {count} checkpoints is asked for, and {found.directory} has {len(steps)} up to step "
            f"{found.step}; checkpoint.keep is {kept}"
        )
    for step in steps[1:]:
        with found.folders.reading(step):
            if problem := problem_of(found.folders[step], ("params", "meta")):
                raise UserError(f"checkpoint {step} of {found.directory} can't be used for an average: {problem}")
            text = found.folders.meta(step).get("config")
        if text and load_text(text).config.model != found.config.model:
            raise UserError(f"checkpoint {step} of {found.directory} is of another model than step {found.step}")
    return steps


def locate_run(path: str | Path, step: int | None = None) -> Located:
    """The checkpoint that `load_run` would load.

    It has been verified. Where no step is named, a damaged one is passed over with a warning.

    Raises:
        UserError: if there is no run, no good checkpoint, or not the step asked for.
    """
    directory, named = run_and_step(path)
    if None not in (step, named) and step != named:
        raise UserError(
            f"{path} is the checkpoint of step {named}, but step {step} is asked for; name the run, {directory}"
        )
    step = step if named is None else named
    local = folder_of(directory).local
    if not (local / "config.yaml").is_file():
        raise not_a_run(directory, local)
    config = config_of_run(local)
    folders = StepFolders(path_of(directory))
    steps = folders.all()
    if not steps:
        raise UserError(f"{directory} has no checkpoint yet; it is saved every {config.checkpoint.every} steps")
    if step is not None and step not in steps:
        raise UserError(f"{directory} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    items: Sequence[str] = ("params", *build(config.model).shapes[1], "meta")
    if step is None:
        step = folders.newest_good(warn, items)
        if step is None and folders.all() != steps:  # training has saved and removed some meanwhile
            step = folders.newest_good(warn, items)
        if step is None:
            raise UserError(f"{directory} has no checkpoint that can be used; see `dreamer checkpoint verify`")
    elif problem := problem_of(folders[step], items):
        raise UserError(f"checkpoint {step} of {directory} can't be used: {problem}")
    with folders.reading(step):
        text = folders.meta(step).get("config")
    if text:  # a run whose depth was changed has steps of both
        config = dataclasses.replace(config, model=load_text(text).config.model)
    return Located(path_of(directory), config, step)


def digest(weights: Any) -> str:
    """What tells weights from others."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(weights):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


def fingerprints(meta: Mapping[str, Any]) -> dict[str, str]:
    """What identifies data and tokenizer in a checkpoint's meta."""
    return {name: meta[name] for name in FINGERPRINTS}
