"""Parameters and FLOPs per token of any model: sums over its blocks, which count themselves (docs/budget.md).

Every count is a dict from part to number, over the family's `parts`. FLOPs are 2 per multiply-add of a matrix product;
elementwise work is counted apart, as blocks/counting.py says and docs/budget.md lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dreamer_jax.blocks.counting import Reach, Share
from dreamer_jax.families import Family

Counts = dict[str, float]
READOUT = ("coda", "end", "post", "decoding", "head")
"""Parts behind the recurrence, which the loss after any depth passes."""


class Work(NamedTuple):
    """What train steps of one depth do.

    Attributes:
        share: of all steps.
        depth: how deep they go.
        differentiated: of those depths, how many have a backward pass.
        losses: depths after which a loss is taken; each passes the coda and the head.
        beside: further products of a depth, as large as its forward pass, that a penalty takes.
    """

    share: float
    depth: int
    differentiated: int
    losses: int = 1
    beside: int = 0


def average_context(length: int, causal: bool = True) -> float:
    """Keys a query sees on average over `length` positions, its own included: all, or if causal (length + 1) / 2."""
    return (length + 1) / 2 if causal else length


def parameters(family: Family, folded: bool = False) -> dict[str, int]:
    """Stored parameters of each part.

    Args:
        family: the model.
        folded: False counts what training stores (docs/budget.md); True what inference stores after the shared
            experts are added into the routed ones (Eq. 8).
    """
    return _by_part(family, lambda share: share.copies * share.block.parameters(folded))


def untrained(family: Family, folded: bool = False) -> int:
    """Numbers stored beside the parameters, float32, that training doesn't change: embeddings of texts."""
    return sum(share.copies * share.block.untrained_elements(folded) for share in family.blocks())


def pass_flops(family: Family) -> float:
    """FLOPs of the forward's matrix products that a pass makes once, however many tokens it has: keys and values of
    texts. A train step has one such pass a microbatch and device, and one product more for each in the backward pass;
    inference none, once the weights are folded."""
    return sum(share.copies * share.block.pass_flops() for share in family.blocks())


def expert_parameters(family: Family) -> int:
    """Those of experts, which expert parallelism divides."""
    return sum(share.copies * share.block.parameters() for share in family.blocks() if share.experts)


