"""The step on eight devices: loss, every gradient and three updates are those of one device, whatever the mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dreamer_jax.config.sections import Config, MeshConfig
from dreamer_jax.families import build
from dreamer_jax.parallel import batch_spec, make_mesh, parameter_layouts
from dreamer_jax.parallel import mesh as meshes
from dreamer_jax.parallel.gather import gather, means, scatter, squared_norm, sum_over
from dreamer_jax.parallel.mesh import EXPERT
from dreamer_jax.planning.collectives import find_collectives, large_all_reduces
from dreamer_jax.planning.hlo import parse_program
from dreamer_jax.runs import knowledge
from dreamer_jax.runs.state import TrainState
from dreamer_jax.training.state import abstract_state, create_state, state_specs
from dreamer_jax.training.train_step import family_on, make_loss_and_gradient, make_train_step
from tests.families.cases import drawn_params
from tests.training.cases import random_batch, tiny_config

MESHES = {
    "data": MeshConfig(data=(8,)),
    "torus": MeshConfig(data=(4, 2)),
    "expert": MeshConfig(expert=8),
    "mixed": MeshConfig(data=(2, 2), expert=2),
    "slices": MeshConfig(slices=2, data=(2,), expert=2),
    "ragged": MeshConfig(data=(2,), expert=4, exchange="ragged"),
}


@pytest.fixture(scope="module", autouse=True)
def two_chips_are_a_ring():
    """Eight devices have no two rings of four: so `mixed` is gathered over both axes of data at once, as a pod is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "RING", 2)
        yield


@functools.cache
def case(variant: str, experts: int, hot: int | None = None) -> tuple[Config, TrainState]:
    """A model of 11 experts; where `hot` is given, its bias draws every token, and another's repels every one."""
    config = tiny_config(model__variant=variant, model__num_experts=experts)
    state = jax.device_get(create_state(config, make_mesh(config.mesh)))
    if hot is not None:
        balancing = state.model_state["balancing"]
        bias = np.zeros_like(balancing["expert_attention"])
        bias[..., hot], bias[..., (hot + 1) % experts] = 100, -100
        state = state.replace(model_state={"balancing": {**balancing, "expert_attention": bias}})
    return config, state


@functools.cache
def compiled(config: Config, mesh_config: MeshConfig) -> Any:
    """(params, model state, batch) -> ((loss sum, (counts, logged sums)), gradients), in the model's shapes."""
    config = dataclasses.replace(config, mesh=mesh_config)
    mesh = make_mesh(mesh_config)
    family = family_on(config, mesh)
    layouts = parameter_layouts(family.boxed, mesh)
    specs = state_specs(config, mesh).params
    local = make_loss_and_gradient(config, family)

    def gradient(params, model_state, batch):
        sums, gradients, _ = local(gather(params, layouts, family.cast), model_state, batch, jnp.int32(0))
        return sum_over(mesh, sums), scatter(gradients, layouts, mesh)

    specs_in = (specs, P(), batch_spec(mesh))
    sharded = jax.shard_map(gradient, mesh=mesh, in_specs=specs_in, out_specs=(P(), specs), check_vma=False)
    return jax.jit(sharded)


def loss_and_gradients(config: Config, state: TrainState, mesh_config: MeshConfig) -> Any:
    """Those of a batch, on the host."""
    return jax.device_get(compiled(config, mesh_config)(state.params, state.model_state, random_batch(1)))


@functools.cache
def expected(variant: str, experts: int, hot: int | None) -> Any:
    return loss_and_gradients(*case(variant, experts, hot), MeshConfig())


def assert_close(actual: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Every leaf to `tolerance` of its largest magnitude."""

    def check(path, a, b):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(check, actual, wanted)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("variant", "mesh"),
    [
        ("DR+DA", "expert"),
        ("DR+DA", "mixed"),
        slow("LA", "mixed"),
        slow("DR+DA", "torus"),  # families without experts train on it in tests/families/test_registry.py
        slow("DR+DA", "data"),
        slow("DR+DA", "slices"),
        slow("DR+DA", "ragged"),
        slow("LA", "torus"),
        slow("LA", "expert"),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(variant, mesh):
    """Eleven experts: a prime, divided by no axis."""
    assert_close(loss_and_gradients(*case(variant, 11), MESHES[mesh]), expected(variant, 11, None))


@pytest.mark.slow  # eight CPU seconds each; tests/families/test_dreamer_parts.py has them without a mesh
@pytest.mark.parametrize("left_out", [("attention_experts", "residual_norm"), ("shared_expert", "router_depth_code")])
def test_a_model_without_a_part_of_section_3_7(left_out):
    config = tiny_config(**{f"model__{name}": False for name in left_out}, model__num_experts=11)
    state = jax.device_get(create_state(config, make_mesh(config.mesh)))
    wanted = loss_and_gradients(config, state, MeshConfig())
    assert_close(loss_and_gradients(config, state, MESHES["mixed"]), wanted)


@pytest.mark.slow
def test_texts_are_the_same_on_every_device(tmp_path):
    """Their file's, whose maps are divided and gathered as all weights are."""
    path = tmp_path / "facts.safetensors"
    knowledge.write(path, np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32), list("abcde"))
    plain = tiny_config(model__num_experts=11)
    model = dataclasses.replace(plain.model, pa_slots=5, pa_source="texts", pa_embedding_size=12)  # type: ignore[call-arg]
    config = dataclasses.replace(plain, model=model, data=dataclasses.replace(plain.data, knowledge=str(path)))
    state = jax.device_get(create_state(config, make_mesh(MESHES["mixed"])))
    texts = state.model_state["knowledge"]["texts"]
    np.testing.assert_array_equal(texts, knowledge.read_embeddings(path, config.model))
    wanted = loss_and_gradients(config, state, MeshConfig())
    assert np.abs(wanted[1]["layer"]["parameter_attention"]["keys"]).max() > 0
    assert_close(loss_and_gradients(config, state, MESHES["mixed"]), wanted)


