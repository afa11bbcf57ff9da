"""Settings of the family `dreamer`: depth-recurrent attention mixtures and their layered baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dreamer_jax.config import mixture_checks as checks
from dreamer_jax.config.expert_subsets import ExpertSubsets
from dreamer_jax.config.mixture_checks import RECURRENT_PARTS
from dreamer_jax.config.values import Balancing, DepthForm, DepthScaling, Implementation, require_positive

Variant = Literal["LA", "LA+DA", "DR", "DR+DA"]
Mixing = Literal["sequential", "parallel_attention", "parallel"]
_MAY_BE_ZERO = (
    *("balancing_boost_steps", "da_window", "pa_slots", "pa_embedding_size", "decoding_size"),
    "dimensions_per_token",
)


@dataclass(frozen=True)
class DreamerConfig:
    """Depth-recurrent attention mixtures and their layered baseline.

    What is computed is section 3 and Table 3 of the paper."""

    family: Literal["dreamer"] = "dreamer"
    """Which models: `dreamer info` lists the families, each with settings of its own."""
    variant: Variant = "DR+DA"
    """LA: distinct layers. DR: one layer applied at every depth. +DA: with depth attention."""
    mixing: Mixing = "parallel_attention"
    """How the attentions are combined: Eq. 4, Eq. 5 (the paper's) or Eq. 6."""
    depth: int = 8
    """L: depths a token passes. In DR also the number of experts of each attention MoE."""
    hidden_size: int = 128
    """h: size of the residual stream."""
    vocab_size: int = 512
    """V: rows of the embedding and of the output head; at least the tokenizer's size."""
    sa_heads: int = 4
    """Query heads of the sequence attention."""
    sa_kv_heads: int = 2
    """Key/value heads of the sequence attention; divides sa_heads."""
    sa_head_size: int = 32
    """d of the sequence attention; even."""
    sa_rope_base: float = 10_000.0
    """RoPE base over the positions of the sequence."""
    sa_every: int = 1
    """DR: the sequence attention acts at depth 0 and every so many-th depth from there; 1: at every depth. Its cache
    holds only depths at which it acts."""
    da_heads: int = 1
    """Query heads of the depth attention."""
    da_kv_heads: int = 1
    """Key/value heads of the depth attention; divides da_heads."""
    da_head_size: int = 32
    """d of the depth attention; divisible by 4 (two RoPE halves)."""
    da_form: DepthForm = "softmax"
    """Depth attention as softmax: over a cache of all depths, as in the paper. gated_delta: a matrix for each head that
    maps keys to values, in which every depth replaces what stood at its key. gated_recurrent: a gated unit for each
    channel. The last two keep a state of one size whatever the depth."""
    da_window: int = 0
    """Depths that depth attention sees, the present one and the newest before it: its cost and its cache in generation
    no longer grow with the depth. 0: all of them. 1: the present depth alone, and queries and keys learn nothing."""
    da_dilation: int = 1
    """Steps between the depths that depth attention sees: with 2 every second one, counted back from the present one. A
    window then reaches twice as far at the same cost."""
    da_every: int = 1
    """DR: the depth attention acts at depth 0 and every so many-th depth from there, and sees only those; 1: at every
    depth."""
    pa_slots: int = 0
    """M: keys and values that every token attends to at every depth (parameter attention); 0: none."""
    pa_source: Literal["latents", "texts"] = "latents"
    """What they are: latents: learned. texts: maps of the embeddings of M texts, which data.knowledge has; the maps are
    learned, the embeddings aren't."""
    pa_embedding_size: int = 0
    """e: numbers of the embedding of a text; 0 for latents."""
    pa_heads: int = 1
    """Heads of the parameter attention, each with slots of its own."""
    pa_head_size: int = 32
    """d of the parameter attention; divisible by 4 (two RoPE halves)."""
    pa_every: int = 1
    """DR: the parameter attention acts at depth 0 and every so many-th depth from there; 1: at every depth."""
    dimensions_per_token: int = 0
    """At each depth a token takes so many of the mixture's dimensions (attention over the sequence, the depths, learned
    slots and experts), chosen by a router that sees its state; the others add nothing to it (section 5). 0: all."""
    depth_rope_base: float = 500.0
    """RoPE base over the depths, in depth attention and in every router."""
    depth_counters: Literal["both", "up", "learned", "none"] = "both"
    """What depth attention and routers are told of a depth l: both: l and L - 1 - l (section 3.4). up: l alone, for
    models that don't know how deep they will go. learned: in DR, a vector for each depth, added to queries and keys in
    place of turning them; deeper than trained it is the last one's. none: nothing."""
    depth_scaling: DepthScaling = "none"
    """Of a pass deeper than model.depth. interpolated: its places are spread over the known ones. ntk: slow rotations
    become slower, fast ones stay. none: it meets places that training has not had."""
    attention_experts: bool = True
    """DR: every projection of the attentions is a mixture of linear experts (section 3.7). False: one matrix that all
    depths reuse."""
    shared_expert: bool = True
    """DR: each attention MoE has an expert that is always active (Eq. 7). False: Eq. 7 without its second term."""
    residual_norm: bool = True
    """DR: the residual stream is normalised after every depth (section 3.7). False: a plain sum and one final norm, as
    in LA."""
    residual_scale: Literal["none", "depth"] = "none"
    """depth: what the attentions add to the residual stream is divided by N, the depth of the pass, so that the best
    learning rate doesn't depend on it. none: it is added as it is, as in the paper."""
    injection: Literal["none", "diagonal"] = "none"
    """DR: diagonal: every depth starts with a stable step towards the embedding, x <- a x + dt B e, with learned a < 1
    and dt for each channel (Parcae). none: the embedding enters at depth 0 alone."""
    decoding_size: int = 0
    """DR: N, inner size of a SwiGLU network with weights of its own that decodes: between the last depth and the final
    norm it adds to the stream, so that the recurrent layer need not prepare states for the head (section 4.2). A state
    of any depth that is read out goes through it. 0: none."""
    router_depth_code: bool = True
    """The queries of all routers are rotated by depth (section 3.5). False: routers see the state alone."""
    num_experts: int = 64
    """E: experts of the expert attention (of each layer in LA)."""
    experts_per_token: int = 4
    """k: experts a token selects."""
    expert_subset: Literal["all", "sliding", "hierarchical"] = "all"
    """DR: which experts a depth may choose among (section 4.2). all: all of them. sliding: a window over the list of
    experts that moves with the depth. hierarchical: one part of the list is every depth's, one is divided between the
    two halves of the depths, one among the four quarters, and so on. Deeper than trained it is the last depth's."""
    expert_subset_share: float = 0.5
    """Of all experts, those that a depth of sliding may choose among."""
    expert_size: int = 64
    """F: intermediate size of an expert."""
    router_size: int = 32
    """r: size of the routers' queries and keys; divisible by 4."""
    expert_bias_rate: float = 1e-3
    """Update rate of the balancing bias of the expert attention (Eq. 3)."""
    attention_bias_rate: float = 1e-2
    """Update rate of the balancing biases of the attention MoEs (Eq. 3)."""
    balancing: Balancing = "sign_median"
    """What an update compares and how it moves: sign_median is Eq. 3; sign_mean, tanh and proportional compare with the
    mean, and move experts that nobody selects too."""
    balancing_boost: float = 1.0
    """So many times the rates at the start, falling in a line to themselves over balancing_boost_steps."""
    balancing_boost_steps: int = 0
    """Steps of the fall; 0: the rates are constant."""
    balancing_groups: int = 1
    """DR: groups of successive depths, each of which moves the biases by what it counted: several updates a step."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute precision; weights, routing, softmax, norm statistics and loss are always float32."""
    implementation: Implementation = "auto"
    """Backend of the attentions and experts; auto takes the fastest of the platform."""

    @property
    def recurrent(self) -> bool:
        """Whether one layer is shared by all depths (DR)."""
        return self.variant.startswith("DR")

    @property
    def depth_attention(self) -> bool:
        """Whether depth attention is part of the mixture."""
        return self.variant.endswith("+DA")

    @property
    def attention_moes(self) -> bool:
        """Whether the attentions' projections are mixtures of linear experts."""
        return self.recurrent and self.attention_experts

    @property
    def shared_experts(self) -> bool:
        """Whether those mixtures have a shared expert."""
        return self.attention_moes and self.shared_expert

    @property
    def normalised_stream(self) -> bool:
        """Whether every depth ends with a norm; the last one is the final norm, unless something decodes."""
        return self.recurrent and self.residual_norm

    @property
    def final_norm(self) -> bool:
        """Whether a norm of its own stands before the head."""
        return not self.normalised_stream or self.decoding_size > 0

    @property
    def left_out(self) -> tuple[str, ...]:
        """The parts of sections 3.5 and 3.7 that settings leave out."""
        return tuple(name for name in (*RECURRENT_PARTS, "router_depth_code") if not getattr(self, name))

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The attentions of the mixture."""
        some = {"depth": self.depth_attention, "parameter": self.pa_slots > 0}
        names = ("sequence", "depth", "parameter", "expert")
        return tuple(f"{name}_attention" for name in names if some.get(name, True))

    @property
    def depths_seen(self) -> str:
        """In words, what of its depths depth attention sees; nothing where it is all of them."""
        if self.da_form != "softmax":
            return f"depth attention as a {self.da_form} state"
        newest = f"the newest {self.da_window} depths" if self.da_window else "depths"
        every = "" if self.da_dilation == 1 else f" at steps of {self.da_dilation}"
        return f"depth attention over {newest}{every}" if self.da_window or every else ""

    @property
    def added(self) -> tuple[str, ...]:
        """What settings add to the paper's model, in words."""
        found = ["residual scale 1/N"] if self.residual_scale == "depth" else []
        found += [f"{self.injection} injection"] if self.injection != "none" else []
        slots = "texts" if self.pa_source == "texts" else "learned slots"
        found += [f"{self.pa_slots} {slots}"] if self.pa_slots else []
        taken, subsets = self.dimensions_per_token, self.expert_subsets
        found += [f"{taken} of {len(self.dimensions)} dimensions a token"] if taken else []
        found += [f"{subsets.kind} subsets of {subsets.size} experts"] if subsets else []
        found += [f"a decoding layer of {self.decoding_size}"] if self.decoding_size else []
        some = {"sequence": self.sa_every, "depth": self.da_every, "parameter": self.pa_every}
        return (*found, *(f"{name} attention at one depth in {n}" for name, n in some.items() if n > 1))

    @property
    def expert_subsets(self) -> ExpertSubsets | None:
        """The experts that depths may choose among, where those aren't all."""
        if self.expert_subset == "all":
            return None
        return ExpertSubsets(self.expert_subset, self.num_experts, self.depth, self.expert_subset_share)

    @property
    def fewest_experts(self) -> int:
        """Of which a depth may choose among as many as a token selects."""
        subsets, fewest = self.expert_subsets, self.experts_per_token
        while subsets and replace(subsets, num_experts=fewest).size < self.experts_per_token:
            fewest += 1
        return fewest

    @property
    def experts(self) -> int:
        """E: the experts that devices can divide among them."""
        return self.num_experts

    @property
    def summary(self) -> str:
        """One line on the model."""
        experts = f"{self.num_experts} experts" + ("" if self.recurrent else " a layer")
        return (
            f"{self.variant}, depth {self.depth}, hidden size {self.hidden_size}, vocabulary {self.vocab_size}, "
            f"{experts} of {self.expert_size}, {self.experts_per_token} active"
            + "".join(
                f", {words}"
                for words in (*(f"no {name}" for name in self.left_out), *self.added, self.depths_seen)
                if words
            )
        )

    def __post_init__(self) -> None:
        require_positive(self, "model", allow_zero=_MAY_BE_ZERO)
        checks.require_heads(self)
        checks.require_slots(self)
        checks.require_depth_signals(self)
        checks.require_recurrence(self)
        checks.require_depth_attention(self)
        checks.require_turns(self)
        checks.require_experts(self)
        checks.require_subsets(self)
        checks.require_dimensions(self)


CONFIG = DreamerConfig
