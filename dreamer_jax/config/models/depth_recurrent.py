"""Settings of the family `depth_recurrent`: one transformer block that thinks for T steps about a puzzle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dreamer_jax.config.values import Implementation, Readout, require, require_positive


@dataclass(frozen=True)
class DepthRecurrentConfig:
    """The depth-recurrent transformer of Chen (2026): a gated block with depth embeddings, applied T times.

    The default is the model of graph reachability (Experiment I), 201,474 parameters; Table 2 has the sizes of the
    other two experiments."""

    family: Literal["depth_recurrent"] = "depth_recurrent"
    """Which models: `dreamer info` lists the families, each with settings of its own."""
    depth: int = 8
    """T: most thinking steps that training draws; what evaluation takes unless it is told otherwise."""
    depth_min: int = 5
    """Fewest thinking steps that training draws; every batch draws one number from here to depth."""
    max_depth: int = 20
    """Rows of the table of depth embeddings: the model can be applied at this many steps at most."""
    hidden_size: int = 128
    """h: size of the state (d in the paper)."""
    heads: int = 4
    """Attention heads; divides hidden_size."""
    mlp_size: int = 256
    """F: intermediate size of the feed-forward network."""
    vocab_size: int = 3
    """V: rows of the embedding; for graphs the roles none, source and target."""
    positions: Literal["rope", "none"] = "none"
    """Rotary positions on queries and keys, or none: nodes of a graph have no order."""
    rope_base: float = 10_000.0
    """RoPE base over the positions of the sequence."""
    norm: Literal["pre", "post"] = "pre"
    """Layer norms in front of the attention and the feed-forward network, or behind the additions."""
    activation: Literal["gelu", "relu"] = "gelu"
    """Of the feed-forward network; gelu is the exact one."""
    layer_scale: float = 0.0
    """What the learned factors on both branches start at, 1e-4 for texts; 0 for none, as for graphs."""
    gate: bool = True
    """Whether a learned gate blends a step's result with the state before it; without, the result is the state."""
    gate_bias: float = -2.0
    """What the gate's bias starts at: -2 opens it by 0.12, so that a step changes little."""
    depth_embedding_std: float = 1.0
    """Of the initial depth embeddings; 0 for none, and then any number of steps is possible."""
    dropout: float = 0.0
    """Share of the numbers that training drops in both branches and between the feed-forward network's matrices."""
    loss_at: Literal["last", "every"] = "last"
    """last: the loss is that of the last step (silent thinking). every: the mean over all steps, for comparison."""
    readout: Readout = "pair"
    """What answers: pair (two states side by side, a hidden layer with ReLU), pair_linear (without that layer), or cls
    (one state, linear)."""
    classes: int = 2
    """Answers to choose from."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Compute precision of the branches; weights, the state, norm statistics, softmax, gate and loss are float32."""
    implementation: Implementation = "auto"
    """Backend of the kernels; this family's attention has one form for all."""

    @property
    def summary(self) -> str:
        """One line on the model."""
        return (
            f"depth_recurrent, {self.depth_min} to {self.depth} thinking steps, hidden size {self.hidden_size}, "
            f"feed-forward {self.mlp_size}, vocabulary {self.vocab_size}, readout {self.readout}"
        )

    def __post_init__(self) -> None:
        may_be_zero = ("layer_scale", "depth_embedding_std", "dropout")
        require_positive(self, "model", allow_zero=may_be_zero, signed=("gate_bias",))
        require(
            self.depth_min <= self.depth,
            "model.depth_min",
            f"{self.depth_min} is more than model.depth {self.depth}, the most that training draws",
        )
        require(
            self.depth <= self.max_depth or not self.depth_embedding_std,
            "model.max_depth",
            f"{self.max_depth} depth embeddings are too few for model.depth {self.depth}",
        )
        require(
            self.hidden_size % self.heads == 0,
            "model.heads",
            f"{self.heads} does not divide model.hidden_size {self.hidden_size}",
        )
        require(
            self.positions == "none" or self.hidden_size // self.heads % 2 == 0,
            "model.heads",
            f"{self.heads} heads have an odd size, {self.hidden_size // self.heads}, and model.positions rope "
            "rotates pairs",
        )
        require(self.dropout < 1, "model.dropout", f"{self.dropout} is a share and must be below 1")


CONFIG = DepthRecurrentConfig
