"""The bound: operations against the analytic count, wires against arithmetic by hand."""

from __future__ import annotations

import dataclasses
import itertools
from unittest import mock

import jax.numpy as jnp
import pytest

from dreamer_jax.blocks.counting import Filled
from dreamer_jax.budget import analytic
from dreamer_jax.config import Config
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.config.models.ponder import PonderConfig
from dreamer_jax.config.recurrence import RecurrenceConfig
from dreamer_jax.config.sections import DataConfig, MeshConfig, TrainingConfig
from dreamer_jax.errors import UserError
from dreamer_jax.families import build
from dreamer_jax.planning import step_cost
from dreamer_jax.planning import topology as topologies
from dreamer_jax.planning.collectives import Collective
from dreamer_jax.planning.report import describe, render
from dreamer_jax.planning.roofline import roofline
from dreamer_jax.planning.step_cost import blocks_of, gradient_depths, operations, rows_per_expert, share_of_tiles
from dreamer_jax.planning.topology import parse_topology
from dreamer_jax.planning.torus import Wires
from pallas_kernels.expert_mlp.shapes import depths_aside
from pallas_kernels.tiles import GENERATIONS

V5P, V5E = parse_topology("v5p:4x4x4"), parse_topology("v5e:16x16")
WIDE = DreamerConfig(
    variant="DR",
    depth=4,
    hidden_size=1024,
    vocab_size=8192,
    sa_heads=16,
    sa_kv_heads=8,
    sa_head_size=128,
    num_experts=4,
    experts_per_token=4,
    expert_size=1024,
    router_size=128,
)


def config(mesh=None, model=WIDE, **training) -> Config:
    """A step of 64 rows of 4096 tokens on 64 chips."""
    mesh = mesh or MeshConfig(data=(4, 4, 4))
    return Config(
        model=model,
        data=DataConfig(sequence_length=4096),
        training=TrainingConfig(**({"batch_size": 64, "remat": "none"} | training)),
        mesh=mesh,
    )


def one(found, name):
    return next(operation for operation in found if operation.name == name)


def test_experts_by_hand(monkeypatch):
    """16,384 rows over 4 experts: blocks of 128, half of an expert's last one empty; h = F = 1024.

    Half of the last ones are filled to no more than a half, and half of such a block is computed.
    """
    target = dataclasses.replace(step_cost.GENERATIONS["v5p"], expert_rows=((0, 128),))
    monkeypatch.setitem(step_cost.GENERATIONS, "v5p", target)
    found = operations(config(), "v5p")
    rows = 4096 * 4 + 4 * 64
    computed = rows - 2 * 64
    assert one(found, "experts: forward").flops == 4 * 2 * computed * 1024 * 3 * 1024
    assert one(found, "experts: weight gradients").flops == 4 * 2 * rows * 1024 * 3 * 1024
    assert one(found, "experts: forward").bytes == 4 * 2 * (rows * 4 * 1024 + 4 * 3 * 1024**2)
    # Rows to the experts, read and written twice (chunks in between stay on the chip elsewhere): forward, and two kinds
    # backward. Home: 4 pairs a token read, their sum written.
    there, home = 4 * rows, 5 * 4096
    assert one(found, "experts: rows to experts and back").bytes == 4 * 2 * 1024 * (3 * there + 2 * home)
    assert rows_per_expert(config()) == 4096
    assert share_of_tiles(config(), "v5p") == pytest.approx(16384 / computed)


def test_projections_by_hand():
    """4,096 rows over 4 experts, two maps: forward and the input gradient with half blocks, the weight gradient with
    whole ones, and the input gradient by the shared matrix."""
    products = 2 * (4096 + 4 * 32) + (4096 + 4 * 64) + 4096
    counted = one(operations(config(), "v5p"), "sequence attention: projections").flops
    assert counted == 4 * 2 * products * 1024 * (4096 + 2048)


