"""config.json of Huginn's own format (`model_type: huginn_raven`), in both directions.

The keys are those of the published configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.errors import UserError
from dreamer_jax.export.json_values import LLAMA3, flag, number, rotation, whole

SIZES = {
    "mean_recurrence": ("depth", 32),
    "n_layers_in_prelude": ("prelude_layers", 2),
    "n_layers_in_recurrent_block": ("core_layers", 4),
    "n_layers_in_coda": ("coda_layers", 2),
    "n_embd": ("hidden_size", 5280),
    "intermediate_size": ("mlp_size", 17920),
    "mean_backprop_depth": ("gradient_recurrences", 8),
}
"""Key -> (our setting, published default): those that have the same meaning."""

BUILT = {
    "architecture_class_name": "RecurrentGPT",
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "bias": False,
    "state_init": "like-init",
    "injection_type": "linear",
}
"""Keys of what could be computed, and the one value that is, which is the default. Retrofitted models keep these names
too, whatever their layers are."""
LATER = {"initial_state_mode": "random", "test_time_noise": 0}
"""The same for keys that the first configurations don't have."""

WITHOUT_EFFECT = {"init_strategy": "takase", "sampling_scheme": "poisson-lognormal-filling"}
"""Written as published; the published code initialises and draws like that whatever they say."""

BLOCK_SIZE = 4096
CLOSE = 1e-9
"""Products of rounded square roots differ by less."""


def read_model(path: Path, content: Mapping[str, Any], pre_norm: bool, run: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the section `model` that config.json decides.

    Args:
        path: of config.json, for messages.
        content: of it.
        pre_norm: whether the layers are those of retrofitted models, which only the tensors tell.
        run: the settings of the run it came from, by dotted key; empty where there is none.
    Raises:
        UserError: a value is broken, or one of a model that can't be computed.
    """
    _check_built(path, content)
    model: dict[str, Any] = {ours: whole(path, content, key, default) for key, (ours, default) in SIZES.items()}
    heads = whole(path, content, "n_heads" if "n_heads" in content else "num_attention_heads", 55)
    if heads < 1 or model["hidden_size"] % heads:
        raise UserError(f"{path}: n_heads {heads} does not divide n_embd {model['hidden_size']}")
    rows = "padded_vocab_size" if content.get("padded_vocab_size") is not None else "vocab_size"
    biased = flag(path, content, "qk_bias", True)
    model |= {
        "heads": heads,
        "kv_heads": whole(path, content, "num_key_value_heads", heads),
        "head_size": model["hidden_size"] // heads,
        "vocab_size": whole(path, content, rows, 65536),
        "form": "pre_norm" if pre_norm else "sandwich",
        "coda_norm": not pre_norm,
        "queries": "bias" if biased else "plain",
        "tied_head": flag(path, content, "tie_embeddings", True),
        "norm_epsilon": number(path, content, "norm_eps", 1e-6),
    }
    if pre_norm:
        model["rope_base"], scaling = rotation(path, content)
        model |= scaling
    else:
        model["rope_base"] = number(path, content, "rope_base", 50_000.0)
    if biased and model["kv_heads"] != heads:
        raise UserError(f"{path}: qk_bias with {model['kv_heads']} key heads for {heads} query heads can't be computed")
    return model | _scales(path, content, model["hidden_size"], run)


def write_model(model: HuginnConfig) -> dict[str, Any]:
    """The keys of config.json that describe a model.

    Raises:
        UserError: there are none for one of its settings.
    """
    check_expressible(model)
    scale, std = scales(model)
    takase = (2 / (5 * model.hidden_size)) ** 0.5
    passed = model.prelude_layers + model.core_layers * model.depth + model.coda_layers
    return {
        **{key: getattr(model, ours) for key, (ours, _) in SIZES.items()},
        "n_heads": model.heads,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "n_layers": model.prelude_layers + model.core_layers + model.coda_layers,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.vocab_size,
        "padding_multiple": 1,
        "tie_embeddings": model.tied_head,
        "qk_bias": model.queries == "bias",
        "norm_eps": model.norm_epsilon,
        "rope_base": model.rope_base,
        **(_rotation(model) if model.form == "pre_norm" else {}),
        "effective_expected_depth": passed,
        "init_values": {
            "std": std / scale,
            "out_proj": takase / (2 * passed) ** 0.5,
            "embedding": takase,
            "embed_scale": scale,
        },
        **BUILT,
        **WITHOUT_EFFECT,
    }


def _rotation(model: HuginnConfig) -> dict[str, Any]:
    """The keys that only retrofitted models have."""
    scaling = {"rope_type": "llama3", **{key: getattr(model, ours) for ours, key in LLAMA3.items()}}
    return {"rope_theta": model.rope_base, **({"rope_scaling": scaling} if model.rope_scaling else {})}


def check_expressible(model: HuginnConfig) -> None:
    """Raises UserError, naming the setting, for a model that these keys and tensors can't say."""
    sandwich = model.form == "sandwich"
    problems = {
        f"form {model.form}": model.form == "branch_norm",
        f"queries {model.queries}": model.queries in ("norm", "head_norm"),
        f"coda_norm {str(model.coda_norm).lower()} with model.form {model.form}": model.coda_norm != sandwich,
        f"kv_heads {model.kv_heads} other than model.heads {model.heads} with model.queries bias": (
            model.queries == "bias" and model.kv_heads != model.heads
        ),
        f"rope_factor {model.rope_factor:g} with model.form {model.form}": bool(model.rope_scaling) and sandwich,
        f"head_size {model.head_size} other than hidden_size / heads": (
            model.head_size * model.heads != model.hidden_size
        ),
    }
    for problem, there in problems.items():
        if there:
            raise UserError(f"folders of the form huginn have no place for model.{problem}")


def scales(model: HuginnConfig) -> tuple[float, float]:
    """(factor on embeddings, standard deviation of the initial state), where zeros stand for the defaults."""
    return model.embedding_scale or model.hidden_size**0.5, model.state_std or (2 / 5) ** 0.5


def _scales(path: Path, content: Mapping[str, Any], hidden: int, run: Mapping[str, Any]) -> dict[str, float]:
    """`embedding_scale` and `state_std`; as the run had them where that comes to the same, else zero for defaults."""
    values = content.get("init_values")
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"{path}: init_values can't be {values!r}")
    scale = number(path, values, "embed_scale", hidden**0.5)
    std = number(path, values, "std", (2 / (5 * hidden)) ** 0.5)
    if scale <= 0 or std <= 0:
        raise UserError(f"{path}: init_values embed_scale {scale} and std {std} must be more than zero")
    found = {}
    for name, told, default in (
        ("embedding_scale", scale, hidden**0.5),
        ("state_std", std * scale, (2 / 5) ** 0.5),
    ):
        candidates = (run.get(f"model.{name}", 0.0), 0.0, told)
        same = (value for value in candidates if math.isclose(value or default, told, rel_tol=CLOSE))
        found[name] = next(same)
    return found


def _check_built(path: Path, content: Mapping[str, Any]) -> None:
    for key, value in {**BUILT, **LATER}.items():
        found = content.get(key)
        if found is not None and found != value:
            raise UserError(f"{path}: {key} is {found!r}; only models with {value!r} can be computed")
