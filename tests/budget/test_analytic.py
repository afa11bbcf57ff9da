"""The analytic counts against the paper's tables, against counts spelt out by hand, and against each other."""

import dataclasses

import pytest

from dreamer_jax.blocks.head import Head
from dreamer_jax.budget import analytic, memory
from dreamer_jax.config import load_config
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.families import Family, build
from tests.outside import paper_tables

SIX = ("la_16", "dr_16", "dr_da_16", "la_32", "dr_32", "dr_da_32")
PARAMETERS = (1.1708, 1.1704, 1.1708, 2.0790, 2.0794, 2.0788)  # Table 1, in 10^9
FLOPS = (0.9389, 0.9389, 0.9413, 1.6150, 1.6199, 1.6130)  # Table 1, in 10^9 a token
PRODUCTS = (0.9381, 0.9381, 0.9404, 1.6136, 1.6179, 1.6106)  # the same by hand, matrix products only

# Small enough for sums on paper, no two sizes alike.
SMALL = DreamerConfig(
    depth=3, hidden_size=8, vocab_size=11, sa_heads=4, sa_kv_heads=2, sa_head_size=6, da_heads=2, da_kv_heads=1,
    da_head_size=12, num_experts=7, experts_per_token=2, expert_size=5, router_size=4,
)  # fmt: skip
SA_WEIGHTS = 8 * (4 + 2 * 2) * 6 + 4 * 6 * 8
DA_WEIGHTS = 8 * (2 + 2 * 1) * 12 + 2 * 12 * 8


def paper_model(name: str) -> Family:
    return build(load_config(name).config.model)


def small(variant: str, **changes) -> Family:
    return build(dataclasses.replace(SMALL, variant=variant, **changes))


@pytest.mark.parametrize(("name", "billions"), list(zip(SIX, PARAMETERS, strict=True)))
def test_parameters_are_table_1_to_four_decimals(name: str, billions: float) -> None:
    assert round(analytic.total(analytic.parameters(paper_model(name))) / 1e9, 4) == billions


@pytest.mark.parametrize(("name", "products", "table"), list(zip(SIX, PRODUCTS, FLOPS, strict=True)))
def test_flops_are_table_1(name: str, products: float, table: float) -> None:
    model, context = paper_model(name), analytic.average_context(1024)
    matmul = analytic.total(analytic.matmul_flops(model, context)) / 1e9
    both = matmul + analytic.total(analytic.elementwise_flops(model, context)) / 1e9
    assert round(matmul, 4) == products
    assert abs(matmul / table - 1) < 0.002
    assert abs(both / table - 1) < 0.0003


def test_the_numbers_above_are_the_papers() -> None:
    rows = paper_tables()["dreamer"]["table1_resources"]
    assert [(row["params_b"], row["gflops_per_token"]) for row in rows] == list(zip(PARAMETERS, FLOPS, strict=True))


def test_parameters_by_hand() -> None:
    embeddings = 2 * 11 * 8
    norms = 8 + 2 * 6 + 8  # SA's pre-norm, q and k norms; EA's pre-norm
    router = 8 * 4 + 7 * 4 + 2 * 4
    layer = SA_WEIGHTS + norms + router + 7 * 3 * 5 * 8
    assert analytic.total(analytic.parameters(small("LA"))) == embeddings + 8 + 3 * layer

    attention_router = 8 * 4 + 3 * 4 + 2 * 4
    layer = 4 * SA_WEIGHTS + norms + router + attention_router + 7 * 3 * 5 * 8
    assert analytic.total(analytic.parameters(small("DR"))) == embeddings + 8 + layer

    depth_attention = 4 * DA_WEIGHTS + 8 + 2 * 12 + attention_router
    assert analytic.total(analytic.parameters(small("DR+DA"))) == embeddings + 8 + layer + depth_attention


