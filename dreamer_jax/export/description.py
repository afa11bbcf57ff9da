"""config.json, in both directions, and generation_config.json: which form a folder has, and what is common to all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dreamer_jax.config import Config
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.export.algoformer_form import AlgoformerForm
from dreamer_jax.export.cotformer_form import CotformerForm
from dreamer_jax.export.depth_recurrent_form import DepthRecurrentForm
from dreamer_jax.export.dreamer_form import NOT_DESCRIBED, DreamerForm
from dreamer_jax.export.form import Description, Form
from dreamer_jax.export.huginn_form import HuginnForm
from dreamer_jax.export.moeut_form import MoeutForm
from dreamer_jax.export.ouro_form import OuroForm
from dreamer_jax.export.ponder_form import PonderForm
from dreamer_jax.export.recursive_form import RecursiveForm
from dreamer_jax.export.universal_form import UniversalForm
from dreamer_jax.runs.safetensors_files import read_json

__all__ = ["FORMS", "NOT_DESCRIBED", "Description", "form_of", "generation_settings", "read_description", "twin_of"]

_FORMS = (
    DreamerForm,
    HuginnForm,
    DepthRecurrentForm,
    OuroForm,
    UniversalForm,
    RecursiveForm,
    CotformerForm,
    AlgoformerForm,
    PonderForm,
    MoeutForm,
)
FORMS: dict[str, Form] = {form.family: form() for form in _FORMS}
"""Family -> the form of its folders."""


def form_of(config: Config) -> Form:
    """The form of the folders of a configuration's family.

    Raises:
        UserError: it has none.
    """
    family = config.model.family
    if family not in FORMS:
        raise UserError(f"models of the family {family} have no PyTorch form yet; {', '.join(FORMS)} have one")
    return FORMS[family]


def twin_of(config: Config) -> DreamerConfig:
    """The section `model` where only Dreamer's PyTorch twin will do.

    Raises:
        UserError: it is of another family.
    """
    if not isinstance(config.model, DreamerConfig):
        raise UserError(f"model.family is {config.model.family}; this is about models of the family dreamer")
    return config.model


def generation_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of generation_config.json: greedy, until the end of text."""
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    return {**ids, "do_sample": False}


def read_description(folder: Path) -> Description:
    """What a folder's config.json says.

    Raises:
        UserError: it is missing, broken, of a model that isn't known here, or of a later version of its form.
    """
    path = folder / "config.json"
    asked = "" if path.exists() else "".join(form.asks(folder) for form in FORMS.values())
    if asked:
        raise UserError(f"{path} does not exist; {asked}")
    content = read_json(path)
    for form in FORMS.values():
        if content.get("model_type") == form.model_type:
            return form.read(folder, content)
    known = ", ".join(form.model_type for form in FORMS.values())
    raise UserError(
        f"{path} describes a model of type {content.get('model_type')!r}; those that can be read are {known}. Of "
        "Llama, Qwen3 and OLMo 2 `dreamer convert` makes models of recurrent depth"
    )
