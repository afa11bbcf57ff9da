"""Ouro in PyTorch: a looped language model with an exit gate, in one file that needs torch and transformers only.

    model = AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True, dtype="auto")
    model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=20)

A stack of layers is applied R times (`total_ut_steps`); the final norm stands behind every loop, and what it puts out
is what the next loop gets and what the head and the gate read. The gate says with which probability lambda_t a token
stops after loop t, so that it stops there with p_t = lambda_t prod_{s<t} (1 - lambda_s), and after the last with all
that is left. Names of parameters and settings are those of the published models. In comments, B batch, S sequence, h
hidden size, V vocabulary, n heads, d head size, R loops.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class OuroConfig(PretrainedConfig):
    """Sizes under their published names."""

    model_type = "ouro"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=None,
        head_dim=None,
        vocab_size=49152,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        total_ut_steps=4,
        early_exit_threshold=1.0,
        entropy_weight=0.1,
        initializer_range=0.02,
        **others,
    ):
        own = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        super().__init__(**{**others, "tie_word_embeddings": False})
        for name, value in own.items():
            setattr(self, name, value)
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads


class Cache:
    """Keys and values [B, k, S, d] of every layer in every loop; layer j of N has the number t N + j in loop t."""

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

    def update(self, keys: Tensor, values: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Append; returns all keys and values of that number."""
        if number in self.rows:
            keys, values = (torch.cat(pair, 2) for pair in zip(self.rows[number], (keys, values)))  # noqa: B905
        if keys.shape[2] != self.length:
            raise ValueError("the cache was filled with other loops; keep total_ut_steps as it was")
        self.rows[number] = keys, values
        return keys, values

    def reorder_cache(self, beam: Tensor) -> None:
        """Take other rows of the batch, as beam search asks."""
        self.rows = {n: (k.index_select(0, beam), v.index_select(0, beam)) for n, (k, v) in self.rows.items()}


class Pass(NamedTuple):
    """What all layers of a pass see."""

    rotation: tuple[Tensor, Tensor]  # (cos, sin) [B, S, 1, d/2] float32
    mask: Tensor | None  # [B, 1, S, keys] bool, True where visible; None: causal
    cache: Cache | None


class RMSNorm(nn.Module):
    """x over the root mean square of its last axis, scaled; float32 inside."""

    def __init__(self, config: OuroConfig):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Linear(nn.Linear):
    """A matrix in whatever type, applied in that of x."""

    def __init__(self, inward: int, outward: int):
        super().__init__(inward, outward, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inward] -> [..., outward]."""
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Causal grouped-query attention; rotary positions of element i and i + d/2."""

    def __init__(self, config: OuroConfig):
        super().__init__()
        self.size, heads, keys = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.grouped = heads != keys
        self.q_proj = Linear(config.hidden_size, heads * self.size)
        self.k_proj = Linear(config.hidden_size, keys * self.size)
        self.v_proj = Linear(config.hidden_size, keys * self.size)
        self.o_proj = Linear(heads * self.size, config.hidden_size)

    def forward(self, x: Tensor, its: Pass, number: int) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        q, k, v = (part(x).unflatten(-1, (-1, self.size)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.transpose(1, 2) for t in (self.rotate(q, its), self.rotate(k, its), v))
        if its.cache is not None:
            k, v = its.cache.update(k, v, number)
        causal = its.mask is None and q.shape[2] > 1
        out = F.scaled_dot_product_attention(q, k, v, its.mask, is_causal=causal, enable_gqa=self.grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor, its: Pass) -> Tensor:
        """[B, S, n, d], in float32."""
        cos, sin = its.rotation
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: OuroConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """x <- x + N2(Attn(N1(x))), x <- x + N4(MLP(N3(x)))."""

    def __init__(self, config: OuroConfig):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm, self.input_layernorm_2 = RMSNorm(config), RMSNorm(config)
        self.post_attention_layernorm, self.post_attention_layernorm_2 = RMSNorm(config), RMSNorm(config)

    def forward(self, x: Tensor, its: Pass, number: int) -> Tensor:
        """[B, S, h] -> [B, S, h]; `number` is its place in the cache."""
        x = x + self.input_layernorm_2(self.self_attn(self.input_layernorm(x), its, number))
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class Model(nn.Module):
    """Everything but the head."""

    def __init__(self, config: OuroConfig):
        super().__init__()
        self.checkpointing = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)

    def forward(self, x: Tensor, its: Pass, loops: int) -> tuple[Tensor, Tensor]:
        """Embeddings [B, S, h] -> normed states after every loop [R, B, S, h], and the gate's logits [R, B, S]."""
        states, again = [], self.checkpointing and self.training and torch.is_grad_enabled()
        for t in range(loops):
            for number, layer in enumerate(self.layers, t * len(self.layers)):
                x = checkpoint(layer, x, its, number, use_reentrant=False) if again else layer(x, its, number)
            x = self.norm(x)
            states.append(x)
        after = torch.stack(states)
        gate = self.early_exit_gate
        return after, F.linear(after.float(), gate.weight.float(), gate.bias.float())[..., 0]


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


class OuroForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model: tokens to logits.

    Attributes:
        compute_dtype: None computes in the type of the embedding; bfloat16 with float32 weights trains as JAX does.
    """

    config_class = OuroConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: OuroConfig):
        super().__init__(config)
        self.model = Model(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.compute_dtype: torch.dtype | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def _set_gradient_checkpointing(self, enable=True, *_, **__) -> None:
        self.model.checkpointing = enable

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a DynamicCache has room for as many layers as the configuration says

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding."""
        return self.model.embed_tokens

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """The matrix of another head, perhaps of more tokens."""
        self.lm_head.weight, self.lm_head.out_features = new_embeddings.weight, new_embeddings.out_features

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, cache=None, **kwargs):
        """The tokens that the cache doesn't hold yet."""
        cache = cache or past_key_values or (Cache() if kwargs.get("use_cache", True) else None)
        options = ("total_ut_steps", "exit_threshold")
        return {
            "input_ids": cache.further(input_ids, attention_mask) if cache else input_ids,
            "past_key_values": cache,
            "attention_mask": attention_mask,
            "use_cache": cache is not None,
            "output_hidden_states": kwargs.get("output_hidden_states"),
            **{name: kwargs[name] for name in options if name in kwargs},
        }

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        total_ut_steps: int | None = None,
        exit_threshold: float | None = None,
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
            labels: [B, S], the tokens themselves, which are shifted here; -100 is ignored. The loss is that of the
                models' training: sum_t p_t CE_t - entropy_weight H(p), not the published code's.
            total_ut_steps: loops; None for the configuration's.
            exit_threshold: q; each token's logits are those of the first loop by which the gate has stopped with this
                probability; None for the configuration's `early_exit_threshold`, 1 for the last loop always. All loops
                are computed.
            output_hidden_states: return also the embeddings, and the normed states after every loop.
            logits_to_keep: compute the logits of that many last tokens only; 0: of all. Or of these places.
        """
        cache = past_key_values if cache is None else cache
        use_cache, output_hidden_states = agreed(
            self, input_ids, attention_mask, cache, labels, use_cache, output_hidden_states, total_ut_steps, kwargs
        )
        cache = Cache() if cache is None and use_cache else cache
        positions, mask = self.places(input_ids, attention_mask, cache)
        positions = positions if position_ids is None else position_ids
        if cache is not None:
            cache.length += input_ids.shape[1]
        e = self.model.embed_tokens(input_ids)
        e = e.to(self.compute_dtype or e.dtype)
        its = Pass(self.rotation(positions), mask, cache)
        states, gates = self.model(e, its, self.config.total_ut_steps if total_ut_steps is None else total_ut_steps)
        threshold = self.config.early_exit_threshold if exit_threshold is None else exit_threshold
        if not 0 <= threshold <= 1:
            raise ValueError(f"exit_threshold {threshold}: a probability is between 0 and 1")
        x = chosen(states, gates, threshold)
        last = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
        logits, loss = self.lm_head(x[:, last]).float(), None
        if labels is not None:
            total, count = self.expected_loss(states, gates, labels), kwargs.get("num_items_in_batch")
            loss = total / ((labels[:, 1:] != -100).sum() if count is None else count)
        seen = (e, *states) if output_hidden_states else None
        said = CausalLMOutputWithPast(loss, logits, cache, seen)  # type: ignore
        return said.to_tuple() if return_dict is False else said

    def expected_loss(self, states: Tensor, gates: Tensor, labels: Tensor) -> Tensor:
        """sum_t p_t CE_t - entropy_weight H(p), summed over the tokens that count."""
        targets, log_p = labels[:, 1:], exit_distribution(gates)[:, :, :-1]
        losses = torch.stack(
            [F.cross_entropy(self.lm_head(x[:, :-1]).float().mT, targets, reduction="none") for x in states]
        )
        p = log_p.exp()
        return ((p * (losses + self.config.entropy_weight * log_p)).sum(0) * (targets != -100)).sum()

    def places(self, tokens: Tensor, segments: Tensor | None, cache: Cache | None) -> tuple[Tensor, Tensor | None]:
        """(positions [B or 1, S] within the documents, mask as `Pass` has it)."""
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

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, S, 1, d/2] float32."""
        half = self.config.head_dim // 2
        steps = torch.arange(half, device=positions.device, dtype=torch.float32) / half
        angle = positions[:, :, None, None].float() * self.config.rope_theta**-steps
        return angle.cos(), angle.sin()


def exit_distribution(gates: Tensor) -> Tensor:
    """log p_t [R, ...] from the gate's logits; the last loop takes all that is left."""
    nothing = torch.zeros_like(gates[:1])
    before = torch.cat([nothing, F.logsigmoid(-gates[:-1]).cumsum(0)])
    return before + torch.cat([F.logsigmoid(gates[:-1]), nothing])


def chosen(states: Tensor, gates: Tensor, threshold: float) -> Tensor:
    """Of every token the state [B, S, h] of the first loop with p_1 + ... + p_t >= threshold, below 1; or the last."""
    if threshold >= 1:
        return states[-1]
    reached = 1 - F.logsigmoid(-gates[:-1]).cumsum(0).exp() >= threshold
    first = len(states) - 1 - reached.long().sum(0)  # once reached, it stays so
    return states.gather(0, first[None, ..., None].expand_as(states[:1]))[0]
