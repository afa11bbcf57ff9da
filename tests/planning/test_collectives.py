"""Collectives, loops and buffers read from the text of compiled programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dreamer_jax.planning.collectives import (
    _first_group,
    find_collectives,
    large_all_reduces,
    trip_count,
    weight_copies,
)
from dreamer_jax.planning.hlo import arrays_of, elements_of, parse_program
from dreamer_jax.planning.memory import largest_buffers, peak_bytes

RECORDED = (Path(__file__).parent / "step_v5p.hlo").read_text()
"""A step compiled for v5p:4x4x4, mesh (x, y, z): a weight [4096, 4096] gathered and its gradient scattered axis by axis
around a scan of 7 steps that gathers and scatters activations over z. Backend details and groups but the first are cut.
"""
TORUS = {"x": 4, "y": 4, "z": 4}
MIB = 1 << 20

ASYNC = (Path(__file__).parent / "asynchronous.hlo").read_text()
"""Written by hand: the forms in which a TPU program overlaps collectives with other work, and iota groups."""


def kinds(found, loops=False):
    return [(c.kind, c.arrays[0], c.axes) for c in found if bool(c.loops) == loops]


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ("{{0,2},{1,3}}", [0, 2]),
        ("[4,2]<=[8]", [0, 1]),
        ("[4,2]<=[2,4]T(1,0)", [0, 4]),
        ("mesh['slice'=1,'data0'=2,'data1'=2,'expert'=2] {'expert'}", [0, 1]),
        ("mesh['slice'=1,'data0'=2,'data1'=2,'expert'=2] {'data0','expert'}", [0, 1, 4, 5]),
        ("{}", None),
    ],
)
def test_groups_as_versions_of_xla_write_them(groups, first):
    assert _first_group(f"channel_id=1, replica_groups={groups}, dimensions={{0}}") == first


def test_groups_of_an_unknown_form_are_an_error():
    """Not all devices, as if nothing were said."""
    with pytest.raises(ValueError, match="unknown way: replica_groups=something"):
        _first_group("replica_groups=something, dimensions={0}")


def test_weights_are_gathered_once_and_gradients_scattered_once_around_the_loops():
    found = find_collectives(parse_program(RECORDED), TORUS)
    outside = [c for c in kinds(found) if c[0] in ("all-gather", "reduce-scatter")]
    assert outside == [
        ("all-gather", "bf16[256,4096]", ("z",)),
        ("all-gather", "bf16[1024,4096]", ("y",)),
        ("all-gather", "bf16[4096,4096]", ("x",)),
        ("reduce-scatter", "f32[4096,4096]", ("x",)),
        ("reduce-scatter", "f32[1024,4096]", ("y",)),
        ("reduce-scatter", "f32[256,4096]", ("z",)),
    ]
    fused = [c for c in found if c.fused]
    assert [c.arrays[0] for c in fused] == ["f32[4096,4096]", "f32[1024,4096]"]
    assert fused[0].bytes == 64 * MIB and fused[0].group == 4
    assert [c.bytes for c in found if c.kind == "all-reduce"] == [8]  # loss and norm; the fused ones aren't counted


def test_collectives_in_loops_run_as_often_as_the_loop():
    found = find_collectives(parse_program(RECORDED), TORUS)
    inside = kinds(found, loops=True)
    assert (
        sorted(inside)
        == [("all-gather", "bf16[256,4096]", ("z",))] * 2 + [("reduce-scatter", "bf16[256,4096]", ("z",))] * 2
    )
    assert {c.times for c in found if c.loops} == {7}
    assert {c.times for c in found if not c.loops} == {1}


def test_asynchronous_forms_iota_groups_and_chains():
    found = find_collectives(parse_program(ASYNC), {"a": 4, "b": 4})
    by_kind = {(c.kind, bool(c.loops)): c for c in found}
    assert len(found) == len(by_kind) + 1  # two all-gathers outside the loop
    gathers = [c for c in found if c.kind == "all-gather"]
    # The chain's later link stands in the loop, but it is the collective that began outside.
    assert [c.loops for c in gathers] == [(), ()]
    assert {c.axes for c in gathers} == {("a",), ("b",)}
    assert all(c.overlapped and c.bytes == 256 * 128 * 2 for c in gathers)
    permute = by_kind["collective-permute", True]
    assert permute.bytes == 64 * 128 * 2 and permute.axes == ("b",)
    assert by_kind["all-to-all", False].axes == ("a",)
    assert by_kind["all-reduce", False].axes == ("a", "b") and by_kind["all-reduce", False].group == 16


def test_trip_count_of_a_bound_that_the_loop_carries():
    program = parse_program(ASYNC)
    loop = program.computations["main"].by_name["while.1"]
    assert trip_count(program, loop) == 32
    unknown = parse_program(ASYNC.replace("%count = s32[] constant(32)", "%count = s32[] copy(%zero)"))
    assert trip_count(unknown, unknown.computations["main"].by_name["while.1"]) == 0
    traced = parse_program(ASYNC.replace("%count = s32[] constant(32)", "%count = s32[] add(%zero, %zero)"))
    assert trip_count(traced, traced.computations["main"].by_name["while.1"]) is None


def test_gradients_that_are_reduced_in_full_are_named():
    found = find_collectives(parse_program(ASYNC), {"a": 4, "b": 4})
    assert large_all_reduces(found, 256 * 128) == ["f32[256,128]"]
    assert large_all_reduces(found, 256 * 128 + 1) == []
    assert large_all_reduces(find_collectives(parse_program(RECORDED), TORUS), 1 << 16) == []


def test_sums_between_slices_are_meant():
    """The same all-reduce over two axes of a slice, of one slice, and over the slices only."""
    for mesh, named in (({"slice": 2, "a": 8}, True), ({"slice": 1, "a": 16}, True), ({"slice": 16, "a": 1}, False)):
        found = find_collectives(parse_program(ASYNC), mesh)
        assert bool(large_all_reduces(found, 256 * 128)) == named


def test_copies_of_weights_count_only_within_hbm():
    text = """HloModule m

