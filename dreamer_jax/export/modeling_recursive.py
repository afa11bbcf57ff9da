"""Recursive transformers in PyTorch, in one file that needs torch and transformers only.

    model = AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True, dtype="auto")
    model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=20)

K layers are applied B times each, in a cycle or each repeated in its place, perhaps with a low-rank change of every
matrix at every application (Bae et al., 2024). Parameters have the names and shapes that they have in JAX: matrices are
[in, out], but for gate and up [F, h] and tables [V, h]; what applications have of their own is stacked. Branches are
computed in the dtype of the matrices, norms and softmax in float32. In comments, B batch, S sequence, h hidden size, V
vocabulary, n heads, d head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class RecursiveConfig(PretrainedConfig):
    """Sizes and switches under the names of the run's configuration."""

    model_type = "recursive"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {"num_attention_heads": "heads", "num_hidden_layers": "layers"}  # noqa: RUF012

    def __init__(
        self,
        depth=2,
        layers=4,
        sharing="cycle",
        rank=0,
        share_norms=True,
        hidden_size=128,
        vocab_size=512,
        heads=4,
        kv_heads=4,
        head_size=32,
        mlp_size=384,
        rope_base=10_000.0,
        rope_factor=1.0,
        rope_low=1.0,
        rope_high=4.0,
        rope_length=8192,
        form="pre_norm",
        queries="plain",
        norm_epsilon=1e-6,
        tied_head=False,
        init_std=0.02,
        exit_weight=0.0,
        exit_confidence=1.0,
        exit_change=0.0,
        refill="propagate",
        **others,
    ):
        own = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        super().__init__(**{**others, "tie_word_embeddings": False})  # a tied head is one matrix, not two
        for name, value in own.items():
            setattr(self, name, value)


class Cache:
    """Keys and values [B, kv, S, d] of every application of a layer."""

    is_compileable, is_linear = False, (False,)  # `generate` asks a cache that it is given

    def __init__(self):
        self.rows: dict[Any, tuple[Tensor, Tensor]] = {}
        self.length = 0

    def get_seq_length(self, layer: int = 0) -> int:
        """Tokens held."""
        return self.length

    def further(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The tokens that it doesn't hold yet: of a whole text, or of what is new with the mask of all."""
        count = (input_ids if attention_mask is None else attention_mask).shape[1] - self.get_seq_length()
        if count < 1:
            raise ValueError(
                "the cache holds all of it; give more tokens, or to new ones alone the mask of the whole text"
            )
        return input_ids[:, -count:]

    def update(self, keys: Tensor, values: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        """Append to an application; returns all of its keys and values."""
        if place in self.rows:
            keys, values = (torch.cat(pair, 2) for pair in zip(self.rows[place], (keys, values)))  # noqa: B905
        if keys.shape[2] != self.length:
            raise ValueError("the cache was filled with fewer loops; keep depth as it was")
        self.rows[place] = keys, values
        return keys, values

    def reorder_cache(self, beam: Tensor) -> None:
        """Take other rows of the batch, as beam search asks."""
        self.rows = {at: (k.index_select(0, beam), v.index_select(0, beam)) for at, (k, v) in self.rows.items()}


class Weights(nn.Module):
    """Parameters by name, in modules as their names are nested."""

    def __init__(self, shapes: dict[str, Any]):
        super().__init__()
        for name, its in shapes.items():
            if isinstance(its, dict):
                self.add_module(name, Weights(its))
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(its)))

    def tree(self, *index: int) -> dict[str, Any]:
        """All of them, of stacked ones those at an index."""
        parts: dict[str, Any] = {name: part.tree(*index) for name, part in self.named_children()}  # type: ignore
        return parts | {name: values[index] for name, values in self.named_parameters(recurse=False)}


