"""`dreamer plan`: what it says, with a compiler that is played where none is needed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from dreamer_jax.cli import plan as command
from dreamer_jax.cli.main import main
from dreamer_jax.config import load_config
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.planning import compiling, kept_reports
from dreamer_jax.planning import sweep as sweeping
from dreamer_jax.planning import table as tables
from dreamer_jax.planning.collectives import Collective
from dreamer_jax.planning.compiling import Compiled
from dreamer_jax.planning.memory import Buffer, reserved_bytes
from dreamer_jax.planning.report import describe, render, render_sweep
from dreamer_jax.planning.roofline import roofline
from dreamer_jax.planning.topology import parse_topology

MODEL = "dr_da_32"
V5P = parse_topology("v5p:4x4x4")
GIB = 1 << 30

GATHER = Collective("all-gather", False, True, ("bf16[1104,944,1024]",), 2 * GIB, ("data0",), 4, (), 1, "step")
EXCHANGE = Collective(
    "reduce-scatter", False, False, ("bf16[4096,1024]",), 1 << 23, ("expert",), 4, ("while",), 32, "x"
)
MEMORY = {"arguments": GIB, "outputs": GIB, "aliased": GIB, "temp": 12 * GIB, "code": 0}
FITS = Compiled(True, "", {"tracing": 9.0, "compiling": 150.0}, MEMORY, (GATHER, EXCHANGE))
TOO_LARGE = Compiled(
    False,
    "RESOURCE_EXHAUSTED: 64.25G exceeds 15.75G",
    {"tracing": 9.0},
    buffers=(Buffer("expert_attention/gather", "bf16[141312,1024]", 3 * GIB, 2, True),),
)


def planned(compiled, *overrides):
    loaded = load_config(MODEL, list(overrides))
    config = command.with_mesh(loaded, V5P)
    found = compiled.collectives if compiled else None
    return describe(config, V5P, compiled, roofline(config, V5P, found))


def test_the_torus_is_the_mesh_unless_one_is_set():
    assert command.with_mesh(load_config(MODEL), V5P).mesh == MeshConfig(data=(4, 4, 4))
    chosen = command.with_mesh(load_config(MODEL, ["--mesh.data", "4,4", "--mesh.expert", "4"]), V5P)
    assert chosen.mesh == MeshConfig(data=(4, 4), expert=4)


def test_roofline_alone_needs_no_compiler(capsys):
    assert main(["plan", MODEL, "--topology", "v5p:4x4x4", "--roofline", "--json"]) == 0
    its = json.loads(capsys.readouterr().out)
    assert its["parameters"] == pytest.approx(2.0788e9, rel=1e-4)
    assert its["model_flops_per_token"] == pytest.approx(6.04e9, rel=1e-3)
    assert its["rows_per_expert"] == pytest.approx(16384 * 8 / 1097)
    assert 0 < its["roofline"]["mfu"] < 1 and "compiled" not in its
    named = {term["name"] for term in its["roofline"]["terms"]}
    assert {"experts: weight gradients", "head and loss", "sequence attention: scores"} <= named


def test_serving_asks_nothing_of_the_training_batch(capsys):
    """Which 64 chips don't divide."""
    for mesh in ([], ["--mesh.data", "8,4", "--mesh.expert", "2"]):
        assert main(["plan", "quickstart", "--topology", "v5e:8x8", "--serve", *mesh]) == 0
        assert "It fits." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--topology", "v5p:5x5x5"], "unknown topology 'v5p:5x5x5'"),
        (["--topology", "v5e:16x16", "--mesh.data", "4,4"], "v5e:16x16 has 1 x 256"),
        (["--topology", "v5p:4x4x4", "--slices", "8", "--roofline"], "do not divide the 256 rows"),
        (
            ["--topology", "v5p:4x4x4", "--mesh.data", "4,4,4", "--training.batch_size", "96"],
            "do not divide the 96 rows",
        ),
        (["--topology", "v5p:2x2x2", "--mesh.expert", "8", "--model.num_experts", "4"], "can't divide the 4 experts"),
        (["--topology", "v5p:4x4x4", "--slices", "0"], "not an integer of 1 or more"),
        (["--topology", "v5p:4x4x4", "--sweep", "--roofline"], "--roofline compiles nothing; leave --sweep"),
        (["--topology", "v5p:4x4x4", "--roofline", "--hlo", "a.txt"], "--roofline compiles nothing; leave"),
        (["--topology", "v5p:4x4x4", "--sweep", "--hlo", "a.txt"], "--sweep compiles several programs"),
        (["--topology", "v5p:4x4x4", "--hlo", "nowhere/a.txt"], "name a file in a folder that is there"),
        (["--topology", "v5p:4x4x4", "--roofline", "--compile", "3"], "--compile is about a sweep"),
        ([], "--topology"),
    ],
)
def test_bad_meshes_are_refused_before_compiling(words, said, capsys, monkeypatch):
    monkeypatch.setattr(compiling.subprocess, "run", lambda *_, **__: pytest.fail("started to compile"))
    small = ["--model.experts_per_token", "2"]
    assert main(["plan", MODEL, *small, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_plan_that_fits_names_memory_collectives_and_bound():
    text = render(planned(FITS))
    assert "2,078,767,488 parameters" in text and "6.040 GFLOP a token" in text
    assert "temp" in text and "12.000" in text and "CPU time: tracing 9 s, compiling 150 s" in text
    (gather,) = [line for line in text.splitlines() if line.startswith("all-gather")]
    assert "2,048.00" in gather and "overlapped" in gather and "no" in gather
    (exchange,) = [line for line in text.splitlines() if line.startswith("reduce-scatter")]
    assert "x 32" in exchange and "expert" in exchange
    assert "no gradient is all-reduced" in text
    assert "119 rows an expert" in text
    assert "bound, not a prediction" in text and "MFU" in text and "tokens/s a chip" in text
    assert "cost_analysis" not in json.dumps(planned(FITS)) and "optimal_seconds" not in json.dumps(planned(FITS))


@pytest.mark.parametrize("page", ["", " page 0,"])  # as newer versions of libtpu write
def test_temporaries_are_what_the_buffer_assignment_reserves(page):
    """One block in HBM; other memory spaces have blocks of their own, and arguments aren't temporary."""
    text = f"""BufferAssignment:
allocation 0: size 4096,{page} parameter 1, shape |f32[1024]| at ShapeIndex {{}}, maybe-live-out:
allocation 1: size 17757127136,{page} preallocated-temp:
 value: <7 x @0> (size=4096,offset=0): f32[1024]{{0:T(1024)}}
allocation 2: size 66232832, color 1,{page} preallocated-temp:
"""
    assert reserved_bytes(text) == 17757127136
    assert reserved_bytes("") is None


def test_a_plan_that_does_not_fit_names_buffers_and_what_to_change():
    text = render(planned(TOO_LARGE, "--training.remat", "none"))
    assert "It does not fit" in text and "64.25G exceeds 15.75G" in text
    assert "bf16[141312,1024]" in text and "expert_attention/gather" in text
    helps = text[text.index("What would help") :]
    assert "--training.remat full" in helps and "--training.microbatches 2" in helps and "expert axis" in helps
    assert "--training.remat full" not in render(planned(TOO_LARGE))


def test_exit_codes_and_chips_with_more_memory(monkeypatch, capsys):
    """What doesn't fit on v5e is compiled for as many v5p chips, to name its buffers."""
    asked = []

    def play(config, topology, keep_text=None):
        asked.append(topology.name)
        return FITS if topology.chip.name == "v5p" else TOO_LARGE

    monkeypatch.setattr(compiling, "compile_step", play)
    words = ["plan", MODEL, "--topology"]
    assert main([*words, "v5p:4x4x4"]) == 0
    assert main([*words, "v5e:16x16"]) == 1
    assert asked == ["v5p:4x4x4", "v5e:16x16", "v5p:4x8x8"]
    assert "compiled for v5p:4x8x8, where it fits" in capsys.readouterr().out


def test_what_fits_no_chip_is_compiled_with_more_microbatches(monkeypatch, capsys):
    def play(config, topology, keep_text=None):
        return FITS if config.training.microbatches == 4 else TOO_LARGE

    monkeypatch.setattr(compiling, "compile_step", play)
    assert main(["plan", MODEL, "--topology", "v5p:4x4x4"]) == 1
    assert "compiled for v5p:4x4x4 with 4 microbatches, where it fits" in capsys.readouterr().out


def test_a_sweep_ranks_by_bound_and_takes_what_fits(monkeypatch):
    """Without rematerialisation it never fits here: the winner is the best of the others that were compiled."""

    def play(config, topology):
        return TOO_LARGE if config.training.remat == "none" else FITS

    monkeypatch.setattr(sweeping, "compile_step", play)
    monkeypatch.setattr(sweeping, "GRADIENT_DEPTHS", (1,))
    lines = []
    found = sweeping.sweep(load_config(MODEL).config, V5P, most=2, progress=lines.append)
    fits = [bool(c.compiled and c.compiled.fits) for c in found]
    assert fits == sorted(fits, reverse=True) and sum(fits) >= 1
    assert found[0].config.training.remat != "none"
    assert 1 <= len(lines) <= 4
    estimated = [c.bound.mfu for c in found if c.compiled is None]
    assert estimated == sorted(estimated, reverse=True) and len(estimated) > 20
    text = render_sweep([describe(c.config, V5P, c.compiled, c.bound) for c in found])
    assert "best that fits: --mesh.data" in text and "not compiled" in text


@pytest.mark.parametrize(
    ("name", "topology", "count"), [("huginn_3b5_v5p_4x4x4", "v5p:4x4x4", 75), ("dr_da_32_v5e_16x16", "v5e:16x16", 60)]
)
def test_a_configuration_is_a_candidate_of_its_sweep(name, topology, count, monkeypatch):
    """Of a dense model one number of gradient_depths is tried, since all are the same program."""
    monkeypatch.setattr(sweeping, "roofline", lambda *_: None)
    monkeypatch.setattr(sweeping, "estimate", lambda *_: 0.0)
    config = load_config(name).config
    tried = [c.config for c in sweeping.candidates(config, parse_topology(topology))]
    assert config in tried and len(tried) == count
    ragged = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, exchange="ragged"))
    assert {c.config.mesh.exchange for c in sweeping.candidates(ragged, parse_topology(topology))} == {"ragged"}


