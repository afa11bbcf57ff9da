"""The Universal Transformer in PyTorch, in one file that needs torch and transformers only.

    model = AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True, dtype="auto")
    model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=20)

One layer is applied at most T times (`depth`); signals of position and step are added to the state every time. Every
position adds up its halting probabilities and stops when they come to more than 1 - epsilon; what it puts out is a
weighted sum of its states (Dehghani et al., 2018; Graves, 2016). Branches are computed in the dtype of the matrices;
halting, the sum, norms and softmax in float32. In comments, B batch, S sequence, h hidden size, V vocabulary, n heads,
d head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class UniversalConfig(PretrainedConfig):
    """Sizes and switches under the names of the run's configuration."""

    model_type = "universal"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {"num_attention_heads": "heads", "num_hidden_layers": "depth"}  # noqa: RUF012

    def __init__(
        self,
        depth=8,
        hidden_size=128,
        heads=4,
        mlp_size=512,
        vocab_size=512,
        halting="graves",
        halting_bias=1.0,
        halting_epsilon=0.01,
        ponder_weight=0.01,
        copy_halted=True,
        **others,
    ):
        own = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        super().__init__(**{**others, "tie_word_embeddings": False})  # there is one matrix, not two that are tied
        for name, value in own.items():
            setattr(self, name, value)


