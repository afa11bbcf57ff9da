"""Memory in bytes by arithmetic: of generating text, and of a training step.

Table 1's quantity is `generation`: the stored weights in bfloat16 and the key/value caches of one sequence of 1024
tokens. The training figures are what the recipe has to hold on one device that holds everything; temporary
buffers of a compiler are its own and are read from the compiled program elsewhere.
"""

from __future__ import annotations

from dreamer_jax.budget import analytic
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.values import Remat

Bytes = dict[str, int]
SIZE = {"bfloat16": 2, "float32": 4}
MASTER = 4  # weights, gradients and optimizer state are float32


def caches(model: DreamerConfig, context: int, batch: int = 1) -> Bytes:
    """Key/value caches of generation, in bfloat16: SA [L, B, S, kv, d] twice, DA [L, B, kv, d] twice.

    DA's cache is overwritten by the next token, so it doesn't grow with the context.
    """
    sequence = 2 * model.depth * batch * context * model.sa_kv_heads * model.sa_head_size * SIZE["bfloat16"]
    depth = 2 * model.depth * batch * model.da_kv_heads * model.da_head_size * SIZE["bfloat16"]
    return {"SA cache": sequence, "DA cache": depth if model.depth_attention else 0}


def generation(model: DreamerConfig, context: int, batch: int = 1, folded: bool = False) -> Bytes:
    """Weights in bfloat16 and the caches of `batch` sequences of `context` tokens.

    Args:
        model: sizes of the model.
        context: tokens of a generated sequence.
        batch: sequences generated at once.
        folded: whether the shared experts have been added into the routed ones. Table 1 compares the models as
            they are stored, unfolded: matched models then agree, which folded ones would not.
    """
    weights = int(analytic.total(analytic.parameters(model, folded))) * SIZE["bfloat16"]
    return {"weights": weights, **caches(model, context, batch)}


def training(model: DreamerConfig, sequence_length: int, batch: int, remat: Remat) -> Bytes:
    """What a training step with microbatches of `batch` rows of S tokens has to hold, if one device does it all.

    float32 weights, their gradients and AdamW's two moments; the copy of the weights in the compute type; the
    activations the backward pass needs under `remat`; float32 logits.
    """
    count = int(analytic.total(analytic.parameters(model)))
    copy = 0 if model.dtype == "float32" else count * SIZE[model.dtype]
    return {
        "weights": count * MASTER,
        "weights, compute copy": copy,
        "gradients": count * MASTER,
        "optimizer": 2 * count * MASTER,
        "activations": activations(model, sequence_length, batch, remat),
        "attention scores": scores(model, sequence_length, batch, remat),
        "logits": batch * sequence_length * model.vocab_size * MASTER,
    }


def activations(model: DreamerConfig, sequence_length: int, batch: int, remat: Remat) -> int:
    """Bytes of the activations kept from the forward for the backward pass of B x S tokens, head and scores excluded.

    full: the residual stream of every depth and the intermediates of the one layer being recomputed; with DA also
    keys and values of every depth and their gradients (float32). attention: also, of every depth, the projections
    into and the outputs of the attentions and the experts' gate and up. none: the intermediates of every depth.
    """
    element = SIZE[model.dtype]
    tokens = batch * sequence_length
    layer = _layer_intermediates(model) * element
    residual = model.hidden_size * element
    cache = 2 * model.depth * model.da_kv_heads * model.da_head_size if model.depth_attention else 0
    kept = {"full": 0, "attention": _kept(model) * element, "none": layer}[remat]
    return tokens * (model.depth * (residual + kept) + layer + cache * (element + MASTER))


def scores(model: DreamerConfig, sequence_length: int, batch: int, remat: Remat) -> int:
    """Bytes of the sequence attention's float32 scores, n x S a token; a kernel recomputes them and keeps none."""
    if model.implementation == "pallas":
        return 0
    layers = model.depth if remat == "none" else 1
    return layers * batch * sequence_length * model.sa_heads * sequence_length * SIZE["float32"]


def _kept(model: DreamerConfig) -> int:
    """Elements per token and depth that remat "attention" keeps beside the residual stream."""
    elements = model.hidden_size + model.experts_per_token * 2 * model.expert_size
    elements += 2 * (model.sa_heads + model.sa_kv_heads) * model.sa_head_size
    if model.depth_attention:
        elements += 2 * (model.da_heads + model.da_kv_heads) * model.da_head_size
    return elements


def _layer_intermediates(model: DreamerConfig) -> int:
    """Elements per token a layer's backward pass reads: the inputs of every product and function worth keeping."""
    h, k, r = model.hidden_size, model.experts_per_token, model.router_size
    attentions = [(model.sa_heads, model.sa_kv_heads, model.sa_head_size)]
    if model.depth_attention:
        attentions.append((model.da_heads, model.da_kv_heads, model.da_head_size))
    elements = 0
    for heads, kv_heads, head_size in attentions:
        rotated = (heads + kv_heads) * head_size
        elements += h + (heads + 2 * kv_heads) * head_size + rotated + heads * head_size + h
    elements += h + k * (2 * h + 3 * model.expert_size)  # normed input; of each expert its input, 3 in between, output
    routers = [model.num_experts] + ([model.depth] * len(attentions) if model.recurrent else [])
    return elements + sum(2 * r + experts for experts in routers)