def shapes_of(c: RecursiveConfig) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Shapes of a layer: what its applications share, what each has of its own, and those of a layer without LoRA."""
    h, queries, keys, size = c.hidden_size, c.heads * c.head_size, c.kv_heads * c.head_size, c.mlp_size
    matrices = {
        "attention": {"qkv": (h, queries + 2 * keys), "out": (queries, h)},
        "feed_forward": {"gate": (size, h), "up": (size, h), "out": (size, h)},
    }
    kind = "_norm" if c.form == "pre_norm" else "_out_norm"
    norms: dict[str, Any] = {f"{half}{kind}": {"scale": (h,)} for half in ("attention", "mlp")}
    if c.queries != "plain":
        widths = (queries, keys) if c.queries == "norm" else (c.head_size, c.head_size)
        scales = {"q_norm": {"scale": widths[:1]}, "k_norm": {"scale": widths[1:]}}
        norms["attention"] = scales
    ranks: dict[str, Any] = {"attention": {}, "feed_forward": {}}
    if c.rank:
        inward = {"q": (h, queries), "k": (h, keys), "v": (h, keys), "out": (queries, h)}
        for half, maps in zip(ranks, (inward, {"gate": (h, size), "up": (h, size), "out": (size, h)})):  # noqa: B905
            for name, (a, b) in maps.items():
                r = min(c.rank, a, b)
                ranks[half][f"{name}_low"] = {"down": (a, r), "up": (r, b)}
    whole = merged(matrices, norms)
    return (whole if c.share_norms else matrices), (ranks if c.share_norms else merged(ranks, norms)), whole


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two layers' parts together; parts without anything are left out."""
    both = {name: {**one.get(name, {}), **other.get(name, {})} for name in {**one, **other}}
    return {name: part for name, part in both.items() if part}


def stacked(shapes: Any, *sizes: int) -> Any:
    """Shapes with leading axes."""
    if isinstance(shapes, dict):
        return {name: stacked(its, *sizes) for name, its in shapes.items() if its}
    return (*sizes, *shapes)


def linear(x: Tensor, weight: Tensor, low: dict[str, Tensor] | None = None) -> Tensor:
    """x W + x A B in the type of x."""
    found = x @ weight.to(x.dtype)
    return found if low is None else found + (x @ low["down"].to(x.dtype)) @ low["up"].to(x.dtype)