def test_flops_by_hand() -> None:
    context = 10.5
    layer = SA_WEIGHTS + 2 * context * 4 * 6 + 2 * 3 * 5 * 8 + 8 * 4 + 7 * 4
    assert analytic.total(analytic.matmul_flops(small("LA"), context)) == 2 * (3 * layer + 8 * 11)
    layer += 8 * 4 + 3 * 4  # the router of SA's mixture
    assert analytic.total(analytic.matmul_flops(small("DR"), context)) == 2 * (3 * layer + 8 * 11)
    layer += DA_WEIGHTS + 2 * 2 * 2 * 12 + 8 * 4 + 3 * 4  # depths 1, 2 and 3: 2 on average
    assert analytic.total(analytic.matmul_flops(small("DR+DA"), context)) == 2 * (3 * layer + 8 * 11)


def test_what_leaving_out_a_part_of_section_3_7_saves() -> None:
    """By hand: parameters, matrix products, elementwise work and what a train step executes beyond three forwards."""

    def counts(**changes) -> tuple[float, float, float, float]:
        model = small("DR+DA", **changes)
        each = (analytic.parameters(model), analytic.matmul_flops(model, 10), analytic.elementwise_flops(model, 10))
        parameters, products, elementwise = map(analytic.total, each)
        extra = analytic.executed_training_flops(model, 20, remat=False)[0] - analytic.training_flops(model, 20)[0]
        return parameters, products, elementwise, extra

    def saved(**changes) -> tuple[float, ...]:
        return tuple(before - after for before, after in zip(counts(), counts(**changes), strict=True))

    both, router = SA_WEIGHTS + DA_WEIGHTS, 8 * 4 + 3 * 4 + 2 * 4
    third = 2 * 3 * both  # the third product of a folded projection's gradient, at three depths
    assert counts()[3] == third
    scaled = (4 + 2 * 2) * 6 + 8 + (2 + 2 * 1) * 12 + 8  # outputs of the four maps, times the score
    routing = 2 * 4 + (2 + 1) * 3  # norm and rotation of the query; sigmoid, bias and comparison of 3 experts
    products, elementwise = 3 * 2 * 2 * (8 + 3) * 4, 3 * (scaled + 2 * routing)
    assert saved(attention_experts=False) == (3 * both + 2 * router, products, elementwise, third)
    assert saved(shared_expert=False) == (both, 0, 0, third)
    assert saved(residual_norm=False) == (0, 0, 2 * 8, 0)  # one norm in place of three
    assert saved(router_depth_code=False) == (0, 0, 3 * 3 * 4, 0)  # three rotated queries at three depths


def test_folding_removes_one_expert_and_one_product() -> None:
    model = small("DR+DA")
    stored, folded = (analytic.total(analytic.parameters(model, folded=each)) for each in (False, True))
    assert stored - folded == SA_WEIGHTS + DA_WEIGHTS
    branches, product = (analytic.total(analytic.matmul_flops(model, 10, folded=each)) for each in (False, True))
    assert branches - product == 2 * 3 * (SA_WEIGHTS + DA_WEIGHTS)
    assert analytic.elementwise_flops(model, 10, folded=False)["SA"] > analytic.elementwise_flops(model, 10)["SA"]
    for model in (small("LA"), small("LA+DA"), small("DR", shared_expert=False), small("DR", attention_experts=False)):
        assert analytic.parameters(model) == analytic.parameters(model, folded=True)
        assert analytic.matmul_flops(model, 10) == analytic.matmul_flops(model, 10, folded=False)


def test_active_parameters() -> None:
    embedding, head, expert = 8, 11 * 8, 3 * 5 * 8
    router = 8 * 4 + 7 * 4 + 2 * 4
    norms = 8 + 2 * 6 + 8
    everything = embedding + head + 8
    assert analytic.total(analytic.active_parameters(small("LA"))) == everything + 3 * (
        SA_WEIGHTS + norms + router + 2 * expert
    )
    dr = analytic.active_parameters(small("DR"))
    assert dr["EA"] == 6 * expert + 8  # 2 at each of 3 depths, of 7
    few = small("DR", num_experts=4)
    assert analytic.active_parameters(few)["EA"] == 4 * expert + 8  # there are no more