class Cache:
    """Keys and values [B, n, S, d] of every step."""

    is_compileable, is_linear = False, (False,)  # `generate` asks a cache that it is given

    def __init__(self):
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
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

    def update(self, keys: Tensor, values: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Append to a step; returns all of its keys and values."""
        if step in self.rows:
            keys, values = (torch.cat(pair, 2) for pair in zip(self.rows[step], (keys, values)))  # noqa: B905
        if keys.shape[2] != self.length:
            raise ValueError("the cache was filled with fewer steps; keep depth as it was")
        self.rows[step] = keys, values
        return keys, values

    def reorder_cache(self, beam: Tensor) -> None:
        """Take other rows of the batch, as beam search asks."""
        self.rows = {t: (k.index_select(0, beam), v.index_select(0, beam)) for t, (k, v) in self.rows.items()}


class Linear(nn.Linear):
    """A map applied in the type of x, whatever its matrix and bias are."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., inward] -> [..., outward]."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class HaltingUnit(Linear):
    """p = sigmoid(w x + b); w starts at zero, so that b alone says how deep training begins."""

    def __init__(self, config: UniversalConfig):
        super().__init__(config.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [...] float32."""
        return super().forward(x.float())[..., 0].sigmoid()


class LayerNorm(nn.LayerNorm):
    """Float32 inside."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        scale, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, scale, bias, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal attention without positions of its own."""

    def __init__(self, config: UniversalConfig):
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = Linear(config.hidden_size, config.hidden_size, bias=False)

    def split(self, x: Tensor) -> list[Tensor]:
        """[B, S, h] -> q, k and v, [B, n, S, d] each."""
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor, mask: Tensor | None, cache: Cache | None, step: int) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        q, k, v = self.split(x)
        if cache is not None:
            k, v = cache.update(k, v, step)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and q.shape[2] > 1)
        return self.out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A = LN(x + MHSA(x)), LN(A + W_2 relu(W_1 A + b_1) + b_2)."""

    def __init__(self, config: UniversalConfig):
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm, self.mlp_norm = LayerNorm(config.hidden_size), LayerNorm(config.hidden_size)
        self.inward = Linear(config.hidden_size, config.mlp_size)
        self.outward = Linear(config.mlp_size, config.hidden_size)

    def forward(self, x: Tensor, mask: Tensor | None, cache: Cache | None, step: int) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        x = self.attention_norm(x + self.attention(x, mask, cache, step))
        return self.mlp_norm(x + self.outward(F.relu(self.inward(x))))


class Pondered(NamedTuple):
    """What positions have put out, y [B, S, h], their probabilities added up, remainders, and steps [B, S]."""

    output: Tensor
    total: Tensor
    remainder: Tensor
    updates: Tensor


def sinusoid(number: Tensor, size: int) -> Tensor:
    """[...] -> [..., size] float32: sin(n / 10000^(2j/size)) at 2j, the cosine at 2j + 1."""
    frequency = 10_000.0 ** (-torch.arange(0, size, 2, device=number.device, dtype=torch.float32) / size)
    angle = number[..., None].float() * frequency
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


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


class UniversalForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model: tokens to logits.

    Attributes:
        compute_dtype: None computes in the type of the embedding; bfloat16 with float32 weights trains as JAX does.
    """

    config_class = UniversalConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: UniversalConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layer = Layer(config)
        self.halting = HaltingUnit(config) if config.halting != "none" else None
        self.compute_dtype: torch.dtype | None = None
        self.post_init()
        self._keep_in_fp32_modules_strict = {r"\w+_norm", "halting", r"\w+ward.bias"}

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, HaltingUnit):
            nn.init.zeros_(module.weight)
            nn.init.constant_(module.bias, self.config.halting_bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)
        elif isinstance(module, Linear):
            size = module.in_features
            if module.bias is None:
                nn.init.normal_(module.weight, std=size**-0.5)
            else:
                nn.init.uniform_(module.weight, -(size**-0.5), size**-0.5)
                nn.init.zeros_(module.bias)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a DynamicCache has room for the trained steps only

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding, which is the head too."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Another embedding, perhaps of more tokens."""
        self.embedding = value

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
            labels: [B, S], the tokens themselves: they are shifted here; -100 is ignored. The loss has the ponder cost.
            depth: most steps; None takes the trained number.
            output_hidden_states: return also the state after every step that was taken, and what the head gets.
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
        x = x.to(self.compute_dtype or x.dtype) * self.config.hidden_size**0.5
        out, pondered, states = self.think(x, positions, mask, cache, depth or self.config.depth)
        last = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
        logits, loss = F.linear(out[:, last], self.embedding.weight.to(out.dtype)).float(), None
        if labels is not None:
            targets, count = labels[:, 1:].flatten(), kwargs.get("num_items_in_batch")
            counted, loss = targets != -100, F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
            if pondered is not None:
                cost = (pondered.updates + pondered.remainder)[:, :-1].flatten()
                loss = loss + self.config.ponder_weight * (cost * counted).sum()
            loss = loss / (counted.sum() if count is None else count)
        seen = (*states, out) if output_hidden_states else None
        said = CausalLMOutputWithPast(loss, logits, cache, seen)  # type: ignore
        return said.to_tuple() if return_dict is False else said

    def think(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None, steps: int):
        """x_0 [B, S, h] -> what the head is applied to, Pondered or None, and the states after the steps."""
        place, states, pondered = sinusoid(positions + 1, x.shape[-1]), [], None
        if self.halting is not None:
            zeros = torch.zeros(x.shape[:2], device=x.device)
            pondered = Pondered(torch.zeros(x.shape, device=x.device), zeros, zeros, zeros.long())
        for t in range(steps):
            running = None if pondered is None else pondered.total < 1
            signalled = (x + (place + sinusoid(torch.tensor(t + 1, device=x.device), x.shape[-1]))).to(x.dtype)
            if running is not None and self.config.copy_halted and not bool(running.any()):
                if cache is None:  # nobody will look at later steps
                    break
                _, keys, values = self.layer.attention.split(signalled)
                cache.update(keys, values, t)
                continue
            new = self.layer(signalled, mask, cache, t)
            if pondered is not None and self.halting is not None:
                pondered = self.ponder(pondered, self.halting(signalled), new, t == steps - 1)
            x = torch.where(running[..., None], new, x) if running is not None and self.config.copy_halted else new
            states.append(x)
        return x if pondered is None else pondered.output.to(x.dtype), pondered, states

    def ponder(self, before: Pondered, p: Tensor, new: Tensor, last: bool) -> Pondered:
        """One step: weights p, and at the last one what is left to 1."""
        running, left = before.total < 1, 1 - before.total
        summed = self.config.halting == "graves"
        halts = running & ((before.total + p > 1 - self.config.halting_epsilon) | (last and summed))
        weight = torch.where(halts, left, torch.where(running, p, 0))
        kept = before.output if summed else (1 - weight[..., None]) * before.output
        return Pondered(
            kept + weight[..., None] * new.float(),
            torch.where(halts, 1.0, before.total + weight),
            torch.where(halts, left, before.remainder),
            before.updates + running,
        )

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
