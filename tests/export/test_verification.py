"""Verification passes what is right, and names the first part that is wrong."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dreamer_jax.cli.main import main
from dreamer_jax.config import Config
from dreamer_jax.errors import UserError
from dreamer_jax.export.form import Description
from dreamer_jax.export.writing import export
from dreamer_jax.runs import safetensors_files
from dreamer_jax.runs.leaves import open_model
from tests.export.cases import WHY_SKIPPED, make_run

torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
pytest.importorskip("safetensors", reason=WHY_SKIPPED)

from dreamer_jax.export import jax_side, modeling_dreamer, verification  # noqa: E402
from dreamer_jax.export.description import read_description  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_run(tmp_path_factory.mktemp("runs") / "dr_da")


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    export(open_model(run), tmp_path / "folder", "float32", False, lambda folder: None)
    return tmp_path / "folder"


def compare(folder: Path, run: Path) -> verification.Finding:
    return verification.compare_outputs(folder, open_model(run), read_description(folder))


def test_a_checkpoint_that_is_removed_meanwhile(run: Path, folder: Path, tmp_path: Path) -> None:
    """The folder doesn't differ from it."""
    model = open_model(shutil.copytree(run, tmp_path / "run"))
    model.found.folders.remove(7)
    with pytest.raises(UserError, match="checkpoints/7 was removed while it was read"):
        verification.verify(folder, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"decoding_size": 10, "sa_every": 2, "da_every": 2, "injection": "diagonal"}, marks=pytest.mark.slow
        ),
        {"da_form": "gated_delta", "da_every": 2, "pa_slots": 3, "pa_head_size": 8, "pa_every": 2},
    ],
)
def test_right_folders_with_what_settings_add_pass(tmp_path: Path, settings: dict[str, Any]) -> None:
    """And with every part in its place, so that a wrong one is named."""
    run = make_run(tmp_path / "run", **settings)
    model = open_model(run)
    export(model, tmp_path / "out", "bfloat16", False, lambda folder: None)
    with pytest.MonkeyPatch.context() as patch:
        assert verification.verify(tmp_path / "out", model).worst < 2e-5
        last = "DecodingLayer" if "decoding_size" in settings else "ParameterAttention"
        cls = getattr(modeling_dreamer, last)
        patch.setattr(cls, "forward", lambda self, *its, forward=cls.forward: forward(self, *its) + 0.01)
        first = "decoding layer" if "decoding_size" in settings else "depth 0: EA"
        with pytest.raises(UserError, match=f"first in {first}"):
            compare(tmp_path / "out", run)


@pytest.mark.slow_but("LA+DA-bfloat16", "DR+DA-float32")
@pytest.mark.parametrize(
    ("variant", "dtype", "keep_shared", "left_out"),
    [
        ("DR", "float32", True, ()),
        ("LA+DA", "bfloat16", False, ()),
        ("DR+DA", "float32", False, ("attention_experts", "residual_norm")),
        ("DR", "bfloat16", True, ("shared_expert", "router_depth_code")),
    ],
)
def test_right_folders_pass(
    tmp_path: Path, variant: str, dtype: str, keep_shared: bool, left_out: tuple[str, ...]
) -> None:
    run = make_run(tmp_path / "run", variant, mixing="sequential", **dict.fromkeys(left_out, False))
    found = []
    model = open_model(run)
    export(model, tmp_path / "out", dtype, keep_shared, lambda path: found.append(verification.verify(path, model)))
    finding = found[0]
    assert finding.mean < finding.worst < 2e-5 and finding.left_out < 0.5 and finding.continuation == 16
    assert (finding.agreement is None) == (dtype == "float32")


def test_large_tensors_are_used_where_they_lie(folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_side, "MAPPED_BYTES", 0)
    assert compare(folder, run).worst < 2e-5


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        ("embedding.weight", "embedding"),
        ("layers.0.sequence_attention.projections.qkv", "SA"),
        ("layers.0.depth_attention.k_norm.weight", "DA"),
        ("layers.0.expert_attention.down", "EA"),
        ("layers.0.expert_attention.router.bias", "EA"),
        ("layers.0.residual_norm.weight", "residual norm"),
        ("head.weight", "head"),
    ],
)
def test_one_wrong_value_is_found_and_named(folder: Path, run: Path, tensor: str, part: str) -> None:
    its = safetensors_files.open_tensors(folder)[f"model.{tensor}"]
    with its.path.open("r+b") as file:
        file.seek(its.end - 4)
        file.write(np.float32(0.123).tobytes())
    with pytest.raises(UserError, match=f"differs from the run first at {part}: the tensor model.{tensor}"):
        verification.verify(folder, open_model(run))