def test_meshes_of_a_sweep_keep_whole_torus_axes():
    shapes = [(mesh.data, mesh.expert) for mesh in sweeping.meshes(V5P)]
    assert shapes == [((4, 4, 4), 1), ((4, 4, 2), 2), ((4, 4), 4), ((4, 2), 8), ((4,), 16)]
    flat = [(mesh.data, mesh.expert) for mesh in sweeping.meshes(parse_topology("v5e:16x16", 2))]
    assert flat == [((16, 16), 1), ((16, 8), 2), ((16, 4), 4), ((16, 2), 8), ((16,), 16)]


def test_the_child_process_reports_what_it_found_before_a_crash(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Crashed:
        returncode, stderr = -11, "Fatal"

    def play(command_line, **_):
        result = Path(command_line[4])
        result.write_text(json.dumps({"fits": True, "memory": MEMORY, "seconds": {"compiling": 1.0}}) + "\n")
        return Crashed

    monkeypatch.setattr(compiling, "require_libtpu", lambda: None)
    monkeypatch.setattr(compiling.subprocess, "run", play)
    found = compiling.compile_step(command.with_mesh(load_config(MODEL), V5P), V5P)
    assert found.fits and found.total == 13 * GIB
    assert found.collectives is None and "didn't write the program" in found.problem


def test_a_step_is_compiled_once(monkeypatch, tmp_path):
    """Its report is kept for the same step alone, wherever its run lies; a crash's isn't."""
    played = []

    class Done:
        returncode, stderr = 0, ""

    def play(command_line, **_):
        told = {"fits": True, "memory": MEMORY, "seconds": {"compiling": 1.0}, "collectives": [], "named_bytes": 5}
        Path(command_line[4]).write_text(json.dumps(told) + "\n")
        played.append(command_line)
        return Done

    def compiled(*overrides, **options):
        loaded = load_config(MODEL, list(overrides))
        return compiling.compile_step(command.with_mesh(loaded, V5P), V5P, **options)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiling, "require_libtpu", lambda: None)
    monkeypatch.setattr(compiling.subprocess, "run", play)
    first = compiled()
    again = compiled("--run.dir", "elsewhere", "--run.seed", "3")
    assert len(played) == 1 and not first.kept and again == dataclasses.replace(first, kept=True)
    assert "(of an earlier time: its report was kept)" in render(planned(again))

    others = [{"keep_text": tmp_path / "step.hlo"}, {}]
    for overrides, options in zip(((), ("--model.depth", "16")), others, strict=True):
        before = len(played)
        assert not compiled(*overrides, **options).kept and len(played) == before + 1
    monkeypatch.setattr(kept_reports, "_source", lambda: "changed")
    assert not compiled().kept
    own = "tests.families.toy"  # whose source may change
    for name, value in (("JAX_ENABLE_COMPILATION_CACHE", "false"), ("DREAMER_FAMILY_MODULE", own)):
        compiled()
        monkeypatch.setenv(name, value)
        assert not compiled().kept and not compiled().kept
        monkeypatch.delenv(name)

    monkeypatch.setattr(Done, "returncode", -11)
    assert not compiled("--model.depth", "8").kept and not compiled("--model.depth", "8").kept

    kept = tmp_path / "dreamer-jax" / "plans"
    monkeypatch.setattr(kept_reports, "MOST", 2)
    monkeypatch.setattr(Done, "returncode", 0)
    compiled("--model.depth", "4")
    assert len(list(kept.iterdir())) == 2
    for path in kept.iterdir():
        path.write_text("{")
    assert not compiled("--model.depth", "4").kept


