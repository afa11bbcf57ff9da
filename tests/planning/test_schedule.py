"""Reading libtpu's schedule, on a small one written out by hand; and what `dreamer bench kernels` prints of it."""

import dataclasses
import json

import jax
import pytest

from dreamer_jax.benchmarks import kernels
from dreamer_jax.benchmarks.kernel_case import Case
from dreamer_jax.cli.main import main
from dreamer_jax.planning.schedule import read_schedule
from dreamer_jax.planning.topology import parse_topology
from tests.aot.predictions import assert_no_costlier

# Bundle 0 before the loops; the grid's loop 1..20 (0x1..0x14), whose branch at 3 skips 8..9; in it a loop 10..13 and,
# behind a branch that skips it whole, a loop 15..17 with an own inner loop 16..17; 21 after the loops.
BUNDLES = """\
     0   :  { %s0 = sld [smem:[#allocation0]] } /* Start region 1 */
   0x1 LB: > { %s1 = sphi %s0 } /* Start region 5 */
   0x2   : > { %p0 = scmp }
   0x3   : > { %3 = sbr.rel (%p0) target = $region7 }
   0x4   : > {}
   0x5   : > {}
   0x6   : > {}
   0x7   : > {}
   0x8   : > { %v0 = vld } /* Start region 6 */
   0x9   : > { %v1 = vld } /* End region 6 */
   0xa LB: >> { %v2 = vld } /* Start/End empty region 7 :: Start region 8 */
   0xb   : >> { %v2 = vadd }
   0xc   : > { %9 = sbr.rel (!%p1) target = $region8 }
   0xd   : >> { vst } /* End region 8 */
   0xe PF: > { %p2 = scmp }
   0xf LB: >> { %s2 = smov } /* Start region 9 */
  0x10 LB: >>> { %v3 = vmatmul } /* Start region 10 */
  0x11   : >>> { %v4 = vpop } /* End region 10 */
  0x12   : > { %s9 = smov } /* End region 9 */
  0x13   : > { %s9 = smov }
  0x14   : > { %s9 = smov } /* End region 5 */
  0x15 PF:  { vsyncpa }
"""
USE = ["file", "MXU, VALU", "2 4", "", *(["1 2"] * 16 + ["2 0"] * 2 + ["0 4"] * 4)]


@pytest.fixture
def dump(tmp_path):
    """A directory as libtpu leaves it: an older schedule of the same kernel, and one of another."""
    for stamp, name, text in ((7, "mine.2", BUNDLES), (5, "mine.1", "garbage"), (9, "other_mine_too", "garbage")):
        (tmp_path / f"{stamp}-{name}-72-final_bundles.txt").write_text(text)
        (tmp_path / f"{stamp}-{name}-70-final_hlo-static-per-bundle-utilization.txt").write_text("\n".join(USE))
    return tmp_path


def test_loops_and_what_branches_skip(dump):
    """Levels, spans, what a loop does itself, and the innermost loops; the branch of two."""
    schedule = read_schedule(dump, "mine")
    assert schedule.bundles == 22
    spans = [(loop.level, loop.start, loop.end, loop.own, loop.optional) for loop in schedule.loops]
    assert spans == [(1, 1, 20, 13, 2), (2, 10, 13, 4, 0), (2, 15, 17, 1, 0), (3, 16, 17, 2, 0)]
    assert [loop.bundles for loop in schedule.leaves] == [4, 2]
    assert schedule.loops[0].longest(1) == [2]


def test_use_of_a_unit(dump):
    """Instructions over what the bundles could hold."""
    schedule = read_schedule(dump, "mine")
    assert schedule.busy("MXU", 16, 17) == 1
    assert schedule.busy("VALU", 0, 21) == (16 * 2 + 4 * 4) / (22 * 4)