def rotate(x: Tensor, positions: Tensor, config: Any) -> Tensor:
    """[B, heads, S, d], rotated in halves by positions [B or 1, S]; with `rope_factor` as Llama 3.1 does for longer
    texts."""
    half = x.shape[-1] // 2
    frequency = config.rope_base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    turns = frequency * config.rope_length / (2 * math.pi)
    stays = ((turns - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
    frequency = frequency * (stays + (1 - stays) / config.rope_factor)
    angle = positions[:, None, :, None].float() * frequency
    first, second = x.float().chunk(2, -1)
    turned = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
    return torch.cat(turned, -1).to(x.dtype)


PASSED = ("num_items_in_batch", "cache_position", "token_type_ids")
"""Options that trainers and `generate` pass to every model."""


def agreed(model, tokens, mask, cache, labels, use_cache, hidden, depth, options) -> tuple[bool, bool]:
    """(whether to keep a cache, whether to return hidden states), by the configuration where a call doesn't say.

    Raises:
        TypeError, ValueError: for what would be passed over, or end in numbers that mean nothing: an option that
            the model hasn't, a mask or a depth that can't be, weights that were offloaded.
    """
    for name, value in options.items():
        if name not in PASSED and value is not None and value is not False:
            raise TypeError(f"{type(model).__name__} has no option {name!r}")
    if depth is not None and depth < 1:
        raise ValueError(f"depth {depth}: it has to be 1 or more")
    rows, places = len(tokens), tokens.shape[1] + (0 if cache is None else cache.get_seq_length())
    if mask is not None and (mask.dim() != 2 or mask.shape[1] != places or len(mask) not in (1, rows)):
        raise ValueError(f"attention_mask is {list(mask.shape)}; with what the cache holds it is [{rows}, {places}]")
    devices = {weight.device for weight in model.parameters()}
    if len(devices) > 1 or (tokens.device.type != "meta" and any(its.type == "meta" for its in devices)):
        raise ValueError("weights are offloaded or on several devices; load the model onto one: device_map={'': 0}")
    keeps = getattr(model.config, "use_cache", True) and not model.training and labels is None
    shows = getattr(model.config, "output_hidden_states", False) if hidden is None else hidden
    return bool(keeps if use_cache is None else use_cache), bool(shows)


class RecursiveForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model: tokens to logits.

    Attributes:
        compute_dtype: None computes in the type of the embedding; bfloat16 with float32 weights trains as JAX does.
    """

    config_class = RecursiveConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: RecursiveConfig):
        super().__init__(config)
        c = config
        shared, own, whole = shapes_of(c)
        self.in_place, ends = c.sharing.endswith("sequence"), c.sharing.startswith("middle")
        table = (c.vocab_size, c.hidden_size)
        self.embedding = nn.Parameter(torch.empty(table))
        if self.in_place:
            self.layers = Weights(stacked(shared, c.layers))
        else:
            self.layers = Weights({str(k): shared for k in range(c.layers)})
        own = stacked(own, *((c.layers, c.depth) if self.in_place else (c.depth,)))
        self.relaxation = None
        if own:
            self.relaxation = Weights(own if self.in_place else {str(k): own for k in range(c.layers)})
        self.first = Weights(whole) if ends else None
        self.last = Weights(whole) if ends else None
        self.final_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.head = None if c.tied_head else nn.Parameter(torch.empty(table))
        self.compute_dtype: torch.dtype | None = None
        self.post_init()
        self._keep_in_fp32_modules_strict = {r"\w+_norm"}

    def _init_weights(self, module: nn.Module) -> None:
        for name, values in module.named_parameters(recurse=False):
            if name in ("scale", "final_norm"):
                nn.init.ones_(values)
            elif name == "up" and "down" in dict(module.named_parameters(recurse=False)):
                nn.init.zeros_(values)
            else:
                nn.init.normal_(values, std=values.shape[-2] ** -0.5 if name == "down" else self.config.init_std)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a DynamicCache has room for the shared layers only

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, cache=None, **kwargs):
        """The tokens that the cache doesn't hold yet."""
        cache = cache or past_key_values or (Cache() if kwargs.get("use_cache", True) else None)
        fed = cache.further(input_ids, attention_mask) if cache else input_ids
        kept = {"past_key_values": cache, "use_cache": cache is not None, "attention_mask": attention_mask}
        kept |= {name: kwargs.get(name) for name in ("output_hidden_states",)}
        return {"input_ids": fed, **kept}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        cache: Cache | None = None,  # as transformers calls `past_key_values` from 5.24 on
        **kwargs,
    ):
        """As every causal language model of transformers.

        Args:
            attention_mask: [B, tokens held by the cache + S], 0 for padding; it may number packed documents from 1,
                which don't see each other.
            position_ids: [B, S], places within the documents; None counts them.
            labels: [B, S], the tokens themselves: they are shifted here; -100 is ignored. The loss has that of every
                loop before the last, weighted by `exit_weight`.
            output_hidden_states: return also the state after every loop, of a sequence after every layer's last
                application, and what the head gets.
            logits_to_keep: compute the logits of that many last tokens only; 0: of all. Or of these places.
        """
        cache = past_key_values if cache is None else cache
        use_cache, output_hidden_states = agreed(
            self, input_ids, attention_mask, cache, labels, use_cache, output_hidden_states, None, kwargs
        )
        cache = Cache() if cache is None and use_cache else cache
        positions, mask = self.places(input_ids, attention_mask, cache)
        positions = positions if position_ids is None else position_ids
        if cache is not None:
            cache.length += input_ids.shape[1]
        x = F.embedding(input_ids, self.embedding)
        x = x.to(self.compute_dtype or x.dtype)
        if self.first is not None:
            x = self.layer(self.first.tree(), x, positions, mask, cache, "first")
        states = []
        times = self.config.depth if self.in_place else self.config.layers
        for l in range(self.config.layers * self.config.depth):
            k, b = (l // times, l % times) if self.in_place else (l % times, l // times)
            x = self.layer(self.weights(k, b), x, positions, mask, cache, l)
            if (l + 1) % times == 0:
                states.append(x)
        if self.last is not None:
            x = self.layer(self.last.tree(), x, positions, mask, cache, "last")
        out = self.norm(x, self.final_norm)
        last = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
        logits, loss = self.logits(out[:, last]), None
        if labels is not None:
            targets, count = labels[:, 1:].flatten(), kwargs.get("num_items_in_batch")
            loss = self.cross_entropy(logits, targets)
            for state in states[:-1] if self.config.exit_weight else ():
                read = self.logits(self.norm(state, self.final_norm))
                loss = loss + self.config.exit_weight * self.cross_entropy(read, targets)
            loss = loss / ((targets != -100).sum() if count is None else count)
        seen = (*states, out) if output_hidden_states else None
        said = CausalLMOutputWithPast(loss, logits, cache, seen)  # type: ignore
        return said.to_tuple() if return_dict is False else said

    def weights(self, k: int, b: int) -> dict[str, Any]:
        """Those of the b-th application of shared layer k."""
        own: dict[str, Any] = {}
        if self.in_place:
            shared = self.layers.tree(k)
            own = {} if self.relaxation is None else self.relaxation.tree(k, b)
        else:
            shared = self.layers.get_submodule(str(k)).tree()  # type: ignore
            own = {} if self.relaxation is None else self.relaxation.get_submodule(str(k)).tree(b)  # type: ignore
        return merged(shared, own)

    def layer(self, its: dict[str, Any], x: Tensor, positions: Tensor, mask, cache: Cache | None, place: Any) -> Tensor:
        """x + f(N(x)) or x + N(f(x)), for attention and for the feed-forward."""

        def branch(half: str, f, x: Tensor) -> Tensor:
            if f"{half}_norm" in its:
                return x + f(self.norm(x, its[f"{half}_norm"]["scale"]))
            return x + self.norm(f(x), its[f"{half}_out_norm"]["scale"])

        def attention(x: Tensor) -> Tensor:
            return self.attention(its["attention"], x, positions, mask, cache, place)

        def feed_forward(x: Tensor) -> Tensor:
            w = its["feed_forward"]
            gate, up = (linear(x, w[name].T, w.get(f"{name}_low")) for name in ("gate", "up"))
            return linear(F.silu(gate) * up, w["out"], w.get("out_low"))

        return branch("mlp", feed_forward, branch("attention", attention, x))

    def attention(
        self, w: dict[str, Any], x: Tensor, positions: Tensor, mask, cache: Cache | None, place: Any
    ) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        c = self.config
        sizes = [c.heads * c.head_size, c.kv_heads * c.head_size, c.kv_heads * c.head_size]
        parts = zip("qkv", w["qkv"].split(sizes, 1))  # noqa: B905
        q, k, v = (linear(x, weight, w.get(f"{name}_low")) for name, weight in parts)
        if c.queries == "norm":
            q, k = self.norm(q, w["q_norm"]["scale"]), self.norm(k, w["k_norm"]["scale"])
        q, k, v = (part.unflatten(-1, (-1, c.head_size)) for part in (q, k, v))
        if c.queries == "head_norm":
            q, k = self.norm(q, w["q_norm"]["scale"]), self.norm(k, w["k_norm"]["scale"])
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        q, k = rotate(q, positions, c), rotate(k, positions, c)
        if cache is not None:
            k, v = cache.update(k, v, place)
        k, v = (part.repeat_interleave(c.heads // c.kv_heads, 1) for part in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and q.shape[2] > 1)
        return linear(out.transpose(1, 2).flatten(2), w["out"], w.get("out_low"))

    def norm(self, x: Tensor, scale: Tensor) -> Tensor:
        """x over its root mean square, in float32."""
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_epsilon)
        return (wide * inverse * scale.float()).to(x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """[.., h] -> [.., V] float32."""
        return F.linear(x, (self.embedding if self.head is None else self.head).to(x.dtype)).float()

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum over the targets of all tokens but the first."""
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")

    def places(self, tokens: Tensor, segments: Tensor | None, cache: Cache | None) -> tuple[Tensor, Tensor | None]:
        """Positions [B or 1, S] within the documents; mask [B, 1, S, keys], True where visible, None for causal."""
        new, held = tokens.shape[1], 0 if cache is None else cache.get_seq_length()
        place = torch.arange(held + new, device=tokens.device)
        starts, mask = torch.zeros_like(place)[None], None
        if segments is not None and not bool((segments == 1).all()):
            changed = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
            starts = torch.where(changed, place, 0).cummax(-1).values
            mask = segments[:, held:, None] == segments[:, None]
        if mask is not None or (held and new > 1):
            causal = place[held:, None] >= place
            mask = (causal if mask is None else mask & causal).view(-1, 1, new, held + new)
        return (place - starts)[:, held:], mask
