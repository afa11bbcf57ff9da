"""CoTFormer in PyTorch, in one file that needs torch and transformers only.

    model = AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True, dtype="auto")
    model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=20)

Begin layers, middle layers that are repeated and see the keys and values of all repeats so far, end layers (Mohtashami
et al., 2023). With `adaptive`, routers decide after each repeat which positions go on: in generation those whose gate
reaches a threshold, in training the largest gates of each document, as many as is drawn. All positions are computed at
every repeat that any of them takes. Branches are computed in the dtype of the matrices; norms, gates and softmax in
float32. In comments, B batch, S sequence, h hidden size, V vocabulary, n heads, d head size, R repeats.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

STD = 0.02


class CotformerConfig(PretrainedConfig):
    """Sizes and switches under the names of the run's configuration."""

    model_type = "cotformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {"num_attention_heads": "heads", "num_hidden_layers": "depth"}  # noqa: RUF012

    def __init__(
        self,
        depth=5,
        begin_layers=1,
        middle_layers=4,
        end_layers=1,
        hidden_size=128,
        heads=4,
        mlp_size=512,
        vocab_size=512,
        repeat_norm=True,
        depth_embedding="linear",
        adaptive=False,
        decide="threshold",
        threshold=0.5,
        capacity=1.0,
        **others,
    ):
        own = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        super().__init__(**{**others, "tie_word_embeddings": False})  # there is one matrix, not two that are tied
        for name, value in own.items():
            setattr(self, name, value)


