"""A served model on a slice: what its weights and the pages of its requests take, and how many tokens a second at best.

As `dreamer serve` has it: rows are divided over all chips, each with pages of its own. Chips along the axis `expert`
hold the experts between them, which the rows of all of them visit. Everything else is on every chip.

The bound is that of decoding, memory or matrix units, whichever takes longer, for one depth and for what lies outside
of the loop: weights are read once for all rows of a chip, keys and values once a row and depth, and experts are as busy
on one chip as on another. Rows that visit the same experts are taken to choose different ones, as far as there are
enough; if they choose alike, less is read. Not counted: prompts, what chips send each other, latencies, and in models
with weights of their own for every depth that rows at different depths read different ones.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Reach, Share
from dreamer_jax.blocks.memory import for_kernels
from dreamer_jax.budget import analytic
from dreamer_jax.budget.memory import SIZE
from dreamer_jax.budget.report import table
from dreamer_jax.config import Config
from dreamer_jax.errors import ConfigError, UserError
from dreamer_jax.families import Family, build
from dreamer_jax.planning.compiling import check_mesh
from dreamer_jax.planning.topology import Topology
from pallas_kernels.sequence_attention import SequenceAttention
from pallas_kernels.sequence_attention.paged import unsupported

SPARE = 0.1
"""Of a chip's memory, for programs and what they need while they run: logits, rows of experts, gathered pages."""
GIB = 1 << 30


BEGUN = 2
"""Requests that have begun for each that a step computes, as `dreamer serve` has it where nothing else is said."""


@dataclass(frozen=True)
class ServingPlan:
    """What `dreamer plan --serve` finds, of one chip where nothing else is said.

    Attributes:
        topology: its name.
        chips, expert: in all; that share their experts.
        rows: R, requests that a step of a chip computes.
        context: positions of a request; on average half of them are seen.
        mean_depth: depths that a token takes on average.
        page_size: positions of a page.
        memory: bytes of a chip.
        weights, page, flight: bytes of weights, of a page, and of what a row's newest position keeps.
        outside_seconds, depth_seconds: of R tokens, outside of the loop and in one depth, at least.
        chooses: whether a token chooses among experts, so that more rows read more weights.
    """

    topology: str
    chips: int
    expert: int
    rows: int
    context: int
    mean_depth: float
    page_size: int
    memory: float
    weights: float
    page: int
    flight: int
    outside_seconds: float
    depth_seconds: float
    chooses: bool

    @property
    def requests(self) -> int:
        """That have begun; a step computes R of them."""
        return BEGUN * self.rows

    @property
    def pages(self) -> int:
        """That fit beside the weights; less than 1 if these don't fit."""
        return math.floor((self.memory * (1 - SPARE) - self.weights - self.requests * self.flight) / self.page)

    @property
    def pages_wanted(self) -> int:
        """Of requests that use the whole context."""
        return self.requests * math.ceil(self.context / self.page_size)

    @property
    def tokens_per_second(self) -> float:
        """Of all chips, at most."""
        return self.chips * self.rows / (self.outside_seconds + self.mean_depth * self.depth_seconds)

    @property
    def fits(self) -> bool:
        """Whether so many requests of the whole context do."""
        return self.pages >= self.pages_wanted


def plan_serving(
    config: Config, topology: Topology, rows: int, context: int, page_size: int, mean_depth: float | None = None
) -> ServingPlan:
    """The plan of a configuration's model.

    Args:
        config: of its training; `mesh` says how chips are divided, `model.dtype` the type of weights and caches.
        topology: the chips.
        rows: requests that a step of each chip computes.
        context: positions of a request, prompt and answer.
        page_size: positions of a page.
        mean_depth: depths of a token on average; None for all.

    Raises:
        UserError: the model writes no text, or the mesh doesn't fit the topology.
    """
    check_mesh(config, topology)
    family = build(config.model)
    if not family.flags.generates:
        raise UserError(f"a model of the family {config.model.family} doesn't generate text, so it can't be served")
    depth = family.depth if mean_depth is None else mean_depth
    if not 1 <= depth <= family.depth:
        raise ConfigError(f"mean depth {depth:g}: must be from 1 to the model's depth, {family.depth}", "mean_depth")
    seconds = {outside: _seconds(family, config, topology, rows, context, outside) for outside in (True, False)}
    experts = analytic.expert_parameters(family) / config.mesh.expert
    weights = analytic.total(analytic.parameters(family, folded=True)) - analytic.expert_parameters(family) + experts
    return ServingPlan(
        topology.name,
        topology.chips,
        config.mesh.expert,
        rows,
        context,
        depth,
        page_size,
        topology.chip.memory,
        weights * SIZE[config.model.dtype],
        _bytes(jax.eval_shape(lambda: _page(family, page_size))),
        _bytes(jax.eval_shape(lambda: family.flight(1, 1, family.depth))),
        seconds[True],
        seconds[False] / family.depth,
        any(_chooses(share) for share in family.blocks()),
    )


