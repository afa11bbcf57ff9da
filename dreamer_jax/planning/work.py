"""What a train step does on one chip, operation by operation: FLOPs of whole matrix tiles, and bytes of HBM.

Symbols as in SPEC.md. T tokens are those of one microbatch on one chip; sums are over microbatches and depths. An
array is counted where it crosses HBM between two operations: once written, once by each operation that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dreamer_jax.budget import analytic
from dreamer_jax.config import Config
from dreamer_jax.training.loss import CHUNK_ELEMENTS
from pallas_kernels.tiles import Generation

LANES = 128
"""Rows and columns of a matrix unit's tile (v4 to v5p)."""
SEQUENCE_BLOCK = Generation("any", cores=1, vmem=0).sequence_block
HALF, FULL = 2, 4
"""Bytes of bfloat16 and float32."""
HIGHEST = 6
"""Passes of a float32 matrix product at highest precision."""


@dataclass(frozen=True)
class Operation:
    """One operation of a step on one chip, over all depths and microbatches: FLOPs of whole tiles, bytes of HBM."""

    name: str
    flops: float
    bytes: float


def rows_per_expert(config: Config) -> float:
    """Rows of one expert in one matrix product, on average: k T times the chips of an expert group, over E."""
    model = config.model
    return _tokens(config) * config.mesh.expert * model.experts_per_token / model.num_experts


def share_of_tiles(config: Config) -> float:
    """Filled part of the experts' row tiles: each expert's rows fill whole tiles but, on average, half of the last."""
    rows = _tokens(config) * config.model.experts_per_token
    return rows / _padded_rows(rows, _own_experts(config))


def operations(config: Config) -> list[Operation]:
    """Every operation of a step, summed over depths and microbatches."""
    model, count = config.model, config.training.microbatches
    again = 1.0 if config.training.remat == "full" else 0.0
    of_a_depth = [*_experts(config, again), *_projections(config, again), *_attentions(config, again)]
    of_a_depth += [_routers(config, again), _elementwise(config, again)]
    repeated = [Operation(o.name, o.flops * model.depth * count, o.bytes * model.depth * count) for o in of_a_depth]
    head = _head(config)
    return [*repeated, Operation(head.name, head.flops * count, head.bytes * count), _optimizer(config)]


def _tokens(config: Config) -> int:
    """T of a microbatch on a chip."""
    rows = config.training.batch_size // (config.mesh.size * config.training.microbatches)
    return rows * config.data.sequence_length