@pytest.mark.parametrize("names", ["MXU, VALU", "MATMUL, MATPUSH"])  # of older and of newer versions of libtpu
def test_how_busy_the_matrix_unit_is(dump, names):
    """From its first instruction to its last: bundles 0 to 17 of 22."""
    for path in dump.glob("*utilization.txt"):
        path.write_text(path.read_text().replace("MXU, VALU", names))
    assert read_schedule(dump, "mine").matrix_busy == (16 * 1 + 2 * 2) / (18 * 2)


def test_a_kernel_that_was_not_dumped(dump):
    """A clear error, not an empty schedule."""
    with pytest.raises(FileNotFoundError, match="theirs"):
        read_schedule(dump, "theirs")


def test_costlier_schedules_are_seen():
    """The rule by which tests/aot compares with the tables: 5 % more is too much, less is welcome."""
    assert_no_costlier({"a": [105, 50]}, {"a": (100, 100)})
    for worse in ({"a": [106, 50]}, {"a": [100]}, {}):
        with pytest.raises(AssertionError):
            assert_no_costlier(worse, {"a": (100, 100)})


def test_without_an_accelerator_it_says_how_to_predict(capsys):
    """Exit code 2 and the fix."""
    assert main(["bench", "kernels"]) == 2
    assert "--topology v5p:2x2x1" in capsys.readouterr().err


def test_a_kernel_nobody_knows(capsys):
    """Names those there are, before anything is compiled."""
    assert main(["bench", "kernels", "--topology", "v5p:2x2x1", "--match", "flash"]) == 2
    error = capsys.readouterr().err
    assert "libtpu" in error or "depth_attention forward" in error


def test_the_table(monkeypatch, capsys):
    """Milliseconds and ratios of a row; and the same as JSON."""
    row = {
        "name": "depth_attention forward",
        "shape": "T=8",
        "seconds": 0.004,
        "compute_seconds": 0.003,
        "memory_seconds": 0.004,
        "roofline_seconds": 0.002,
        "xla_seconds": 0.008,
        "temporary": 3 << 20,
        "figures": {"ratio": 0.3},
    }
    monkeypatch.setattr(kernels, "predict", lambda topology, match, say: [row])
    assert main(["bench", "kernels", "--topology", "v5p:2x2x1"]) == 0
    header, line, note = capsys.readouterr().out.splitlines()
    assert note == "depth_attention forward, T=8: ratio 0.3"
    assert line.split()[3:] == ["4.000", "3.000", "4.000", "2.000", "2.00", "8.000", "2.00", "3.0"]
    assert header.split()[:3] == ["kernel", "shape", "ms"]
    assert main(["bench", "kernels", "--topology", "v5p:2x2x1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [row]


def test_the_table_without_xla(monkeypatch, capsys):
    """Where XLA fails or has nothing to say: empty cells, and why."""
    row = {"name": "dispatch slots", "shape": "M=8", "seconds": 0.004, "xla_error": "too large"}
    monkeypatch.setattr(kernels, "predict", lambda topology, match, say: [row])
    assert main(["bench", "kernels", "--topology", "v5p:2x2x1"]) == 0
    _, line, note = capsys.readouterr().out.splitlines()
    assert line.split() == ["dispatch", "slots", "M=8", "4.000"] and note.endswith("XLA: too large")


def test_xla_may_fail(monkeypatch):
    """One row with the reason; the kernels' figures don't depend on it."""
    case = Case("a", "T=1", None, None, None, None, flops=0, least_bytes=0)  # type: ignore
    topology = parse_topology("v5p:2x2x1")
    assert kernels.compare_case(case, topology) == {"name": "a", "shape": "T=1"}

    def fails(*arguments):
        raise RuntimeError("out of memory\nmuch text")

    monkeypatch.setattr(kernels, "devices_of", lambda topology: jax.devices())
    monkeypatch.setattr(kernels, "_compile", fails)
    found = kernels.compare_case(dataclasses.replace(case, xla=fails), topology)
    assert found == {"name": "a", "shape": "T=1", "xla_error": "out of memory"}
