"""A plan to serve: bytes and seconds against arithmetic by hand, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dreamer_jax.cli.main import main
from dreamer_jax.config import Config
from dreamer_jax.config.models.cotformer import CotformerConfig
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.config.models.moeut import MoeutConfig
from dreamer_jax.config.models.ouro import OuroConfig
from dreamer_jax.config.models.ponder import PonderConfig
from dreamer_jax.config.models.universal import UniversalConfig
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.errors import UserError
from dreamer_jax.planning.serving import SPARE, plan_serving, render
from dreamer_jax.planning.topology import parse_topology
from dreamer_jax.serving.options import Options

V5E = parse_topology("v5e:2x2")
SMALL = DreamerConfig(
    variant="LA",
    depth=4,
    hidden_size=64,
    vocab_size=1000,
    sa_heads=4,
    sa_kv_heads=2,
    sa_head_size=16,
    num_experts=8,
    experts_per_token=2,
    expert_size=32,
    router_size=16,
)
EXPERT = 3 * 64 * 32
LAYER = 64 * (2 * 4 + 2 * 2) * 16 + (64 + 8) * 16
"""A layer's matrices but its experts: q, k, v, o; the router's query and keys. Norms are left out below."""


def plan(model=SMALL, mesh=None, **sizes):
    chosen = {"rows": 3, "context": 40, "page_size": 16} | sizes
    return plan_serving(Config(model=model, mesh=mesh or MeshConfig(data=(2, 2))), V5E, **chosen)


def test_memory_by_hand():
    """Weights of two bytes; a page has keys and values of 16 positions at four depths; experts are divided."""
    its = plan()
    numbers = 2 * 1000 * 64 + 4 * (LAYER + 8 * EXPERT)
    assert its.weights == pytest.approx(2 * numbers, rel=0.01) and its.weights > 2 * numbers
    assert (its.page, its.flight) == (2 * 4 * 16 * 128 * 2, 0)  # two heads of 16, filled up to a tile
    of_tiles = plan(model=dataclasses.replace(SMALL, sa_head_size=128))
    assert of_tiles.page == 2 * 4 * 16 * 2 * 128 * 2
    assert its.pages == int((16e9 * (1 - SPARE) - its.weights) // its.page)
    assert its.pages_wanted == 2 * 3 * 3 and its.expert == 1  # six requests of 40 positions
    assert its.requests == Options(rows=3).all_places
    divided = plan(mesh=MeshConfig(data=(2,), expert=2))
    assert its.weights - divided.weights == 2 * 4 * 4 * EXPERT and divided.expert == 2
    flying = plan(dataclasses.replace(SMALL, variant="DR+DA", da_head_size=16, da_heads=1, da_kv_heads=1))
    assert flying.flight == 2 * 4 * 16 * 2


def test_seconds_by_hand():
    """Memory decides of few rows: weights once for three that choose six experts, keys of 20.5 positions each."""
    its = plan()
    read = 2 * (LAYER + 6 * EXPERT + 3 * 20.5 * 2 * 2 * 16)
    assert its.depth_seconds == pytest.approx(read / 819e9, rel=0.02)
    assert its.outside_seconds > 2 * 1000 * 64 / 819e9
    assert its.tokens_per_second == pytest.approx(4 * 3 / (its.outside_seconds + 4 * its.depth_seconds))
    half = plan(mean_depth=2)
    assert half.tokens_per_second == pytest.approx(4 * 3 / (its.outside_seconds + 2 * its.depth_seconds))
    divided = plan(mesh=MeshConfig(data=(2,), expert=2))  # six rows choose all eight experts, of which a chip has four
    read = 2 * (LAYER + 4 * EXPERT + 3 * 20.5 * 2 * 2 * 16)
    assert divided.depth_seconds == pytest.approx(read / 819e9, rel=0.02)
    assert divided.tokens_per_second == pytest.approx(4 * 3 / (divided.outside_seconds + 4 * divided.depth_seconds))
    many = plan(rows=100_000, context=1)  # of many rows that see little, the products
    flops = 100_000 * 2 * (LAYER + 2 * EXPERT + 2 * 4 * 16)
    assert many.depth_seconds == pytest.approx(flops / 197e12, rel=0.02)
    shared = plan(rows=100_000, context=1, mesh=MeshConfig(data=(2,), expert=2))  # its own rows' and others' visits
    assert shared.depth_seconds == pytest.approx(many.depth_seconds)


def test_keys_are_read_at_every_depth():
    """However many depths keep some; and those of all repeats so far, where a repeat sees these."""
    seconds = [plan(OuroConfig(cache=cache), context=4000).depth_seconds for cache in ("loops", "last")]
    assert seconds[0] == seconds[1]
    one, four = (plan(CotformerConfig(depth=depth), context=4000) for depth in (2, 4))
    keys = 3 * 2000.5 * 2 * 128 * 4 * 2  # of 3 rows in 4 middle layers, bfloat16
    assert four.depth_seconds - one.depth_seconds == pytest.approx((2.5 - 1.5) * keys / 819e9, rel=0.01)


def test_a_pondering_model_reads_both_matrices_again():
    small, large = (plan(PonderConfig(vocab_size=size)) for size in (1000, 2000))
    more = 3 * 2 * 1000 * 128 * 2 / 4  # three times in four passes
    assert large.depth_seconds - small.depth_seconds == pytest.approx(more / 819e9)


def test_only_models_with_experts_speak_of_them():
    dense = plan(HuginnConfig(hidden_size=64, heads=4))
    assert plan().chooses and "no two rows choose the same expert" in render(plan())
    assert not dense.chooses and "expert" not in render(dense)
    assert plan(MoeutConfig()).chooses and not plan(UniversalConfig()).chooses


def test_what_does_not_fit_says_what_to_do():
    its = plan(context=200_000)
    assert its.fits and "It fits." in render(its)
    most = its.pages * 16 // 200_000
    assert not (over := plan(context=200_000, rows=most // 2 + 1)).fits
    assert f"pages for {most} such requests" in render(over)
    paged = plan(context=200_000, page_size=150_000, rows=most // 2 + 1)  # a request takes two
    assert f"pages for {paged.pages // 2} such requests" in render(paged)
    none = dataclasses.replace(its, weights=16e9)
    assert not none.fits and "mesh.expert" in render(none)


def test_the_command(capsys):
    words = ["plan", "dr_da_tiny", "--topology", "v5e:2x2", "--serve", "--rows", "2"]
    assert main([*words, "--context", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 2 and found["pages_wanted"] == 28 and found["fits"]
    for wrong, said in (
        (["--mean-depth", "99"], "mean depth 99"),
        (["--sweep"], "--serve compiles nothing"),
        (["--roofline"], "--roofline is a plan of its own"),
        (["--mesh.data", "8,8"], "v5e:2x2 has 1 x 4"),
        (["--mesh.data", "3"], "3"),
    ):
        assert main([*words, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert main([*words[:4], "--context", "5"]) == 2
    assert "--context is about serving" in capsys.readouterr().err


def test_puzzles_are_not_served():
    from tests.families.test_puzzle_solvers import MODELS

    with pytest.raises(UserError, match="doesn't generate text"):
        plan(MODELS["dreamer"])