def test_products_of_few_rows_wait_for_the_matrices():
    """Blocks of 64: halves of 32 take as long as 48 rows; the weight gradients' sums as long as 128."""
    filled = Filled(block=64, used=10, halves=4)
    assert filled.computed == 6 * 64 + 4 * 48 and filled.summed == 10 * 128
    assert dataclasses.replace(filled, block=16, halves=0).computed == 10 * 48


def test_scores_are_counted_by_the_blocks_that_the_kernel_takes():
    """Of 1,536 positions 768 each: two of four blocks of the square and a half, not of blocks of 1,024."""
    its = dataclasses.replace(config(), data=DataConfig(sequence_length=1536))
    flops = one(operations(its, "v5p"), "sequence attention: scores").flops
    assert flops == 4 * 2 * 1536 * (1536 + 768) / 2 * 16 * 128 * 7


def test_experts_that_a_depth_cannot_choose_are_not_read():
    """Eight at each of four depths, in place of sixteen: less of their weights, and fewer blocks filled in part."""
    whole = dataclasses.replace(WIDE, num_experts=16)
    sliding = dataclasses.replace(whole, expert_subset="sliding")
    forward = [one(operations(config(model=its), "v5p"), "experts: forward") for its in (whole, sliding)]
    saved = (forward[0].flops - forward[1].flops) / (4 * 2 * 1024 * 3 * 1024)  # rows
    assert saved > 0 and saved % 8 == 0  # a quarter of a block of each of the eight; half is fetched
    assert forward[0].bytes - forward[1].bytes == 4 * 2 * (2 * saved * 4 * 1024 + 8 * 3 * 1024**2)
    assert rows_per_expert(config(model=sliding)) == 2048


def test_a_choice_of_dimensions_costs_its_router_and_gates():
    found = operations(config(model=dataclasses.replace(WIDE, dimensions_per_token=1)), "v5p")
    assert one(found, "dimensions").bytes > 0 and one(found, "dimensions").flops == 0
    assert sum(o.bytes for o in found) > sum(o.bytes for o in operations(config(), "v5p"))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_matrix_work_is_the_analytic_count_and_little_more(remat, monkeypatch):
    """What it adds: part-filled tiles, the causal triangle's edge, the scores again, routing in float32."""
    target = dataclasses.replace(step_cost.GENERATIONS["v5p"], sequence_block=512)
    monkeypatch.setitem(step_cost.GENERATIONS, "v5p", target)
    tokens = 4096
    counted = sum(operation.flops for operation in operations(config(remat=remat), "v5p"))
    expected = analytic.executed_training_flops(build(WIDE), 4096, remat == "full")[0] * tokens
    assert 1.0 < counted / expected < 1.15


@pytest.mark.parametrize("remat", ["none", "attention", "full"])
def test_pondering_is_what_a_step_executes_of_it(remat):
    """All of a step's products but those of the layers and the head."""
    sizes = {"layers": 1, "hidden_size": 128, "heads": 4, "kv_heads": 4, "mlp_size": 128, "vocab_size": 1024}
    model = PonderConfig(depth=3, **sizes)
    counted = one(operations(config(model=model, remat=remat), "v5p"), "pondering").flops / 4096
    (share,) = (share for share in build(model).blocks() if share.part == "pondering")
    with mock.patch.object(type(build(model)), "blocks", lambda _: [share]):
        executed = analytic.executed_training_flops(build(model), 4096, remat == "full")[0]
    assert counted == executed


def test_what_is_kept_saves_what_is_computed_again():
    flops = {r: sum(o.flops for o in operations(config(remat=r), "v5p")) for r in ("full", "attention", "none")}
    assert flops["full"] > flops["attention"] > flops["none"]
    forward = analytic.matmul_flops(build(WIDE), analytic.average_context(4096))
    again = (analytic.total(forward) - forward["head"]) * 4096
    assert flops["full"] - flops["none"] == pytest.approx(again, rel=0.15)


