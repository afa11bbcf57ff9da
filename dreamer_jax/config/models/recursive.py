"""Settings of the family `recursive`: a few layers that are shared by all of a deep stack, and relaxed by LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dreamer_jax.config.values import Implementation, require, require_positive

Sharing = Literal["cycle", "sequence", "middle_cycle", "middle_sequence"]


@dataclass(frozen=True)
class RecursiveConfig:
    """A recursive transformer (Bae et al., 2024): K layers, each applied B times, perhaps relaxed by LoRA at each.

    With the values of `form` and `queries` its layers are those of Llama, Qwen3 or OLMo 2, from which `dreamer convert`
    makes it."""

    family: Literal["recursive"] = "recursive"
    """Which models: `dreamer info` lists the families, each with settings of its own."""
    depth: int = 2
    """B: how often every shared layer is applied."""
    layers: int = 4
    """K: shared layers."""
    sharing: Sharing = "cycle"
    """Order of the layers. cycle: the stack of K is looped, 0 1 0 1. sequence: every layer is repeated in its place,
    0 0 1 1. middle_*: the same between a first and a last layer that are applied once."""
    rank: int = 0
    """Of the LoRA that every matrix has at every application; 0 for none. A matrix has at most its own rank."""
    share_norms: bool = True
    """Whether all applications of a layer share its norms, or each has its own."""
    hidden_size: int = 128
    """h: size of the state."""
    vocab_size: int = 512
    """V: rows of the embedding and of the output head; at least the tokenizer's size."""
    heads: int = 4
    """Query heads of every layer."""
    kv_heads: int = 4
    """Key/value heads; divides heads."""
    head_size: int = 32
    """d of every head; even."""
    mlp_size: int = 384
    """F: intermediate size of the feed-forward networks."""
    rope_base: float = 10_000.0
    """RoPE base over the positions of the sequence."""
    rope_factor: float = 1.0
    """How many times more slowly the slow pairs of RoPE turn, as of Llama 3.1 to 3.3 for longer texts; 1: none."""
    rope_low: float = 1.0
    """Slow are pairs that turn at most so many times in `rope_length` positions."""
    rope_high: float = 4.0
    """Pairs that turn at least so many times there stay as they are; those between turn a little more slowly."""
    rope_length: int = 8192
    """Positions of the texts before they became longer."""
    form: Literal["pre_norm", "branch_norm"] = "pre_norm"
    """Norms of a layer: x + f(N(x)) (Llama, Qwen3) or x + N(f(x)) (OLMo 2)."""
    queries: Literal["plain", "head_norm", "norm"] = "plain"
    """What queries and keys get before RoPE: nothing (Llama), a norm over each head (Qwen3) or over all heads together
    (OLMo 2)."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in every norm."""
    tied_head: bool = False
    """Whether the output head is the embedding."""
    init_std: float = 0.02
    """Standard deviation of every matrix at the start, but for those of LoRA."""
    exit_weight: float = 0.0
    """Weight in the loss of what the head makes of each loop before the last, so that tokens may stop there; published
    0.1; 0: only the last loop is trained."""
    exit_confidence: float = 1.0
    """A generated token stops after the first loop at which the head's likeliest token leads the second by more than
    this probability; 1: never. The head is then computed after every loop."""
    exit_change: float = 0.0
    """A generated token stops after the first loop that changes its state by less than this, relative to its norm; 0:
    never."""
    refill: Literal["propagate", "share"] = "propagate"
    """Keys and values of the loops that a token left out: projected from its last state by the weights of each loop, or
    those of its last loop."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute precision; weights, softmax, norm statistics and loss are always float32."""
    implementation: Implementation = "auto"
    """Backend of the attentions; auto takes the fastest of the platform."""

    @property
    def in_place(self) -> bool:
        """Whether a layer is repeated in its place, so that there is one pass through the stack and no loop."""
        return self.sharing.endswith("sequence")

    @property
    def ends(self) -> bool:
        """Whether there is a first and a last layer, which are applied once."""
        return self.sharing.startswith("middle")

    @property
    def experts(self) -> int:
        """F where devices can divide the feed-forward matrices among them like experts, else 0."""
        return 0 if self.rank or self.in_place else self.mlp_size

    @property
    def rope_scaling(self) -> tuple[float, ...]:
        """Of frequencies, as `blocks/positions.py` takes it; () for none."""
        return (self.rope_factor, self.rope_low, self.rope_high, self.rope_length) if self.rope_factor != 1 else ()

    @property
    def summary(self) -> str:
        """One line on the model."""
        relaxed = f", LoRA of rank {self.rank}" if self.rank else ""
        return (
            f"recursive, {self.layers} layers {self.depth} times ({self.sharing}){relaxed}, hidden size "
            f"{self.hidden_size}, feed-forward {self.mlp_size}, vocabulary {self.vocab_size}"
        )

    def __post_init__(self) -> None:
        require_positive(self, "model", allow_zero=("rank", "exit_weight", "exit_confidence", "exit_change"))
        require(
            self.heads % self.kv_heads == 0,
            "model.kv_heads",
            f"{self.kv_heads} does not divide model.heads {self.heads}",
        )
        require(
            self.head_size % 2 == 0,
            "model.head_size",
            f"{self.head_size} is odd; RoPE rotates pairs, so use an even number",
        )
        require(self.rope_low < self.rope_high, "model.rope_low", f"{self.rope_low:g} is not below model.rope_high")
        require(
            self.exit_confidence <= 1,
            "model.exit_confidence",
            f"{self.exit_confidence:g} is no probability; 1 never stops early",
        )
        read = {"exit_weight": self.exit_weight > 0, "exit_confidence": self.exit_confidence < 1}
        for key, used in read.items():
            require(
                not used or self.sharing == "cycle",
                f"model.{key}",
                f"reads the head after every loop, which model.sharing {self.sharing} doesn't have; use cycle",
            )
        require(
            not self.exit_change or not self.in_place,
            "model.exit_change",
            f"compares loops, which model.sharing {self.sharing} doesn't have; use cycle or middle_cycle",
        )


CONFIG = RecursiveConfig