def _own_experts(config: Config) -> int:
    return -(-config.model.num_experts // config.mesh.expert)


def _tiled(size: int) -> int:
    return -(-size // LANES) * LANES


def _padded_rows(rows: float, groups: int) -> float:
    return rows + groups * LANES / 2


def _experts(config: Config, again: float) -> Iterator[Operation]:
    model, tokens = config.model, _tokens(config)
    h, size, own = model.hidden_size, model.expert_size, _own_experts(config)
    rows = _padded_rows(tokens * model.experts_per_token, own)
    visiting = tokens * config.mesh.expert
    products = 2 * rows * h * (_tiled(2 * size) + _tiled(size))
    weights = own * 3 * h * size
    wide, narrow = rows * h * HALF, rows * size * HALF

    passes = 1 + again
    moving = (2 * wide + wide + visiting * h * HALF) * passes  # gather the rows; read the values, write their sums
    moving += 2 * wide + wide + visiting * h * HALF + 2 * wide * again  # backward, and the rows for the weights again
    yield Operation("experts: rows to experts and back", 0, moving)
    forward = (2 * wide + weights * HALF) * passes + 2 * narrow  # gate and up are kept once
    yield Operation("experts: forward", products * passes, forward)
    yield Operation("experts: input gradients", products, 2 * wide + 5 * narrow + weights * HALF)
    totals = weights * 2 * FULL / _deferred(config) if model.recurrent else weights * FULL
    yield Operation("experts: weight gradients", products, 2 * wide + 3 * narrow + totals)


def _deferred(config: Config) -> int:
    """Depths whose weight gradients share one reading and writing of the totals."""
    return 1


def _projections(config: Config, again: float) -> Iterator[Operation]:
    """Both linear maps around each attention: a mixture of L experts in DR, plain matrices in LA."""
    model, tokens = config.model, _tokens(config)
    h, groups = model.hidden_size, model.depth if model.recurrent else 1
    for name, heads, kv_heads, size in _heads(model):
        inner, outer = (heads + 2 * kv_heads) * size, heads * size
        rows = _padded_rows(tokens, groups) if model.recurrent else tokens
        product = 2 * rows * h * (_tiled(inner) + _tiled(outer))
        weights = groups * h * (inner + outer)
        moved = rows * (2 * h + inner + outer) * HALF  # the inputs and outputs of both
        shared = 2 * tokens * h * (_tiled(inner) + _tiled(outer)) if model.recurrent else 0  # Eq. 7's second branch
        totals = weights * 2 * FULL if model.recurrent else weights * FULL
        flops = product * (1 + again) + 2 * product + shared
        traffic = (moved + weights * HALF) * (1 + again) + 2 * moved + weights * HALF + totals
        yield Operation(f"{name}: projections", flops, traffic)


def _heads(model) -> list[tuple[str, int, int, int]]:
    found = [("sequence attention", model.sa_heads, model.sa_kv_heads, model.sa_head_size)]
    if model.depth_attention:
        found.append(("depth attention", model.da_heads, model.da_kv_heads, model.da_head_size))
    return found


def _attentions(config: Config, again: float) -> Iterator[Operation]:
    model, tokens, length = config.model, _tokens(config), config.data.sequence_length
    width = model.sa_heads * _tiled(model.sa_head_size)
    context = (length + SEQUENCE_BLOCK) / 2  # whole blocks of the causal triangle
    # Forward: scores and values. Backward, from q, k, v alone: the scores again, and four products.
    flops = 2 * tokens * context * width * (2 * (1 + again) + 5)
    arrays = tokens * 2 * (model.sa_heads + model.sa_kv_heads) * model.sa_head_size * HALF  # q, out; k, v
    yield Operation("sequence attention: scores", flops, arrays * (1 + again + 2))
    if model.depth_attention:
        slots = analytic.average_context(model.depth)
        keys_values = 2 * tokens * model.da_kv_heads * model.da_head_size * HALF
        queries = 2 * tokens * model.da_heads * model.da_head_size * HALF
        # Backward: keys and values below, and queries and cotangents above.
        traffic = slots * (keys_values * (1 + again) + keys_values + queries)
        yield Operation("depth attention: scores", 0, traffic)


def _routers(config: Config, again: float) -> Operation:
    model, tokens = config.model, _tokens(config)
    h, r = model.hidden_size, _tiled(model.router_size)
    flops = traffic = 0.0
    for experts in [model.num_experts] + [model.depth] * (len(_heads(model)) if model.recurrent else 0):
        passes = 1 + again + 2
        flops += passes * 2 * tokens * (h * r + HIGHEST * r * _tiled(experts))
        traffic += passes * tokens * (h * HALF + 2 * model.router_size * FULL)
        traffic += (2 * (1 + again) + 2) * tokens * _tiled(experts) * FULL  # logits written, read for the selection
    return Operation("routers", flops, traffic)


def _elementwise(config: Config, again: float) -> Operation:
    """Norms, rotations and the residual stream: what the fused loops between the products read and write."""
    model, tokens = config.model, _tokens(config)
    stream = tokens * model.hidden_size * HALF
    norms = len(_heads(model)) + 2  # of each attention, of the experts and of the stream; one read, one write each
    rotated = sum(tokens * (heads + kv_heads) * size * HALF for _, heads, kv_heads, size in _heads(model))
    forward = stream * (2 * norms + 3) + 2 * rotated
    return Operation("norms, rotations, residual stream", 0, forward * (1 + again + 2) + 2 * stream)


def _head(config: Config) -> Operation:
    """The output head and the loss, in chunks of rows: logits in float32, the head's gradient added chunk by chunk."""
    model, tokens = config.model, _tokens(config)
    weights = model.vocab_size * model.hidden_size
    chunks = -(-tokens // max(1, CHUNK_ELEMENTS // model.vocab_size))
    logits = tokens * model.vocab_size * (3 * FULL + 3 * HALF)
    traffic = logits + chunks * weights * (2 * HALF + 2 * FULL)
    return Operation("head and loss", 3 * 2 * tokens * model.hidden_size * _tiled(model.vocab_size), traffic)


def _optimizer(config: Config) -> Operation:
    """AdamW on a chip's part of the state: four arrays read, three written, and the gradient's norm."""
    own = analytic.total(analytic.parameters(config.model)) / (config.mesh.size // config.mesh.slices)
    return Operation("optimizer", 0, own * 8 * FULL)