def test_gate_and_up_computed_again_are_never_written():
    """remat attention: two more of the three products in the input gradients, which read the rows in their place."""
    kept, again = (operations(config(remat=remat), "v5p") for remat in ("none", "attention"))
    assert one(again, "experts: forward").flops == one(kept, "experts: forward").flops
    name = "experts: input gradients"
    assert one(again, name).flops == pytest.approx(one(kept, name).flops * 5 / 3)
    rows = blocks_of(config(), "v5p")
    written = 4 * 2 * rows.filled.rows * 2 * 1024  # gate and up, F each
    assert one(kept, "experts: forward").bytes - one(again, "experts: forward").bytes == written
    assert one(again, name).bytes - one(kept, name).bytes == written / 2 - written  # h = F


def test_logits_are_computed_again_in_a_whole_layer_only():
    """remat attention keeps what was selected, and computes the queries again."""
    flops = {r: one(operations(config(remat=r), "v5p"), "routers").flops for r in ("none", "attention", "full")}
    queries, logits = 1024 * 128, 6 * 128 * 128  # a token's; of both routers, E up to a tile
    assert flops["attention"] - flops["none"] == 4 * 2 * 4096 * 2 * queries
    assert flops["full"] - flops["attention"] == 4 * 2 * 4096 * 2 * logits


def test_linear_experts_share_the_totals_traffic_too():
    """The sequence attention's 16 experts' two maps, read and written in float32 at 16 depths; as long as an expert has
    so few rows that it shortens anything."""
    name, deep = "sequence attention: projections", dataclasses.replace(WIDE, depth=16)
    each, shared, more = (one(operations(config(model=deep, gradient_depths=n), "v5p"), name).bytes for n in (1, 4, 8))
    assert each - shared == 16 * 1024 * (4096 + 2048) * 8 * 16 * 3 / 4
    assert more == shared  # 256 rows a depth, 1024 at four
    assert one(operations(config(model=deep), "v5p"), name).bytes == shared  # by default, where there is room
    few = (one(operations(config(gradient_depths=n), "v5p"), name).bytes for n in (1, 4))
    assert len(set(few)) == 1  # 4 experts have 1024 each at once


def test_rows_aside_need_room_for_the_worst_routing_once():
    """With four chips an expert group all tokens of all four may come; kept aside are those of one."""
    asked = [config(MeshConfig(data=(4, 4), expert=4), gradient_depths=n) for n in (1, 2, 3, 4)]
    scratch = [step_cost.scratch_bytes(its, "v5p") for its in asked]
    first, *more = (after - before for before, after in itertools.pairwise(scratch))
    assert more[0] == more[1] < first / 3


def test_a_pass_that_is_computed_again_is_exchanged_again():
    """Unless what was gathered is kept, and nothing is sent back: remat attention, all tokens to all chips."""
    mesh = MeshConfig(data=(4, 4), expert=4)
    times = {}
    for exchange in ("gather", "ragged"):
        for remat in ("none", "attention", "full"):
            its = config(dataclasses.replace(mesh, exchange=exchange), remat=remat)
            times[exchange, remat] = one(roofline(its, V5P).exchanges, "expert exchange").bytes / (2**25 * 4)
    assert times == {
        **{("gather", remat): n for remat, n in (("none", 4), ("attention", 4), ("full", 6))},
        **{("ragged", remat): n for remat, n in (("none", 4), ("attention", 5), ("full", 6))},
    }


def test_gradients_in_bfloat16_take_half_the_wires_where_axes_are_short():
    """Over rings of 4 an all-to-all of half the bytes; along longer axes it would take longer, and float32 stays."""
    found = {}
    for data in ((4, 4, 4), (64,)):
        for dtype in ("float32", "bfloat16"):
            its = config(MeshConfig(data=data), scatter_dtype=dtype)
            found[data, dtype] = one(roofline(its, V5P).exchanges, "gradient scatter")
    wide, narrow = (found[(4, 4, 4), dtype] for dtype in ("float32", "bfloat16"))
    assert narrow.bytes == wide.bytes / 2
    # Two rings at once, then one of what is left, a 16th: (1 / 2 + 1 / 16) against (15 / 16 + 2 * 3 / 4 / 16).
    assert narrow.seconds / wide.seconds == pytest.approx((1 / 2 + 2 / 2 / 16) / (15 / 16 + 2 * 3 / 4 / 16))
    assert found[(64,), "bfloat16"] == found[(64,), "float32"]
    arrived = collective(kind="all-to-all", arrays=("bf16[8]",), op_name="jit(step)/gradient_scatter/all_to_all")
    assert {e.name for e in roofline(config(), V5P, [arrived]).exchanges} == {"gradient scatter"}


