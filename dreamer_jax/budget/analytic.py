"""Parameters and FLOPs per token by arithmetic (SPEC.md 4): exact integers, no jax, no allocation.

Every count is a dict from part to number, over PARTS:
    embedding   the look-up table [V, h]
    SA, DA      projections, scores and values, pre-norm, q/k norms
    EA          the experts and their pre-norm
    routers     query projections, keys and their norms, of EA and (in DR) of the attention MoEs
    residual    the norm of the residual stream and its additions
    head        the product with [h, V]

FLOPs are 2 per multiply-add of a matrix product. Elementwise work is counted apart: one FLOP an element of each
elementwise function (a norm, a rotation, a softmax, a sigmoid, a product, an addition), as docs/budget.md lists.
"""

from __future__ import annotations

from dataclasses import dataclass

from dreamer_jax.config.models.dreamer import DreamerConfig

PARTS: tuple[str, ...] = ("embedding", "SA", "DA", "EA", "routers", "residual", "head")
Counts = dict[str, float]


@dataclass(frozen=True)
class _Attention:
    """Sizes of one attention: columns of its fused q/k/v projection, rows of its output projection."""

    heads: int
    kv_heads: int
    head_size: int

    @property
    def qkv_size(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def output_size(self) -> int:
        return self.heads * self.head_size

    @property
    def rotated_size(self) -> int:
        """Elements of q and k, which are normalised and rotated (v is not)."""
        return (self.heads + self.kv_heads) * self.head_size

    def projection_weights(self, hidden_size: int) -> int:
        return hidden_size * (self.qkv_size + self.output_size)


def _attentions(model: DreamerConfig) -> dict[str, _Attention]:
    sizes = {"SA": _Attention(model.sa_heads, model.sa_kv_heads, model.sa_head_size)}
    if model.depth_attention:
        sizes["DA"] = _Attention(model.da_heads, model.da_kv_heads, model.da_head_size)
    return sizes


def average_context(length: int) -> float:
    """Keys a causal query sees on average over `length` positions, its own included: (length + 1) / 2."""
    return (length + 1) / 2


def parameters(model: DreamerConfig, folded: bool = False) -> dict[str, int]:
    """Stored parameters of each part.

    Args:
        model: sizes of the model.
        folded: False counts what training stores (SPEC.md 4); True what inference stores after the shared
            experts are added into the routed ones (Eq. 8).
    """
    h, r = model.hidden_size, model.router_size
    layers = 1 if model.recurrent else model.depth
    linear_experts = (model.depth + (not folded)) if model.recurrent else 1
    attentions = _attentions(model)

    count = dict.fromkeys(PARTS, 0)
    count["embedding"] = count["head"] = model.vocab_size * h
    count["residual"] = h
    for name, attention in attentions.items():
        norms = h + 2 * attention.head_size
        count[name] = layers * (linear_experts * attention.projection_weights(h) + norms)
    count["EA"] = layers * (model.num_experts * 3 * h * model.expert_size + h)
    count["routers"] = layers * sum(h * r + experts * r + 2 * r for experts in _routed_experts(model))
    return count


def active_parameters(model: DreamerConfig) -> dict[str, int]:
    """Parameters one token meets on its way through all depths, each counted once, after folding.

    One row of the embedding; in DR the experts of different depths are taken to be different ones as far as there
    are enough (at most k·L of E), which is an upper bound.
    """
    h = model.hidden_size
    count = parameters(model, folded=True)
    count["embedding"] = h
    experts = min(model.num_experts, model.experts_per_token * model.depth)
    if not model.recurrent:
        experts = model.depth * model.experts_per_token
    norms = h if model.recurrent else model.depth * h
    count["EA"] = experts * 3 * h * model.expert_size + norms
    return count


def matmul_flops(
    model: DreamerConfig, context: float, depth_context: float | None = None, folded: bool = True
) -> Counts:
    """FLOPs per token of the forward's matrix products, 2 per multiply-add.

    Args:
        model: sizes of the model.
        context: keys of the sequence attention a token meets on average; `average_context(1024)` in Table 1.
        depth_context: the same of depth attention; default the average depth (L + 1) / 2.
        folded: False adds the products with the shared experts of Eq. 7.
    """
    h, r, depth = model.hidden_size, model.router_size, model.depth
    contexts = {"SA": context, "DA": average_context(depth) if depth_context is None else depth_context}
    branches = 1 if folded or not model.recurrent else 2

    multiply_adds = dict.fromkeys(PARTS, 0.0)
    for name, attention in _attentions(model).items():
        scores_and_values = 2 * contexts[name] * attention.output_size
        multiply_adds[name] = depth * (branches * attention.projection_weights(h) + scores_and_values)
    multiply_adds["EA"] = depth * model.experts_per_token * 3 * h * model.expert_size
    multiply_adds["routers"] = depth * sum(h * r + experts * r for experts in _routed_experts(model))
    multiply_adds["head"] = h * model.vocab_size
    return {part: 2 * number for part, number in multiply_adds.items()}


def elementwise_flops(
    model: DreamerConfig, context: float, depth_context: float | None = None, folded: bool = True
) -> Counts:
    """FLOPs per token of everything that is not a matrix product, up to the logits; arguments as matmul_flops.

    One FLOP an element of each function: norm, rotation, softmax, sigmoid, product, addition, and one a comparison of
    a selection (k passes over the experts). Norms of the routers' keys belong to no token and aren't counted.
    """
    h, r, k, depth = model.hidden_size, model.router_size, model.experts_per_token, model.depth
    contexts = {"SA": context, "DA": average_context(depth) if depth_context is None else depth_context}
    attentions = _attentions(model)

    count = dict.fromkeys(PARTS, 0.0)
    for name, attention in attentions.items():
        norms_and_rotation = h + 2 * attention.rotated_size
        softmax = contexts[name] * attention.heads
        mixture = 0
        if model.recurrent:  # the score times the output; unfolded twice, and the sum of both branches
            mixture = (1 if folded else 3) * (attention.qkv_size + h)
        count[name] = depth * (norms_and_rotation + softmax + mixture)
    count["EA"] = depth * (h + 2 * k * model.expert_size + (2 * k - 1) * h)  # norm; silu, product; weighted sum

    selected = [k] + [1] * (len(_routed_experts(model)) - 1)
    for experts, active in zip(_routed_experts(model), selected, strict=True):
        norm_and_rotation = 2 * r
        sigmoid_and_bias = 2 * experts
        normalise = 2 * k if active > 1 else 0
        count["routers"] += depth * (norm_and_rotation + sigmoid_and_bias + active * experts + normalise)

    additions = depth * (len(attentions) + 1) * h
    norms = (depth if model.recurrent else 1) * h
    count["residual"] = additions + norms
    return count


def training_flops(model: DreamerConfig, sequence_length: int) -> tuple[float, float]:
    """Model FLOPs per token of training, what utilisation is measured by: (matrix products, elementwise work).

    3 times the forward: the backward pass takes two products for each of the forward, and elementwise work is taken to
    behave alike. Documents are taken to fill the rows of S tokens.
    """
    context = average_context(sequence_length)
    return 3 * total(matmul_flops(model, context)), 3 * total(elementwise_flops(model, context))


def executed_training_flops(model: DreamerConfig, sequence_length: int, remat: bool) -> tuple[float, float]:
    """As training_flops, with what the program does beyond it.

    In DR the gradient of a folded projection (Eq. 8) takes a third product, because the router's gradient may not see
    the shared expert (Eq. 7). `remat` computes the layers' forward a second time.
    """
    matmul, elementwise = training_flops(model, sequence_length)
    if model.recurrent:
        weights = sum(attention.projection_weights(model.hidden_size) for attention in _attentions(model).values())
        matmul += 2 * model.depth * weights
    if remat:
        context = average_context(sequence_length)
        forward = matmul_flops(model, context)
        matmul += total(forward) - forward["head"]
        elementwise += total(elementwise_flops(model, context))
    return matmul, elementwise


def total(counts: dict[str, int] | Counts) -> float:
    """Sum over the parts."""
    return sum(counts.values())


def _routed_experts(model: DreamerConfig) -> list[int]:
    """Number of experts of each router of a layer, EA's first."""
    return [model.num_experts] + ([model.depth] * len(_attentions(model)) if model.recurrent else [])
