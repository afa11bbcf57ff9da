"""The default programs compiled for an NVIDIA H200 on a machine without one: every kernel of ours fits and is taken.

Needs jax's plugin for CUDA, none of NVIDIA's libraries: pip install jax-cuda13-plugin jax-cuda13-pjrt.
"""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from dreamer_jax.benchmarks.kernels import kernel_cases
from dreamer_jax.blocks.operations import in_int8
from dreamer_jax.config import load_config
from dreamer_jax.families import build, initialise
from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.inference.programs import Kinds, decode
from dreamer_jax.inference.samplers import Static
from dreamer_jax.inference.samplers.contract import Asked, Choosing, Progress
from dreamer_jax.inference.sampling import Sampling
from tests.pallas_kernels.test_gpu import gpu  # noqa: F401, the fixture

PLUGIN = bool(importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13"))
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not PLUGIN, reason="needs jax-cuda13-plugin and jax-cuda13-pjrt"),
]

H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  device_memory_size: 150754820096
}
"""
"""What the compiler asks of a GPU."""


@functools.cache
def one_gpu():
    """Everything on it."""
    jax.devices("cpu")  # plugins are found
    device = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1").devices[0]
    return jax.sharding.SingleDeviceSharding(device)


def compiled(function, *arguments):
    """The program's text, of arguments by their shapes."""

    def there(leaf):
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), sharding=one_gpu())

    options = {"xla_gpu_autotune_level": "0"}  # which would run on the GPU
    return function.lower(*jax.tree.map(there, arguments)).compile(options).as_text()


def calls(text):
    """Our kernels in a program, each as often as it is there."""
    return re.findall(r'custom-call\(.*op_name="[^"]*?(\w+)\)*/pallas_call"', text)


@pytest.mark.parametrize("case", kernel_cases(platform="gpu"), ids=lambda case: f"{case.name} {case.shape}")
def test_the_papers_shapes(case):
    """Forward and gradient of every operation: registers and shared memory suffice."""
    arguments = *jax.eval_shape(case.arguments, jax.random.key(0)), jax.ShapeDtypeStruct((), jnp.int32)
    assert calls(compiled(jax.jit(case.kernel), *arguments))


@pytest.mark.parametrize(("batch", "int8"), [(1, False), (16, False), (16, True)])
@pytest.mark.parametrize("name", ["la_small", "dr_da_16"])
def test_decoding(name, batch, int8):
    """A depth has a kernel for each map of few rows, and one for the attention over slots."""
    family = build(load_config(name).config.model)
    params, state = jax.eval_shape(lambda: initialise(family, jax.random.key(0)))
    folding = build(family.config, in_int8(family.operations)) if int8 else family
    folded = jax.eval_shape(lambda *both: folding.fold(folding.prepare(*both)), params, state)
    assert any(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(folded)) == int8
    model, sampler = FoldedModel(folded, state, family, family.depth), Static()
    slots = jax.eval_shape(lambda model: model.empty_slots(batch, 4096), model)
    rows = jax.ShapeDtypeStruct((batch,), jnp.int32)
    progress = Progress(rows, rows, jax.ShapeDtypeStruct((batch,), jnp.bool_), rows, rows, rows)
    asked = Asked(jnp.int32(32), jnp.asarray([-1]), Sampling().numbers(), sampler.numbers())
    program = jax.jit(functools.partial(decode, Kinds(Choosing(), sampler)), donate_argnums=2)
    found = calls(compiled(program, model, progress, slots, sampler.carry(model, batch), asked))
    maps = 2 if name == "la_small" else 4  # qkv and out of each attention
    assert sorted(found) == sorted(
        ["few_swiglu", "slots_attention", *["few_product"] * (maps + 1), *["depth_attention_forward"] * (maps // 4)]
    )
