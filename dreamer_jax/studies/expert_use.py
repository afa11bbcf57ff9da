"""How evenly a trained model uses its experts, over more text than a training step has.

A step of a small run has a few thousand tokens of a handful of documents, which ask for experts of their own: what is
uneven in it may be even over many.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from dreamer_jax.analysis.run_data import data_of
from dreamer_jax.data import Data
from dreamer_jax.families import forward
from dreamer_jax.runs.models import TrainedModel
from dreamer_jax.studies.depths import Kept, Progress, Say

TOKENS = 65_536
"""Of which experts are counted."""
AT_ONCE = 8192
"""Tokens that are computed at once, about."""
SETTINGS = {"tokens": TOKENS}
PREFIX, NAME = "experts/", "/gini"


def expert_use(model: TrainedModel, kept: Kept, say: Say) -> dict[str, float]:
    """Router -> Gini coefficient of its experts' use by a run's checkpoint.

    Counted over the rows of training that would come next, at the trained depth: DR sums its depths, LA's layers are
    averaged. Empty for models without experts.

    Args:
        model: of the run.
        kept: gets what is found, and has what is known.
        say: gets lines of progress.
    """
    found = kept.part("experts", SETTINGS)
    if "gini" not in found:
        found["gini"] = _gini(model, data_of(model), say)
        kept.write()
    return found["gini"]


def _gini(model: TrainedModel, data: Data, say: Say) -> dict[str, float]:
    family, length = model.family, model.config.data.sequence_length
    rows = range(min(model.config.training.batch_size, max(1, AT_ONCE // length)))

    @jax.jit
    def count(params: Any, model_state: Any, batch: Any) -> Any:
        return forward(family, family.cast(params), model_state, batch, family.depth).counts

    steps = -(-TOKENS // (len(rows) * length))
    progress, total, found = Progress(say, "use of experts", steps), None, {}
    for step in range(model.step, model.step + steps):
        counts = jax.tree.map(np.asarray, count(model.params, model.model_state, data.batch_at(step, rows)))
        total = counts if total is None else jax.tree.map(np.add, total, counts)
        found = {k: v for k, v in family.log(model.model_state, total).items() if k.endswith(NAME)}
        if not found:
            break  # it has no experts
        progress.done(f"{(step + 1 - model.step) * len(rows) * length:,} tokens")
    return {key.removeprefix(PREFIX).removesuffix(NAME): round(value, 4) for key, value in found.items()}