ENTRY %main (w: bf16[67,944,1024]) -> bf16[67,944,1024] {
  %w = bf16[67,944,1024]{2,1,0:T(8,128)(2,1)} parameter(0)
  %copy.1 = bf16[67,944,1024]{1,2,0:T(8,128)(2,1)} copy(%w)
  %copy.2 = bf16[67,944,1024]{2,1,0:T(8,128)(2,1)S(1)} copy(%w)
  %copy.3 = bf16[67,944,512]{2,1,0:T(8,128)(2,1)} copy(%w)
  ROOT %transpose.4 = bf16[67,1024,944]{2,1,0:T(8,128)(2,1)} transpose(%w), dimensions={0,2,1}
}
"""
    found = weight_copies(parse_program(text), {(67, 944, 1024)})
    assert found == ["copy.1: bf16[67,944,1024]", "transpose.4: bf16[67,1024,944]"]


def test_shapes_know_their_padding_and_memory_space():
    (array,) = arrays_of("bf16[16384,1]{1,0:T(8,128)(2,1)}")
    assert array.bytes == 32768 and array.padded_bytes == 128 * 32768
    (chip,) = arrays_of("f32[7,100]{1,0:T(8,128)S(1)}")
    assert chip.space == 1 and chip.padded_bytes == 8 * 128 * 4
    assert arrays_of("pred[3]")[0].bytes == 3 and arrays_of("s32[]{:T(128)}")[0].bytes == 4
    nested = "((bf16[2]{0}, f32[3,4]{1,0:T(8,128)}), /*index=1*/u32[]{:S(2)})"
    assert elements_of(nested) == ["(bf16[2]{0}, f32[3,4]{1,0:T(8,128)})", "u32[]{:S(2)}"]


def test_the_fullest_moment():
    """w is an argument; a and b are alive together, c is written over b, and the loop's body needs d at a time."""
    text = """HloModule m

%body (p: (s32[], f32[256,1024])) -> (s32[], f32[256,1024]) {
  %p = (s32[], f32[256,1024]{1,0:T(8,128)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[256,1024]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %d = f32[1024,1024]{1,0:T(8,128)} broadcast(%x), metadata={op_name="jit(step)/while/body/layer/widen"}
  %y = f32[256,1024]{1,0:T(8,128)} slice(%d)
  ROOT %r = (s32[], f32[256,1024]{1,0:T(8,128)}) tuple(%i, %y)
}

%condition (q: (s32[], f32[256,1024])) -> pred[] {
  %q = (s32[], f32[256,1024]{1,0:T(8,128)}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%j, %n), direction=LT
}

ENTRY %main (w: f32[256,1024]) -> f32[8,128] {
  %w = f32[256,1024]{1,0:T(8,128)} parameter(0)
  %zero = s32[] constant(0)
  %a = f32[512,1024]{1,0:T(8,128)} pad(%w), metadata={op_name="jit(step)/first"}
  %b = f32[256,1024]{1,0:T(8,128)} slice(%a), metadata={op_name="jit(step)/second"}
  %c = f32[256,1024]{1,0:T(8,128)} dynamic-update-slice(%b, %w, %zero, %zero)
  %t = (s32[], f32[256,1024]{1,0:T(8,128)}) tuple(%zero, %c)
  %while.1 = (s32[], f32[256,1024]{1,0:T(8,128)}) while(%t), condition=%condition, body=%body
  %e = f32[256,1024]{1,0:T(8,128)} get-tuple-element(%while.1), index=1
  ROOT %out = f32[8,128]{1,0:T(8,128)} slice(%e)
}
"""
    program = parse_program(text)
    assert peak_bytes(program) == 5 * MIB  # b (1 MiB) and, in the loop, d (4); before it a and b are 3
    found = largest_buffers(program)
    assert [(b.name, b.array, b.loop) for b in found] == [
        ("layer/widen", "f32[1024,1024]", True),
        ("second", "f32[256,1024]", False),
    ]


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse_program("nothing of the kind")


