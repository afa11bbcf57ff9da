"""Settings of the family `huginn`: latent recurrent depth, and pretrained stacks cut into the same form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dreamer_jax.config.values import Implementation, require, require_positive

Form = Literal["sandwich", "pre_norm", "branch_norm"]
Queries = Literal["bias", "norm", "head_norm", "plain"]
Draw = Literal["poisson_lognormal", "exponential", "fixed"]


@dataclass(frozen=True)
class HuginnConfig:
    """Latent recurrent depth: a prelude, a core applied r times on [state; input] from a random state, a coda.

    What is computed is section 3 of Geiping et al. (2025), with the sizes of a small model by default. Other values of
    `form`, `queries` and the switches below them give the retrofitted models of McLeish et al. (2025)."""

    family: Literal["huginn"] = "huginn"
    """Which models: `dreamer info` lists the families, each with settings of its own."""
    depth: int = 8
    """Mean number of recurrences; what evaluation and generation take unless they are told otherwise."""
    prelude_layers: int = 2
    """Layers before the recurrence; what they make of the tokens is given to every recurrence."""
    core_layers: int = 4
    """Layers of one recurrence."""
    coda_layers: int = 2
    """Layers after the recurrence."""
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
    rope_base: float = 50_000.0
    """RoPE base over the positions of the sequence."""
    rope_factor: float = 1.0
    """How many times more slowly the slow pairs of RoPE turn, as of Llama 3.1 to 3.3 for longer texts; 1: none."""
    rope_low: float = 1.0
    """Slow are pairs that turn at most so many times in `rope_length` positions."""
    rope_high: float = 4.0
    """Pairs that turn at least so many times there stay as they are; those between turn a little more slowly."""
    rope_length: int = 8192
    """Positions of the texts before they became longer."""
    form: Form = "sandwich"
    """Norms of a layer: N(x + f(N(x))) (Huginn), x + f(N(x)) (Llama) or x + N(f(x)) (OLMo 2)."""
    queries: Queries = "bias"
    """What queries and keys get before RoPE: biases (Huginn), nothing (Llama), a norm over each head (Qwen3) or over
    all heads together (OLMo 2)."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in every norm."""
    coda_norm: bool = True
    """Whether the final norm stands before the coda too (Huginn) or only behind it (retrofitted models)."""
    tied_head: bool = True
    """Whether the output head is the embedding."""
    embedding_scale: float = 0.0
    """Factor on embeddings; 0 for sqrt(h)."""
    state_std: float = 0.0
    """Of the random state that a pass starts from; 0 for sqrt(2/5), that of an embedding at sqrt(h)."""
    depth_draw: Draw = "poisson_lognormal"
    """How training draws the number of recurrences; fixed takes `depth`."""
    depth_sigma: float = 0.5
    """Spread of the log-normal rate of the Poisson draws."""
    curriculum_steps: int = 0
    """Steps of training over which the mean of the draws grows from 1 to `depth`; 0: it is `depth` from the start."""
    curriculum: Literal["linear", "one_minus_sqrt"] = "linear"
    """How it grows with the share t of those steps: as t, or as 1 - sqrt(1 - t), which stays shallow for longer."""
    draw_by: Literal["step", "row"] = "step"
    """Whether all rows of a step have one number of recurrences, or each its own."""
    row_groups: int = 4
    """With draw_by row: rows are sorted into so many groups, each as deep as its deepest row."""
    gradient_recurrences: int = 8
    """Recurrences that training differentiates, the last ones (truncated backpropagation)."""
    z_loss: float = 0.0
    """Weight of the squared logarithm of the softmax's normaliser in the loss."""
    cache: str = "latest"
    """Which keys a token sees of others that stopped earlier or later: full, latest, always-last, compress-sN."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute precision; weights, softmax, norm statistics and loss are always float32."""
    implementation: Implementation = "auto"
    """Backend of the attentions; auto takes the fastest of the platform."""

    @property
    def experts(self) -> int:
        """F: rows of the feed-forward matrices, which devices can divide among them like experts."""
        return self.mlp_size

    @property
    def rope_scaling(self) -> tuple[float, ...]:
        """Of frequencies, as `blocks/positions.py` takes it; () for none."""
        return (self.rope_factor, self.rope_low, self.rope_high, self.rope_length) if self.rope_factor != 1 else ()

    @property
    def summary(self) -> str:
        """One line on the model."""
        layers = f"{self.prelude_layers}+{self.core_layers}+{self.coda_layers} layers"
        return (
            f"huginn, {layers}, {self.depth} recurrences on average, hidden size {self.hidden_size}, feed-forward "
            f"{self.mlp_size}, vocabulary {self.vocab_size}"
        )

    def __post_init__(self) -> None:
        may_be_zero = ("embedding_scale", "state_std", "depth_sigma", "z_loss")
        may_be_zero += ("prelude_layers", "coda_layers", "curriculum_steps")
        require_positive(self, "model", allow_zero=may_be_zero)
        sigma = self.depth_sigma
        require(sigma <= 10, "model.depth_sigma", f"{sigma:g} is too large; it must be at most 10")
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
        ring(self.cache, self.core_layers)


CONFIG = HuginnConfig

RULES = ("full", "latest", "always-last")


def ring(cache: str, core_layers: int) -> int | None:
    """Recurrences that a cache of this rule keeps of a token; None for all.

    Raises:
        ConfigError: there is no such rule.
    """
    if cache in RULES:
        return None
    kind, _, size = cache.rpartition("-")
    number = size[1:]
    require(
        not (kind == "compress" and size[:1] == "r" and number.isdigit()),
        "model.cache",
        f"{cache} pools keys of different layers, which have nothing to do with one another; use compress-s{number}",
    )
    require(
        kind == "compress" and size[:1] == "s" and number.isdigit() and int(number) > 0,
        "model.cache",
        f"unknown rule '{cache}'; use full, latest, always-last or compress-sN, such as compress-s{core_layers}",
    )
    require(
        int(number) % core_layers == 0,
        "model.cache",
        f"{cache}: {number} is no multiple of model.core_layers {core_layers}; a layer would meet another's keys",
    )
    return int(number) // core_layers