def active_parameters(family: Family) -> dict[str, int]:
    """Parameters one token meets on its way through all depths, each counted once, after folding: at most."""

    def active(share: Share) -> int:
        return share.copies and share.copies * share.block.active_parameters(share.depths // share.copies)

    return _by_part(family, active)


def matmul_flops(family: Family, context: float, depth_context: float | None = None, folded: bool = True) -> Counts:
    """FLOPs per token of the forward's matrix products, 2 per multiply-add.

    Args:
        family: the model.
        context: keys of the sequence attention a token meets on average; `average_context(1024)` in Table 1.
        depth_context: the same of depth attention; default the average depth (L + 1) / 2.
        folded: False adds the products with the shared experts of Eq. 7.
    """
    reach = _reach(family, context, depth_context)
    return _by_part(family, lambda share: share.depths * share.block.matmul_flops(reach, folded))


def flops_by_depth(family: Family, context: float) -> tuple[float, float]:
    """FLOPs per token of the forward's matrix products outside of the depths (F0), and in one of them (Fr); so L depths
    take F0 + L Fr. `context` as of `matmul_flops`."""
    reach, outside, inside = _reach(family, context, None), 0.0, 0.0
    for share in family.blocks():
        flops = share.depths * share.block.matmul_flops(reach, True)
        outside, inside = outside + flops * share.outside, inside + flops * (not share.outside)
    return outside, inside / family.depth


def elementwise_flops(
    family: Family, context: float, depth_context: float | None = None, folded: bool = True
) -> Counts:
    """FLOPs per token of everything that is not a matrix product, up to the logits; arguments as matmul_flops."""
    reach = _reach(family, context, depth_context)
    return _by_part(family, lambda share: share.depths * share.block.elementwise_flops(reach, folded))


def whole(family: Family) -> tuple[Work, ...]:
    """Train steps that go to the family's depth, and take the loss as it says."""
    return (Work(1.0, family.depth, min(family.differentiated, family.depth)),)


def applied(family: Family, share: Share, work: Work) -> tuple[float, float]:
    """Applications of a block to a token in steps of one depth: (forward, with a backward pass)."""
    if share.outside:
        times = work.losses if share.part in READOUT else 1
        return times * share.depths, times * share.differentiated
    if share.every > 1 or share.skips:  # the depths at which it acts aren't spread evenly over a pass
        forward, before, whole = map(share.acting, (work.depth, work.depth - work.differentiated, family.depth))
        each, beside = share.depths / max(1, whole), work.beside * share.depths / family.depth
        return each * forward + beside, each * (forward - before) + beside
    forward, backward = work.depth + work.beside, work.differentiated + work.beside
    return share.depths * forward / family.depth, share.depths * backward / family.depth


def training_flops(family: Family, sequence_length: int, work: Sequence[Work] | None = None) -> tuple[float, float]:
    """Model FLOPs per token of training, what utilisation is measured by: (matrix products, elementwise work).

    3 times the forward: the backward pass takes two products for each of the forward, and elementwise work is taken to
    behave alike. Depths that aren't differentiated count once, and a loss of several depths has several heads.
    Documents are taken to fill the rows of S tokens.

    Args:
        family: the model.
        sequence_length: S.
        work: of the steps, see `training.work`; default `whole`.
    """
    matmul = elementwise = 0.0
    for its in work or whole(family):
        reach = _training_reach(family, sequence_length, its.depth)
        for share in family.blocks():
            forward, backward = applied(family, share, its)
            count = its.share * (forward + 2 * backward)
            matmul += count * share.block.matmul_flops(reach)
            matmul += count * _further_losses(family, share, its, reach)
            elementwise += count * share.block.elementwise_flops(reach)
    return matmul, elementwise


def executed_training_flops(
    family: Family, sequence_length: int, remat: bool, work: Sequence[Work] | None = None
) -> tuple[float, float]:
    """As training_flops, with what the program does beyond it.

    Some blocks take more than two products for each of the forward. `remat` computes the forward of the differentiated
    depths a second time. Layers before and after the recurrence keep their input only and are computed again in any
    case, and for losses before the last once more, with the head; for the last loss the head is computed once.
    """
    matmul, elementwise = training_flops(family, sequence_length, work)
    for its in work or whole(family):
        reach = _training_reach(family, sequence_length, its.depth)
        for share in family.blocks():
            count = its.share * applied(family, share, its)[1]
            matmul += count * share.block.extra_training_flops()
            if (remat or share.outside) and share.part != "head":
                matmul += count * (share.block.matmul_flops(reach) + _further_losses(family, share, its, reach))
                elementwise += count * share.block.elementwise_flops(reach)
            if share.outside and share.part in READOUT:  # losses before the last are computed again whole
                count = its.share * (its.losses - 1) * share.differentiated
                matmul += count * share.block.matmul_flops(reach)
                elementwise += count * share.block.elementwise_flops(reach)
    return matmul, elementwise


def _further_losses(family: Family, share: Share, work: Work, reach: Reach) -> float:
    """Matrix products of a block, forward, for losses of several depths beyond those of one: of those of the family, as
    many as there are depths."""
    most = family.output_depths or max(family.depth, work.depth)
    taken, asked = (min(most, depth) - 1 for depth in (work.depth, family.depth))
    return share.block.loss_flops(reach) * taken / max(1, asked)


def total(counts: dict[str, int] | Counts) -> float:
    """Sum over the parts."""
    return sum(counts.values())


def _training_reach(family: Family, sequence_length: int, depth: int) -> Reach:
    return Reach(average_context(sequence_length, family.flags.causal), average_context(depth), depth)


def _reach(family: Family, context: float, depth_context: float | None) -> Reach:
    if depth_context is None:
        return Reach(context, average_context(family.depth), family.depth)
    return Reach(context, depth_context)


def _by_part(family: Family, count: Callable[[Share], float]) -> dict:
    counts: dict[str, Any] = dict.fromkeys(family.parts, 0)
    for share in family.blocks():
        counts[share.part] = counts.get(share.part, 0) + count(share)
    return counts