def test_a_training_step_is_three_forwards_and_what_folding_and_remat_add() -> None:
    context = analytic.average_context(20)
    forward = analytic.total(analytic.matmul_flops(small("LA"), context))
    assert analytic.training_flops(small("LA"), 20)[0] == 3 * forward
    assert analytic.executed_training_flops(small("LA"), 20, remat=False)[0] == 3 * forward
    assert analytic.executed_training_flops(small("LA"), 20, remat=True)[0] == 4 * forward - 2 * 8 * 11
    forward = analytic.total(analytic.matmul_flops(small("DR"), context))
    assert analytic.training_flops(small("DR"), 20)[0] == 3 * forward
    assert analytic.executed_training_flops(small("DR"), 20, remat=False)[0] == 3 * forward + 2 * 3 * SA_WEIGHTS


def test_generation_memory_of_matched_models_agrees() -> None:
    totals = [sum(memory.generation(paper_model(name), 1024).values()) for name in SIX]
    for la, *matched in (totals[:3], totals[3:]):
        assert all(abs(each / la - 1) < 0.001 for each in matched)
    cache = 2 * 16 * 1024 * 8 * 128 * 2
    assert totals[0] == 2 * 1_170_842_624 + cache


def test_caches_grow_with_the_context_but_for_depth_attention() -> None:
    short, long = (memory.caches(small("DR+DA"), context, batch=2) for context in (10, 30))
    assert short == {"SA cache": 2 * 3 * 2 * 10 * 2 * 6 * 2, "DA cache": 2 * 3 * 2 * 1 * 12 * 2}
    assert long["SA cache"] == 3 * short["SA cache"]
    assert long["DA cache"] == short["DA cache"]
    assert memory.caches(small("DR"), 10)["DA cache"] == 0


def test_remat_makes_activations_grow_slowly_with_depth() -> None:
    def activations(depth: int, remat: memory.Remat) -> int:
        return memory.activations(small("DR+DA", depth=depth), 32, 2, remat)

    assert activations(64, "full") < activations(64, "none") / 4
    # Linear under every policy: the depth cache is kept once, not at every depth.
    steps = [activations(depth + 8, "full") - activations(depth, "full") for depth in (8, 32, 64)]
    assert max(steps) < 1.2 * min(steps)
    assert activations(128, "none") < 2.6 * activations(64, "none")


def test_training_memory_is_sixteen_bytes_a_parameter_before_activations() -> None:
    model = small("DR+DA", dtype="float32")
    count = analytic.total(analytic.parameters(model))
    held = memory.training(model, 32, 2, "full")
    assert held["weights"] + held["gradients"] + held["optimizer"] == 16 * count
    assert held["weights, compute copy"] == 0
    assert memory.training(small("DR+DA"), 32, 2, "full")["weights, compute copy"] == 2 * count
    kernels = small("DR+DA", dtype="float32", implementation="pallas")
    assert memory.training(kernels, 32, 2, "none")["attention scores"] == 0
    assert memory.training(model, 32, 2, "none")["attention scores"] == 3 * 2 * 32 * 4 * 32 * 4


def test_logits_are_those_of_a_chunk() -> None:
    """The loss has never all of a batch, nor of several losses."""
    for losses in (1, 3):
        head = Head(1 << 14, 8, losses)
        assert head.logit_elements(100) == 100 * losses * (1 << 14)
        assert head.logit_elements(1 << 20) == 2048 * (1 << 14)


def test_depths_and_what_is_outside_of_them_are_all_there_is() -> None:
    """F0 + L Fr is every matrix product; the head is outside, and twice the depths take twice Fr."""
    family = build(load_config("dr_16").config.model)
    outside, each = analytic.flops_by_depth(family, 512)
    counts = analytic.matmul_flops(family, 512)
    assert outside + family.depth * each == pytest.approx(analytic.total(counts))
    assert outside == counts["head"]


def test_a_map_is_active_where_its_attention_acts() -> None:
    """Experts of projections, of which a depth takes one."""
    every, second = (analytic.active_parameters(small("DR+DA", da_every=n)) for n in (1, 2))
    assert every["DA"] - second["DA"] == DA_WEIGHTS  # depths 0 and 2 of three
    sparse = analytic.active_parameters(small("DR+DA", sa_every=2))
    assert every["SA"] - sparse["SA"] == SA_WEIGHTS