def scaled(original: Callable) -> Callable:
    def wrong(self, *arguments):
        first, *others = original(self, *arguments)
        return (first * 1.001, *others)

    return wrong


@pytest.mark.parametrize(
    ("owner", "method", "message"),
    [
        ("SequenceAttention", "attend", "first in depth 0: SA"),
        ("DepthAttention", "attend", "first in depth 0: DA"),
        ("ExpertAttention", "forward", "first in depth 0: EA"),
        ("Layer", "forward", "first in depth 0: residual"),
    ],
)
def test_wrong_computing_is_found_and_named(
    folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch, owner: str, method: str, message: str
) -> None:
    cls = getattr(modeling_dreamer, owner)
    monkeypatch.setattr(cls, method, scaled(getattr(cls, method)))
    with pytest.raises(UserError, match=message):
        compare(folder, run)


def test_a_wrong_rotation_shows_at_the_depth_it_matters(
    folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = modeling_dreamer.DepthAttention.attend

    def forgetful(self, qk, v, shape, step):
        return original(self, qk, v, shape, step._replace(earlier=step.earlier[1:]))

    monkeypatch.setattr(modeling_dreamer.DepthAttention, "attend", forgetful)
    with pytest.raises(UserError, match="first in depth 1: DA"):
        compare(folder, run)


def test_a_wrong_head_and_a_wrong_cache_are_found(folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        logits = modeling_dreamer.Head.forward
        patch.setattr(modeling_dreamer.Head, "forward", lambda self, x: logits(self, x) * 1.001)
        with pytest.raises(UserError, match="first in the head"):
            compare(folder, run)
    update = modeling_dreamer.Cache.update

    def shifted(self, keys, values, depth):
        return update(self, keys, values * (1 if self.get_seq_length(depth) == 0 else 1.5), depth)

    monkeypatch.setattr(modeling_dreamer.Cache, "update", shifted)
    with pytest.raises(UserError, match="doesn't generate what the run does"):
        compare(folder, run)


@pytest.mark.parametrize(
    ("steps", "schedule", "more"),
    [
        (7, "constant", " --training.steps MORE"),
        (7, "cosine", " --training.steps MORE --checkpoint.allow learning_rate"),
        (8, "cosine", ""),
    ],
)
def test_import_says_what_goes_on_with_a_complete_run(
    steps: int, schedule: str, more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without more steps than it has the command that is named would train nothing."""
    config = Config()
    training = dataclasses.replace(config.training, steps=steps, warmup_steps=1, schedule=schedule)
    config = dataclasses.replace(config, training=training)
    found = Description(config, {}, "float32", True, 7, {"data": "0"})
    monkeypatch.setattr("dreamer_jax.export.reading.import_run", lambda folder, out: found)
    assert main(["import", "folder", "my runs/back"]) == 0
    assert capsys.readouterr().out.endswith(f"go on with `dreamer train 'my runs/back/config.yaml'{more}`\n")


def test_the_command_exports_verifies_and_refuses(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "float32 logits differ by" in printed and "bfloat16 greedy tokens agree on" in printed
    assert main(["export", str(run), str(out), "--verify-only"]) == 0
    assert main(["export", str(run), str(out)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["import", str(out), str(tmp_path / "back")]) == 0
    assert main(["export", str(tmp_path / "back"), str(out), "--verify-only"]) == 0
    capsys.readouterr()
    code = out / "modeling_dreamer.py"
    code.write_text(code.read_text() + "\n# mine\n")
    assert main(["export", str(run), str(out), "--verify-only"]) == 2
    assert "is not the one this version" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "x"), "--step", "9"]) == 2
    assert "no checkpoint of step 9; it has 7" in capsys.readouterr().err
