"""Ouro's PyTorch code: against the JAX model and the official outputs, in transformers, and its verification."""

from __future__ import annotations

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.errors import UserError
from dreamer_jax.export.description import read_description
from dreamer_jax.export.reading import import_run
from dreamer_jax.export.writing import export
from dreamer_jax.families import forward
from dreamer_jax.runs.leaves import open_model
from dreamer_jax.runs.models import load_run
from tests.export.cases import OURO, WHY_SKIPPED, ouro_run, write_folder
from tests.outside import official_outputs

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
transformers = pytest.importorskip("transformers", reason=WHY_SKIPPED)

from dreamer_jax.export import modeling_ouro, ouro_sides, verification  # noqa: E402

TOKENS = torch.randint(0, 259, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory):
    """Where transformers copies a folder's code to: not the home of whoever runs the tests."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        place = str(tmp_path_factory.mktemp("modules"))
        for module in (transformers.dynamic_module_utils, transformers.utils.hub, transformers.utils):
            patch.setattr(module, "HF_MODULES_CACHE", place, raising=False)
        yield place


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return ouro_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def folder(run: Path) -> Path:
    export(open_model(run), run.parent / "folder", "float32", False, lambda folder: None)
    return run.parent / "folder"


@pytest.fixture(scope="module")
def loaded(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")


@torch.no_grad()
def test_states_logits_and_loss_are_those_of_jax(loaded, run: Path) -> None:
    """After every loop; with labels, the loss of the first stage."""
    trained, tokens = load_run(run), TOKENS.numpy().astype(np.int32)
    passed = forward(trained.family, trained.params, {}, {"tokens": tokens})
    out = loaded(TOKENS, labels=TOKENS, output_hidden_states=True)
    np.testing.assert_allclose(torch.stack(out.hidden_states[1:]), passed.outputs[0], atol=1e-4)
    expected = np.asarray(trained.family.logits(trained.params, passed.state.x))
    np.testing.assert_allclose(out.logits, expected, atol=2e-5 * np.abs(expected).max())
    last = np.arange(9) == 8
    batch = {"targets": np.roll(tokens, -1, 1), "loss_mask": jnp.asarray(~np.stack([last, last]))}
    loss, _ = trained.family.loss(trained.params, passed, batch)
    assert out.loss.item() == pytest.approx(float(loss) / 16, rel=1e-5)
    torch.testing.assert_close(loaded(TOKENS, total_ut_steps=2, logits_to_keep=2).logits.shape, (2, 2, 259))


@torch.no_grad()
def test_early_exits_are_read_off_by_the_sum_of_probabilities(loaded) -> None:
    by_loop = torch.stack([loaded(TOKENS, total_ut_steps=t).logits for t in (1, 2, 3)])
    logits = loaded(TOKENS, exit_threshold=0.6).logits
    states = torch.stack(loaded(TOKENS, output_hidden_states=True).hidden_states[1:])
    gate = loaded.model.early_exit_gate
    stopped = 1 - torch.cumprod(1 - torch.sigmoid(states @ gate.weight[0] + gate.bias), 0)
    loops = torch.where(stopped[0] >= 0.6, 0, torch.where(stopped[1] >= 0.6, 1, 2))
    assert len(loops.unique()) > 1
    torch.testing.assert_close(logits, by_loop.gather(0, loops[None, ..., None].expand_as(logits[None]))[0])
    torch.testing.assert_close(loaded(TOKENS, exit_threshold=0.0).logits, by_loop[0])
    gate_bias = gate.bias.clone()
    gate.bias.fill_(200.0)  # rounded to 1, and yet nothing stops early at 1
    torch.testing.assert_close(loaded(TOKENS, exit_threshold=1.0).logits, by_loop[2])
    gate.bias.copy_(gate_bias)


def test_generation_with_and_without_a_cache(loaded) -> None:
    for options in ({}, {"total_ut_steps": 2}, {"num_beams": 3}, {"exit_threshold": 0.6}):
        fast, slow = (
            loaded.generate(TOKENS, max_new_tokens=5, do_sample=False, eos_token_id=None, use_cache=cache, **options)
            for cache in (True, False)
        )
        assert fast.shape == (2, 14) and torch.equal(fast, slow), options


@torch.no_grad()
def test_padding_and_packing_change_nothing(loaded) -> None:
    alone = loaded(TOKENS[1:, :6]).logits
    left = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    padded = torch.cat([torch.full((1, 3), 258), TOKENS[1:, :6]], 1)
    batch = {"input_ids": torch.cat([TOKENS[:1], padded]), "attention_mask": left}
    torch.testing.assert_close(loaded(**batch).logits[1:, 3:], alone, rtol=1e-4, atol=1e-4)
    packed = loaded(torch.cat([TOKENS[:1], TOKENS[1:, :6]], 1), torch.tensor([[1] * 9 + [2] * 6])).logits
    torch.testing.assert_close(packed[:, 9:], alone, rtol=1e-4, atol=1e-4)
    both = loaded.generate(**batch, max_new_tokens=4, do_sample=False, eos_token_id=None)
    one = loaded.generate(TOKENS[1:, :6], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert torch.equal(both[1:, 9:], one[:, 6:])
    cache = loaded(TOKENS, use_cache=True, total_ut_steps=2).past_key_values
    with pytest.raises(ValueError, match="keep total_ut_steps"):
        loaded(TOKENS[:, :1], past_key_values=cache)


def test_fine_tuning_saving_and_the_way_back(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    model.train()
    losses, gradients = [], []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(6):
        model.model.checkpointing = step == 1  # the same gradients, computed again
        if step > 1:
            optimizer.step()
        optimizer.zero_grad()
        loss = model(TOKENS, labels=TOKENS.clone()).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])
    assert losses[0] == losses[1] and losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "tuned")
    import_run(tmp_path / "tuned", tmp_path / "back")
    back = load_run(tmp_path / "back")
    assert back.step == 7 and back.config.model == OURO
    np.testing.assert_array_equal(back.params["embedding"], model.model.embed_tokens.weight.detach().numpy())
    found = dreamer_jax.load(tmp_path / "tuned").logits(TOKENS.numpy())
    np.testing.assert_allclose(model.eval()(TOKENS).logits.detach(), found, atol=1e-3)


@torch.no_grad()
def test_official_outputs(tmp_path: Path) -> None:
    arrays, said = official_outputs("ouro_tiny")
    tensors = {name[2:]: arrays[name] for name in arrays.files if name.startswith("w/")}
    model = ouro_sides.torch_model(write_folder(tmp_path / "folder", tensors, said["config"]))
    tokens = torch.tensor(arrays["input_ids"]).long()
    out = model(tokens, labels=tokens, output_hidden_states=True)
    np.testing.assert_allclose(torch.stack(out.hidden_states[1:]), arrays["hidden_normed"], atol=1e-4)
    np.testing.assert_allclose(out.logits, arrays["logits_per_loop"][-1], atol=1e-4)
    derived = next(value for key, value in said.items() if key.endswith("- 0.1 H(p)]"))
    assert out.loss.item() == pytest.approx(derived, rel=1e-5)


def test_the_command_exports_verifies_and_refuses(run: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--dtype", "bfloat16", "--format", "ouro"]) == 0
    printed = capsys.readouterr().out
    assert "float32 logits differ by" in printed and "16 greedy tokens agree" in printed
    (out / "modeling_ouro.py").unlink()
    assert main(["export", str(run), str(out), "--verify-only"]) == 2
    assert "is not the one this version" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "other"), "--format", "huginn"]) == 2
    assert "is of the family ouro" in capsys.readouterr().err


def test_wrong_computing_is_found_and_named(folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare() -> verification.Finding:
        return verification.compare_outputs(folder, open_model(run), read_description(folder))

    right = compare()
    assert right.mean < right.worst < 2e-5 and right.left_out == 0
    update = modeling_ouro.Cache.update

    def shifted(self, keys, values, number):
        return update(self, keys, values * (1 if self.length == keys.shape[2] else -2), number)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_ouro.Attention, "rotate", lambda self, x, its: x)
        with pytest.raises(UserError, match="first in loop 1"):
            compare()
    with monkeypatch.context() as patch:
        patch.setattr(modeling_ouro.Cache, "update", shifted)
        with pytest.raises(UserError, match="doesn't generate what the run does"):
            compare()
