"""Operations of a trace: what each takes by itself, multiplies and moves, by hand; and a real trace of a loop."""

import jax
import jax.numpy as jnp
import pytest

from dreamer_jax.benchmarks import profiling
from dreamer_jax.benchmarks.profiling import Event, Rates
from dreamer_jax.errors import UserError
from dreamer_jax.planning.hlo import parse_program

TEXT = """HloModule jit_f, is_scheduled=true

%fused (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[4,8], w: f32[8,16]) -> f32[4,16] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = f32[8,16]{1,0} parameter(1)
  %product = f32[4,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused, metadata={op_name="jit(f)/dot_general"}
  ROOT %sum = f32[4,16]{1,0} add(%product, %product)
}
"""


def test_an_operation_has_what_those_within_it_leave():
    """A loop of 100 ns with two rounds of a product, which holds a copy; and a product behind it."""
    line = [
        Event("while", 0, 100),
        Event("dot", 10, 30),
        Event("copy", 15, 5),
        Event("dot", 50, 40),
        Event("dot", 100, 7),
    ]
    found = profiling.own_seconds(line)
    assert {name: (round(seconds * 1e9), count) for name, (seconds, count) in found.items()} == {
        "while": (30, 1),
        "dot": (72, 3),
        "copy": (5, 1),
    }


def test_costs_by_hand():
    """Two runs on two threads; the product has 2 x 4 x 8 x 16 FLOPs and moves 4 x 8 + 8 x 16 + 4 x 16 floats."""
    lines = [
        [Event("product", 0, 3000), Event("sum", 3000, 500)],
        [Event("product", 0, 1000), Event("unknown", 1000, 500)],
    ]
    product, total, unknown = profiling.costs(lines, TEXT, 2, Rates(flops=1e9, bandwidth=1e9, origin="by hand"))
    assert (product.name, product.origin, product.count) == ("product", "jit(f)/dot_general", 1)
    assert (product.flops, product.bytes) == (2 * 4 * 8 * 16, 4 * (32 + 128 + 64))
    assert product.seconds == pytest.approx(2e-6) and product.share == pytest.approx(0.8)
    assert product.bound == pytest.approx(1024e-9 / 2e-6)
    assert {total.name, unknown.name} == {"sum", "unknown"} and unknown.flops == unknown.bytes == 0
    assert "product  jit(f)/dot_general" in profiling.table([product], Rates(1e9, 1e9, "by hand"))


CUBLAS = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[8,4], w: f32[8,16]) -> (f32[4,16], s8[1024]) {
  %x = f32[8,4]{1,0} parameter(0)
  %w = f32[8,16]{1,0} parameter(1)
  ROOT %product = (f32[4,16]{1,0}, s8[1024]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],\
"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"epilogue":"DEFAULT"}}
}
"""

CONVOLUTIONS = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: bf16[16,128,256], w: bf16[16,384,256], a: bf16[512,256], b: bf16[256,1024]) -> bf16[512,1024] {
  %x = bf16[16,128,256]{2,1,0} parameter(0)
  %w = bf16[16,384,256]{2,1,0} parameter(1)
  %a = bf16[512,256]{1,0} parameter(2)
  %b = bf16[256,1024]{1,0} parameter(3)
  %batch = bf16[16,128,384]{2,1,0:T(8,128)(2,1)} convolution(%x, %w), window={size=16 stride=15 lhs_dilate=16}, \
dim_labels=0bf_0oi->0bf
  ROOT %one = bf16[512,1024]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_io->bf
}
"""


