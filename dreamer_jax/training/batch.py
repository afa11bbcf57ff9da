"""What batches hold, without any data: for those who time or compile a train step."""

from __future__ import annotations

import numpy as np

from dreamer_jax.config.sections import Config
from dreamer_jax.families import build

Entry = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype."""


def batch_entries(config: Config) -> dict[str, Entry]:
    """Name -> shape and dtype of all that a training batch of `open_data` holds.

    B rows of P places each, copies counted: [B, P], but for `step_targets` [B, P, N] of models that are shown their
    steps, `visible` [B, P, P] of graphs, and what the family reads beside them (`Family.row_entries`).
    """
    rows, places = config.training.batch_size, config.data.places
    entries: dict[str, Entry] = dict.fromkeys(
        ("tokens", "targets", "segment_ids", "positions"), ((rows, places), np.dtype(np.int32))
    )
    entries |= dict.fromkeys(("loss_mask", "answer_mask"), ((rows, places), np.dtype(np.bool_)))
    for name, (shape, dtype) in build(config.model).row_entries.items():
        entries[name] = (rows, *shape), np.dtype(dtype)
    if config.recurrence.steps:
        entries["step_targets"] = (rows, places, config.data.difficulty), np.dtype(np.int32)
    if config.data.source == "puzzle" and config.data.puzzle.task == "graph":
        entries["visible"] = (rows, places, places), np.dtype(np.bool_)
    return entries