def test_a_window_reads_as_much_less_as_it_sees():
    """Of 8 depths a window of 2, 2 apart, sees one at the first two and two at the others; all see 4.5."""
    model = dataclasses.replace(WIDE, variant="DR+DA", depth=8)
    seen = dataclasses.replace(model, da_window=2, da_dilation=2)
    whole, window = (one(operations(config(model=its), "v5p"), "depth attention: scores") for its in (model, seen))
    assert window.bytes / whole.bytes == pytest.approx((2 * 1 + 6 * 2) / 36)


def test_gradient_depths_share_the_totals_traffic():
    totals = 4 * 3 * 1024**2 * 8 * 4  # of E experts of 3hF, read and written in float32 at 4 depths
    each = one(operations(config(gradient_depths=1), "v5p"), "experts: weight gradients").bytes
    shared = one(operations(config(gradient_depths=4), "v5p"), "experts: weight gradients").bytes
    assert each - shared == totals * 3 / 4
    more_than_there_are = one(operations(config(gradient_depths=64), "v5p"), "experts: weight gradients").bytes
    assert more_than_there_are == shared


def test_gradient_depths_by_default_fit_an_eighth_of_the_chip():
    """A power of two, at most 8 and the model's depth."""
    sizes = (1024, 1024, jnp.bfloat16)  # rows of 10 KiB
    for memory, rows, depth, expected in (
        (95e9, 8000, 32, 8),
        (95e9, 8000, 6, 4),
        (8 * 10240 * 4 * 8000, 8000, 32, 4),
        (8 * 10240 * 4 * 8000 - 1, 8000, 32, 2),
        (0, 8000, 32, 1),
    ):
        target = dataclasses.replace(GENERATIONS["v5p"], memory=memory)
        assert depths_aside(rows, *sizes, depth, target) == expected
    assert gradient_depths(config(gradient_depths=3), "v5p") == 3
    rows = blocks_of(config(), "v5p").buffer
    assert gradient_depths(config(), "v5p") == depths_aside(rows, *sizes, 4, GENERATIONS["v5p"])


def test_expert_parallelism_gathers_rows_and_sends_tokens():
    alone = config()
    together = config(MeshConfig(data=(4, 4), expert=4))
    assert rows_per_expert(together) == 4 * rows_per_expert(alone)
    exchange = one(roofline(together, V5P).exchanges, "expert exchange")
    # 4 chips' tokens gathered and summed, forward and backward, at each of 4 depths.
    assert exchange.bytes == 4 * 4096 * 1024 * 2 * 4 * 4
    assert exchange.seconds == pytest.approx(exchange.bytes * 3 / 4 / (2 * 90e9))


def test_neurons_of_depths_without_gradient_are_gathered_and_summed_forward_alone():
    """Two exchanges forward, two again and two backward, at 8 depths of which 2 have a backward pass."""
    dense = HuginnConfig(vocab_size=64, hidden_size=64, heads=4, kv_heads=4, mlp_size=256, depth=8)
    dense = dataclasses.replace(dense, prelude_layers=1, core_layers=1, coda_layers=1)
    its = config(MeshConfig(data=(4, 4), expert=4), model=dense, remat="full")
    its = dataclasses.replace(its, recurrence=RecurrenceConfig(draw="fixed", differentiated=2))
    exchange = one(roofline(its, V5P).exchanges, "expert exchange")
    assert exchange.bytes == 4 * 4096 * 64 * 2 * (2 * 8 + 4 * 2 + 2 * 6)  # and of prelude and coda


