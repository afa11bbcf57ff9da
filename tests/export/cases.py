"""Small runs, their PyTorch twins and comparisons that the tests of export share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dreamer_jax.config.loading import LoadedConfig
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.sections import Config, DataConfig, RunConfig
from dreamer_jax.data import open_data
from dreamer_jax.export.description import NOT_DESCRIBED
from dreamer_jax.export.names import FOLDED, names_of
from dreamer_jax.export.writing import fold
from dreamer_jax.families import build
from dreamer_jax.runs.leaves import write_run
from dreamer_jax.training.optimizer import make_optimizer
from tests.families.cases import random_weights, small_config

WHY_SKIPPED = "needs the extra export: pip install -e '.[export]'"


def torch_weights(params: Any, bias: Any, model: DreamerConfig, keep_shared: bool) -> dict[str, np.ndarray]:
    """Tensor name, as in `Dreamer.state_dict()`, -> values."""
    weights = {}
    for name in names_of(model, keep_shared):
        *scope, last = name.leaf.split(".")
        node = params if name.item == "params" else bias
        for key in scope:
            node = node[key]
        values = np.asarray(node[last])
        if last in FOLDED and model.recurrent and not keep_shared:
            values = fold(values, np.asarray(node[FOLDED[last]]))
        weights[name.tensor.removeprefix("model.")] = values if name.layer is None else values[name.layer]
    return weights


def torch_model(model: DreamerConfig, keep_shared: bool = False, weights: tuple[Any, Any] | None = None) -> Any:
    """The PyTorch model with the (params, bias) given, those of `random_weights(model)` by default."""
    import torch

    from dreamer_jax.export.modeling_dreamer import Dreamer, DreamerConfig

    torch.set_num_threads(1)  # the models are far too small for more
    params, bias = random_weights(model) if weights is None else weights
    fields = dataclasses.asdict(model)
    for name in NOT_DESCRIBED:
        del fields[name]
    dreamer = Dreamer(DreamerConfig(**fields, keep_shared=keep_shared))
    named = torch_weights(params, bias, model, keep_shared)
    dreamer.load_state_dict({name: torch.tensor(values) for name, values in named.items()})
    return dreamer.eval()


def run_config(directory: Path, variant: str = "DR+DA", **changes: Any) -> Config:
    """A run of a small model on a built-in task, with the byte tokenizer."""
    model = small_config(variant, **{"vocab_size": 259, **changes})
    data = DataConfig(sequence_length=32, difficulty=2, heldout_records=8)
    return Config(model=model, data=data, run=RunConfig(dir=str(directory)))


def make_run(
    directory: Path, variant: str = "DR+DA", step: int = 7, tokenizer: str | None = None, **changes: Any
) -> Path:
    """A run directory with random weights; the fingerprint of its tokenizer may be another's."""
    config = run_config(directory, variant, **changes)
    params, bias = random_weights(config.model)
    data = open_data(config)
    meta = {"data": data.fingerprint, "tokenizer": tokenizer or data.tokenizer.fingerprint}
    directory.mkdir()
    start = make_optimizer(config.training, build(config.model).roles).init
    state = {"balancing": jax.tree.map(np.asarray, bias)}
    write_run(LoadedConfig(config, {}), directory, step, params, state, meta, start)
    return directory