class Cache:
    """Keys and values [B, n, S, d] of every layer and repeat, and how many repeats positions took, [B, S]."""

    is_compileable, is_linear = False, (False,)  # `generate` asks a cache that it is given

    def __init__(self):
        self.rows: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}
        self.reached: Tensor | None = None
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

    def update(self, name: tuple[str, int, int], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append to (part, layer, repeat); returns all of its keys and values."""
        held = self.rows.get(name, (keys[:, :, :0], values[:, :, :0]))
        missing = self.length - keys.shape[2] - held[0].shape[2]  # of tokens that all stopped before this repeat
        gap = keys.new_zeros(*keys.shape[:2], missing, keys.shape[3])
        self.rows[name] = torch.cat([held[0], gap, keys], 2), torch.cat([held[1], gap, values], 2)
        return self.rows[name]

    def reorder_cache(self, beam: Tensor) -> None:
        """Take other rows of the batch, as beam search asks."""
        self.rows = {name: (k.index_select(0, beam), v.index_select(0, beam)) for name, (k, v) in self.rows.items()}
        if self.reached is not None:
            self.reached = self.reached.index_select(0, beam)


class Linear(nn.Linear):
    """A map without bias, applied in the type of x."""

    def __init__(self, inward: int, outward: int):
        super().__init__(inward, outward, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inward] -> [..., outward]."""
        return F.linear(x, self.weight.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """Without bias, float32 inside."""

    def __init__(self, size: int):
        super().__init__(size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), None, self.eps).to(x.dtype)


class Seen(NamedTuple):
    """What a layer's queries see.

    Attributes:
        positions: [B or 1, S], of the new tokens in their documents.
        visible: [B or 1, S, tokens], whether a token sees another.
        cache: of keys and values, the new tokens' own included.
        repeat: r from 0; of begin and end layers 0.
    """

    positions: Tensor
    visible: Tensor
    cache: Cache
    repeat: int = 0


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """[B, n, S, d] at positions [B or 1, S]; element i turns with element i + d/2."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * frequency
    first, second = x.float().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotated queries and keys, over one repeat or all of them so far."""

    def __init__(self, config: CotformerConfig):
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, name: tuple[str, int], seen: Seen) -> Tensor:
        """[B, S, h] -> [B, S, h]; `name` is the layer's, (part, number)."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k, cache, visible = rotated(q, seen.positions), rotated(k, seen.positions), seen.cache, seen.visible
        cache.update((*name, seen.repeat), k, v)
        rows = [cache.rows[(*name, repeat)] for repeat in range(seen.repeat + 1)]
        keys, values = (torch.cat(parts, 2) for parts in zip(*rows))  # noqa: B905
        if name[0] == "middle":
            reached = cache.reached[:, None]  # type: ignore
            visible = torch.cat([visible & (repeat < reached) for repeat in range(seen.repeat + 1)], -1)
        out = F.scaled_dot_product_attention(q, keys, values, visible[:, None])
        return self.out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """x + f(LN(x)), of attention and of a feed-forward with GELU."""

    def __init__(self, config: CotformerConfig):
        super().__init__()
        self.attention_norm, self.mlp_norm = LayerNorm(config.hidden_size), LayerNorm(config.hidden_size)
        self.attention = Attention(config)
        self.inward = Linear(config.hidden_size, config.mlp_size)
        self.outward = Linear(config.mlp_size, config.hidden_size)

    def forward(self, x: Tensor, name: tuple[str, int], seen: Seen) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        x = x + self.attention(self.attention_norm(x), name, seen)
        return x + self.outward(F.gelu(self.inward(self.mlp_norm(x))))


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


class CotformerForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model: tokens to logits.

    Attributes:
        compute_dtype: None computes in the type of the embedding; bfloat16 with float32 weights trains as JAX does.
    """

    config_class = CotformerConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: CotformerConfig):
        super().__init__(config)
        h, rows = config.hidden_size, (config.depth, config.hidden_size)
        self.embedding = nn.Embedding(config.vocab_size, h)
        self.begin, self.middle, self.end = (
            nn.ModuleList(Layer(config) for _ in range(count))
            for count in (config.begin_layers, config.middle_layers, config.end_layers)
        )
        shapes = {"none": None, "linear": (h,), "learned": rows}
        shape = shapes[config.depth_embedding]
        self.depth_embedding = None if shape is None else nn.Parameter(torch.empty(shape))
        self.repeat_norm = LayerNorm(h) if config.repeat_norm else None
        self.routers = nn.Parameter(torch.empty(rows)) if config.adaptive else None
        self.final_norm = LayerNorm(h)
        self.compute_dtype: torch.dtype | None = None
        self.post_init()
        self._keep_in_fp32_modules_strict = {r"\w+_norm", "depth_embedding", "routers"}

    def _init_weights(self, module: nn.Module) -> None:
        layers = len(self.begin) + len(self.middle) + len(self.end)
        if isinstance(module, Layer):
            for matrix in (module.attention.out, module.outward):
                nn.init.normal_(matrix.weight, std=STD / (2 * layers) ** 0.5)
            for matrix in (module.attention.qkv, module.inward):
                nn.init.normal_(matrix.weight, std=STD)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=STD)
        elif module is self:
            for rows in (self.depth_embedding, self.routers):
                if rows is not None:
                    nn.init.normal_(rows, std=STD)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a DynamicCache has no room for repeats

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrices; that of the first parameter, which transformers would take, stays float32."""
        return self.embedding.weight.dtype

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding, which is the head too."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Another embedding, perhaps of more tokens."""
        self.embedding = value

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, cache=None, **kwargs):
        """The tokens that the cache doesn't hold yet; they decide by the threshold, also without a cache."""
        cache = cache or past_key_values or (Cache() if kwargs.get("use_cache", True) else None)
        fed = cache.further(input_ids, attention_mask) if cache else input_ids
        kept = {"past_key_values": cache, "use_cache": cache is not None, "attention_mask": attention_mask}
        kept |= {name: kwargs.get(name) for name in ("depth", "output_hidden_states")}
        return {"input_ids": fed, **kept, "decide": "threshold"}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        depth: int | None = None,
        decide: str | None = None,
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
            labels: [B, S], the tokens themselves: they are shifted here; -100 is ignored.
            depth: repeats; None takes the trained number.
            decide: how an adaptive model decides in evaluation, "threshold" or "capacity"; None for the first with a
                cache, else for what the configuration says.
            output_hidden_states: return also the state after every repeat, and what the head gets.
            logits_to_keep: compute the logits of that many last tokens only; 0: of all. Or of these places.
        """
        cache = past_key_values if cache is None else cache
        if use_cache is None and self.config.adaptive:
            use_cache = False  # with one it would decide by the threshold
        use_cache, output_hidden_states = agreed(
            self, input_ids, attention_mask, cache, labels, use_cache, output_hidden_states, depth, kwargs
        )
        keep = use_cache or cache is not None
        cache = Cache() if cache is None else cache
        segments, positions, visible = self.places(input_ids, attention_mask, cache)
        positions = positions if position_ids is None else position_ids
        cache.length += input_ids.shape[1]
        x = self.embedding(input_ids)
        x = x.to(self.compute_dtype or x.dtype)
        seen = Seen(positions, visible, cache)
        for number, layer in enumerate(self.begin):
            x = layer(x, ("begin", number), seen)
        how = "drawn" if self.training else decide or ("threshold" if keep else self.config.decide)
        x, states = self.repeated(x, seen, segments, how, depth or self.config.depth)
        for number, layer in enumerate(self.end):
            x = layer(x, ("end", number), seen)
        x = self.final_norm(x)
        last = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
        logits, loss = F.linear(x[:, last], self.embedding.weight.to(x.dtype)).float(), None
        if labels is not None:
            targets, count = labels[:, 1:].flatten(), kwargs.get("num_items_in_batch")
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
            loss = loss / ((targets != -100).sum() if count is None else count)
        shown = (*states, x) if output_hidden_states else None
        said = CausalLMOutputWithPast(loss, logits, cache if keep else None, shown)  # type: ignore
        return said.to_tuple() if return_dict is False else said

    def repeated(self, x: Tensor, seen: Seen, segments: Tensor, how: str, depth: int) -> tuple[Tensor, list[Tensor]]:
        """x_0 [B, S, h] -> x_R, and the states after all repeats."""
        config, cache, new = self.config, seen.cache, x.shape[1]
        active = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        reached = cache.reached if cache.reached is not None else active[:, :0].long()
        held, gate, states = reached, None, []
        if depth > config.depth and (config.adaptive or config.depth_embedding == "learned"):
            raise ValueError(
                f"there are routers or depth embeddings for {config.depth} repeats; ask for at most that many"
            )
        shares = self.capacities(how, x.device) if config.adaptive else None
        for r in range(depth):
            if active.any():
                taken = torch.where(active, r + 1, reached[:, held.shape[1] :] if r else 0)
                cache.reached = reached = torch.cat([held, taken], 1)
                after = self.signalled(x, r, depth)
                for number, layer in enumerate(self.middle):
                    after = layer(after, ("middle", number), seen._replace(repeat=r))
                if self.repeat_norm is not None:
                    after = self.repeat_norm(after)
                if gate is not None:
                    mixed = (1 - gate[..., None]) * x.float() + gate[..., None] * after.float()
                    after = mixed.to(x.dtype)
                x = torch.where(active[..., None], after, x)
                if self.routers is not None:
                    logits = (x.float() * self.routers[r]).sum(-1)
                    gate = logits.sigmoid()
                    if shares is None:
                        active = active & (gate >= config.threshold)
                    else:
                        share = shares[r + 1] / shares[r].clamp(min=1e-6)
                        active = largest(logits, active, segments[:, -new:], share)
            states.append(x)
        return x, states

    def signalled(self, x: Tensor, r: int, depth: int) -> Tensor:
        """With the depth embedding of repeat r, from 0: learned, or a vector times the repeats still to come."""
        if self.depth_embedding is None:
            return x
        if self.config.depth_embedding == "learned":
            return x + self.depth_embedding[r].to(x.dtype)
        return x + ((depth - 1 - r) * self.depth_embedding).to(x.dtype)

    def capacities(self, how: str, device: torch.device) -> Tensor | None:
        """1, f_1, .., f_{R-1}, 0: shares of positions that take each repeat; None for the threshold."""
        count = self.config.depth - 1
        if how == "threshold":
            return None
        if how == "drawn":
            f = (1.05 * torch.rand(count, device=device)).clamp(max=1).sort(descending=True).values
        else:
            f = 1 - (1 - self.config.capacity) * torch.arange(1, count + 1, device=device) / max(1, count)
        return torch.cat([f.new_ones(1), f, f.new_zeros(1)])

    def places(self, tokens: Tensor, segments: Tensor | None, cache: Cache) -> tuple[Tensor, Tensor, Tensor]:
        """Documents [B or 1, tokens], positions [B or 1, S] in them, and what is visible [B or 1, S, tokens]."""
        held, total = cache.get_seq_length(), cache.get_seq_length() + tokens.shape[1]
        place = torch.arange(total, device=tokens.device)
        segments = torch.ones_like(place)[None] if segments is None else segments
        changed = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
        starts = torch.where(changed, place, 0).cummax(-1).values
        visible = (segments[:, held:, None] == segments[:, None]) & (place[held:, None] >= place)
        return segments, (place - starts)[:, held:], visible


def largest(logits: Tensor, active: Tensor, segments: Tensor, share: Tensor) -> Tensor:
    """[B, S]: of each document's n active positions the int(share n) with the largest logits, of equals the earlier."""
    place = torch.arange(logits.shape[1], device=logits.device)
    rivals = (segments[:, :, None] == segments[:, None]) & active[:, None]
    mine, other = logits[:, :, None], logits[:, None]
    rank = (rivals & ((other > mine) | ((other == mine) & (place < place[:, None])))).sum(-1)
    return active & (rank < (share * rivals.sum(-1) + 1e-4).floor())