def test_wires():
    wires = Wires(MeshConfig(data=(4, 4, 4)), V5P)
    assert wires.seconds("all-gather", 180e9, ["data0"]) == pytest.approx(0.75)  # a ring: both links of an axis
    assert wires.seconds("all-reduce", 180e9, ["data0"]) == pytest.approx(1.5)
    assert wires.seconds("all-gather", 1e9, []) == 0
    assert wires.seconds("collective-permute", 90e9, ["data1"]) == pytest.approx(1.0)
    assert wires.seconds("all-to-all", 180e9, ["data2"]) == pytest.approx(1.0)
    half = Wires(MeshConfig(data=(4, 4, 2), expert=2), V5P)
    assert half.seconds("all-gather", 90e9, ["expert"]) == pytest.approx(0.5)  # two neighbours: one link
    line = Wires(MeshConfig(data=(16, 2), expert=8), V5E)
    assert line.seconds("reduce-scatter", 45e9, ["expert"]) == pytest.approx(7 / 8)  # part of a ring is a line
    square = Wires(MeshConfig(data=(4, 2), expert=8), V5P)
    assert square.seconds("all-gather", 270e9, ["expert"]) == pytest.approx(7 / 8)  # a ring of 4 by a line of 2


def test_a_bound_of_float32_says_what_it_counts():
    said = "counted in bfloat16, and this model computes in float32"
    for dtype in ("float32", "bfloat16"):
        its = config(model=dataclasses.replace(WIDE, dtype=dtype))
        assert (said in render(describe(its, V5P, None, roofline(its, V5P)))) == (dtype == "float32")


def test_slices_are_connected_by_the_network():
    two = parse_topology("v5p:4x4x4", 2)
    wires = Wires(MeshConfig(slices=2, data=(4, 4, 4)), two)
    assert wires.seconds("all-reduce", 6.25e9, ["slice"]) == pytest.approx(1.0)
    mesh = MeshConfig(slices=2, data=(4, 4, 4))
    once, often = (
        one(roofline(config(mesh, batch_size=512, microbatches=4, scatter=each), two).exchanges, "between slices")
        for each in ("step", "microbatch")
    )
    assert once.seconds > 0 and (often.bytes, often.seconds) == pytest.approx((4 * once.bytes, 4 * once.seconds))


def collective(**changes) -> Collective:
    base = Collective("all-gather", False, False, ("bf16[8]",), 180_000_000, ("data0",), 4, (), 1, "")
    return dataclasses.replace(base, **changes)


def test_the_compiled_programs_collectives_take_the_place_of_the_estimate():
    asked = config()
    bound = roofline(asked, V5P, [collective(), collective(loops=("while",), times=4)])
    assert bound.compiled and {e.name for e in bound.exchanges} == {"weight gather", "expert exchange"}
    assert one(bound.exchanges, "weight gather").seconds == pytest.approx(0.75e-3)
    assert one(bound.exchanges, "expert exchange").seconds == pytest.approx(4 * 0.75e-3)
    hidden = roofline(asked, V5P, [collective(overlapped=True)])
    assert hidden.seconds == pytest.approx(roofline(asked, V5P, []).seconds)


def test_an_exchange_in_loops_of_unknown_length_is_estimated():
    """Some of it may stand in loops whose length is written; it isn't counted twice."""
    together = config(MeshConfig(data=(4, 4), expert=4))
    looped = collective(loops=("while",), times=2)
    bound = roofline(together, V5P, [collective(), looped, dataclasses.replace(looped, times=None)])
    expected = one(roofline(together, V5P).exchanges, "expert exchange")
    assert [e for e in bound.exchanges if e.name == "expert exchange"] == [expected]
    assert one(bound.exchanges, "weight gather").seconds == pytest.approx(0.75e-3)


