"""Huginn in PyTorch: latent recurrent depth, in one file that needs torch and transformers only.

    model = AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True, dtype="auto")
    model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=20, num_steps=16)

A prelude embeds the tokens, e = P(x). A core is applied r times (`num_steps`) on the state and that input, from a
random state s_0: s <- R(s, e). A coda reads the last state, p = C(s_r). Retrofitted models, which the key `rope_theta`
tells, have layers as Llama has, rotate in halves where the others rotate neighbours, and have no norm between core and
coda. Names of parameters and settings are those of the published models. In comments, B batch, S sequence, h hidden
size, V vocabulary, n heads, d head size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class HuginnConfig(PretrainedConfig):
    """Sizes under their published names."""

    model_type = "huginn_raven"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "n_embd",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }

    def __init__(
        self,
        n_embd=5280,
        n_heads=55,
        num_key_value_heads=None,
        n_layers=8,
        n_layers_in_prelude=2,
        n_layers_in_recurrent_block=4,
        n_layers_in_coda=2,
        intermediate_size=17920,
        vocab_size=65536,
        padded_vocab_size=None,
        mean_recurrence=32,
        mean_backprop_depth=8,
        tie_embeddings=True,
        qk_bias=True,
        norm_eps=1e-6,
        rope_base=50_000.0,
        rope_theta=None,
        rope_scaling=None,
        rope_parameters=None,
        init_values=None,
        **others,
    ):
        apart = ("self", "others", "__class__", "rope_scaling", "rope_parameters")
        own = {name: value for name, value in locals().items() if name not in apart}
        super().__init__(**{**others, "tie_word_embeddings": False})  # it has no effect: tie_embeddings decides
        for name, value in own.items():
            setattr(self, name, value)
        if scaling := rope_scaling or rope_parameters:  # the latter is what transformers 5 writes
            self.rope_parameters = {"rope_theta": rope_theta, **scaling}
        self.num_key_value_heads = num_key_value_heads or n_heads
        self.padded_vocab_size = padded_vocab_size or vocab_size
        std, core = (2 / (5 * n_embd)) ** 0.5, n_layers_in_recurrent_block * mean_recurrence
        passed = n_layers_in_prelude + core + n_layers_in_coda
        drawn = {"std": std, "out_proj": std / (2 * passed) ** 0.5, "embedding": std, "embed_scale": n_embd**0.5}
        self.init_values = {**drawn, **(init_values or {})}

    @property
    def sandwich(self) -> bool:
        """Whether layers have norms behind their halves too."""
        return self.rope_theta is None


class Cache:
    """Keys and values [B, k, S, d] of every layer; a core layer has its own at every recurrence."""

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

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append to a layer; returns all of its keys and values."""
        if layer in self.rows:
            keys, values = (torch.cat(pair, 2) for pair in zip(self.rows[layer], (keys, values)))  # noqa: B905
        if keys.shape[2] != self.length:
            raise ValueError("the cache was filled with other recurrences; keep num_steps as it was")
        self.rows[layer] = keys, values
        return keys, values

    def reorder_cache(self, beam: Tensor) -> None:
        """Take other rows of the batch, as beam search asks."""
        self.rows = {n: (k.index_select(0, beam), v.index_select(0, beam)) for n, (k, v) in self.rows.items()}


class Step(NamedTuple):
    """What all layers of a pass see."""

    rotation: tuple[Tensor, Tensor]  # (cos, sin) [B, S, 1, d/2] float32
    mask: Tensor | None  # [B, 1, S, keys] bool, True where visible; None: causal
    cache: Cache | None


