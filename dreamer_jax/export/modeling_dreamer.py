"""Dreamer in PyTorch: depth-recurrent attention mixtures, in one file that needs torch and safetensors only.

Without transformers:

    model = Dreamer.load("folder")                                  # bfloat16 or float32, as the folder has it
    tokens = model.generate(torch.tensor([[256, 72, 105]]), max_new_tokens=20)

With it: `AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True)`, `pipeline("text-generation")`.

A token passes L depths. At each it attends to earlier tokens (SA), to what it was at earlier depths (DA), and to MLP
experts (EA). In the variants DR and DR+DA one layer serves every depth, and the projections of SA and DA are linear
experts, one selected a token; in LA and LA+DA every depth has its own layer. Four settings leave out a part each:
attention_experts, shared_expert, residual_norm, router_depth_code. DA may see the newest da_window depths only, or
every da_dilation-th, or fold them into a state (da_form); SA, DA and PA may act at every sa_every-th, da_every-th and
pa_every-th depth only; a depth may choose among some of the experts only (expert_subset), and a token take only some of
the attentions (dimensions_per_token); residual_scale divides by L what a depth adds; with injection every depth gets
the embedding; a layer of decoding_size may decode what the last depth leaves. With pa_slots tokens attend at every
depth to learned slots, or to texts, whose embeddings are in the buffer `knowledge`: any number of others of that size
may take their place. A DR model may run at any depth (`depth=...`), an LA model at no more than it has.

In comments, B batch, S sequence, T = B·S tokens, h hidden size, V vocabulary, E experts, F expert size, k active
experts, r router size, n heads, kv key/value heads, d head size.

Router queries, softmaxes, norms and logits are float32 whatever the weights are. Matrices are stored [in, out], but
for the embedding and head [V, h] and the experts' gate_up [E, 2F, h].
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

try:
    from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError:
    PreTrainedModel = None

    class PretrainedConfig:  # what a configuration needs when transformers isn't there
        def __init__(self, **others):
            self.__dict__.update(others)


EPSILON = 1e-6
GATHERED_BYTES = 1 << 20
FORMAT_VERSION = 1


class DreamerConfig(PretrainedConfig):
    """Sizes and variant; the names are those of `model:` in the training configuration."""

    model_type = "dreamer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "num_hidden_layers": "depth",
        "num_attention_heads": "sa_heads",
        "num_key_value_heads": "sa_kv_heads",
        "head_dim": "sa_head_size",
    }

    def __init__(
        self,
        variant="DR+DA",
        mixing="parallel_attention",
        depth=8,
        hidden_size=128,
        vocab_size=512,
        sa_heads=4,
        sa_kv_heads=2,
        sa_head_size=32,
        sa_rope_base=10_000.0,
        sa_every=1,
        da_heads=1,
        da_kv_heads=1,
        da_head_size=32,
        da_form="softmax",
        da_window=0,
        da_dilation=1,
        da_every=1,
        pa_slots=0,
        pa_source="latents",
        pa_embedding_size=0,
        pa_heads=1,
        pa_head_size=32,
        pa_every=1,
        dimensions_per_token=0,
        depth_rope_base=500.0,
        depth_counters="both",
        depth_scaling="none",
        attention_experts=True,
        shared_expert=True,
        residual_norm=True,
        residual_scale="none",
        injection="none",
        decoding_size=0,
        router_depth_code=True,
        num_experts=64,
        experts_per_token=4,
        expert_subset="all",
        expert_subset_share=0.5,
        expert_size=64,
        router_size=32,
        expert_bias_rate=1e-3,
        attention_bias_rate=1e-2,
        balancing="sign_median",
        keep_shared=False,
        format_version=FORMAT_VERSION,
        use_cache=True,
        **others,
    ):
        if format_version > FORMAT_VERSION:
            raise ValueError(f"this folder has format {format_version}; this file reads up to {FORMAT_VERSION}")
        own = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        others.setdefault("tie_word_embeddings", False)
        for name, value in own.items():
            setattr(self, name, value)
        super().__init__(**others)

    @property
    def recurrent(self) -> bool:
        """Whether one layer serves every depth (DR)."""
        return self.variant.startswith("DR")

    @property
    def depth_attention(self) -> bool:
        """Whether tokens attend to their own earlier depths."""
        return self.variant.endswith("+DA")

    @property
    def attention_moes(self) -> bool:
        """Whether the projections of SA and DA are linear experts."""
        return self.recurrent and self.attention_experts

    @property
    def normalised_stream(self) -> bool:
        """Whether every depth ends with a norm; the last one is the final norm, unless something decodes."""
        return self.recurrent and self.residual_norm


class Cache:
    """Keys and values of the sequence attention, [B, kv, S, d] for each depth; room grows by doubling.

    It also keeps what doesn't change while a text is continued: the routers' keys, rotated for each depth.
    """

    is_compileable, is_linear = False, (False,)  # `generate` asks a cache that it is given

    def __init__(self):
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.lengths: list[int] = []
        self.router_keys: dict[tuple[int, int, int], Tensor] = {}

    def get_seq_length(self, depth: int = 0) -> int:
        """Tokens held."""
        return self.lengths[depth] if depth < len(self.lengths) else 0

    def further(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The tokens that it doesn't hold yet: of a whole text, or of what is new with the mask of all."""
        count = (input_ids if attention_mask is None else attention_mask).shape[1] - self.get_seq_length()
        if count < 1:
            raise ValueError(
                "the cache holds all of it; give more tokens, or to new ones alone the mask of the whole text"
            )
        return input_ids[:, -count:]

    def update(self, keys: Tensor, values: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Append to a depth; returns all of its keys and values."""
        old, new = self.get_seq_length(depth), keys.shape[2]
        if depth and old + new != self.lengths[0]:
            raise ValueError("the cache was filled with fewer depths; keep depth as it was")
        if depth == len(self.rows):
            self.rows.append((keys, values))
            self.lengths.append(new)
            return keys, values
        if torch.is_grad_enabled():  # writing in place would break the gradient
            held = self.rows[depth]
            self.rows[depth] = tuple(torch.cat([a[:, :, :old], b], 2) for a, b in zip(held, (keys, values)))  # noqa: B905
        elif old + new > self.rows[depth][0].shape[2]:
            self.rows[depth] = tuple(F.pad(a, (0, 0, 0, max(old, new, 64))) for a in self.rows[depth])
        if not torch.is_grad_enabled():
            for room, part in zip(self.rows[depth], (keys, values)):  # noqa: B905
                room[:, :, old : old + new] = part
        self.lengths[depth] = old + new
        return tuple(a[:, :, : old + new] for a in self.rows[depth])

    def reorder_cache(self, beam: Tensor) -> None:
        """Take other rows of the batch, as beam search asks."""
        self.rows = [(k.index_select(0, beam), v.index_select(0, beam)) for k, v in self.rows]


class Step(NamedTuple):
    """What one depth of a forward pass sees beside x. Counts come back from it, router name -> [E] int64."""

    depth: int
    total: int  # L of this pass
    positions: tuple[Tensor, Tensor]  # rotation over the sequence, (cos, sin) [B, S, 1, d/2]
    da_rotation: tuple[Tensor, ...]  # rotation by this depth, see depth_rotation, (cos, sin) [parts, ...]
    router_rotation: tuple[Tensor, ...]  # (cos, sin) [2, r/4]
    mask: Tensor | None  # [B, 1, S, keys] bool, True where visible; None: causal
    real: Tensor | None  # [T] bool, False for padding; None: all are real
    cache: Cache | None
    earlier: list  # (k, v), each [T, kv, d], of the depths below that are seen; or their states, the newest last
    entered: Tensor  # [B, S, h], what entered depth 0
    scale: float  # of what this depth adds
    place: float  # of this depth among those that are learned
    pa_rotation: tuple[Tensor, ...]  # as da_rotation
    slots: tuple[Tensor, Tensor] | None  # keys and values of PA, [n, M, d] each


class RMSNorm(nn.Module):
    """x over the root mean square of its last axis, scaled; float32 inside."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., c] -> [..., c]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), EPSILON).to(x.dtype)


def rotation(position: Tensor, size: int, base: float) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [..., size/2] float32, of RoPE at positions [...]."""
    frequency = base ** (-torch.arange(size // 2, device=position.device, dtype=torch.float32) / (size // 2))
    angle = position.float()[..., None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos_sin: tuple[Tensor, ...]) -> Tensor:
    """Rotate-half RoPE over the last axis, in float32."""
    (cos, sin), (first, second) = cos_sin, x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rotate_by_depth(x: Tensor, cos_sin: tuple[Tensor, ...]) -> Tensor:
    """Both parts of the head, or the whole of it, turned by as many angles as there are."""
    return rotate(x.unflatten(-1, (len(cos_sin[0]), -1)), cos_sin).flatten(-2)


def turned(qk: Tensor, step: Step) -> Tensor:
    """Queries and keys of DA, turned by their depth."""
    return rotate_by_depth(qk, step.da_rotation)


def depth_rotation(config: DreamerConfig, total: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [L, parts, size / parts / 2]: one half counts depths up and the other down, each a RoPE of size
    d/2; or the whole head counts up, or no part of it turns. Deeper than trained, as `depth_scaling` says."""
    up = torch.arange(total, device=device).float()
    places = {"both": [up, total - 1 - up], "up": [up]}.get(config.depth_counters, [0 * up])
    rotated, base = size // len(places), config.depth_rope_base
    stretch = max((total - 1) / max(config.depth - 1, 1), 1.0)
    if config.depth_scaling == "interpolated":
        places = [each / stretch for each in places]
    elif config.depth_scaling == "ntk":
        base *= stretch ** (rotated / (rotated - 2))
    return rotation(torch.stack(places, -1), rotated, base)


def depth_signals(config: DreamerConfig, size: int) -> nn.Parameter | None:
    """A vector for each depth [L, size], where depths are learned."""
    return nn.Parameter(torch.zeros(config.depth, size)) if config.depth_counters == "learned" else None


def signal(rows: Tensor, step: Step) -> Tensor:
    """[size] float32: the row of this depth; the last one, or interpolated, deeper than trained."""
    below = int(step.place)
    share = step.place - below
    return (1 - share) * rows[below].float() + share * rows[min(below + 1, len(rows) - 1)].float()


class Weights(nn.Module):
    """A module that knows the initial standard deviation of its matrices."""

    def __init__(self):
        super().__init__()
        self.deviations: dict[str, float] = {}

    def matrix(self, name: str, *shape: int, deviation: float) -> None:
        """Register a parameter drawn from N(0, deviation²)."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.deviations[name] = deviation
        nn.init.normal_(getattr(self, name), std=deviation)

    def reset_parameters(self) -> None:
        """Draw the matrices anew."""
        for name, deviation in self.deviations.items():
            nn.init.normal_(getattr(self, name), std=deviation)


def input_deviation(config: DreamerConfig) -> float:
    """Of every matrix but the output projections."""
    return (1 / (5 * config.hidden_size)) ** 0.5


def output_deviation(config: DreamerConfig) -> float:
    """Of output projections and the experts' down projections."""
    return (1 / (2.5 * config.hidden_size * config.depth * (2 + config.depth_attention + bool(config.pa_slots)))) ** 0.5


def expert_subsets(config: DreamerConfig) -> list[list[int]] | None:
    """The experts that each depth may choose among, L lists of n; None: all.

    Place p of the list of experts is expert p s mod E. sliding: a window over it that moves with the depth.
    hierarchical: the list is cut in parts; of the first every depth has all, of the next each half of the depths has
    its own window, then each quarter, and at last each depth.
    """
    experts, depth = config.num_experts, config.depth
    if config.expert_subset == "all":
        return None
    if config.expert_subset == "sliding":
        parts = [(0, experts, math.ceil(config.expert_subset_share * experts - 1e-9), depth)]
    else:
        count = math.ceil(math.log2(depth)) + 1
        cuts = [j * experts // count for j in range(count + 1)]
        sizes = [(cuts[j], cuts[j + 1] - cuts[j], min(2**j, depth)) for j in range(count)]
        parts = [(first, size, -(-size // groups), groups) for first, size, groups in sizes]
    stride = max(1, round((5**0.5 - 1) / 2 * experts))
    while math.gcd(stride, experts) > 1:
        stride += 1
    found = []
    for l in range(depth):
        begins = [first + l * g // depth * (size - n) // max(g - 1, 1) for first, size, n, g in parts]
        places = [range(begin, begin + part[2]) for begin, part in zip(begins, parts)]  # noqa: B905
        found.append([place * stride % experts for own in places for place in own])
    return found


class Router(Weights):
    """Tokens choose experts by attention: depth-encoded low-rank queries, learned keys, a bias that balances."""

    def __init__(self, config: DreamerConfig, experts: int, active: int, rate: float, subsets=None):
        super().__init__()
        self.subsets = subsets
        self.experts, self.active, self.rate, self.rule = experts, active, rate, config.balancing
        self.depth_code = config.router_depth_code
        self.matrix("query", config.hidden_size, config.router_size, deviation=input_deviation(config))
        self.matrix("keys", experts, config.router_size, deviation=input_deviation(config))
        self.query_norm, self.keys_norm = RMSNorm(config.router_size), RMSNorm(config.router_size)
        self.depth_signals = depth_signals(config, config.router_size) if self.depth_code else None
        self.register_buffer("bias", torch.zeros(experts))
        self.used: Tensor | None = None  # selections since the last update_balancing
        self.even: Tensor | None = None  # the same if every depth had used the experts that it has evenly

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor | None]:
        """[T, h] -> selected experts [T, k], their sigmoid scores [T, k] float32, in training selections [E]."""
        query = x.float() @ self.query.to(x.dtype).float()
        query = F.rms_norm(query, query.shape[1:], eps=EPSILON)
        if self.depth_signals is not None:
            keys = self.keys_norm(self.chosen(self.keys, step).float())
            logits = (self.query_norm(query) + signal(self.depth_signals, step)) @ keys.T
            logits = logits * query.shape[1] ** -0.5
        else:
            logits = query @ self.rotated_keys(step).T
        indices = (logits.detach() + self.chosen(self.bias, step).float()).topk(self.active, -1).indices
        scores = logits.gather(-1, indices).sigmoid()
        if self.subsets is not None:
            indices = self.among(step, indices.device)[indices]
        counts = None
        if self.training:
            chosen = indices if step.real is None else indices[step.real]
            counts = torch.bincount(chosen.flatten(), minlength=self.experts)
        return indices, scores, counts

    def among(self, step: Step, device: torch.device) -> Tensor:
        """The experts [n] of a depth; beyond the trained depth those of the last."""
        return torch.tensor(self.subsets[min(step.depth, len(self.subsets) - 1)], device=device)

    def chosen(self, rows: Tensor, step: Step) -> Tensor:
        """Of rows [E, ...] those that the depth may choose among."""
        return rows if self.subsets is None else rows[self.among(step, rows.device)]

    def rotated_keys(self, step: Step) -> Tensor:
        """[E, r] float32: scaled for the product, and turned back by the depth in place of turning queries forward.

        Without a depth code they are the same at every depth."""
        kept = None if step.cache is None or torch.is_grad_enabled() else step.cache.router_keys
        place = id(self), step.depth, step.total
        if kept is not None and place in kept:
            return kept[place]
        cos, sin = step.router_rotation
        keys = self.keys_norm(self.chosen(self.keys, step).float())
        if self.depth_code:
            keys = rotate_by_depth(keys, (cos, -sin))
        keys = keys * self.query_norm.weight.float() * keys.shape[1] ** -0.5
        if kept is not None:
            kept[place] = keys
        return keys

    def count(self, chosen: Tensor, step: Step) -> None:
        """Remember the selections [E] of a depth."""
        self.used = chosen if self.used is None else self.used + chosen
        if self.subsets is not None:
            among = self.among(step, chosen.device)
            even = torch.zeros(self.experts, dtype=torch.double, device=chosen.device)
            even[among] = chosen.sum().double() / len(among)
            self.even = even if self.even is None else self.even + even

    @torch.no_grad()
    def update_balancing(self) -> None:
        """b += rate * sign(median(N) - N), or by another rule, for the selections N since the last update, over all
        processes. Where depths have subsets of the experts, N is in proportion to what even use would have given."""
        if self.used is None:
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for counted in (self.used, self.even):
                if counted is not None:
                    torch.distributed.all_reduce(counted)
        n, reached = self.used.double(), torch.ones_like(self.used, dtype=torch.bool)
        mean = n.mean()
        if self.even is not None:
            reached = self.even > 0
            n = n[reached] * mean / self.even[reached]
        violation = 1 - n / mean.clamp(min=1)
        if self.rule == "sign_median":
            moved = torch.sign(n.quantile(0.5) - n)
        elif self.rule == "sign_mean":
            moved = torch.sign(violation)
        elif self.rule == "proportional":
            moved = violation.clamp(min=-5)
        else:
            moved = torch.tanh(violation) - torch.tanh(violation).mean()
        self.bias[reached] += self.rate * moved.to(self.bias.dtype)
        self.used = self.even = None


class Groups(NamedTuple):
    """Rows sorted by expert: which experts have rows, and how many."""

    experts: list[int]
    sizes: list[int]
    ends: Tensor | None  # [E] int32, where the rows of each expert end; None: groups are few


def grouped_product(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """[rows, a], sorted by expert, times the matrix [a, b] of each expert's own -> [rows, b]."""
    strides = (*rows.stride(), *weight.stride())
    aligned = all(stride == 1 or stride * rows.element_size() % 16 == 0 for stride in strides)  # grouped_mm asks for it
    if groups.ends is not None and weight.dtype == rows.dtype and aligned:
        return F.grouped_mm(rows, weight, offs=groups.ends)
    parts = zip(rows.split(groups.sizes), groups.experts)  # noqa: B905
    return torch.cat([part @ weight[expert].to(rows.dtype) for part, expert in parts])


def through_experts(x: Tensor, indices: Tensor, weights: Tensor, experts: int, function) -> Tensor:
    """Send every token through the experts it selected, and add up what comes back.

    Args:
        x: [T, a].
        indices, weights: [T, k], the experts each token selected, and what each counts for.
        function: (rows [R, a] sorted by expert, groups) -> [R, b].

    Returns:
        [T, b].
    """
    choices, flat = indices.shape[1], indices.flatten()
    if len(indices) == 1:  # nothing to sort
        return weights @ function(x.expand(choices, -1), Groups(flat.tolist(), [1] * choices, None))
    order = flat.argsort(stable=True)
    sizes = torch.bincount(flat, minlength=experts)
    ends = sizes.cumsum(0).int() if hasattr(F, "grouped_mm") else None  # torch 2.10
    listed = sizes.tolist()
    hit = [expert for expert, size in enumerate(listed) if size]
    rows = x.index_select(0, order // choices)  # six times as fast as x[...] on a CPU
    done = function(rows, Groups(hit, [listed[expert] for expert in hit], ends))
    place = order.argsort().view_as(indices)  # the inverse: a sort is quicker than writing at the places
    return F.embedding_bag(place, done, per_sample_weights=weights, mode="sum")


def gather_pays(weight: Tensor, indices: Tensor) -> bool:
    """Whether to copy the selected matrices into one batch: where they are small, or launches are what costs.

    On a CPU the products of few tokens are bound by reading the weights, and a copy would read them thrice.
    """
    size = indices.numel() * weight[0].numel() * weight.element_size()
    if weight.device.type == "cpu":
        return len(indices) > 1 and size <= GATHERED_BYTES
    return size <= 64 * GATHERED_BYTES


class Projections(Weights):
    """The fused q/k/v projection and the output projection of one attention.

    In DR both are linear experts, as many as the trained depth, with one selection and one score s a token:
    s·xW_e + stop_gradient(s)·xW_shared. The shared expert is usually folded into W_e already. In LA, and in DR without
    attention_experts, both are plain matrices.
    """

    def __init__(self, config: DreamerConfig, qkv_size: int, out_size: int):
        super().__init__()
        hidden, lead = config.hidden_size, (config.depth,) if config.attention_moes else ()
        self.matrix("qkv", *lead, hidden, qkv_size, deviation=input_deviation(config))
        self.matrix("out", *lead, out_size, hidden, deviation=output_deviation(config))
        self.router = Router(config, config.depth, 1, config.attention_bias_rate) if config.attention_moes else None
        if config.attention_moes and config.shared_expert and config.keep_shared:
            self.matrix("qkv_shared", hidden, qkv_size, deviation=input_deviation(config))
            self.matrix("out_shared", out_size, hidden, deviation=output_deviation(config))
        else:
            self.qkv_shared = self.out_shared = None

    def route(self, x: Tensor, step: Step):
        """[T, h] -> ((expert [T, 1], score [T, 1]) and selections), None for plain matrices."""
        if self.router is None:
            return None, None
        indices, scores, counts = self.router(x, step)
        return (indices, scores), counts

    def project(self, x: Tensor, choice, weight: Tensor, shared: Tensor | None) -> Tensor:
        """[T, a] -> [T, b]."""
        if choice is None:
            return x @ weight.to(x.dtype)
        indices, scores = choice[0], choice[1].to(x.dtype)
        if gather_pays(weight, indices):
            out = scores * torch.einsum("ta,tab->tb", x, weight[indices[:, 0]].to(x.dtype))
        else:
            out = through_experts(x, indices, scores, len(weight), lambda rows, g: grouped_product(rows, weight, g))
        return out if shared is None else out + scores.detach() * (x @ shared.to(x.dtype))


class Attention(nn.Module):
    """Grouped-query attention: over earlier tokens (SA), or over the depths of a token (DA)."""

    def __init__(self, config: DreamerConfig, heads: int, kv_heads: int, size: int):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.projections = Projections(config, (heads + 2 * kv_heads) * size, heads * size)
        self.q_norm, self.k_norm = RMSNorm(size), RMSNorm(size)

    def forward(self, x: Tensor, step: Step):
        """[B, S, h] -> [B, S, h], selections, and for DA (k, v) of this depth, each [T, kv, d]."""
        flat, own = x.flatten(0, 1), self.projections
        choice, counts = own.route(flat, step)
        qkv = own.project(flat, choice, own.qkv, own.qkv_shared).view(len(flat), -1, self.size)
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], 1)
        scales = self.q_norm.weight.expand(self.heads, -1), self.k_norm.weight.expand(self.kv_heads, -1)
        qk = F.rms_norm(qk.float(), (self.size,), eps=EPSILON) * torch.cat(scales).float()  # both norms at once
        attended, row = self.attend(qk.to(x.dtype), v, x.shape[:2], step)
        return own.project(attended, choice, own.out, own.out_shared).view_as(x), counts, row


class SequenceAttention(Attention):
    """SA: tokens look at earlier tokens of their document, at the same depth."""

    def __init__(self, config: DreamerConfig):
        super().__init__(config, config.sa_heads, config.sa_kv_heads, config.sa_head_size)
        self.every = config.sa_every

    def attend(self, qk: Tensor, v: Tensor, shape, step: Step):
        """Queries and keys [T, n + kv, d], values [T, kv, d] -> [T, n d]."""
        qk, v = (t.view(*shape, -1, self.size) for t in (qk, v))
        q, k = rotate(qk, step.positions).split([self.heads, self.kv_heads], 2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if step.cache is not None:
            k, v = step.cache.update(k, v, step.depth // self.every)
        causal = step.mask is None and q.shape[2] > 1
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=step.mask, is_causal=causal, enable_gqa=self.heads != self.kv_heads
        )
        return out.transpose(1, 2).reshape(shape[0] * shape[1], -1), None


class DepthAttention(Attention):
    """DA: tokens look back at what they were at earlier depths; nothing crosses tokens, nothing outlives one."""

    def __init__(self, config: DreamerConfig, heads: int, kv_heads: int, size: int):
        super().__init__(config, heads, kv_heads, size)
        self.depth_signals = depth_signals(config, size)

    def attend(self, qk: Tensor, v: Tensor, shape, step: Step):
        """Queries and keys [T, n + kv, d], values [T, kv, d] -> [T, n d], and the row of the depth cache."""
        if self.depth_signals is not None:
            qk = (qk + signal(self.depth_signals, step)).to(qk.dtype)
        else:
            qk = turned(qk, step)
        q, k = qk.split([self.heads, self.kv_heads], 1)
        rows = [*step.earlier, (k, v)]
        keys, values = (torch.stack([row[i] for row in rows], 2).float() for i in (0, 1))  # [T, kv, l + 1, d]
        grouped = q.float().view(len(q), self.kv_heads, -1, self.size)  # [T, kv, n / kv, d]
        out = F.scaled_dot_product_attention(grouped, keys, values)
        return out.to(q.dtype).reshape(len(q), -1), (k, v)


class GatedDelta(nn.Module):
    """DA as a state [T, kv, d, d]: S <- a S (I - b k k') + b v k', read as S q; a and b from x, q and k of length 1."""

    def __init__(self, config: DreamerConfig, heads: int, kv_heads: int, size: int):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.projections = Projections(config, (heads + 2 * kv_heads) * size, heads * size)
        self.gates = nn.Parameter(torch.randn(config.hidden_size, 2 * kv_heads) * input_deviation(config))
        self.fall = nn.Parameter(torch.zeros(kv_heads))
        self.rate = nn.Parameter(torch.full((kv_heads,), 1 / 16).expm1().log())  # fallen to 1/e after 16 depths
        self.depth_signals = depth_signals(config, size)

    def forward(self, x: Tensor, step: Step):
        """[B, S, h] -> [B, S, h], selections, and the state."""
        flat, own = x.flatten(0, 1), self.projections
        choice, counts = own.route(flat, step)
        qkv = own.project(flat, choice, own.qkv, own.qkv_shared).view(len(flat), -1, self.size).float()
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], 1)
        qk = unit(qk)
        qk = qk + signal(self.depth_signals, step) if self.depth_signals is not None else turned(qk, step)
        q, k = qk.split([self.heads, self.kv_heads], 1)
        k = unit(k)
        falling, taking = (flat.float() @ self.gates.float()).chunk(2, -1)
        kept = (-self.fall.float().exp() * F.softplus(falling + self.rate.float())).exp()[..., None]
        state = step.earlier[-1] if step.earlier else v.new_zeros(*v.shape, self.size)
        stood = torch.einsum("tkvd,tkd->tkv", state, k)
        change = taking.sigmoid()[..., None] * (v - kept * stood)
        state = kept[..., None] * state + change[..., None] * k[:, :, None]
        read = torch.einsum("tkvd,tkgd->tkgv", state, q.unflatten(1, (self.kv_heads, -1)))
        return own.project(read.flatten(1).to(x.dtype), choice, own.out, own.out_shared).view_as(x), counts, state


class GatedRecurrent(nn.Module):
    """DA as a gated unit a channel, [T, kv, d]: s <- (1 - z) s + z v, read as sigmoid(q) s; z from x."""

    def __init__(self, config: DreamerConfig, heads: int, kv_heads: int, size: int):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.projections = Projections(config, (heads + kv_heads) * size, heads * size)
        self.gates = nn.Parameter(torch.randn(config.hidden_size, kv_heads * size) * input_deviation(config))
        self.offset = nn.Parameter(torch.full((kv_heads * size,), 1 / 3).log())  # a depth takes a quarter

    def forward(self, x: Tensor, step: Step):
        """[B, S, h] -> [B, S, h], selections, and the state."""
        flat, own = x.flatten(0, 1), self.projections
        choice, counts = own.route(flat, step)
        qv = own.project(flat, choice, own.qkv, own.qkv_shared).view(len(flat), -1, self.size).float()
        q, v = qv.split([self.heads, self.kv_heads], 1)
        z = (flat.float() @ self.gates.float() + self.offset.float()).sigmoid().view_as(v)
        state = (1 - z) * (step.earlier[-1] if step.earlier else 0) + z * v
        read = q.sigmoid().unflatten(1, (self.kv_heads, -1)) * state[:, :, None]
        return own.project(read.flatten(1).to(x.dtype), choice, own.out, own.out_shared).view_as(x), counts, state


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1 along the last axis."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class ParameterAttention(Weights):
    """PA: attention over keys and values, learned or mapped from embeddings of texts; queries are turned by the
    depth."""

    def __init__(self, config: DreamerConfig):
        super().__init__()
        hidden, self.heads, size = config.hidden_size, config.pa_heads, config.pa_head_size
        own, deviation = (self.heads, config.pa_slots, size), input_deviation(config)
        self.matrix("query", hidden, self.heads * size, deviation=deviation)
        if config.pa_embedding_size:
            own, deviation = (config.pa_embedding_size, self.heads * size), (5 * config.pa_embedding_size) ** -0.5
        self.matrix("keys", *own, deviation=deviation)
        self.matrix("values", *own, deviation=deviation)
        self.matrix("output", self.heads * size, hidden, deviation=output_deviation(config))
        self.q_norm, self.k_norm = RMSNorm(size), RMSNorm(size)
        self.depth_signals = depth_signals(config, size)

    def slots(self, texts: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [n, M, d]; of texts the same at every depth, so made once a pass, in the compute type."""
        if texts is None:
            return self.keys, self.values
        made = (texts.to(dtype) @ matrix.to(dtype) for matrix in (self.keys, self.values))
        return tuple(rows.unflatten(1, (self.heads, -1)).transpose(0, 1) for rows in made)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        q = self.q_norm((x @ self.query.to(x.dtype)).unflatten(-1, (self.heads, -1)))
        q = (
            q + signal(self.depth_signals, step)
            if self.depth_signals is not None
            else rotate_by_depth(q, step.pa_rotation)
        )
        keys, values = step.slots
        q, keys, values = (t.to(x.dtype) for t in (q.transpose(1, 2), self.k_norm(keys.to(x.dtype)), values))
        out = F.scaled_dot_product_attention(q, keys[None], values[None])
        return out.transpose(1, 2).flatten(2) @ self.output.to(x.dtype)


class ExpertAttention(Weights):
    """EA: every token is answered by the k SwiGLU experts whose keys match its query best."""

    def __init__(self, config: DreamerConfig):
        super().__init__()
        experts, size, hidden = config.num_experts, config.expert_size, config.hidden_size
        subsets = expert_subsets(config)
        self.router = Router(config, experts, config.experts_per_token, config.expert_bias_rate, subsets)
        self.matrix("gate_up", experts, 2 * size, hidden, deviation=input_deviation(config))
        self.matrix("down", experts, size, hidden, deviation=output_deviation(config))

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """[B, S, h] -> [B, S, h], selections [E]."""
        flat = x.flatten(0, 1)
        indices, scores, counts = self.router(flat, step)
        weights = (scores / scores.sum(-1, keepdim=True)).to(x.dtype)
        if gather_pays(self.gate_up, indices):
            gate, up = torch.einsum("th,tkfh->tkf", flat, self.gate_up[indices].to(x.dtype)).chunk(2, -1)
            values = torch.einsum("tkf,tkfh->tkh", F.silu(gate) * up, self.down[indices].to(x.dtype))
            out = torch.einsum("tkh,tk->th", values, weights)
        else:
            out = through_experts(flat, indices, weights, len(self.down), self.experts)
        return out.view_as(x), counts

    def experts(self, rows: Tensor, groups: Groups) -> Tensor:
        """[R, h] sorted by expert -> [R, h]: W_down(silu(W_gate x) * (W_up x))."""
        gate, up = grouped_product(rows, self.gate_up.mT, groups).chunk(2, -1)
        return grouped_product(F.silu(gate) * up, self.down, groups)


class DiagonalInjection(nn.Module):
    """exp(-dt exp(A)) x + dt B e, dt = softplus(rate): every depth is given what entered depth 0, in a stable way."""

    def __init__(self, size: int):
        super().__init__()
        self.norm, self.matrix = RMSNorm(size), nn.Parameter(torch.eye(size))
        self.fall = nn.Parameter(torch.zeros(size))
        self.rate = nn.Parameter(torch.full((size,), 5**0.5).log().expm1().log())  # keeps 1 / sqrt(5) of x

    def forward(self, x: Tensor, entered: Tensor) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        dt = F.softplus(self.rate.float())
        new = self.norm(entered) @ self.matrix.to(x.dtype)
        return ((-dt * self.fall.float().exp()).exp() * x + dt * new).to(x.dtype)


class Dimensions(nn.Module):
    """Each token takes some of the attentions at a depth, by its state; their outputs are multiplied by 2 sigmoid."""

    def __init__(self, config: DreamerConfig):
        super().__init__()
        there = {"depth": config.depth_attention, "parameter": config.pa_slots}
        self.names = [name for name in ("sequence", "depth", "parameter", "expert") if there.get(name, True)]
        self.router = Router(config, len(self.names), config.dimensions_per_token, config.attention_bias_rate)

    def forward(self, x: Tensor, step: Step) -> tuple[dict[str, Tensor], Tensor | None]:
        """[B, S, h] -> name -> gates [B, S, 1], zero where it isn't taken; how often each was [D]."""
        indices, scores, counts = self.router(x.flatten(0, 1), step)
        gates = scores.new_zeros(len(scores), len(self.names)).scatter(1, indices, 2 * scores)
        return dict(zip(self.names, gates.view(*x.shape[:2], -1).split(1, 2))), counts  # noqa: B905


class Layer(nn.Module):
    """One depth: x + DA + SA + EA in one of three orders, each with its pre-norm; in DR normalised at the end."""

    def __init__(self, config: DreamerConfig):
        super().__init__()
        self.mixing, hidden = config.mixing, config.hidden_size
        self.sa_every, self.da_every, self.pa_every = config.sa_every, config.da_every, config.pa_every
        self.sequence_attention = SequenceAttention(config)
        self.expert_attention = ExpertAttention(config)
        self.sequence_norm, self.expert_norm = RMSNorm(hidden), RMSNorm(hidden)
        self.depth_attention = self.depth_norm = self.residual_norm = None
        if config.depth_attention:
            kind = {"gated_delta": GatedDelta, "gated_recurrent": GatedRecurrent}.get(config.da_form, DepthAttention)
            self.depth_attention = kind(config, config.da_heads, config.da_kv_heads, config.da_head_size)
            self.depth_norm = RMSNorm(hidden)
        self.parameter_attention = ParameterAttention(config) if config.pa_slots else None
        self.parameter_norm = RMSNorm(hidden) if config.pa_slots else None
        self.dimensions = Dimensions(config) if config.dimensions_per_token else None
        self.dimension_norm = RMSNorm(hidden) if config.dimensions_per_token else None
        if config.normalised_stream:
            self.residual_norm = RMSNorm(hidden)
        self.injection = DiagonalInjection(hidden) if config.injection == "diagonal" else None

    def forward(self, x: Tensor, step: Step):
        """[B, S, h] -> [B, S, h], (k, v) of this depth or None, router name -> selections."""
        if self.injection is not None:
            x = self.injection(x, step.entered)
        counts, gates, row, y = {}, {}, None, x
        if self.dimensions is not None:
            gates, counts["dimensions"] = self.dimensions(self.dimension_norm(x), step)

        def scaled(name: str, out: Tensor) -> Tensor:
            return step.scale * ((out * gates[name]).to(out.dtype) if gates else out)

        if self.depth_attention is not None and step.depth % self.da_every == 0:
            out, counts["depth_attention"], row = self.depth_attention(self.depth_norm(x), step)
            y = y + scaled("depth", out)
        if self.parameter_attention is not None and step.depth % self.pa_every == 0:
            y = y + scaled("parameter", self.parameter_attention(self.parameter_norm(x), step))
        seen = y if self.mixing == "sequential" else x
        if step.depth % self.sa_every == 0:
            out, counts["sequence_attention"], _ = self.sequence_attention(self.sequence_norm(seen), step)
            y = y + scaled("sequence", out)
        seen = x if self.mixing == "parallel" else y
        if gates:  # selections count where the answer is taken
            taken = gates["expert"].flatten() > 0
            step = step._replace(real=taken if step.real is None else taken & step.real)
        out, counts["expert_attention"] = self.expert_attention(self.expert_norm(seen), step)
        y = y + scaled("expert", out)
        if self.residual_norm is not None:
            y = self.residual_norm(y)
        return y, row, counts

    def routers(self) -> dict[str, Router]:
        """Router name -> router."""
        found = {"expert_attention": self.expert_attention.router}
        if self.dimensions is not None:
            found["dimensions"] = self.dimensions.router
        for name in ("sequence_attention", "depth_attention"):
            attention = getattr(self, name)
            if attention is not None and attention.projections.router is not None:
                found[name] = attention.projections.router
        return found


class DecodingLayer(Weights):
    """x + W_out (silu(W_gate x) * W_up x) after the last depth, with a pre-norm; matrices [N, h]."""

    def __init__(self, config: DreamerConfig):
        super().__init__()
        shape = config.decoding_size, config.hidden_size
        self.norm = RMSNorm(config.hidden_size)
        self.matrix("gate", *shape, deviation=input_deviation(config))
        self.matrix("up", *shape, deviation=input_deviation(config))
        self.matrix("out", *shape, deviation=output_deviation(config))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        normed = self.norm(x)
        gate, up = (normed @ matrix.to(x.dtype).T for matrix in (self.gate, self.up))
        return x + (F.silu(gate) * up) @ self.out.to(x.dtype)


class Head(nn.Linear):
    """[..., h] -> [..., V] float32: bfloat16 factors, but the sum isn't rounded to bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """The product; of bfloat16 in two, the second of which computes what the first's rounding lost."""
        weight = self.weight.to(x.dtype)
        if x.dtype == torch.float32:
            return F.linear(x, weight)
        flat = x.flatten(0, -2)
        rounded = F.linear(flat, weight).detach()
        lost = torch.addmm(rounded, flat, weight.T, beta=-1)
        return (rounded.float() + lost).view(*x.shape[:-1], -1)


class Dreamer(nn.Module):
    """The whole model: tokens to logits.

    Attributes:
        compute_dtype: None computes in the type of the embedding; bfloat16 with float32 weights trains as JAX does.
        gradient_checkpointing: keep only x of every depth and compute the depth again in the backward pass.
    """

    def __init__(self, config: DreamerConfig):
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.gradient_checkpointing = False
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = Head(config.hidden_size, config.vocab_size, bias=False)
        for module in (self.embedding, self.head):
            nn.init.normal_(module.weight, std=input_deviation(config))
        size = config.pa_embedding_size
        self.register_buffer("knowledge", torch.zeros(config.pa_slots, size) if size else None)
        self.layers = nn.ModuleList(Layer(config) for _ in range(1 if config.recurrent else config.depth))
        self.decoding = DecodingLayer(config) if config.decoding_size else nn.Identity()
        normed = config.normalised_stream and not config.decoding_size
        self.final_norm = nn.Identity() if normed else RMSNorm(config.hidden_size)

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> Dreamer:
        """The model of a folder, in evaluation mode; on the CPU the weights stay mapped from the files."""
        from safetensors.torch import load_file

        folder = Path(folder)
        config = DreamerConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
        index = folder / "model.safetensors.index.json"
        names = {"model.safetensors"}
        if index.exists():
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            # transformers, saving one file over several, removes these and leaves their index.
            left = not any((folder / name).exists() for name in shards) and (folder / "model.safetensors").exists()
            names = names if left else shards
        tensors = {}
        for name in sorted(names):
            tensors |= load_file(folder / name, device=str(device))
        with torch.device("meta"):
            model = cls(config)
        model.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items()}, assign=True)
        return model.requires_grad_(True).eval()

    def forward(
        self,
        tokens: Tensor,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        depth: int | None = None,
        cache: Cache | None = None,
        last: int = 0,
    ) -> Tensor:
        """Logits of the next token, float32.

        Args:
            tokens: [B, S] integers.
            segment_ids: [B, S], or [B, S held by the cache + S]: the document of each token, 0 for padding; tokens
                see their own document only. An attention mask of ones and zeros is one.
            positions: [B, S], places within the documents; None counts them from the segments.
            depth: L of this pass, None for the trained one.
            cache: holds earlier tokens and takes these.
            last: compute the logits of that many last tokens only; 0: of all.

        Returns:
            [B, S or last, V].
        """
        return self.head(self.trunk(tokens, segment_ids, positions, depth, cache)[:, -last:])

    def trunk(self, tokens, segment_ids=None, positions=None, depth=None, cache=None, kept=None) -> Tensor:
        """Everything before the head: [B, S] -> [B, S, h]; a list that is `kept` gets the states on the way."""
        total = self.config.depth if depth is None else depth
        if total < 1 or (not self.config.recurrent and total > self.config.depth):
            raise ValueError(f"this {self.config.variant} model of {self.config.depth} depths can't run at {total}")
        x = self.embedding(tokens)
        x = x.to(self.compute_dtype or x.dtype)
        config, rows = self.config, []
        first = self.step(tokens, segment_ids, positions, cache)._replace(entered=x)
        first = first._replace(scale=1 / total if config.residual_scale == "depth" else 1.0)
        da, router = (depth_rotation(config, total, its, x.device) for its in (config.da_head_size, config.router_size))
        stretch = max((total - 1) / max(config.depth - 1, 1), 1.0) if config.depth_scaling == "interpolated" else 1.0
        pa = depth_rotation(config, total, config.pa_head_size, x.device)
        attentions = [layer.parameter_attention for layer in self.layers if layer.parameter_attention is not None]
        slots = [its.slots(self.knowledge, x.dtype) for its in attentions] or [None] * len(self.layers)
        for l in range(total):
            layer = self.layers[0 if config.recurrent else l]
            earlier = rows[len(rows) % config.da_dilation :: config.da_dilation]  # as many below as the window has
            earlier = earlier[max(0, len(earlier) - config.da_window + 1) :] if config.da_window else earlier
            step = first._replace(
                depth=l,
                total=total,
                pa_rotation=(pa[0][l], pa[1][l]),
                slots=slots[0 if config.recurrent else l],
                place=min(l / stretch, config.depth - 1),
                da_rotation=(da[0][l], da[1][l]),
                router_rotation=(router[0][l], router[1][l]),
                earlier=earlier,
            )
            if kept is not None:
                kept.append(x)
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x, row, counts = checkpoint(layer, x, step, use_reentrant=False)
            else:
                x, row, counts = layer(x, step)
            if row is not None:
                rows.append(row)
            if config.da_form != "softmax":
                rows[:-1] = [None] * (len(rows) - 1)  # the newest state has all of them
            oldest = len(rows) - 1 - (config.da_window - 1) * config.da_dilation
            if config.da_window and oldest >= 0:
                rows[oldest] = None  # no depth looks that far back any more
            if self.training:  # here, not in the router: a checkpointed layer runs twice
                for name in counts.keys() & layer.routers().keys():
                    layer.routers()[name].count(counts[name], step)
        if kept is not None:
            kept.append(x)
        return self.final_norm(self.decoding(x))

    def step(self, tokens, segment_ids, positions, cache) -> Step:
        """What all depths share: rotation, mask, and which tokens are real."""
        (_, new), held = tokens.shape, 0 if cache is None else cache.get_seq_length()
        place = torch.arange(held + new, device=tokens.device)
        mask = real = None
        starts = torch.zeros_like(place)[None]
        if segment_ids is not None and not bool((segment_ids == 1).all()):
            changed = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
            starts = torch.where(changed, place, 0).cummax(-1).values
            mask = segment_ids[:, held:, None] == segment_ids[:, None]
            real = segment_ids[:, held:].flatten() > 0
        if mask is not None or (held and new > 1):
            causal = place[held:, None] >= place
            mask = (causal if mask is None else mask & causal).view(-1, 1, new, held + new)
        if positions is None:
            positions = (place - starts)[:, held:]
        cos, sin = rotation(positions, self.config.sa_head_size, self.config.sa_rope_base)
        return Step(0, 0, (cos[:, :, None], sin[:, :, None]), (), (), mask, real, cache, [], starts, 1.0, 0.0, (), None)

    def update_balancing(self) -> None:
        """Move the routers' biases by what training passes have selected since the last call: after every step."""
        for layer in self.layers:
            for router in layer.routers().values():
                router.update_balancing()

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        eos: int | None = None,
        depth: int | None = None,
        segment_ids: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue each row: [B, S] -> [B, S + n], n <= max_new_tokens; rows that are done repeat `eos`.

        Args:
            tokens: [B, S] prompts; pad shorter ones on the left and say so in `segment_ids` (0 there, 1 elsewhere).
            temperature: 0 takes the likeliest token.
            top_k: draw from that many likeliest tokens; 0: from all.
            eos: stop when every row has produced it.
        """
        cache, fed, done = Cache(), tokens, torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for _ in range(max_new_tokens):
            logits = self(fed, segment_ids, None, depth, cache, last=1)[:, 0]
            if temperature > 0:
                if top_k:
                    logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
                fed = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                fed = logits.argmax(-1, keepdim=True)
            if eos is not None:
                fed = fed.masked_fill(done[:, None], eos)
                done |= fed[:, 0] == eos
            tokens = torch.cat([tokens, fed], 1)
            if segment_ids is not None:
                segment_ids = F.pad(segment_ids, (0, 1), value=1)
            if bool(done.all()):
                break
        return tokens


if PreTrainedModel is not None:
    PASSED = ("num_items_in_batch", "cache_position", "token_type_ids")
    """Options that trainers and `generate` pass to every model."""

    def agreed(model, tokens, mask, cache, labels, use_cache, hidden, depth, options) -> tuple[bool, bool]:
        """(whether to keep a cache, whether to return hidden states), by the configuration where a call doesn't say.

        Raises:
            TypeError, ValueError: for what would be passed over, or end in numbers that mean nothing: an option
                that the model hasn't, a mask or a depth that can't be, weights that were offloaded.
        """
        for name, value in options.items():
            if name not in PASSED and value is not None and value is not False:
                raise TypeError(f"{type(model).__name__} has no option {name!r}")
        if depth is not None and depth < 1:
            raise ValueError(f"depth {depth}: it has to be 1 or more")
        rows, places = len(tokens), tokens.shape[1] + (0 if cache is None else cache.get_seq_length())
        if mask is not None and (mask.dim() != 2 or mask.shape[1] != places or len(mask) not in (1, rows)):
            raise ValueError(
                f"attention_mask is {list(mask.shape)}; with what the cache holds it is [{rows}, {places}]"
            )
        devices = {weight.device for weight in model.parameters()}
        if len(devices) > 1 or (tokens.device.type != "meta" and any(its.type == "meta" for its in devices)):
            raise ValueError("weights are offloaded or on several devices; load the model onto one: device_map={'': 0}")
        keeps = getattr(model.config, "use_cache", True) and not model.training and labels is None
        shows = getattr(model.config, "output_hidden_states", False) if hidden is None else hidden
        return bool(keeps if use_cache is None else use_cache), bool(shows)

    class DreamerForCausalLM(PreTrainedModel, GenerationMixin):
        """The same model behind the interface of transformers; its `model` is the `Dreamer`."""

        config_class = DreamerConfig
        base_model_prefix = "model"
        supports_gradient_checkpointing = True
        _no_split_modules = ("Layer",)
        _supports_sdpa = True

        def __init__(self, config: DreamerConfig):
            super().__init__(config)
            self.model = Dreamer(config)
            self.post_init()
            self._keep_in_fp32_modules_strict = {
                *(
                    r"\w+_norm",
                    "router.keys",
                    "router.bias",
                    "depth_signals",
                    "knowledge",
                    "injection.(norm|fall|rate)",
                    "decoding.norm",
                    "gates",
                    "fall",
                    "rate",
                    "offset",
                )
            }

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, Weights):
                module.reset_parameters()
            elif isinstance(module, (nn.Embedding, nn.Linear)):
                nn.init.normal_(module.weight, std=input_deviation(self.config))

        def _set_gradient_checkpointing(self, enable=True, *_, **__) -> None:
            self.model.gradient_checkpointing = enable

        @classmethod
        def _supports_default_dynamic_cache(cls) -> bool:
            return False  # a DynamicCache has room for the trained depth only

        def get_input_embeddings(self) -> nn.Embedding:
            """The embedding."""
            return self.model.embedding

        def set_input_embeddings(self, value: nn.Embedding) -> None:
            """Another embedding, perhaps of more tokens."""
            self.model.embedding = value

        def get_output_embeddings(self) -> nn.Linear:
            """The head, which is not tied to the embedding."""
            return self.model.head

        def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
            """The matrix of another head, perhaps of more tokens."""
            self.model.head.weight, self.model.head.out_features = new_embeddings.weight, new_embeddings.out_features

        def prepare_inputs_for_generation(
            self, input_ids, past_key_values=None, attention_mask=None, cache=None, **kwargs
        ):
            """The tokens that the cache doesn't hold yet."""
            cache = cache or past_key_values or (Cache() if kwargs.get("use_cache", True) else None)
            fed = cache.further(input_ids, attention_mask) if cache else input_ids
            return {
                "input_ids": fed,
                "past_key_values": cache,
                "use_cache": cache is not None,
                "attention_mask": attention_mask,
                "depth": kwargs.get("depth"),
                "output_hidden_states": kwargs.get("output_hidden_states"),
            }

        def forward(
            self,
            input_ids: Tensor,
            attention_mask: Tensor | None = None,
            position_ids: Tensor | None = None,
            past_key_values: Cache | None = None,
            labels: Tensor | None = None,
            use_cache: bool | None = None,
            depth: int | None = None,
            output_hidden_states: bool | None = None,
            logits_to_keep: int | Tensor = 0,
            return_dict: bool | None = None,
            cache: Cache | None = None,  # as transformers calls `past_key_values` from 5.24 on
            **kwargs,
        ):
            """As every causal language model of transformers; `attention_mask` may number packed documents.

            `output_hidden_states` returns the embeddings, the state after every depth, and what the head is applied to;
            `logits_to_keep` computes the logits of that many last tokens only, 0 of all; or of these places.
            """
            cache = past_key_values if cache is None else cache
            use_cache, output_hidden_states = agreed(
                self, input_ids, attention_mask, cache, labels, use_cache, output_hidden_states, depth, kwargs
            )
            cache = Cache() if cache is None and use_cache else cache
            states = [] if output_hidden_states else None
            x = self.model.trunk(input_ids, attention_mask, position_ids, depth, cache, states)
            last = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
            logits = self.model.head(x[:, last])
            loss = None
            if labels is not None:
                flat, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
                count = kwargs.get("num_items_in_batch")
                loss = F.cross_entropy(flat, targets, reduction="mean" if count is None else "sum")
                loss = loss if count is None else loss / count
            seen = None if states is None else (*states, x)
            said = CausalLMOutputWithPast(loss, logits, cache, seen)  # type: ignore
            return said.to_tuple() if return_dict is False else said
