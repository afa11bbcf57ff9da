"""Types of values that several sections share, and the checks that a section makes of its values."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Protocol

from dreamer_jax.errors import ConfigError

Implementation = Literal["auto", "xla", "pallas"]
Remat = Literal["full", "attention", "none"]
DepthCounters = Literal["both", "up", "learned"]
DepthForm = Literal["softmax", "gated_delta", "gated_recurrent"]
DepthScaling = Literal["none", "interpolated", "ntk"]
Balancing = Literal["sign_median", "sign_mean", "tanh", "proportional"]
Readout = Literal["pair", "pair_linear", "cls"]


class ModelConfig(Protocol):
    """The section `model` as rooms that know no family see it; each family has a frozen dataclass of its own.

    A dataclass may define two properties more: `experts`, see `experts_of`, and `summary`, one line on
    the model for people; and the settings `pa_source`, `pa_slots` and `pa_embedding_size`, see `knowledge_of`.

    Attributes:
        family: its key in the register (dreamer_jax/config/models).
        hidden_size: h, size of the residual stream.
        vocab_size: V, rows of the embedding and of the output head.
        dtype: compute precision.
        implementation: backend of the kernels.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def family(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> Literal["bfloat16", "float32"]: ...
    @property
    def implementation(self) -> Implementation: ...


def experts_of(model: ModelConfig) -> int:
    """E: the experts that the devices of `mesh.expert` can divide among them; 0 for a model without."""
    return getattr(model, "experts", 0)


def knowledge_of(model: ModelConfig) -> tuple[int, int] | None:
    """(M, e): how many texts a model attends to, and the size of their embeddings; None if it attends to none."""
    if getattr(model, "pa_source", "latents") != "texts":
        return None
    return model.pa_slots, model.pa_embedding_size  # type: ignore[attr-defined]


def require(condition: bool, key: str, problem: str) -> None:
    """Refuse the value of a dotted key, with the problem, unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key}: {problem}", key=key)


def require_positive(
    section: object, prefix: str, allow_zero: tuple[str, ...] = (), signed: tuple[str, ...] = ()
) -> None:
    """Every number of a section is positive, but for the named ones, which may be zero, or are `signed`; whole numbers
    have 32 bits, as programs on devices do."""
    for f in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, f.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or f.name in signed:
            continue
        smallest_ok = value >= 0 if f.name in allow_zero else value > 0
        require(
            smallest_ok,
            f"{prefix}.{f.name}",
            f"{value} is too small; it must be " + ("zero or more" if f.name in allow_zero else "more than zero"),
        )
        rounds = f"float32 rounds {value:g} to zero; it must be {2**-126:.2g} or more"
        require(not 0 < value < 2**-126, f"{prefix}.{f.name}", rounds)
        fits = isinstance(value, float) or value < 2**31
        require(fits, f"{prefix}.{f.name}", f"{value} is too large; it must be less than 2^31")
