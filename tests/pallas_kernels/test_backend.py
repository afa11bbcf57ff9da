"""Which form of an operation runs: by configuration, by what is compiled for, by shapes; and what is said of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from dreamer_jax.blocks.operations import Operations, operations_of
from pallas_kernels import backend, tiles
from pallas_kernels.attention_moe import ExpertLinear, LinearTape
from pallas_kernels.depth_attention import DepthAttention, DepthCache
from pallas_kernels.depth_attention.pull import Queries
from pallas_kernels.depth_attention.xla import CacheGradient
from pallas_kernels.expert_mlp import ExpertMLP, ExpertTape
from pallas_kernels.sequence_attention import SequenceAttention
from pallas_kernels.weights import OutputRows
from tests.pallas_kernels.compiling import KINDS, compiling_for

TOKENS = 128
NAMES = ("sequence attention", "depth attention", "expert MLP", "attention MoE")


@pytest.fixture(autouse=True)
def nothing_said():
    """What this process has said before is said again."""
    backend._say_once.cache_clear()


def shape(*sizes, dtype=jnp.bfloat16):
    """An argument."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def arguments(name, width=128):
    """Of the operation, by the name that the log gives it; kernels take them if 128 divides the width."""
    rows, heads = shape(TOKENS, width), shape(1, TOKENS, 2, width)
    matrices, cache = shape(6, width, width), shape(4, TOKENS, width)
    return {
        "sequence attention": (heads, heads, heads, shape(1, TOKENS, dtype=jnp.int32)),
        "depth attention": (*[shape(TOKENS, 1, width)] * 3, DepthCache(cache, cache), shape(dtype=jnp.int32)),  # type: ignore[arg-type]
        "expert MLP": (
            rows,
            *(shape(TOKENS, 2, dtype=dtype) for dtype in (jnp.int32, jnp.float32)),
            *(shape(6, size, width) for size in (48, 24)),
        ),
        "attention MoE": (
            rows,
            *(shape(TOKENS, dtype=dtype) for dtype in (jnp.int32, jnp.float32)),
            *(matrices, shape(width, width)),
        ),
    }[name]


def tape_of(name, operations, width=128):
    """The empty tape of an operation, where it has one."""
    its = arguments(name, width)
    if name == "depth attention":
        return operations.depth_attention.start_tape(its[3], 1, width)
    if name == "expert MLP":
        return jax.eval_shape(lambda: operations.expert_mlp.start_tape((TOKENS, 2), its[3].shape, its[0].dtype))
    return jax.eval_shape(lambda: operations.expert_linear.start_tape(TOKENS, its[3].shape, its[0].dtype))


def operation_of(name, operations):
    """The operation with this name in the log."""
    attribute = {"expert MLP": "expert_mlp", "attention MoE": "expert_linear"}.get(name, name.replace(" ", "_"))
    return getattr(operations, attribute)


