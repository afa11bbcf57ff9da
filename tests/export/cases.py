"""Small runs, their PyTorch twins and comparisons that the tests of export share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import ml_dtypes
import numpy as np
import pytest

from dreamer_jax.config.loading import LoadedConfig
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.config.models.ouro import OuroConfig
from dreamer_jax.config.sections import Config, DataConfig, RunConfig
from dreamer_jax.data import open_data
from dreamer_jax.data.tokenizers import ByteTokenizer
from dreamer_jax.export.description import NOT_DESCRIBED
from dreamer_jax.export.form import Description
from dreamer_jax.export.names import FOLDED, fold, names_of
from dreamer_jax.families import build, initialise
from dreamer_jax.runs import safetensors_files
from dreamer_jax.runs.leaves import write_run
from dreamer_jax.runs.safetensors_files import Tensor
from dreamer_jax.training.optimizer import make_optimizer
from tests.families.cases import random_weights, small_config

WHY_SKIPPED = "needs the extra export: pip install -e '.[export]'"


def torch_weights(
    params: Any, bias: Any, model: DreamerConfig, keep_shared: bool, texts: Any = None
) -> dict[str, np.ndarray]:
    """Tensor name, as in `Dreamer.state_dict()`, -> values."""
    weights, items = {}, {"params": params, "balancing": bias, "knowledge": {"texts": texts}}
    for name in names_of(model, keep_shared):
        *scope, last = name.leaf.split(".")
        node = items[name.item]
        for key in scope:
            node = node[key]
        values = np.asarray(node[last])
        if name.shared and model.shared_experts and not keep_shared:
            values = fold(values, np.asarray(node[FOLDED[last]]))
        weights[name.tensor.removeprefix("model.")] = values if name.layer is None else values[name.layer]
    return weights


def torch_model(
    model: DreamerConfig, keep_shared: bool = False, weights: tuple[Any, Any] | None = None, texts: Any = None
) -> Any:
    """The PyTorch model with the (params, bias) given, those of `random_weights(model)` by default."""
    import torch

    from dreamer_jax.export.modeling_dreamer import Dreamer, DreamerConfig

    torch.set_num_threads(1)  # the models are far too small for more
    params, bias = random_weights(model) if weights is None else weights
    fields = dataclasses.asdict(model)
    for name in NOT_DESCRIBED:
        del fields[name]
    dreamer = Dreamer(DreamerConfig(**fields, keep_shared=keep_shared))
    named = torch_weights(params, bias, model, keep_shared, texts)
    dreamer.load_state_dict({name: torch.tensor(values) for name, values in named.items()})
    return dreamer.eval()


def check_dtypes(folder: Path) -> None:
    """That transformers loads every tensor of a bfloat16 folder in its dtype: no norm, gate or router is rounded."""
    transformers = pytest.importorskip("transformers", reason=WHY_SKIPPED)
    from safetensors.torch import load_file

    with contextlib.ExitStack() as stack:
        for module in (transformers.dynamic_module_utils, transformers.utils.hub, transformers.utils):
            place = str(folder.parent / "modules")
            stack.enter_context(mock.patch.object(module, "HF_MODULES_CACHE", place, create=True))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")
    found, stored = model.state_dict(), load_file(folder / "model.safetensors")
    assert {name: found[name].dtype for name in stored} == {name: its.dtype for name, its in stored.items()}
    assert len({its.dtype for its in stored.values()}) == 2


def use_of(form: Any, model: Any) -> str:
    """How the README of a folder says that its model is used."""
    return form.about(Description(Config(model=model), {}, "float32", False, 1, {}), ByteTokenizer()).use


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
    return write_small_run(config, params, {"balancing": jax.tree.map(np.asarray, bias)}, step, tokenizer)


def write_small_run(config: Config, params: Any, state: Any, step: int = 7, tokenizer: str | None = None) -> Path:
    """The directory `run.dir` with these weights."""
    data, directory = open_data(config), Path(config.run.dir)
    meta = {"data": data.fingerprint, "tokenizer": tokenizer or data.tokenizer.fingerprint}
    directory.mkdir()
    start = make_optimizer(config.training, build(config.model).roles).init
    write_run(LoadedConfig(config, {}), directory, step, params, state, meta, start)
    return directory


_HUGINN = HuginnConfig(
    depth=3,
    hidden_size=32,
    heads=4,
    kv_heads=4,
    head_size=8,
    mlp_size=24,
    vocab_size=259,
    prelude_layers=1,
    core_layers=2,
    coda_layers=1,
    gradient_recurrences=2,
    dtype="float32",
)
HUGINN = {
    "huginn": _HUGINN,
    "llama": dataclasses.replace(
        _HUGINN,
        kv_heads=2,
        queries="plain",
        form="pre_norm",
        coda_norm=False,
        tied_head=False,
        embedding_scale=1.0,
        state_std=0.0087,
        norm_epsilon=1e-5,
        rope_base=1000.0,
        rope_factor=8.0,
        rope_length=16,
    ),
}


def huginn_run(directory: Path, model: HuginnConfig) -> Path:
    """A run in which no weight is zero or one."""
    params, _ = initialise(build(model), jax.random.key(0))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = structure.unflatten([x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])
    data = DataConfig(sequence_length=32, difficulty=2, heldout_records=8)
    return write_small_run(Config(model=model, data=data, run=RunConfig(dir=str(directory))), params, {})


def write_folder(folder: Path, tensors: dict[str, np.ndarray], settings: dict[str, Any]) -> Path:
    """A folder of tensors and config.json alone, as others publish them."""
    folder.mkdir()
    codes = {np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}
    listed = [
        Tensor(name, codes[values.dtype], values.shape, lambda start, stop, values=values: values[start:stop])
        for name, values in tensors.items()
    ]
    safetensors_files.write(folder, listed)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


OURO = OuroConfig(
    depth=3,
    layers=2,
    hidden_size=16,
    heads=4,
    kv_heads=2,
    head_size=6,
    mlp_size=12,
    vocab_size=259,
    rope_base=1000.0,
    dtype="float32",
)


def ouro_run(directory: Path, model: OuroConfig = OURO) -> Path:
    """A run in which no weight is zero or one."""
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        norm = path[-1].key in ("scale", "final_norm")
        return (norm + 0.3 * rng.normal(size=leaf.shape)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, nn.meta.unbox(build(model).shapes[0]))
    data = DataConfig(sequence_length=32, difficulty=2, heldout_records=8)
    return write_small_run(Config(model=model, data=data, run=RunConfig(dir=str(directory))), params, {})
