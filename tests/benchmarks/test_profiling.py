"""Operations of a trace: what each takes by itself, multiplies and moves, by hand; and a real trace of a loop."""

import jax
import jax.numpy as jnp
import pytest

from dreamer_jax.benchmarks import profiling
from dreamer_jax.benchmarks.profiling import Event, Rates
from dreamer_jax.errors import UserError

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
