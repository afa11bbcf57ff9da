"""config.json, in both directions, and generation_config.json."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from dreamer_jax.config import Config, LoadedConfig
from dreamer_jax.config.keys import INTEGERS, key_types, values_of
from dreamer_jax.config.loading import Setting, build
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.export.safetensors_files import read_json

FORMAT_VERSION = 1
MODEL_FILE = "modeling_dreamer.py"
NOT_DESCRIBED = ("family", "implementation", "dtype")
"""Settings that `model_type` says, or that say how to compute in JAX, not what."""


@dataclasses.dataclass(frozen=True)
class Description:
    """What config.json says.

    Attributes:
        config: the configuration of the run it came from; without one, defaults around the model.
        origins: dotted key -> where its value is from, for messages and the saved configuration.
        dtype: "bfloat16" or "float32", of the matrices.
        keep_shared: whether shared experts are tensors of their own.
        step: optimizer steps the run had done.
        meta: fingerprints of its data and tokenizer.
    """

    config: Config
    origins: dict[str, str]
    dtype: str
    keep_shared: bool
    step: int
    meta: dict[str, str]

    @property
    def model(self) -> DreamerConfig:
        """The section `model`."""
        return twin_of(self.config)

    def loaded(self, directory: str) -> LoadedConfig:
        """The configuration of a run in `directory`."""
        run = dataclasses.replace(self.config.run, dir=directory)
        return LoadedConfig(dataclasses.replace(self.config, run=run), self.origins | {"run.dir": "command line"})


def twin_of(config: Config) -> DreamerConfig:
    """The section `model`, of the one family that has a PyTorch twin.

    Raises:
        UserError: it is of another family.
    """
    if not isinstance(config.model, DreamerConfig):
        raise UserError(f"models of the family {config.model.family} have no PyTorch form yet; only dreamer has")
    return config.model


def describe(description: Description, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of config.json."""
    model = dataclasses.asdict(description.model)
    values = values_of(description.config)
    del values["run.dir"]  # says nothing of the model, and would differ between a run and its copy
    return {
        "architectures": ["DreamerForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_dreamer.DreamerConfig",
            "AutoModelForCausalLM": "modeling_dreamer.DreamerForCausalLM",
        },
        "model_type": "dreamer",
        "format_version": FORMAT_VERSION,
        "dtype": description.dtype,
        "keep_shared": description.keep_shared,
        **{name: value for name, value in model.items() if name not in NOT_DESCRIBED},
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": tokenizer.pad,
        "max_position_embeddings": description.config.data.sequence_length,
        "tie_word_embeddings": False,
        "training_run": {"step": description.step, "meta": description.meta, "config": values},
    }


def generation_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of generation_config.json: greedy, until the end of text."""
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    return {**ids, "do_sample": False}


def read_description(folder: Path) -> Description:
    """What a folder's config.json says.

    Raises:
        UserError: it is missing, broken, of another model, or of a later version of this format.
    """
    path = folder / "config.json"
    content = read_json(path)
    if content.get("model_type") != "dreamer":
        raise UserError(f"{path} describes a model of type {content.get('model_type')!r}, not a dreamer")
    version = content.get("format_version")
    if type(version) is not int or version < 1:
        raise UserError(f"{path}: format_version must be a number, not {version!r}")
    if version > FORMAT_VERSION:
        raise UserError(
            f"{path} has format {version}, which is newer than this version of dreamer-jax reads ({FORMAT_VERSION}); "
            "update dreamer-jax"
        )
    run = content.get("training_run") or {}
    values = {} if not isinstance(run, dict) else dict(run.get("config") or {})
    for name in (field.name for field in dataclasses.fields(DreamerConfig)):
        if name in content and name not in NOT_DESCRIBED:
            values[f"model.{name}"] = content[name]
    dtype = content.get("dtype", content.get("torch_dtype"))
    if dtype not in ("bfloat16", "float32"):
        raise UserError(f"{path}: dtype must be bfloat16 or float32, not {dtype!r}")
    settings = {key: Setting(_checked(path, key, value), str(path)) for key, value in values.items()}
    loaded = build(settings)
    step, meta = run.get("step", 0), run.get("meta") or {"data": "", "tokenizer": ""}
    if type(step) is not int or step < 0 or not all(isinstance(text, str) for text in meta.values()):
        raise UserError(f"{path}: training_run is damaged")
    return Description(loaded.config, loaded.origins, dtype, bool(content.get("keep_shared")), step, meta)


def _checked(path: Path, key: str, value: Any) -> Any:
    """A value of config.json, if it has the type of its key."""
    expected = key_types(DreamerConfig).get(key)
    if expected is None:
        raise UserError(f"{path}: unknown setting '{key}'; it was written by another version of dreamer-jax")
    if expected is float and type(value) is int:
        value = float(value)
    if expected == INTEGERS:  # a list in JSON; one integer in folders of earlier versions
        value = tuple(value) if isinstance(value, list) else (value,)
        right = bool(value) and all(type(number) is int for number in value)
    elif get_origin(expected) is Literal:
        right = value in get_args(expected)
    else:
        right = type(value) is expected
    if not right:
        raise UserError(f"{path}: {key} can't be {value!r}")
    return value
