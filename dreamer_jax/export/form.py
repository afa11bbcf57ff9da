"""What a form is: all that folders of one family have of their own. Writing, reading and comparing know this alone."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import flax.linen as nn
import numpy as np

from dreamer_jax.config import Config, LoadedConfig
from dreamer_jax.config.keys import INTEGERS, key_types, values_of
from dreamer_jax.config.values import ModelConfig
from dreamer_jax.data.json_tokenizer import JsonTokenizer
from dreamer_jax.data.tokenizers import load_tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.families import build
from dreamer_jax.runs.checkpoints import FINGERPRINTS
from dreamer_jax.runs.leaves import StoredModel
from dreamer_jax.runs.safetensors_files import Stored, Tensor

CODES = {"bfloat16": "BF16", "float32": "F32"}
"""A folder's dtype -> that of its tensors, in a safetensors header."""
LARGEST = 10**18
"""What integers are below, as in a configuration file."""
LARGEST_SIZE = 1 << 31
MOST_LAYERS = 1 << 12
"""More would take minutes before it is seen that the tensors are of fewer."""
"""What sizes of a model are below, so that shapes and indices can be computed."""


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
    def model(self) -> Any:
        """The section `model`."""
        return self.config.model

    def loaded(self, directory: str) -> LoadedConfig:
        """The configuration of a run in `directory`."""
        run = dataclasses.replace(self.config.run, dir=directory)
        return LoadedConfig(dataclasses.replace(self.config, run=run), self.origins | {"run.dir": "command line"})


class Leaf(NamedTuple):
    """The values of a leaf of the train state, or of one layer of it.

    Attributes:
        item: "params" or a collection of the model's own state.
        path: in that item, joined by dots.
        layer: index along the leading axis, or None: the whole leaf.
        values: in any float dtype.
    """

    item: str
    path: str
    layer: int | None
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Trace:
    """One forward pass.

    Attributes:
        parts: (name, output [B, S, h]) in the order of the forward pass.
        logits: [B, S, V] float32; of models that classify rows [B, T, C], after every step.
        clean: [B, S] bool, False where rounding decides what comes out, because a router tied at this token or an
            earlier one of its row, or because recurrences enlarge it.
    """

    parts: list[tuple[str, np.ndarray]]
    logits: np.ndarray
    clean: np.ndarray


class TorchSide(NamedTuple):
    """What the PyTorch side computed of a folder.

    Attributes:
        trace: in float32.
        rounded: [B, S, V], the logits in bfloat16; None for a float32 folder.
        continued: [1, prompt + new], the last row's beginning and what greedy decoding wrote after it.
    """

    trace: Trace
    rounded: np.ndarray | None
    continued: np.ndarray


@dataclasses.dataclass(frozen=True)
class About:
    """What a model card says of one family's models alone.

    Attributes:
        tags: for search.
        title: of the card.
        introduction: what the model is, and of what dtype its tensors are.
        use: how to load it.
        counted: to be said below the budget.
    """

    tags: tuple[str, ...]
    title: str
    introduction: str
    use: str
    counted: str = ""


class Form(abc.ABC):
    """The form of one family's folders."""

    family: ClassVar[str]
    """The family's key, and the form's name on the command line."""
    model_type: ClassVar[str]
    """In config.json."""
    model_file: ClassVar[str]
    """The PyTorch code, beside this module and in every folder."""
    packages: ClassVar[tuple[str, ...]] = ("torch", "safetensors")
    """What that code needs."""
    texts: ClassVar[bool] = True
    """Whether its models write texts, so that a folder has a tokenizer and a continuation is compared."""

    def has_shared(self, model: Any) -> bool:
        """Whether the model has shared experts, which are folded into the routed ones or kept."""
        return False

    # config.json

    @abc.abstractmethod
    def settings(self, description: Description, tokenizer: Any) -> dict[str, Any]:
        """The content of config.json; the tokenizer is None where there are no texts.

        Raises:
            UserError: the form has no place for a setting of the model.
        """

    @abc.abstractmethod
    def read(self, folder: Path, content: dict[str, Any]) -> Description:
        """What config.json says.

        Raises:
            UserError: it is broken, or describes what can't be computed here.
        """

    def asks(self, folder: Path) -> str:
        """Of a folder without config.json: what one has to say, if its tensors are of this form."""
        return ""

    # Tensors

    @abc.abstractmethod
    def tensors(self, stored: StoredModel, description: Description) -> list[Tensor]:
        """The tensors that hold the model, in the order of the forward pass, to be read when they are written."""

    def derived(self, stored: StoredModel, description: Description) -> list[Tensor]:
        """Tensors that are written too and say nothing new."""
        return []

    def without_derived(self, folder: Path, tensors: dict[str, Stored], description: Description) -> dict[str, Stored]:
        """A folder's tensors but for the derived ones.

        Raises:
            UserError: a derived one contradicts what it is derived from.
        """
        return tensors

    @abc.abstractmethod
    def shapes(self, description: Description) -> dict[str, tuple[int, ...]]:
        """Tensor name -> shape, of those of `tensors`."""

    @abc.abstractmethod
    def leaves(self, tensors: Mapping[str, Stored], description: Description) -> Iterator[Leaf]:
        """The train state's values, one tensor after another; what is left out is zero."""

    @abc.abstractmethod
    def parts(self, description: Description) -> dict[str, str]:
        """Tensor name -> what a person calls the part of the model that it belongs to."""

    # Comparing and describing

    def affordable(self, model: Any) -> int:
        """Most tokens of a row that comparing has time for."""
        return 64

    @abc.abstractmethod
    def torch_side(self, folder: Path, tokens: np.ndarray, prompt: int, new: int, bfloat16: bool) -> TorchSide:
        """What the folder's own code computes.

        Args:
            folder: the folder.
            tokens: [B, S] int32.
            prompt: how many tokens of the last row are continued.
            new: by how many.
            bfloat16: whether to compute in bfloat16 too.
        """

    @abc.abstractmethod
    def jax_side(self, stored: StoredModel, folder: Path, description: Description, dtype: str) -> Any:
        """The JAX model in a compute precision, with `trace(tokens) -> Trace`."""

    @abc.abstractmethod
    def about(self, description: Description, tokenizer: Any) -> About:
        """For the model card."""