def test_gradients_may_be_scattered_after_every_microbatch():
    """Then they travel as often, and what is float32 in a loop is theirs; what is bfloat16 there is the exchange."""
    once, often = (config(batch_size=128, microbatches=2, scatter=when) for when in ("step", "microbatch"))
    scatters = [one(roofline(asked, V5P).exchanges, "gradient scatter") for asked in (once, often)]
    assert scatters[1].bytes == 2 * scatters[0].bytes and scatters[1].seconds == 2 * scatters[0].seconds
    looped = [
        collective(loops=("while",), times=2, kind="reduce-scatter", arrays=(f"{d}[8]",)) for d in ("f32", "bf16")
    ]
    assert {e.name for e in roofline(often, V5P, looped).exchanges} == {"gradient scatter", "expert exchange"}
    assert {e.name for e in roofline(once, V5P, looped).exchanges} == {"expert exchange"}


def test_tokens_are_those_of_the_text():
    """Three copies of every token take three times the places, and a token's FLOPs are those of its copies."""
    data = [DataConfig(sequence_length=1024, copies=3), DataConfig(sequence_length=3072)]
    copied, plain = (dataclasses.replace(config(), data=its) for its in data)
    bounds = [roofline(its, V5P) for its in (copied, plain)]
    assert bounds[0].seconds == bounds[1].seconds and bounds[0].mfu == bounds[1].mfu
    assert bounds[0].tokens_per_second == pytest.approx(bounds[1].tokens_per_second / 3)
    plans = [describe(its, V5P, None, bound) for its, bound in zip((copied, plain), bounds, strict=True)]
    assert plans[0]["tokens"] == {"step": 64 * 1024, "chip": 1024, "row": 1024}
    assert plans[0]["model_flops_per_token"] == 3 * plans[1]["model_flops_per_token"]


def test_the_bound_is_the_sum_of_the_longer_times_and_the_exchanges():
    bound = roofline(config(), V5P)
    whole = sum(max(t.matrix_seconds, t.memory_seconds) for t in bound.terms) + bound.total("collective")
    assert bound.seconds == pytest.approx(whole)
    useful = analytic.training_flops(build(WIDE), 4096)[0] * 4096
    assert bound.mfu == pytest.approx(useful / 459e12 / bound.seconds) and bound.mfu < 1
    assert bound.tokens_per_second == pytest.approx(4096 / bound.seconds)


@pytest.mark.parametrize("name", ["v5p:4x4", "v5e:3x5", "v7:2x2", "H100:1x1", "v5p", ""])
def test_unknown_topologies_are_refused_by_name(name):
    with pytest.raises(UserError, match="unknown topology"):
        parse_topology(name)


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"\.\[tpu\]"):
        topologies.devices_of(V5P)


def test_ragged_exchange_sends_choices_instead_of_tokens():
    together = config(MeshConfig(data=(4, 4), expert=4, exchange="ragged"))
    exchange = one(roofline(together, V5P).exchanges, "expert exchange")
    assert exchange.bytes == 4 * 4096 * 1024 * 2 * 4 * 4  # k = 4 copies of a token, as many as chips here
    assert exchange.seconds == pytest.approx(exchange.bytes / (2 * 90e9))  # half crosses the middle of the ring


@pytest.mark.parametrize("name", ["v5e:1x1", "v6e:1x1", "v5e:2x2", "v4:2x2x1"])
def test_a_slice_of_one_chip_has_a_host_of_one_chip(monkeypatch, name):
    """libtpu takes hosts of four unless it's told, and then refuses a slice that is smaller."""
    from jax.experimental import topologies as jax_topologies

    asked = {}
    monkeypatch.setattr(topologies, "require_libtpu", lambda: None)
    monkeypatch.setattr(jax_topologies, "get_topology_desc", lambda *_, **options: asked.update(options) or mock.Mock())
    topologies.devices_of(topologies.parse_topology(name))
    assert asked.get("chips_per_host_bounds") == ((1, 1, 1) if name.endswith(":1x1") else None)
