"""MoEUT in PyTorch, in one file that needs torch and transformers only.

    model = AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True, dtype="auto")
    model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=20)

A group of layers is repeated R times (`depth`). Feed-forward networks are sigma-MoE, attentions SwitchHead, and layer
norms stand only before what a softmax or sigmoid follows (Csordas et al., 2024). Names and shapes of the parameters are
those of the published code. Branches are computed in the dtype of the embedding; selection, norms and softmax in
float32. In comments, B batch, S sequence, h hidden size, V vocabulary, n heads, d head size, E experts, k active ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class MoeutConfig(PretrainedConfig):
    """Sizes and switches under the names of the run's configuration."""

    model_type = "moeut"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {"num_attention_heads": "heads", "num_hidden_layers": "layers"}  # noqa: RUF012

    def __init__(
        self,
        depth=4,
        layers=2,
        hidden_size=128,
        vocab_size=512,
        heads=4,
        head_size=32,
        attention_experts=4,
        attention_experts_per_token=2,
        num_experts=32,
        experts_per_token=4,
        expert_size=64,
        rope_base=10_000.0,
        expert_entropy_weight=0.01,
        attention_entropy_weight=0.001,
        **others,
    ):
        own = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        super().__init__(**{**others, "tie_word_embeddings": False})
        for name, value in own.items():
            setattr(self, name, value)


