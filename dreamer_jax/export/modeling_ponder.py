"""PonderLM in PyTorch, in one file that needs torch and transformers only.

    model = AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True, dtype="auto")
    model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=20)

One stack of layers is applied L times (`depth`). After every pass but the last the prediction comes back to the input
as the mean of all embeddings, weighted by it (Zeng et al., 2025). Branches are computed in the dtype of the matrices,
norms and softmax in float32. In comments, B batch, S sequence, h hidden size, V vocabulary, n heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class PonderConfig(PretrainedConfig):
    """Sizes and switches under the names of the run's configuration."""

    model_type = "ponder"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {"num_attention_heads": "heads", "num_hidden_layers": "depth"}  # noqa: RUF012

    def __init__(
        self,
        depth=4,
        layers=4,
        hidden_size=128,
        vocab_size=512,
        heads=4,
        kv_heads=4,
        head_size=32,
        mlp_size=384,
        rope_base=10_000.0,
        norm_epsilon=1e-6,
        init_std=0.02,
        **others,
    ):
        own = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        super().__init__(**{**others, "tie_word_embeddings": False})
        for name, value in own.items():
            setattr(self, name, value)


class Cache:
    """Keys and values [B, heads, S, d] of every layer, of those that are applied again in every pass."""

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
        """Append to a place; returns all of its keys and values."""
        if place in self.rows:
            keys, values = (torch.cat(pair, 2) for pair in zip(self.rows[place], (keys, values)))  # noqa: B905
        if keys.shape[2] != self.length:
            raise ValueError("the cache was filled with fewer passes; keep depth as it was")
        self.rows[place] = keys, values
        return keys, values

    def reorder_cache(self, beam: Tensor) -> None:
        """Take other rows of the batch, as beam search asks."""
        self.rows = {at: (k.index_select(0, beam), v.index_select(0, beam)) for at, (k, v) in self.rows.items()}


class Linear(nn.Linear):
    """A map without bias, applied in the type of x, whatever its matrix is."""

    def __init__(self, inward: int, outward: int):
        super().__init__(inward, outward, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inward] -> [..., outward]."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x over its root mean square, in float32."""

    def __init__(self, config: PonderConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.epsilon = config.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * inverse * self.weight.float()).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """[B, heads, S, d], rotated in halves by positions [B or 1, S]."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * frequency
    first, second = x.float().chunk(2, -1)
    turned = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
    return torch.cat(turned, -1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped keys."""

    def __init__(self, config: PonderConfig):
        super().__init__()
        self.size, self.rope_base = config.head_size, config.rope_base
        self.sizes = [n * config.head_size for n in (config.heads, config.kv_heads, config.kv_heads)]
        self.group = config.heads // config.kv_heads
        self.qkv = Linear(config.hidden_size, sum(self.sizes))
        self.out = Linear(self.sizes[0], config.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None, place: Any) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        parts = self.qkv(x).split(self.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        q, k = rotate(q, positions, self.rope_base), rotate(k, positions, self.rope_base)
        if cache is not None:
            k, v = cache.update(k, v, place)
        k, v = (part.repeat_interleave(self.group, 1) for part in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and q.shape[2] > 1)
        return self.out(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """W_out (silu(W_gate x) * W_up x)."""

    def __init__(self, config: PonderConfig):
        super().__init__()
        self.gate = Linear(config.hidden_size, config.mlp_size)
        self.up = Linear(config.hidden_size, config.mlp_size)
        self.out = Linear(config.mlp_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        return self.out(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """x += attention(N(x)), then x += feed_forward(N(x))."""

    def __init__(self, config: PonderConfig):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(config), Attention(config)
        self.mlp_norm, self.feed_forward = RMSNorm(config), FeedForward(config)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None, place: Any) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        x = x + self.attention(self.attention_norm(x), positions, mask, cache, place)
        return x + self.feed_forward(self.mlp_norm(x))


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


class PonderForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model: tokens to logits.

    Attributes:
        compute_dtype: None computes in the type of the embedding; bfloat16 with float32 weights trains as JAX does.
    """

    config_class = PonderConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: PonderConfig):
        super().__init__(config)
        c = config
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.final_norm = RMSNorm(c)
        self.head = Linear(c.hidden_size, c.vocab_size)
        self.compute_dtype: torch.dtype | None = None
        self.post_init()
        self._keep_in_fp32_modules_strict = {r"\w+_norm"}

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, (Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.init_std)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a DynamicCache has room for as many layers as there are weights

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding, whose rows are what the model ponders on."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Another embedding, perhaps of more tokens."""
        self.embedding = value

    def get_output_embeddings(self) -> nn.Linear:
        """The head, which is not tied to the embedding."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """The matrix of another head, perhaps of more tokens."""
        self.head.weight, self.head.out_features = new_embeddings.weight, new_embeddings.out_features

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, cache=None, **kwargs):
        """The tokens that the cache doesn't hold yet."""
        cache = cache or past_key_values or (Cache() if kwargs.get("use_cache", True) else None)
        fed = cache.further(input_ids, attention_mask) if cache else input_ids
        kept = {"past_key_values": cache, "use_cache": cache is not None, "attention_mask": attention_mask}
        kept |= {name: kwargs.get(name) for name in ("depth", "output_hidden_states")}
        return {"input_ids": fed, **kept}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        depth: int | None = None,
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
            labels: [B, S], the tokens themselves: they are shifted here; -100 is ignored. The loss is that
                of the last prediction.
            depth: number of passes; None takes the trained one.
            output_hidden_states: return also the state after every pass, and what the head gets.
            logits_to_keep: compute the logits of that many last tokens only; 0: of all. Or of these places.
        """
        cache = past_key_values if cache is None else cache
        use_cache, output_hidden_states = agreed(
            self, input_ids, attention_mask, cache, labels, use_cache, output_hidden_states, depth, kwargs
        )
        cache = Cache() if cache is None and use_cache else cache
        positions, mask = self.places(input_ids, attention_mask, cache)
        positions = positions if position_ids is None else position_ids
        if cache is not None:
            cache.length += input_ids.shape[1]
        x = self.embedding(input_ids)
        x = x.to(self.compute_dtype or x.dtype)
        states, passes = [], depth or self.config.depth
        for t in range(passes):
            h = x
            for j, layer in enumerate(self.layers):
                h = layer(h, positions, mask, cache, (t, j))
            states.append(self.final_norm(h))
            if t < passes - 1:
                x = x + self.expected(states[-1])
        out = states[-1]
        last = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
        logits, loss = self.head(out[:, last]).float(), None
        if labels is not None:
            targets, count = labels[:, 1:].flatten(), kwargs.get("num_items_in_batch")
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
            loss = loss / ((targets != -100).sum() if count is None else count)
        seen = (*states, out) if output_hidden_states else None
        said = CausalLMOutputWithPast(loss, logits, cache, seen)  # type: ignore
        return said.to_tuple() if return_dict is False else said

    def expected(self, h: Tensor) -> Tensor:
        """The mean of all embeddings, weighted by the prediction, [B, S, h] -> [B, S, h]."""
        shares = self.head(h).float().softmax(-1)
        return shares.to(h.dtype) @ self.embedding.weight.to(h.dtype)

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