def test_without_libtpu_plan_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("dreamer_jax.planning.topology.importlib.util.find_spec", lambda name: None)
    assert main(["plan", MODEL, "--topology", "v5p:4x4x4"]) == 2
    assert "pip install -e '.[tpu]'" in capsys.readouterr().err


def test_the_table_of_plans(tmp_path, capsys):
    for name, compiled in (("a", FITS), ("b", TOO_LARGE)):
        (tmp_path / f"{name}.json").write_text(json.dumps(planned(compiled)))
    assert tables.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(line.count("|") == lines[0].count("|") for line in lines)
    assert "| 12.00 | 13.00 |" in lines[2] and "DR+DA/32" in lines[2] and "does not fit" in lines[3]


def test_the_table_compiles_what_its_folder_lacks(tmp_path, monkeypatch, capsys):
    compiled = []

    def play(config, topology):
        compiled.append((config.model.variant, config.model.depth, topology.name))
        return FITS

    monkeypatch.setattr(tables, "compile_step", play)
    monkeypatch.chdir(tmp_path)
    assert tables.main([str(tmp_path / "plans")]) == 0
    assert len(set(compiled)) == 18
    (tmp_path / "plans" / "dr_16_v4.json").unlink()
    assert tables.main([str(tmp_path / "plans")]) == 0
    assert compiled[18:] == [("DR", 16, "v4:4x4x4")]
    assert len(capsys.readouterr().out.splitlines()) == 2 * 20