def with_elements_as_operands(text: str) -> str:
    """The same program as newer compilers write it: `%x#2` in place of an instruction that takes element 2 of x."""
    lines = []
    for computation in re.split(r"(?<=^})$", text, flags=re.MULTILINE):
        taken = dict[str, str]()
        for line in computation.splitlines():
            found = re.match(r"\s+%([\w.\-]+) = .* get-tuple-element\(.*%([\w.\-]+)\), index=(\d+)", line)
            if found and found[2] not in taken:
                taken[found[1]] = f"{found[2]}#{found[3]}"
            else:
                lines.append(re.sub(r"%([\w.\-]+)", lambda name, its=taken: f"%{its.get(name[1], name[1])}", line))
    return "\n".join(lines)


@pytest.mark.parametrize("text", [RECORDED, ASYNC], ids=["recorded", "asynchronous"])
def test_elements_of_tuples_may_be_operands(text):
    """As libtpu writes them since jax 0.12: the same collectives, loops and memory are read."""
    newer = with_elements_as_operands(text)
    assert newer.count("get-tuple-element") < text.count("get-tuple-element") / 2 and "#1" in newer
    axes = TORUS if text is RECORDED else {"a": 4, "b": 4}
    one, other = parse_program(text), parse_program(newer)
    assert find_collectives(other, axes) == find_collectives(one, axes)
    assert peak_bytes(other) == peak_bytes(one)
    assert [b.as_dict() for b in largest_buffers(other)] == [b.as_dict() for b in largest_buffers(one)]
