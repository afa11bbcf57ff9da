"""What a training refuses before anything is made: settings that mean nothing, and processes that differ."""

from __future__ import annotations

import dataclasses
from typing import Any

from dreamer_jax.config.sections import Config
from dreamer_jax.data import Data
from dreamer_jax.errors import ConfigError, UserError
from dreamer_jax.families import build
from dreamer_jax.parallel.distributed import others_than_the_first
from dreamer_jax.runs.folders import PLACES
from dreamer_jax.training import depths
from dreamer_jax.training.optimizer import trained_leaves
from dreamer_jax.training.penalties import check_likeness


def check_settings(config: Config) -> None:
    """That the settings of training have a meaning for the model.

    Raises:
        ConfigError: one hasn't.
    """
    family = build(config.model)
    depths.check(config.recurrence, family)
    rows = config.training.batch_size // config.training.microbatches // config.mesh.size
    key, groups = _groups(config, rows)
    if rows % groups:
        raise ConfigError(
            f"{key}: the {rows} rows that a device computes at once can't be divided into {groups} groups "
            "of like depth; change it or training.batch_size",
            key,
        )
    check_likeness(config, family)
    if config.training.trainable:
        trained_leaves(config.training, family.roles)


def _groups(config: Config, rows: int) -> tuple[str, int]:
    """The setting that says into how many groups of like depth rows are divided, and how many that are."""
    if config.recurrence.draw != "model":
        return "recurrence.groups", config.recurrence.groups if config.recurrence.by == "row" else 1
    model: Any = config.model
    apart = getattr(model, "draw_by", "step") == "row" and getattr(model, "depth_draw", "") != "fixed"  # of Huginn
    return "model.row_groups", min(getattr(model, "row_groups", 1), rows) if apart else 1


def check_alike(config: Config, data: Data) -> None:
    """Each process updates its part of the weights and reads rows of its own by one plan, so all of them must have the
    same settings, but for where files lie, and have read the same files.

    Raises:
        UserError: some differ from process 0.
    """
    settings = dataclasses.asdict(config)
    for place in PLACES:
        section, _, key = place.partition(".")
        del settings[section][key]
    if others := others_than_the_first(repr(settings)):
        numbers = ", ".join(map(str, others))
        raise UserError(
            f"the configuration of process {numbers} is another than that of process 0; start all with the same file "
            "and options"
        )
    if others := others_than_the_first(data.fingerprint + data.tokenizer.fingerprint):
        numbers = ", ".join(map(str, others))
        raise UserError(
            f"the data or the tokenizer of process {numbers} are others than those of process 0; give all hosts "
            "the same files, or a place that all of them see"
        )
