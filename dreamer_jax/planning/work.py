"""What a train step does on one chip, operation by operation: FLOPs of whole matrix tiles, and bytes of HBM.

Symbols as in SPEC.md. T tokens are those of one microbatch on one chip; sums are over microbatches and depths. An
array is counted where it crosses HBM between two operations: once written, once by each operation that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from dreamer_jax.budget import analytic
from dreamer_jax.config import Config
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.training.loss import CHUNK_ELEMENTS, CHUNK_ROWS
from pallas_kernels.expert_mlp.shapes import Tiles, depths_aside
from pallas_kernels.tiles import GENERATIONS, Generation

LANES = 128
"""Rows and columns of a matrix unit's tile (v4 to v5p)."""
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


@dataclass(frozen=True)
class Again:
    """What a remat policy computes a second time in the backward pass: 1 for all of it, 0 for nothing.

    Attributes:
        products: projections, attention scores and values, the experts' products.
        cheap: norms, rotations, routers, gathers of rows.
    """

    products: int
    cheap: int


AGAIN = {"full": Again(1, 1), "attention": Again(0, 1), "none": Again(0, 0)}


@dataclass(frozen=True)
class Blocks:
    """How the expert kernels cut the rows of a chip.

    Attributes:
        rows: of a block; every expert's rows fill whole blocks but, on average, half of the last.
        used: blocks of a product that hold rows, on average.
        pairs: (token, choice) pairs that visit the chip, those of other chips' experts included.
        buffer: rows that there is room for, whatever the router does: all visiting pairs and every last block. Only
            used blocks are read or written.
        passes: times the weight gradient reads the experts' intermediates.
    """

    rows: int
    used: float
    pairs: int
    buffer: int
    passes: int

    @property
    def tile_rows(self) -> float:
        """Rows as the matrix unit sees them: a block of fewer than its 128 takes as long as one of 128."""
        return self.used * max(self.rows, LANES)


def rows_per_expert(config: Config) -> float:
    """Rows of one expert in one matrix product, on average: k T times the chips of an expert group, over E."""
    model = config.model
    return _tokens(config) * config.mesh.expert * model.experts_per_token / model.num_experts


def share_of_tiles(config: Config, chip: str) -> float:
    """Filled part of the matrix tiles of the experts' products on a chip of that name."""
    return _tokens(config) * config.model.experts_per_token / blocks_of(config, chip).tile_rows


def operations(config: Config, chip: str) -> list[Operation]:
    """Every operation of a step on a chip of that name, such as "v5p", summed over depths and microbatches."""
    model, count = config.model, config.training.microbatches
    again, target = AGAIN[config.training.remat], _target(chip)
    of_a_depth = [*_experts(config, chip, again), *_projections(config, again), *_attentions(config, again, target)]
    of_a_depth += [_routers(config, again), _elementwise(config, again)]
    repeated = [Operation(o.name, o.flops * model.depth * count, o.bytes * model.depth * count) for o in of_a_depth]
    head = _head(config)
    return [*repeated, Operation(head.name, head.flops * count, head.bytes * count), _optimizer(config)]


def _target(chip: str) -> Generation:
    return GENERATIONS.get(chip, Generation(chip, cores=1, vmem=0))


def _tokens(config: Config) -> int:
    """T of a microbatch on a chip."""
    rows = config.training.batch_size // (config.mesh.size * config.training.microbatches)
    return rows * config.data.sequence_length