class RMSNorm(nn.Module):
    """x over the root mean square of its last axis, scaled; float32 inside."""

    def __init__(self, config: HuginnConfig):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.n_embd))

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Linear(nn.Linear):
    """A matrix in whatever type, applied in that of x; its rows, in equal parts, are drawn with `init_values`."""

    def __init__(self, config: HuginnConfig, inward: int, outward: int, *deviations: str):
        self.deviations = [config.init_values[name] for name in deviations]
        super().__init__(inward, outward, bias=False)

    def reset_parameters(self) -> None:
        """Draw anew, from normals cut off at three deviations."""
        for rows, std in zip(self.weight.chunk(len(self.deviations)), self.deviations):  # noqa: B905
            nn.init.trunc_normal_(rows, std=std, a=-3 * std, b=3 * std)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inward] -> [..., outward]."""
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: HuginnConfig):
        super().__init__()
        self.heads, self.kv_heads = config.n_heads, config.num_key_value_heads
        self.size = config.n_embd // config.n_heads
        self.interleaved = config.sandwich
        rows = (self.heads + 2 * self.kv_heads) * self.size
        self.Wqkv = Linear(config, config.n_embd, rows, "std")
        self.proj = Linear(config, config.n_embd, config.n_embd, "out_proj")
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, self.heads, self.size)) if config.qk_bias else None

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        q, k, v = self.Wqkv(x).unflatten(-1, (-1, self.size)).split([self.heads, self.kv_heads, self.kv_heads], 2)
        if self.qk_bias is not None:
            q, k = q + self.qk_bias[0].to(q.dtype), k + self.qk_bias[1].to(k.dtype)
        q, k, v = (t.transpose(1, 2) for t in (self.rotate(q, step), self.rotate(k, step), v))
        if step.cache is not None:
            k, v = step.cache.update(k, v, layer)
        causal, grouped = step.mask is None and q.shape[2] > 1, self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, step.mask, is_causal=causal, enable_gqa=grouped)
        return self.proj(out.transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor, step: Step) -> Tensor:
        """[B, S, n, d], in float32: pairs are neighbours, or element i and i + d/2."""
        cos, sin = step.rotation
        if self.interleaved:
            first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        else:
            first, second = x.float().chunk(2, -1)
        turned = first * cos - second * sin, second * cos + first * sin
        return (torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)).to(x.dtype)


class GatedMLP(nn.Module):
    """SwiGLU; the gate's rows come first."""

    def __init__(self, config: HuginnConfig):
        super().__init__()
        self.fc = Linear(config, config.n_embd, 2 * config.intermediate_size, "std", "out_proj")
        self.proj = Linear(config, config.intermediate_size, config.n_embd, "out_proj")

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        gate, up = self.fc(x).chunk(2, -1)
        return self.proj(F.silu(gate) * up)


class Layer(nn.Module):
    """x <- N2(x + Attn(N1(x))), x <- N4(x + MLP(N3(x))); or x <- x + Attn(N1(x)), x <- x + MLP(N2(x))."""

    def __init__(self, config: HuginnConfig):
        super().__init__()
        self.sandwich = config.sandwich
        self.attn, self.mlp = Attention(config), GatedMLP(config)
        self.norm_1, self.norm_2 = RMSNorm(config), RMSNorm(config)
        if self.sandwich:
            self.norm_3, self.norm_4 = RMSNorm(config), RMSNorm(config)

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[B, S, h] -> [B, S, h]; `layer` is its number in the cache."""
        x = x + self.attn(self.norm_1(x), step, layer)
        if not self.sandwich:
            return x + self.mlp(self.norm_2(x))
        x = self.norm_2(x)
        return self.norm_4(x + self.mlp(self.norm_3(x)))


class Transformer(nn.Module):
    """Everything but the head."""

    def __init__(self, config: HuginnConfig):
        super().__init__()
        self.config, self.checkpointing = config, False
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.prelude, self.core_block, self.coda = (
            nn.ModuleList(Layer(config) for _ in range(count))
            for count in (config.n_layers_in_prelude, config.n_layers_in_recurrent_block, config.n_layers_in_coda)
        )
        self.adapter = Linear(config, 2 * config.n_embd, config.n_embd, "std")
        self.ln_f = RMSNorm(config)

    def forward(self, e: Tensor, state: Tensor, recurrences: tuple[int, int], step: Step, keep: bool):
        """Embeddings and states [B, S, h] -> what the head is applied to [B, S, h]; P(x) and all states that follow.

        Args:
            recurrences: without gradient, and with it after those.
            keep: whether to return the latter.
        """
        first_core = len(self.prelude) + len(self.coda)
        e = self.through(self.prelude, e, step, 0)
        kept = [e] if keep else []
        for number in range(sum(recurrences)):
            with torch.set_grad_enabled(torch.is_grad_enabled() and number >= recurrences[0]):
                x = self.adapter(torch.cat([state, e], -1))
                state = self.through(self.core_block, x, step, first_core + number * len(self.core_block))
            kept += [state] if keep else []
        x = self.ln_f(state) if self.config.sandwich else state
        return self.ln_f(self.through(self.coda, x, step, len(self.prelude))), kept

    def through(self, layers: nn.ModuleList, x: Tensor, step: Step, first: int) -> Tensor:
        """[B, S, h] -> [B, S, h]; `first` is the first layer's number in the cache."""
        for number, layer in enumerate(layers, first):
            again = self.checkpointing and self.training and torch.is_grad_enabled()
            x = checkpoint(layer, x, step, number, use_reentrant=False) if again else layer(x, step, number)
        return x


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


class HuginnForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model: tokens to logits.

    Attributes:
        compute_dtype: None computes in the type of the embedding; bfloat16 with float32 weights trains as JAX does.
        state_std: of the initial state's numbers, which are cut off at three of it.
    """

    config_class = HuginnConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _supports_sdpa = True
    _keys_to_ignore_on_load_unexpected = ["freqs_cis", "lm_head"]  # noqa: RUF012

    def __init__(self, config: HuginnConfig):
        super().__init__(config)
        self.transformer = Transformer(config)
        rows = config.padded_vocab_size
        self.lm_head = None if config.tie_embeddings else Linear(config, config.n_embd, rows, "std")
        self.compute_dtype: torch.dtype | None = None
        self.state_std = config.init_values["std"] * config.init_values["embed_scale"]
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Linear):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding):
            std = self.config.init_values["embedding"]
            nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)

    def _set_gradient_checkpointing(self, enable=True, *_, **__) -> None:
        self.transformer.checkpointing = enable

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a DynamicCache has room for as many layers as the configuration says

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding."""
        return self.transformer.wte

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Another embedding, perhaps of more tokens."""
        self.transformer.wte = value
        self.config.padded_vocab_size = value.num_embeddings

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, cache=None, **kwargs):
        """The tokens that the cache doesn't hold yet, and their initial states."""
        cache = cache or past_key_values or (Cache() if kwargs.get("use_cache", True) else None)
        held = cache.get_seq_length() if cache else 0
        fed = cache.further(input_ids, attention_mask) if cache else input_ids
        states = kwargs.get("input_states")
        return {
            "input_ids": fed,
            "past_key_values": cache,
            "attention_mask": attention_mask,
            "use_cache": cache is not None,
            "output_hidden_states": kwargs.get("output_hidden_states"),
            "num_steps": kwargs.get("num_steps"),
            "input_states": None if states is None else states[:, held : held + fed.shape[1]],
        }

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        num_steps: int | tuple[int, int] | None = None,
        input_states: Tensor | None = None,
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
            labels: [B, S], the tokens themselves: they are shifted here, unlike in the published code; -100 is ignored.
            num_steps: recurrences, or (those without gradient, those with it after them). None takes
                `mean_recurrence`, and in training draws as the models were trained (see `draw`).
            input_states: [B, S, h], the initial state; in `generate` also of the positions to come. None draws it: in
                training anew, otherwise by position, so that a token starts the same however it is batched or cached.
            output_hidden_states: return also P(x), the state after every recurrence, and what the head is applied to.
            logits_to_keep: compute the logits of that many last tokens only; 0: of all. Or of these places.
        """
        cache = past_key_values if cache is None else cache
        use_cache, output_hidden_states = agreed(
            self, input_ids, attention_mask, cache, labels, use_cache, output_hidden_states, None, kwargs
        )
        cache = Cache() if cache is None and use_cache else cache
        positions, mask = self.places(input_ids, attention_mask, cache)
        positions = positions if position_ids is None else position_ids
        step = Step(self.rotation(positions), mask, cache)
        if cache is not None:
            cache.length += input_ids.shape[1]
        e = self.transformer.wte(input_ids)
        e = e.to(self.compute_dtype or e.dtype) * self.config.init_values["embed_scale"]
        state = self.initial_state(positions) if input_states is None else input_states
        state = state.to(e.device, e.dtype).expand_as(e)
        steps = self.draw() if num_steps is None else num_steps
        steps = tuple(map(int, steps)) if isinstance(steps, (tuple, list)) else (0, int(steps))
        if len(steps) != 2 or min(steps) < 0:
            raise ValueError(f"num_steps {num_steps}: give a number of 0 or more, or a pair of them")
        x, states = self.transformer(e, state, steps, step, bool(output_hidden_states))
        head = self.transformer.wte if self.lm_head is None else self.lm_head
        last = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
        logits, loss = F.linear(x[:, last], head.weight.to(x.dtype)).float(), None
        if labels is not None:
            targets, count = labels[:, 1:].flatten(), kwargs.get("num_items_in_batch")
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
            loss = loss / ((targets != -100).sum() if count is None else count)
        seen = (*states, x) if output_hidden_states else None
        said = CausalLMOutputWithPast(loss, logits, cache, seen)  # type: ignore
        return said.to_tuple() if return_dict is False else said

    def places(self, tokens: Tensor, segments: Tensor | None, cache: Cache | None) -> tuple[Tensor, Tensor | None]:
        """(positions [B or 1, S] within the documents, mask as `Step` has it)."""
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
        """(cos, sin) [B, S, 1, d/2] float32; with scaled rotations as Llama 3.1 turns for longer texts."""
        config = self.config
        half, base = config.n_embd // config.n_heads // 2, config.rope_theta or config.rope_base
        frequency = base ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
        scaling = getattr(config, "rope_parameters", None) or {}
        if scaling.get("rope_type") == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            turns = frequency * scaling["original_max_position_embeddings"] / (2 * math.pi)
            stays = ((turns - low) / (high - low)).clamp(0, 1)
            frequency = frequency * (stays + (1 - stays) / scaling["factor"])
        angle = positions[:, :, None, None].float() * frequency
        return angle.cos(), angle.sin()

    def initial_state(self, positions: Tensor) -> Tensor:
        """[B, S, h] float32."""
        std, size = self.state_std, self.config.n_embd
        if self.training:
            fresh = torch.empty(*positions.shape, size, device=positions.device)
            return nn.init.trunc_normal_(fresh, std=std, a=-3 * std, b=3 * std)
        places, where = positions.unique(return_inverse=True)
        seeds = (torch.Generator().manual_seed(place) for place in places.tolist())
        drawn = [nn.init.trunc_normal_(torch.empty(size), 0.0, std, -3 * std, 3 * std, seed) for seed in seeds]
        return torch.stack(drawn).to(positions.device)[where]

    def draw(self) -> tuple[int, int]:
        """Recurrences: r = 1 + Poisson(rate) in training, rate log-normal, of which the last few get gradient."""
        mean, sigma = self.config.mean_recurrence, 0.5
        if not self.training:
            return 0, mean
        rate = torch.empty(1).log_normal_(math.log(mean) - sigma**2 / 2, sigma)
        total = 1 + int(torch.poisson(rate))
        last = min(total, self.config.mean_backprop_depth)
        return total - last, last
