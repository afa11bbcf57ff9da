"""Checks of the settings that say who of Dreamer's mixture acts where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dreamer_jax.config.values import require

if TYPE_CHECKING:
    from dreamer_jax.config.models.dreamer import DreamerConfig


def require_subsets(model: DreamerConfig) -> None:
    """Every depth has experts enough, and every expert a depth."""
    kind, share, subsets = model.expert_subset, model.expert_subset_share, model.expert_subsets
    require(
        kind == "sliding" or share == type(model).expert_subset_share,
        "model.expert_subset_share",
        f"{share} is for sliding, and model.expert_subset is {kind}; leave the setting out",
    )
    if subsets is None:
        return
    require(
        model.recurrent,
        "model.expert_subset",
        f"{kind} is for DR and DR+DA; layers of {model.variant} have experts of their own, so leave the setting out",
    )
    require(
        model.depth > 1,
        "model.expert_subset",
        f"{kind} has no meaning at model.depth 1; leave the setting out",
    )
    require(
        share <= 1,
        "model.expert_subset_share",
        f"{share} is more than all experts; use a number up to 1",
    )
    require(
        kind != "sliding" or share * model.depth > 1 - 1e-9,
        "model.expert_subset_share",
        f"{share} leaves experts that no depth has at model.depth {model.depth}; use at least 1 / model.depth",
    )
    require(
        subsets.size >= model.experts_per_token,
        "model.expert_subset",
        f"{kind} leaves a depth {subsets.size} of {model.num_experts} experts, which is less than "
        f"model.experts_per_token {model.experts_per_token}; use more experts",
    )


def require_dimensions(model: DreamerConfig) -> None:
    """A token can take as many dimensions, and at every depth each of them is there to be taken."""
    taken, dimensions = model.dimensions_per_token, len(model.dimensions)
    require(
        taken <= dimensions,
        "model.dimensions_per_token",
        f"{taken} is more than the {dimensions} that {model.variant} has" + (" with slots" if model.pa_slots else ""),
    )
    for name in ("sa_every", "da_every", "pa_every"):
        value = getattr(model, name)
        require(
            not taken or value == 1,
            "model.dimensions_per_token",
            f"{taken} can't be combined with model.{name} {value}: a token would take what rests at its depth; set one "
            "of the two",
        )