@pytest.mark.slow
def test_experts_of_a_depth_are_on_several_devices():
    """Six of eleven experts at each of two depths; with a choice of dimensions beside."""
    config = tiny_config(model__expert_subset="sliding", model__num_experts=11, model__dimensions_per_token=2)
    state = jax.device_get(create_state(config, make_mesh(config.mesh)))
    (_, (counts, _)), _ = wanted = loss_and_gradients(config, state, MeshConfig())
    assert all(np.unique(np.flatnonzero(row) // 6).size == 2 for row in counts["expert_attention"])
    assert_close(loss_and_gradients(config, state, MESHES["mixed"]), wanted)


@pytest.mark.parametrize("mesh", ["expert", "mixed"])
def test_an_expert_with_everything_and_one_with_nothing(mesh):
    (_, (counts, _)), _ = wanted = expected("DR+DA", 11, 10)
    tokens = int((random_batch(1)["segment_ids"] > 0).sum())
    assert list(counts["expert_attention"][:, 10]) == [tokens] * 2 and not counts["expert_attention"][:, 0].any()
    assert_close(loss_and_gradients(*case("DR+DA", 11, 10), MESHES[mesh]), wanted)


@functools.cache
def compiled_step(mesh_config: MeshConfig) -> Any:
    config = dataclasses.replace(case("DR+DA", 11)[0], mesh=mesh_config)
    mesh = make_mesh(mesh_config)
    rows = NamedSharding(mesh, batch_spec(mesh))
    batch = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=rows) for k, v in random_batch(1).items()}
    return make_train_step(config, mesh).lower(abstract_state(config, mesh), batch).compile()


@functools.cache
def three_steps(mesh_config: MeshConfig) -> Any:
    step = compiled_step(mesh_config)
    (state_sharding, batch_sharding), _ = step.input_shardings
    state = jax.device_put(case("DR+DA", 11)[1], state_sharding)
    for seed in (1, 2, 3):
        state, metrics = step(state, jax.device_put(random_batch(seed), batch_sharding))
    return jax.device_get((state, metrics))


@pytest.mark.parametrize("mesh", ["mixed", "torus", "slices", "expert"])
@pytest.mark.slow
def test_three_steps_give_the_same_weights(mesh):
    assert_close(three_steps(MESHES[mesh]), three_steps(MeshConfig()), 2e-5)


@pytest.mark.parametrize("mesh", ["mixed", slow("torus"), slow("slices")])
def test_every_weight_is_gathered_once_and_its_gradient_scattered_once(mesh):
    """Along every axis of data, or two at once; in loops, nothing travels but what goes to other devices' experts."""
    program = parse_program(compiled_step(MESHES[mesh]).as_text())
    device_mesh = make_mesh(MESHES[mesh])
    found = find_collectives(program, device_mesh.shape)
    inside = {(c.kind, c.axes) for c in found if c.loops}
    exchange = {("all-gather", (EXPERT,)), ("reduce-scatter", (EXPERT,))}
    assert inside == (exchange if MESHES[mesh].expert > 1 else set())

    layouts = jax.tree.leaves(parameter_layouts(build(case("DR+DA", 11)[0].model).boxed, device_mesh))
    wanted = Counter(part.axes for layout in layouts for part in layout.parts if part.computed is not None)
    for kind in ("all-gather", "reduce-scatter"):
        outside = [c for c in found if c.kind == kind and not c.loops]
        assert Counter(c.axes for c in outside for _ in c.arrays) == wanted
    scales = max(layout.shape[0] for layout in layouts if len(layout.shape) == 1)
    assert large_all_reduces(found, 2 * scales) == []


def test_the_state_is_divided_over_all_devices():
    """And its numbers are those of one device, bit by bit."""
    config, state = case("DR+DA", 8)
    mesh = make_mesh(MESHES["mixed"])
    divided = create_state(dataclasses.replace(config, mesh=MESHES["mixed"]), mesh)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(divided), state)
    for tree in (divided.params, divided.optimizer):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if leaf.ndim > 1 and path[-1].key != "scale" and leaf.shape[0] % 8 == 0:
                assert leaf.addressable_shards[0].data.size == leaf.size // 8, jax.tree_util.keystr(path)


@pytest.mark.parametrize("mesh", ["mixed", "slices"])
def test_means_and_norms_are_those_of_whole_arrays(mesh):
    """However an array is divided or copied, and with leaves left out, as those that aren't trained are."""
    config = tiny_config(model__num_experts=5)
    mesh, params = make_mesh(MESHES[mesh]), drawn_params(config.model)
    layouts = parameter_layouts(build(config.model).boxed, mesh)
    specs = jax.tree.map(lambda layout: layout.spec, layouts)

    def run(params):
        kept = {**params, "head": optax.MaskedNode()}
        return means(kept, layouts, mesh), squared_norm(params, layouts, mesh)

    sharded = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
    found, norm = jax.jit(sharded)(params)
    wanted = {**jax.tree.map(np.mean, jax.device_get(params)), "head": optax.MaskedNode()}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, wanted)
    np.testing.assert_allclose(norm, sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(params)), rtol=1e-5)