def abstract(model: ModelConfig) -> dict[str, Any]:
    """Item of a checkpoint -> its tree of shapes."""
    params, model_state = nn.meta.unbox(build(model).shapes)
    return {"params": params, **model_state}


def at(tree: Any, path: str) -> Any:
    """What is in a tree at keys joined by dots."""
    for key in path.split("."):
        tree = tree[key]
    return tree


def training_run(description: Description) -> dict[str, Any]:
    """The content of `training_run` in config.json."""
    values = values_of(description.config)
    del values["run.dir"]  # says nothing of the model, and would differ between a run and its copy
    return {"step": description.step, "meta": description.meta, "config": values}


def read_training_run(path: Path, content: Mapping[str, Any]) -> tuple[dict[str, Any], int, dict[str, str]]:
    """(dotted key -> value, step, meta) from config.json; nothing, 0 and empty fingerprints where there is no run.

    Raises:
        UserError: it is damaged.
    """
    run = content.get("training_run") or {}
    damaged = UserError(f"{path}: training_run is damaged")
    if not isinstance(run, dict):
        raise damaged
    values, step = run.get("config") or {}, run.get("step", 0)
    meta: Any = run.get("meta") or dict.fromkeys(FINGERPRINTS, "")
    if not isinstance(values, dict) or not isinstance(meta, dict) or not set(FINGERPRINTS) <= set(meta):
        raise damaged
    if type(step) is not int or not 0 <= step < 2**31 or not all(isinstance(text, str) for text in meta.values()):
        raise damaged
    return dict(values), step, meta


def dtype_of(folder: Path, tensors: Mapping[str, Stored], *names: str) -> str:
    """The dtype that a folder's matrices are computed in: that of the first of these tensors that is there, and for
    float16, which bfloat16 would round, float32.

    Raises:
        UserError: none is.
    """
    table = next((tensors[name] for name in names if name in tensors), None)
    if table is None:
        raise UserError(f"{folder}: the tensor {names[0]} is missing")
    return next((dtype for dtype, code in CODES.items() if code == table.dtype), "float32")


def without_run(folder: Path, length: int, dtype: str, vocabulary: int) -> tuple[dict[str, Any], dict[str, str]]:
    """(dotted key -> value, meta) for a folder that came from no run: its tokenizer, rows of S tokens, and a dtype.

    Raises:
        UserError: its tokenizer has more ids than the model has tokens.
    """
    path = folder.absolute() / "tokenizer.json"
    spec = str(path) if path.is_file() else "bytes"
    settings = {"data.tokenizer": spec, "data.sequence_length": length, "model.dtype": dtype}
    tokenizer = load_tokenizer(spec)
    if spec != "bytes" and tokenizer.vocab_size > vocabulary:
        raise UserError(
            f"{path}: with begin and end of text it has {tokenizer.vocab_size} ids, and the model {vocabulary} tokens; "
            "name its bos_token and eos_token in a tokenizer_config.json beside it"
        )
    return settings, {"data": "", "tokenizer": tokenizer.fingerprint}


def note_on_tokenizer(spec: str) -> str:
    """What has to be known of the tokenizer that `without_run` found, behind its name; "" where it is all right."""
    if spec == "bytes":
        return ", as the folder has no tokenizer.json; unless the model reads bytes, put its own there and begin again"
    tokenizer = JsonTokenizer(Path(spec))
    if tokenizer.bos < tokenizer.file_ids:
        return ""
    return f"; it names no begin of text, and {tokenizer.bos}, which all texts begin with now, is new to the model"


def checked(path: Path, key: str, value: Any, model: type[ModelConfig]) -> Any:
    """A value of config.json, if it has the type of its key.

    Args:
        path: of config.json, for messages.
        key: dotted.
        value: as JSON has it.
        model: the dataclass of the family.
    Raises:
        UserError: there is no such key, or it can't have that value.
    """
    expected = key_types(model).get(key)
    if expected is None:
        raise UserError(f"{path}: unknown setting '{key}'; it was written by another version of dreamer-jax")
    if expected is float and type(value) is int:
        value = float(value)
    limit = LARGEST_SIZE if key.startswith("model.") else LARGEST
    limit = MOST_LAYERS if key.endswith("layers") else limit
    if expected == INTEGERS:  # a list in JSON; one integer in folders of earlier versions
        value = tuple(value) if isinstance(value, list) else (value,)
        right = bool(value) and all(type(number) is int and abs(number) < limit for number in value)
    elif get_origin(expected) is Literal:
        right = value in get_args(expected)
    else:
        right = type(value) is expected and (expected is not float or math.isfinite(value))
        right = right and not (expected is int and abs(value) >= limit)
    if not right:
        raise UserError(f"{path}: {key} can't be {value!r}")
    return value