def kernels(name, operations, width=128):
    """Of an operation's forward pass, whether each kernel is interpreted; none where no kernel runs.

    But for the one that counts pairs in place of a sort, which every form takes on a TPU (pallas_kernels/dispatch).
    """

    def found(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                if "dispatch_slots" not in str(equation.params["name"]):
                    yield bool(equation.params["interpret"])
            else:
                for inner in jaxprs_in_params(equation.params):
                    yield from found(inner)

    # A function that jax hasn't seen: what it has traced for another mesh it would take from its cache.
    program = jax.make_jaxpr(lambda *its: operation_of(name, operations)(*its))(*arguments(name, width))
    return list(found(program.jaxpr))


KERNEL_TAPES = {"depth attention": Queries, "expert MLP": ExpertTape, "attention MoE": LinearTape}
PLAIN_TAPES = {"depth attention": CacheGradient, "expert MLP": type(None), "attention MoE": type(None)}


def assert_form(name, operations, kernel, interpreted=False, width=128):
    """Kernel or plain form, and the tape that goes with it."""
    ran = kernels(name, operations, width)
    assert ran if kernel else not ran
    assert all(each is interpreted for each in ran)
    if name in KERNEL_TAPES:
        assert type(tape_of(name, operations, width)) is (KERNEL_TAPES if kernel else PLAIN_TAPES)[name]


@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu(name, caplog):
    """`auto` is the plain form; `pallas` interprets kernels, which is for tests. Nothing is said of either."""
    assert_form(name, operations_of("auto"), kernel=False)
    assert_form(name, operations_of("xla"), kernel=False)
    assert_form(name, operations_of("pallas"), kernel=True, interpreted=True)
    assert not caplog.records


@pytest.mark.parametrize("chip", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_auto_takes_kernels_where_the_program_is_for_a_tpu(name, chip, caplog):
    """By what is compiled for, not by what this machine has; kernels then are not interpreted."""
    with compiling_for(KINDS[chip]):
        assert tiles.generation() is tiles.GENERATIONS[chip]
        assert_form(name, operations_of("auto"), kernel=True)
        assert_form(name, operations_of("pallas"), kernel=True)
        assert_form(name, operations_of("xla"), kernel=False)
    assert not caplog.records


@pytest.mark.parametrize("name", NAMES)
def test_a_tpu_that_the_table_does_not_know(name):
    """`auto` takes the plain form: there are no tiles for it."""
    with compiling_for("TPU v2"):
        assert_form(name, operations_of("auto"), kernel=False)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_that_no_kernel_takes(name, caplog):
    """The plain form, on a TPU by default and where kernels are asked for, with one line that says why."""
    width = 80 if name == "sequence attention" else 100  # which pads heads by up to half
    for implementation, chip in (("auto", KINDS["v5p"]), ("pallas", KINDS["v5p"]), ("pallas", None)):
        with compiling_for(chip):
            for _ in range(2):
                assert_form(name, operations_of(implementation), kernel=False, width=width)
    [line] = {record.message for record in caplog.records}
    assert line.startswith(f"{name} without a kernel: ") and str(width) in line
    assert len(caplog.records) == 1


def test_nothing_is_asked_of_kernels_that_are_not_wanted(caplog):
    """Shapes are looked at only where a kernel would run."""

    def unsupported():
        raise AssertionError

    assert backend.backend("sums", "auto", unsupported) == "cpu"
    assert backend.backend("sums", "xla", unsupported) == "xla"
    assert not caplog.records


def test_on_a_gpu(monkeypatch, caplog):
    """Its own form where there is one for the shapes, unless plain forms are asked for; TPUs' shapes don't matter."""
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")

    def asked(implementation, reason):
        return backend.backend("sums", implementation, lambda: "no TPU", lambda: reason)

    assert [asked(each, None) for each in ("auto", "pallas", "xla")] == ["gpu", "gpu", "xla"]
    assert not caplog.records
    assert [asked(each, "too small") for each in ("auto", "pallas", "xla")] == ["xla", "xla", "xla"]
    assert backend.backend("products", "auto", lambda: None) == "xla"
    lines = [record.message for record in caplog.records]
    assert lines == ["sums without a kernel: too small", "products without a kernel: there is none for GPUs"]
    with compiling_for(KINDS["v5p"]):  # a plan, made on a machine with a GPU
        assert backend.backend("sums", "auto", lambda: None, lambda: None) == "pallas"


def test_a_real_tpu_without_tiles(monkeypatch, caplog):
    """Kernels can't be interpreted there; the line names the generations that have some."""
    monkeypatch.setattr("jax.default_backend", lambda: "tpu")
    with compiling_for("TPU v2"):
        assert backend.backend("sums", "auto", lambda: None) == "xla"
        assert not caplog.records
        assert backend.backend("sums", "pallas", lambda: None) == "xla"
    [line] = [record.message for record in caplog.records]
    assert line == "sums without a kernel: no tiles for v2, only for v4, v5e, v5p, v6e"


@pytest.mark.parametrize("operation", [ExpertMLP, ExpertLinear])
def test_weights_are_arranged_for_decoding_on_a_cpu(operation):
    """Outputs as rows where the plain form decodes on a CPU; as they are for kernels and other platforms."""
    matrices = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    given = (matrices,) if operation is ExpertLinear else (np.ones((2, 6, 4), np.float32), matrices)

    def arranged(implementation: str) -> tuple[Any, ...]:
        found = operation(implementation).arrange(*map(jnp.asarray, given))
        return found if isinstance(found, tuple) else (found,)

    *gate_up, last = arranged("auto")
    assert all(isinstance(its, OutputRows) for its in (*gate_up, last))
    np.testing.assert_array_equal(last.matrices, matrices.swapaxes(1, 2))
    for its in gate_up:  # whose outputs are rows already
        np.testing.assert_array_equal(its.matrices, given[0])
    assert not any(isinstance(its, OutputRows) for its in arranged("pallas"))
    with compiling_for(KINDS["v5p"]):
        assert not any(isinstance(its, OutputRows) for its in arranged("auto"))


@pytest.mark.parametrize("implementation", ["auto", "xla", "pallas"])
def test_operations_of_a_backend(implementation):
    """All four of one implementation; equal ones are equal, so that programs are compiled once."""
    operations = operations_of(implementation, gradient_depths=4, total_depth=16)
    assert operations == Operations(
        SequenceAttention(implementation),
        DepthAttention(implementation),
        ExpertMLP(implementation, 4, 16),
        ExpertLinear(implementation, 4, 16),
    )
    assert hash(operations) == hash(operations_of(implementation, 4, 16))
    assert operations != operations_of(implementation)