class Cache:
    """Keys, rotated by their positions, and values [B, n, S, d] of every layer in every repeat."""

    is_compileable, is_linear = False, (False,)  # `generate` asks a cache that it is given

    def __init__(self):
        self.rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
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

    def update(self, keys: Tensor, values: Tensor, place: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Append to a repeat and layer; returns all of its keys and values."""
        if place in self.rows:
            keys, values = (torch.cat(pair, 2) for pair in zip(self.rows[place], (keys, values)))  # noqa: B905
        if keys.shape[2] != self.length:
            raise ValueError("the cache was filled with fewer repeats; keep depth as it was")
        self.rows[place] = keys, values
        return keys, values

    def reorder_cache(self, beam: Tensor) -> None:
        """Take other rows of the batch, as beam search asks."""
        self.rows = {place: (k.index_select(0, beam), v.index_select(0, beam)) for place, (k, v) in self.rows.items()}


class Linear(nn.Linear):
    """A map applied in the type of x, whatever its matrix and bias are."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., inward] -> [..., outward]."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """Float32 inside."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        scale, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, scale, bias, self.eps).to(x.dtype)


def select(z: Tensor, selector: Tensor, selected: int, heads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, S, n, E] in float32, and the numbers and sigmoids of the k largest of each head, [B S n k].

    Experts of all heads are numbered in a row."""
    logits = F.linear(z.float(), selector.float()).unflatten(-1, (heads, -1))
    best, experts = logits.topk(selected, -1)
    experts = experts + torch.arange(heads, device=z.device)[:, None] * logits.shape[-1]
    return logits, experts.flatten(), best.sigmoid().flatten()


def through_experts(rows: Tensor, experts: Tensor, matrices: Tensor) -> Tensor:
    """Each row [N, a] times the matrix of its expert: matrices [E, a, b] -> [N, b]."""
    order = experts.argsort(stable=True)
    parts = rows[order].split(experts.bincount(minlength=len(matrices)).tolist())
    done = [part @ matrix.to(part.dtype) for part, matrix in zip(parts, matrices)]  # noqa: B905
    return torch.cat(done)[order.argsort()]


class SigmaMoE(nn.Module):
    """sum over the selected e of s_e relu(x K_e) V_e."""

    def __init__(self, config: MoeutConfig):
        super().__init__()
        e, h, size = config.num_experts, config.hidden_size, config.expert_size
        self.selected = config.experts_per_token
        self.keys = nn.Parameter(torch.empty(e, h, size))
        self.values = nn.Parameter(torch.empty(e, size, h))
        self.expert_sel = nn.Parameter(torch.empty(e, h))

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, h], and what selects -> [B, S, h], logits [B, S, 1, E]."""
        logits, experts, scores = select(z, self.expert_sel, self.selected)
        rows = x.flatten(0, 1).repeat_interleave(self.selected, 0)
        inner = F.relu(through_experts(rows, experts, self.keys))
        out = through_experts(inner, experts, self.values) * scores[:, None].to(x.dtype)
        return out.view(*x.shape[:2], self.selected, -1).sum(2), logits


class Attention(nn.Module):
    """SwitchHead: experts for values and outputs of every head; with one expert, plain matrices and a gate a head."""

    def __init__(self, config: MoeutConfig):
        super().__init__()
        h, n, d, e = config.hidden_size, config.heads, config.head_size, config.attention_experts
        self.heads, self.size, self.base = n, d, config.rope_base
        self.experts, self.selected = e, config.attention_experts_per_token
        self.q, self.k = Linear(h, n * d, bias=False), Linear(h, n * d, bias=False)
        self.v = nn.Parameter(torch.empty((n * e, h, d) if e > 1 else (n * d, h)))
        self.o = nn.Parameter(torch.empty((n * e, d, h) if e > 1 else (h, n * d)))
        if e > 1:
            self.sel_v = nn.Parameter(torch.empty(n * e, h))
        self.sel_o = nn.Parameter(torch.empty(n * e, h))

    def forward(
        self,
        x: Tensor,
        z: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
        place: tuple[int, int],
    ) -> tuple[Tensor, list[Tensor]]:
        """[B, S, h], and what is normed -> [B, S, h], logits [B, S, n, E] of the selections."""
        q, k = (self.rotate(m(z).unflatten(-1, (self.heads, -1)).transpose(1, 2), positions) for m in (self.q, self.k))
        v, said = self.values(x, z)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, place)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and q.shape[2] > 1)
        out, also = self.outputs(out.transpose(1, 2), z)
        return out, said + also

    def values(self, x: Tensor, z: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[B, S, n, d]."""
        if self.experts == 1:
            return F.linear(x, self.v.to(x.dtype)).unflatten(-1, (self.heads, -1)), []
        logits, experts, scores = select(z, self.sel_v, self.selected, self.heads)
        rows = x.flatten(0, 1).repeat_interleave(self.heads * self.selected, 0)
        made = through_experts(rows, experts, self.v) * scores[:, None].to(x.dtype)
        return made.view(*x.shape[:2], self.heads, self.selected, -1).sum(3), [logits]

    def outputs(self, attended: Tensor, z: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[B, S, n, d] -> [B, S, h]."""
        if self.experts == 1:
            gate = F.linear(z.float(), self.sel_o.float()).sigmoid()[..., None].to(attended.dtype)
            return F.linear((attended * gate).flatten(2), self.o.to(attended.dtype)), []
        logits, experts, scores = select(z, self.sel_o, self.selected, self.heads)
        rows = attended.flatten(0, 2).repeat_interleave(self.selected, 0)
        made = through_experts(rows, experts, self.o) * scores[:, None].to(attended.dtype)
        return made.view(*attended.shape[:2], self.heads * self.selected, -1).sum(2), [logits]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, n, S, d], the first half of each head in halves; the second knows no positions."""
        quarter = self.size // 4
        frequency = self.base ** (-torch.arange(quarter, device=x.device, dtype=torch.float32) / quarter)
        angle = positions[:, None, :, None].float() * frequency
        cos, sin = angle.cos(), angle.sin()
        first, second, rest = x.float().split([quarter, quarter, self.size - 2 * quarter], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


class Layer(nn.Module):
    """x += SwitchHead(LN(x), values of x), then x += sigma-MoE(x, selected by LN(x))."""

    def __init__(self, config: MoeutConfig):
        super().__init__()
        self.attention, self.ffn = Attention(config), SigmaMoE(config)
        self.ln1, self.ln2 = LayerNorm(config.hidden_size), LayerNorm(config.hidden_size)

    def forward(self, x: Tensor, *others) -> tuple[Tensor, list[Tensor], Tensor]:
        """[B, S, h] -> [B, S, h], and the logits of the attention's selections and of the experts."""
        attended, said = self.attention(x, self.ln1(x), *others)
        x = x + attended
        made, logits = self.ffn(x, self.ln2(x))
        return x + made, said, logits


class Group(nn.Module):
    """The layers that are repeated."""

    def __init__(self, config: MoeutConfig):
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))


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


class MoeutForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model: tokens to logits.

    Attributes:
        compute_dtype: None computes in the type of the embedding; bfloat16 with float32 weights trains as JAX does.
    """

    config_class = MoeutConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: MoeutConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.transformer = Group(config)
        self.out_norm = LayerNorm(config.hidden_size)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.compute_dtype: torch.dtype | None = None
        self.post_init()
        # Without a star, which transformers 5 would take for a glob's.
        self._keep_in_fp32_modules_strict = {r"ln\d", "out_norm", "expert_sel", "sel_v", "sel_o", "lm_head.bias"}

    def _init_weights(self, module: nn.Module) -> None:
        c = self.config
        scale, bound = (2 / (c.layers * c.depth)) ** 0.5, c.hidden_size**-0.5
        width, rows = c.heads * c.head_size, c.num_experts * c.expert_size
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=bound)
        elif isinstance(module, Linear) and module.bias is not None:  # the head
            nn.init.uniform_(module.weight, -bound, bound)
            nn.init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, (Linear, Attention, SigmaMoE)):
            for name, its in module.named_parameters(recurse=False):
                std = {"o": width**-0.5, "values": rows**-0.5}.get(name, bound)
                nn.init.normal_(its, std=scale * std)
                if "sel" in name:
                    its.data = F.normalize(its.data, dim=-1) * scale

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a DynamicCache has no place for repeats

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Another embedding, perhaps of more tokens."""
        self.embedding = value

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """The matrix and bias of another head, perhaps of more tokens."""
        self.lm_head.weight, self.lm_head.out_features = new_embeddings.weight, new_embeddings.out_features
        self.lm_head.bias = nn.Parameter(new_embeddings.bias.float())

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
            labels: [B, S], the tokens themselves: they are shifted here; -100 is ignored. In training mode the loss has
                the regularisers of the routers.
            depth: how often the group is applied; None takes the trained number.
            output_hidden_states: return also the state after every repeat, and what the head gets.
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
        states, routers = [], []
        for r in range(depth or self.config.depth):
            said = []
            for g, layer in enumerate(self.transformer.layers):
                x, attention, experts = layer(x, positions, mask, cache, (r, g))
                said += [*((logits, False) for logits in attention), (experts, True)]
            states.append(x)
            routers.append(said)
        last = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
        out = self.out_norm(x[:, last])
        logits, loss = self.lm_head(out).float(), None
        if labels is not None:
            counted = labels[:, 1:] != -100
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            if self.training:
                real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
                loss = loss + (self.regularisers(routers, real != 0) * counted.sum(1)).sum()
            count = kwargs.get("num_items_in_batch")
            loss = loss / (counted.sum() if count is None else count)
        seen = (*states, out) if output_hidden_states else None
        said = CausalLMOutputWithPast(loss, logits, cache, seen)  # type: ignore
        return said.to_tuple() if return_dict is False else said

    def regularisers(self, routers: list[list[tuple[Tensor, bool]]], real: Tensor) -> Tensor:
        """-H of the mean probabilities of each row, over its tokens and all repeats; weighted and summed, [B]."""
        c, total = self.config, torch.zeros(len(real), device=real.device)
        weights = real[:, :, None, None] / real.sum(1).clamp(min=1)[:, None, None, None]
        for repeats in zip(*routers):  # noqa: B905
            mean = torch.stack([(logits.softmax(-1) * weights).sum(1) for logits, _ in repeats]).mean(0)  # [B, n, E]
            weight = c.expert_entropy_weight if repeats[0][1] else c.attention_entropy_weight
            total = total + weight * (mean * mean.clamp(min=torch.finfo(mean.dtype).tiny).log()).sum(-1).mean(-1)
        return total

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