class _OnTpu(SequenceAttention):
    """Attention that lays pages as on a TPU, whatever the code is traced for."""

    def interleaves(self, kv_heads: int, size: int, dtype: Any) -> bool:
        """As the kernel reads them."""
        return self.implementation != "xla" and unsupported(kv_heads, size, jnp.dtype(dtype).itemsize) is None

    def flattens(self) -> bool:
        """Where it doesn't."""
        return True


def _page(family: Family, page_size: int) -> Any:
    attention = _OnTpu(family.config.implementation)
    operations = dataclasses.replace(family.operations, sequence_attention=attention)
    return for_kernels(family.slots(1, page_size, family.depth), operations)


def _chooses(share: Share) -> bool:
    """Of blocks that are applied at every depth: a token also chooses among the rows of an embedding."""
    inside = share.depths > 1 and not share.outside
    return inside and share.block.active_parameters(1) < share.block.parameters(folded=True)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _seconds(family: Family, config: Config, topology: Topology, rows: int, context: int, outside: bool) -> float:
    """Of R tokens through the blocks that are applied once, or through all the others, on a chip."""
    chip, size = topology.chip, SIZE[config.model.dtype]
    reach = Reach(analytic.average_context(context), analytic.average_context(family.depth), family.depth)
    flops = read = 0.0
    for share in family.blocks():
        if (share.outside or share.depths <= 1) != outside or not share.depths:
            continue
        block, group = share.block, config.mesh.expert if share.experts else 1
        flops += share.depths * rows * block.matmul_flops(reach)  # of a group's rows a chip has its share
        read += share.depths * block.active_parameters(rows * group) / group * size
        read += share.depths * rows * size * (block.cache_read(reach) + block.flight_read(reach))
    return max(flops / chip.peak_flops, read / chip.bandwidth)


def describe(plan: ServingPlan) -> dict[str, Any]:
    """As plain data."""
    found = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    derived = ("pages", "pages_wanted", "fits", "tokens_per_second")
    return found | {name: getattr(plan, name) for name in derived}


def render(plan: ServingPlan) -> str:
    """As text for a person."""
    rest = plan.memory * (1 - SPARE) - plan.weights
    memory = [
        ["memory of a chip", f"{plan.memory / GIB:.2f} GiB", ""],
        ["spare", f"{plan.memory * SPARE / GIB:.2f} GiB", "programs and what they need while they run"],
        ["weights", f"{plan.weights / GIB:.2f} GiB", ""],
        ["a page", f"{plan.page / (1 << 20):.2f} MiB", f"{plan.page_size} positions at all depths"],
        ["pages that fit", f"{max(0, plan.pages):,}", f"{max(0, plan.pages) * plan.page_size:,} positions"],
        [
            "pages wanted",
            f"{plan.pages_wanted:,}",
            f"{plan.requests} requests of {plan.context:,} positions, of which a step computes {plan.rows}",
        ],
    ]
    shared = f", of which {plan.expert} share experts" if plan.expert > 1 else ""
    apart = "; no two rows choose the same expert" if plan.chooses else ""
    most = f"at most, of {plan.chips} chips{shared}{apart}"
    speed = [
        ["outside of the loop", f"{plan.outside_seconds * 1e6:,.0f} us", f"{plan.rows} tokens, at least"],
        ["a depth", f"{plan.depth_seconds * 1e6:,.0f} us", f"{plan.mean_depth:g} of them a token"],
        ["tokens/s", f"{plan.tokens_per_second:,.0f}", most],
    ]
    lines = [table(["memory", "", ""], memory), table(["speed", "", ""], speed)]
    if rest <= 0:
        lines.append(
            "It doesn't fit: the weights alone are too large; divide the experts over more chips (mesh.expert)."
        )
    elif not plan.fits:
        most = max(0, plan.pages) // math.ceil(plan.context / plan.page_size)
        lines.append(f"It doesn't fit: there are pages for {most} such requests at once; lower --rows or --context.")
    else:
        lines.append("It fits.")
    return "\n\n".join([f"serving on {plan.topology}", *lines])
