"""A tiny configuration and packed batches that the tests of training share."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.sections import Config, DataConfig, TrainingConfig

MODEL = DreamerConfig(
    variant="DR+DA",
    depth=2,
    hidden_size=16,
    vocab_size=23,
    sa_heads=2,
    sa_kv_heads=1,
    sa_head_size=8,
    da_heads=1,
    da_kv_heads=1,
    da_head_size=8,
    num_experts=6,
    experts_per_token=2,
    expert_size=8,
    router_size=8,
    dtype="float32",
)
TRAINING = TrainingConfig(steps=3, batch_size=8, learning_rate=1e-2, warmup_steps=2, epsilon=1e-4, weight_decay=0.1)


def tiny_config(**changes: Any) -> Config:
    """The configuration with changes, written section__key=value."""
    config = Config(model=MODEL, training=TRAINING, data=DataConfig(sequence_length=12))
    for name, value in changes.items():
        section, _, key = name.partition("__")
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{key: value})})
    return config


def random_batch(seed: int, vocab_size: int = 23) -> dict[str, np.ndarray]:
    """[8, 12]: documents of many lengths, trained on in part, the last two rows all padding."""
    rng = np.random.default_rng(seed)
    lengths = [(12,), (5, 7), (4, 4), (1, 9), (3,), (2, 2, 2), (), ()]
    shape = (len(lengths), 12)
    batch = {name: rng.integers(0, vocab_size, shape).astype(np.int32) for name in ("tokens", "targets")}
    batch["segment_ids"], batch["positions"] = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, sizes in enumerate(lengths):
        start = 0
        for segment, size in enumerate(sizes, 1):
            batch["segment_ids"][row, start : start + size] = segment
            batch["positions"][row, start : start + size] = np.arange(size)
            start += size
    batch["loss_mask"] = (batch["segment_ids"] > 0) & (rng.random(shape) < 0.7)
    batch["answer_mask"] = batch["loss_mask"].copy()
    return batch
