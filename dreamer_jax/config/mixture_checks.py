"""Checks of the settings of Dreamer's mixture: which go together, and who acts where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dreamer_jax.config.values import require

if TYPE_CHECKING:
    from dreamer_jax.config.models.dreamer import DreamerConfig

RECURRENT_PARTS = ("attention_experts", "shared_expert", "residual_norm")
"""Settings of DR and DR+DA alone that leave something out."""


def require_heads(model: DreamerConfig) -> None:
    """Groups of heads are whole, and rotations have pairs to turn."""
    require(
        model.sa_heads % model.sa_kv_heads == 0,
        "model.sa_kv_heads",
        f"{model.sa_kv_heads} does not divide model.sa_heads {model.sa_heads}",
    )
    require(
        model.da_heads % model.da_kv_heads == 0,
        "model.da_kv_heads",
        f"{model.da_kv_heads} does not divide model.da_heads {model.da_heads}",
    )
    require(
        model.sa_head_size % 2 == 0,
        "model.sa_head_size",
        f"{model.sa_head_size} is odd; RoPE rotates pairs, so use an even number",
    )
    for name in ("da_head_size", "pa_head_size", "router_size"):
        value = getattr(model, name)
        require(
            value % 4 == 0,
            f"model.{name}",
            f"{value} is not divisible by 4; depth RoPE rotates pairs in two halves",
        )


def require_slots(model: DreamerConfig) -> None:
    """Parameter attention has what its texts, or its own slots, need."""
    texts = model.pa_source == "texts"
    require(
        not texts or model.pa_slots > 0,
        "model.pa_slots",
        "is 0 with model.pa_source texts; it is the number of texts in the file of data.knowledge",
    )
    require(
        texts == bool(model.pa_embedding_size),
        "model.pa_embedding_size",
        "is 0 with model.pa_source texts; it is the size of the embeddings in the file of data.knowledge"
        if texts
        else f"{model.pa_embedding_size} is for model.pa_source texts, and it is latents; leave the setting out",
    )


def require_depth_signals(model: DreamerConfig) -> None:
    """Depth counters and what is done about depths beyond the trained ones go together."""
    turned = {
        "router_size": model.router_depth_code,
        "da_head_size": model.depth_attention and model.da_form != "gated_recurrent",
        "pa_head_size": model.pa_slots > 0,
    }
    for name in (name for name, its in turned.items() if its and model.depth_scaling == "ntk"):
        require(
            getattr(model, name) // (2 if model.depth_counters == "both" else 1) > 2,
            "model.depth_scaling",
            f"ntk has no meaning where each counter turns one pair; take a larger model.{name}",
        )
    require(
        model.depth_counters != "learned" or model.depth_scaling != "ntk",
        "model.depth_scaling",
        "ntk is about rotations, and learned depth counters have none; use interpolated or none",
    )
    require(
        model.depth_counters != "learned" or model.recurrent,
        "model.depth_counters",
        f"learned is for DR and DR+DA; every layer of {model.variant} can learn its own place, so use another value",
    )
    require(
        model.depth_counters != "none" or model.depth_scaling == "none",
        "model.depth_scaling",
        f"{model.depth_scaling} has no meaning where model.depth_counters is none",
    )


def require_recurrence(model: DreamerConfig) -> None:
    """What only a shared layer can leave out, or be given, isn't asked of layers of their own."""
    for name in RECURRENT_PARTS:
        require(
            model.recurrent or getattr(model, name),
            f"model.{name}",
            f"false is for DR and DR+DA; {model.variant} has nothing to leave out, so leave the setting out",
        )
    require(
        model.recurrent or model.injection == "none",
        "model.injection",
        f"{model.injection} is for DR and DR+DA; in {model.variant} nothing enters again, so leave the setting out",
    )
    require(
        model.recurrent or not model.decoding_size,
        "model.decoding_size",
        f"{model.decoding_size} is for DR and DR+DA; {model.variant} has layers of its own, so leave the setting out",
    )
    most = model.depth if model.recurrent else 1
    require(
        model.balancing_groups <= most,
        "model.balancing_groups",
        f"{model.balancing_groups}, where {most} depths share a router"
        if model.recurrent
        else f"{model.balancing_groups} is for DR and DR+DA; every layer of {model.variant} has a bias of its own",
    )


def require_depth_attention(model: DreamerConfig) -> None:
    """The form of depth attention and what it sees go together."""
    for name, plain in (("da_form", "softmax"), ("da_window", 0), ("da_dilation", 1)):
        value = getattr(model, name)
        require(
            model.depth_attention or value == plain,
            f"model.{name}",
            f"{value} is for depth attention; {model.variant} has none, so leave the setting out",
        )
        require(
            model.da_form == "softmax" or name == "da_form" or value == plain,
            f"model.{name}",
            f"{value} is for softmax; with model.da_form {model.da_form} there is one state of all depths",
        )


def require_turns(model: DreamerConfig) -> None:
    """An attention that rests at some depths is there, acts at two depths at least, and sees an earlier one."""
    for name in ("sa_every", "da_every", "pa_every"):
        value = getattr(model, name)
        require(
            model.recurrent or value == 1,
            f"model.{name}",
            f"{value} is for DR and DR+DA; {model.variant} has layers of its own, so leave the setting out",
        )
        require(
            value == 1 or value < model.depth,
            f"model.{name}",
            f"{value} leaves depth 0 alone at model.depth {model.depth}; use a smaller number",
        )
    require(
        model.depth_attention or model.da_every == 1,
        "model.da_every",
        f"{model.da_every} is for depth attention; {model.variant} has none, so leave the setting out",
    )
    require(
        model.pa_slots > 0 or model.pa_every == 1,
        "model.pa_every",
        f"{model.pa_every} is for parameter attention; set model.pa_slots too, or leave the setting out",
    )
    places = -(-model.depth // model.da_every)
    require(
        model.da_dilation == 1 or model.da_dilation < places,
        "model.da_dilation",
        f"{model.da_dilation} leaves no earlier depth to see at model.depth {model.depth}"
        + (f" with model.da_every {model.da_every}" if model.da_every > 1 else "")
        + "; use a smaller number",
    )
    require(
        model.da_dilation == 1 or model.da_window != 1,
        "model.da_dilation",
        f"{model.da_dilation} has no meaning with model.da_window 1, the present depth alone; use a larger window",
    )


def require_experts(model: DreamerConfig) -> None:
    """What tokens select is there."""
    require(
        model.attention_experts or model.shared_expert,
        "model.shared_expert",
        "false has no meaning without attention MoEs; set only one of it and model.attention_experts to false",
    )
    require(
        model.experts_per_token <= model.num_experts,
        "model.experts_per_token",
        f"{model.experts_per_token} is more than model.num_experts {model.num_experts}",
    )


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
