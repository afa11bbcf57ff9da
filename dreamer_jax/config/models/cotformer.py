"""Settings of the family `cotformer`: a stack whose middle is repeated and sees the keys of all repeats so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dreamer_jax.config.values import Implementation, require, require_positive

DepthEmbedding = Literal["none", "linear", "learned"]


@dataclass(frozen=True)
class CotformerConfig:
    """A CoTFormer: begin layers, middle layers that are repeated, end layers; the middle attends over all repeats.

    Mohtashami et al. (2023), with its layer norm after each repeat, and its mixture of repeats."""

    family: Literal["cotformer"] = "cotformer"
    """Which models: `dreamer info` lists the families, each with settings of its own."""
    depth: int = 5
    """R: repeats of the middle layers."""
    begin_layers: int = 1
    """Layers before the first repeat; may be 0."""
    middle_layers: int = 4
    """Layers that every repeat applies."""
    end_layers: int = 1
    """Layers after the last repeat; may be 0."""
    hidden_size: int = 128
    """h: size of the state."""
    heads: int = 4
    """Attention heads; hidden_size divided by them is even."""
    mlp_size: int = 512
    """F: intermediate size of the feed-forward, two matrices with GELU between them; 4h as published."""
    vocab_size: int = 512
    """V: rows of the embedding, which is the output head too; at least the tokenizer's size."""
    repeat_norm: bool = True
    """Whether a layer norm follows each repeat (published as LN-CoTFormer)."""
    depth_embedding: DepthEmbedding = "linear"
    """What is added before each repeat. linear: a learned vector times the repeats that are still to come after it, 0
    at the last. learned: a vector of its own for each repeat. none: nothing."""
    adaptive: bool = False
    """Whether routers decide after each repeat which positions go on: the mixture of repeats. Training draws in every
    step how many may."""
    decide: Literal["threshold", "capacity"] = "threshold"
    """How an adaptive model decides in evaluation of whole texts. threshold: as in generation, causally. capacity: as
    in training, by the largest gates, which looks at later tokens. Generation always takes the threshold."""
    threshold: float = 0.5
    """A position goes on if its gate, between 0 and 1, is at least this; 0 lets all go on."""
    capacity: float = 1.0
    """With decide: capacity, the share of positions that take the last repeat; shares of the repeats before go down to
    it from 1 in equal steps."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute precision; weights, gates, softmax, norm statistics and loss are always float32."""
    implementation: Implementation = "auto"
    """Backend of the begin and end layers' attention; auto takes the fastest of the platform. Attention over all
    repeats has one form."""

    @property
    def summary(self) -> str:
        """One line on the model."""
        kind = "adaptive, " if self.adaptive else ""
        return (
            f"cotformer, {kind}layers {self.begin_layers}+{self.middle_layers}x{self.depth}+{self.end_layers}, "
            f"hidden size {self.hidden_size}, feed-forward {self.mlp_size}, vocabulary {self.vocab_size}"
        )

    def __post_init__(self) -> None:
        require_positive(self, "model", allow_zero=("begin_layers", "end_layers", "threshold", "capacity"))
        require(
            self.hidden_size % self.heads == 0,
            "model.heads",
            f"{self.heads} does not divide model.hidden_size {self.hidden_size}",
        )
        require(
            self.hidden_size // self.heads % 2 == 0,
            "model.heads",
            f"heads of size {self.hidden_size // self.heads} are odd; RoPE rotates pairs, so use an even size",
        )
        for name in ("threshold", "capacity"):
            value = getattr(self, name)
            require(value <= 1, f"model.{name}", f"{value:g} is a share and can't be above 1")


CONFIG = CotformerConfig