KERNEL = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[256,256]) -> f32[256,256] {
  %x = f32[256,256]{1,0:T(8,128)} parameter(0)
  ROOT %f = f32[256,256]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"TUzvUg==","cost_estimate":{"flops":"12345","transcendentals":"9"}}}
}
"""


@pytest.mark.parametrize(
    ("text", "flops"),
    [
        (CUBLAS, {"product": 2 * 4 * 8 * 16}),
        (CONVOLUTIONS, {"batch": 2 * 16 * 128 * 256 * 384, "one": 2 * 512 * 256 * 1024}),
        (KERNEL, {"f": 12345}),
    ],
    ids=["cublas", "tpu", "kernel"],
)
def test_products_of_a_device(text, flops):
    """As compilers for GPUs and TPUs write them: `A^T B`, a batch of `x w^T`, and `a b`."""
    program = parse_program(text)
    entry = program.computations[program.entry]
    found = {its.name: profiling.flops_of(program, entry, its) for its in entry.instructions}
    assert {name: found[name] for name in flops} == flops
    assert sum(found.values()) == sum(flops.values())


def test_a_real_trace(tmp_path, monkeypatch):
    """The product within a loop runs as often as the loop goes round; the trace is where TensorBoard looks for it."""
    monkeypatch.setattr(profiling, "rates_of_machine", lambda: Rates(1e9, 1e9, "here"))
    step = (
        jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda i, x: jnp.tanh(x @ x), x)).lower(jnp.ones((64, 64))).compile()
    )
    x = jnp.full((64, 64), 0.1)
    found, _ = profiling.profile(lambda: jax.block_until_ready(step(x)), step.as_text(), tmp_path / "trace", runs=2)
    assert sum(cost.flops * cost.count for cost in found) == 5 * 2 * 64**3
    assert sum(cost.share for cost in found) == pytest.approx(1)
    assert list((tmp_path / "trace").glob("plugins/profile/*/*.xplane.pb"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="no trace can be written there"):
        profiling.profile(lambda: None, step.as_text(), tmp_path / "file" / "below")


# Planes, lines and names as a TPU's and a GPU's traces have them; times are by hand.

TPU = """
planes { name: "/device:TPU:0"
  lines { name: "Steps" events { metadata_id: 3 duration_ps: 9000 } }
  lines { name: "XLA Modules" events { metadata_id: 3 duration_ps: 9000 } }
  lines { name: "XLA Ops"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 5000 }
    events { metadata_id: 2 offset_ps: 5000 duration_ps: 1000 } }
  lines { name: "Async XLA Ops"
    events { metadata_id: 4 offset_ps: 0 duration_ps: 8000 stats { metadata_id: 1 str_value: "copy-start.1" } } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  event_metadata { key: 1 value { id: 1 name:
    "%product = f32[4,16]{1,0:T(8,128)} fusion(f32[4,8]{1,0:T(8,128)} %x, f32[8,16]{1,0:T(8,128)} %w), calls=%fused" } }
  event_metadata { key: 2 value { id: 2 name: "%sum = f32[4,16]{1,0:T(8,128)} add(f32[4,16]{1,0:T(8,128)} %product)" } }
  event_metadata { key: 3 value { id: 3 name: "jit_f(123)" } }
  event_metadata { key: 4 value { id: 4 name: "%copy-start.1 = (f32[4,16]{1,0}, u32[]{:S(2)}) copy-start(%x)" } }
}
planes { name: "/host:CPU" lines { name: "python" events { metadata_id: 1 duration_ps: 100 } }
  event_metadata { key: 1 value { id: 1 name: "PjitFunction(f)" } } }
"""

GPU = """
planes { name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 5000 stats { metadata_id: 1 str_value: "product" } }
    events { metadata_id: 2 offset_ps: 5000 duration_ps: 1000 stats { metadata_id: 1 str_value: "sum" } } }
  lines { name: "Stream #14(MemcpyH2D)" events { metadata_id: 3 duration_ps: 700 } }
  event_metadata { key: 1 value { id: 1 name: "ampere_sgemm_32x32_sliced1x4_nn" } }
  event_metadata { key: 2 value { id: 2 name: "loop_add_fusion" } }
  event_metadata { key: 3 value { id: 3 name: "MemcpyH2D" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
}
planes { name: "/host:CPU"
  lines { name: "launcher" events { metadata_id: 1 duration_ps: 40 stats { metadata_id: 1 str_value: "product" } } }
  event_metadata { key: 1 value { id: 1 name: "product" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
}
"""


@pytest.mark.parametrize("trace", [TPU, GPU], ids=["tpu", "gpu"])
def test_what_ran_on_a_device(tmp_path, trace):
    """Operations have their names in the program, are counted once, and only those of the device are."""
    file = tmp_path / "x.xplane.pb"
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(trace))
    lines = profiling.operations_of(file)
    assert [[(event.name, event.duration) for event in line] for line in lines] == [[("product", 5), ("sum", 1)]]
    product, total = profiling.costs(lines, TEXT, 1, Rates(1e12, 1e12, "by hand"))
    assert (product.name, product.flops, product.origin) == ("product", 2 * 4 * 8 * 16, "jit(f)/dot_general")
    assert total.name == "sum" and total.share == pytest.approx(1 / 6)