def _own_experts(config: Config) -> int:
    return -(-config.model.num_experts // config.mesh.expert)


def _tiled(size: int) -> int:
    return -(-size // LANES) * LANES


def blocks_of(config: Config, chip: str) -> Blocks:
    """The blocks of one product of the experts on a chip of that name."""
    model, own = config.model, _own_experts(config)
    rows = _tokens(config) * model.experts_per_token
    pairs = rows * config.mesh.expert
    tiles = Tiles.of(pairs, own, model.expert_size, model.hidden_size, jnp.dtype(model.dtype), _target(chip))
    block, passes = (tiles.block, model.hidden_size // tiles.columns) if tiles else (LANES, 1)
    return Blocks(block, rows / block + own / 2, pairs, pairs + own * (block - 1), passes)


def gradient_depths(config: Config, chip: str) -> int:
    """Depths whose rows are kept aside for the weight gradient on a chip of that name: as chosen, or the default."""
    model = config.model
    if not model.recurrent:
        return 1
    rows = blocks_of(config, chip).buffer
    sizes = model.expert_size, model.hidden_size, jnp.dtype(model.dtype)
    return config.training.gradient_depths or depths_aside(rows, *sizes, model.depth, _target(chip))


def _experts(config: Config, chip: str, again: Again) -> Iterator[Operation]:
    model, blocks = config.model, blocks_of(config, chip)
    h, size, own = model.hidden_size, model.expert_size, _own_experts(config)
    products = 2 * blocks.tile_rows * h * 3 * _tiled(size)
    weights = own * 3 * h * size
    used, back = blocks.used * blocks.rows * HALF, blocks.pairs * HALF
    visiting = _tokens(config) * config.mesh.expert * h * HALF

    # To the experts, whenever products are computed, and twice for the gradient: fetched in chunks, and those put into
    # their place, where they also are kept aside. Home: read, for every pair that visits, and their sums written.
    there, home = 4 * used * h, back * h + visiting
    moving = there * (3 + again.products) + home * (2 + again.products)
    yield Operation("experts: rows to experts and back", 0, moving)
    forward = (used * h + used * h + weights * HALF) * (1 + again.products)
    yield Operation("experts: forward", products * (1 + again.products), forward + 2 * used * size)  # gate, up: once
    gradients = used * (h + 2 * size) + used * (h + 3 * size) + weights * HALF
    yield Operation("experts: input gradients", products, gradients)
    totals = weights * FULL
    if model.recurrent:  # read and written, by as many depths at once as are kept aside
        totals = weights * 2 * FULL / min(gradient_depths(config, chip), model.depth)
    yield Operation("experts: weight gradients", products, used * (2 * h + 3 * size * blocks.passes) + totals)


def _projections(config: Config, again: Again) -> Iterator[Operation]:
    """Both linear maps around each attention: a mixture of L experts in DR, plain matrices in LA."""
    model, tokens = config.model, _tokens(config)
    h, groups = model.hidden_size, model.depth if model.recurrent else 1
    for name, heads, kv_heads, size in _heads(model):
        inner, outer = (heads + 2 * kv_heads) * size, heads * size
        rows = tokens + groups * LANES / 2 if model.recurrent else tokens
        product = 2 * rows * h * (_tiled(inner) + _tiled(outer))
        weights = groups * h * (inner + outer)
        moved = rows * (2 * h + inner + outer) * HALF  # the inputs and outputs of both
        shared = 2 * tokens * h * (_tiled(inner) + _tiled(outer)) if model.recurrent else 0  # Eq. 7's second branch
        totals = weights * 2 * FULL if model.recurrent else weights * FULL
        flops = product * (1 + again.products) + 2 * product + shared
        traffic = (moved + weights * HALF) * (1 + again.products) + 2 * moved + weights * HALF + totals
        yield Operation(f"{name}: projections", flops, traffic)


def _heads(model: DreamerConfig) -> list[tuple[str, int, int, int]]:
    found = [("sequence attention", model.sa_heads, model.sa_kv_heads, model.sa_head_size)]
    if model.depth_attention:
        found.append(("depth attention", model.da_heads, model.da_kv_heads, model.da_head_size))
    return found


def _attentions(config: Config, again: Again, target: Generation) -> Iterator[Operation]:
    model, tokens, length = config.model, _tokens(config), config.data.sequence_length
    width = model.sa_heads * _tiled(model.sa_head_size)
    block = min(target.sequence_block, length)
    context = (length + block) / 2  # whole blocks of the causal triangle
    # Forward: scores and values. Backward: the scores again, and four products.
    flops = 2 * tokens * context * width * (2 * (1 + again.products) + 5)
    arrays = tokens * 2 * (model.sa_heads + model.sa_kv_heads) * model.sa_head_size * HALF  # q, out; k, v
    parts = 2 * tokens * model.sa_heads * model.sa_head_size * HALF * length / block  # gradients of q by block of keys
    yield Operation("sequence attention: scores", flops, arrays * (1 + again.products + 2) + parts)
    if model.depth_attention:
        slots = analytic.average_context(model.depth)
        keys_values = 2 * tokens * model.da_kv_heads * model.da_head_size * HALF
        queries = 2 * tokens * model.da_heads * model.da_head_size * HALF
        # Backward: keys and values below, and queries and cotangents above.
        traffic = slots * (keys_values * (1 + again.products) + keys_values + queries)
        yield Operation("depth attention: scores", 0, traffic)


def _routers(config: Config, again: Again) -> Operation:
    model, tokens = config.model, _tokens(config)
    h, r = model.hidden_size, _tiled(model.router_size)
    flops = traffic = 0.0
    for experts in [model.num_experts] + [model.depth] * (len(_heads(model)) if model.recurrent else 0):
        passes = 1 + again.cheap + 2
        flops += passes * 2 * tokens * (h * r + HIGHEST * r * _tiled(experts))
        traffic += passes * tokens * (h * HALF + 2 * model.router_size * FULL)
        traffic += (
            (2 * (1 + again.cheap) + 2) * tokens * _tiled(experts) * FULL
        )  # logits written, read for the selection
    return Operation("routers", flops, traffic)


def _elementwise(config: Config, again: Again) -> Operation:
    """Norms, rotations and the residual stream: what the fused loops between the products read and write."""
    model, tokens = config.model, _tokens(config)
    stream = tokens * model.hidden_size * HALF
    norms = len(_heads(model)) + 2  # of each attention, of the experts and of the stream; one read, one write each
    rotated = sum(tokens * (heads + kv_heads) * size * HALF for _, heads, kv_heads, size in _heads(model))
    forward = stream * (2 * norms + 3) + 2 * rotated
    return Operation("norms, rotations, residual stream", 0, forward * (1 + again.cheap + 2) + 2 * stream)


def _head(config: Config) -> Operation:
    """The output head and the loss, in chunks of rows: logits in float32, the head's gradient added chunk by chunk."""
    model, tokens = config.model, _tokens(config)
    weights = model.vocab_size * model.hidden_size
    chunks = -(-tokens // max(CHUNK_ROWS, CHUNK_ELEMENTS // model.vocab_size))
    logits = tokens * model.vocab_size * (3 * FULL + 3 * HALF)
    traffic = logits + chunks * weights * (2 * HALF + 2 * FULL)
    return Operation("head and loss", 3 * 2 * tokens * model.hidden_size * _tiled(model.vocab_size), traffic)


def _optimizer(config: Config) -> Operation:
    """AdamW on a chip's part of the state: four arrays read, three written, and the gradient's norm."""
    own = analytic.total(analytic.parameters(config.model)) / (config.mesh.size // config.mesh.slices)
    return Operation("optimizer", 0, own * 8 * FULL)
