"""What a train step does on one chip, operation by operation: FLOPs of whole matrix tiles, and bytes of HBM.

Blocks say what they do (`Counted.step_cost`); here it is summed over microbatches, depths and blocks. T tokens are
those of one microbatch on one chip. An array is counted where it crosses HBM between two operations: once written, once
by each operation that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator

from dreamer_jax.blocks.counting import AGAIN, FLOAT32_BYTES, OnChip, Operation, Share
from dreamer_jax.blocks.experts import ExpertAttention, Rows
from dreamer_jax.blocks.feed_forward import FeedForward
from dreamer_jax.budget import analytic
from dreamer_jax.config import Config
from dreamer_jax.families import build
from dreamer_jax.training.optimizer import trained_parameters
from dreamer_jax.training.work import work_of
from pallas_kernels.tiles import GENERATIONS, Generation


def operations(config: Config, chip: str) -> list[Operation]:
    """Every operation of a step on a chip of that name, such as "v5p", summed over depths and microbatches."""
    found: dict[str, Operation] = {}
    for share in build(config.model).blocks():
        on = on_chip(config, chip, share)
        # Depths that aren't differentiated do a pass of the three and what is computed again.
        forward, backward = applications(config, share)
        times = backward + (forward - backward) / (3 + on.again.products)
        for one in share.block.step_cost(on) if share.depths else ():
            one = one.times(times * config.training.microbatches)
            before = found.get(one.name, Operation(one.name, 0, 0))
            found[one.name] = Operation(one.name, before.flops + one.flops, before.bytes + one.bytes)
    return [*found.values(), _optimizer(config)]


def applications(config: Config, share: Share) -> tuple[float, float]:
    """Of a block to a token, in a train step on average: (forward, with a backward pass)."""
    family, work = build(config.model), work_of(config)
    each = [(its.share, *analytic.applied(family, share, its)) for its in work]
    return sum(part * forward for part, forward, _ in each), sum(part * backward for part, _, backward in each)


def on_chip(config: Config, chip: str, share: Share) -> OnChip:
    """What of a step a chip of that name has to do with a block."""
    rows = config.training.batch_size // (config.mesh.size * config.training.microbatches)
    return OnChip(
        tokens=rows * config.data.places,
        length=config.data.places,
        group=config.mesh.expert,
        again=AGAIN[config.training.remat],
        target=GENERATIONS.get(chip, Generation(chip, cores=1, vmem=0)),
        dtype=config.model.dtype,
        depths=share.depths // max(1, share.copies),
        total_depth=build(config.model).depth,
        gradient_depths=config.training.gradient_depths,
    )


def experts_on(config: Config, chip: str) -> Iterator[tuple[ExpertAttention, OnChip, Share]]:
    """The model's blocks of experts, none if it has none."""
    for share in build(config.model).blocks():
        if isinstance(share.block, ExpertAttention) and share.depths:
            yield share.block, on_chip(config, chip, share), share


def neurons_on(config: Config) -> Iterator[tuple[FeedForward, OnChip, Share]]:
    """The model's dense feed-forward networks."""
    for share in build(config.model).blocks():
        if isinstance(share.block, FeedForward):
            yield share.block, on_chip(config, "", share), share


def rows_per_expert(config: Config) -> float:
    """Rows of one expert in one matrix product, on average: k T times the chips of an expert group, over E, or
    over as many as a depth may choose among."""
    counts = [
        on.tokens * on.group * block.router.selected / block.router.choices for block, on, _ in experts_on(config, "")
    ]
    return counts[0] if counts else 0.0


def share_of_tiles(config: Config, chip: str) -> float:
    """Filled part of the matrix tiles of the experts' products on a chip of that name; 1 without experts."""
    found = experts_on(config, chip)
    shares = [on.tokens * block.router.selected / block.rows(on).filled.computed for block, on, _ in found]
    return shares[0] if shares else 1.0


def blocks_of(config: Config, chip: str) -> Rows:
    """The blocks of one product of the first experts on a chip of that name."""
    block, on, _ = next(experts_on(config, chip))
    return block.rows(on)


def gradient_depths(config: Config, chip: str) -> int:
    """Depths whose rows are kept aside for the experts' weight gradient: as chosen, or the default."""
    return max((block.depths_aside(on) for block, on, _ in experts_on(config, chip)), default=1)


def scratch_bytes(config: Config, chip: str) -> float:
    """What blocks need on a chip beside the activations that `budget.memory` counts."""
    shares = build(config.model).blocks()
    return sum(share.block.scratch_bytes(on_chip(config, chip, share)) for share in shares if share.depths)


def _optimizer(config: Config) -> Operation:
    """AdamW on a chip's part of what is trained: four arrays read, three written, and the gradient's norm."""
    family = build(config.model)
    trained = trained_parameters(config.training, family)
    parameters = analytic.total(analytic.parameters(family)) if trained is None else trained
    return Operation("optimizer", 0, parameters / (config.mesh.size // config.mesh.slices) * 8 * FLOAT32_BYTES)
