"""Huginn's PyTorch code: against the JAX model and the official outputs, in transformers, and its verification."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.errors import UserError
from dreamer_jax.export.description import read_description
from dreamer_jax.export.reading import import_run
from dreamer_jax.export.writing import export
from dreamer_jax.runs import safetensors_files
from dreamer_jax.runs.leaves import open_model
from dreamer_jax.runs.models import load_run
from tests.export.cases import HUGINN, WHY_SKIPPED, huginn_run, make_run, write_folder
from tests.outside import official_outputs

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
transformers = pytest.importorskip("transformers", reason=WHY_SKIPPED)

from dreamer_jax.export import huginn_sides, modeling_huginn, verification  # noqa: E402

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


# One modeling file has both: the other form takes its turn where there is time.
@pytest.fixture(
    scope="module", params=[n if n == "huginn" else pytest.param(n, marks=pytest.mark.slow) for n in HUGINN]
)
def run(request, tmp_path_factory) -> Path:
    return huginn_run(tmp_path_factory.mktemp("runs") / request.param, HUGINN[request.param])


@pytest.fixture(scope="module")
def folder(run: Path) -> Path:
    export(open_model(run), run.parent / "folder", "float32", False, lambda folder: None)
    return run.parent / "folder"


@pytest.fixture(scope="module")
def loaded(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")


def states_of(length: int = 9, rows: int = 2) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(rows, length, 32)).astype(np.float32)


def test_logits_and_states_at_any_depth(folder: Path, loaded) -> None:
    model, s0 = dreamer_jax.load(folder), states_of()
    assert not loaded.training and loaded.config.mean_recurrence == 3
    for depth in (1, 3, 5):
        with torch.no_grad():
            out = loaded(TOKENS, input_states=torch.tensor(s0), num_steps=depth, output_hidden_states=True)
        expected = np.asarray(model.logits(TOKENS.numpy(), depth, s0))
        np.testing.assert_allclose(out.logits, expected, atol=2e-5 * np.abs(expected).max())
        assert len(out.hidden_states) == depth + 2
        last = model.states(TOKENS.numpy(), depth, s0)[-1]
        np.testing.assert_allclose(out.hidden_states[-2], last, atol=1e-4)
        again = loaded(TOKENS, input_states=torch.tensor(s0), num_steps=depth, logits_to_keep=2).logits
        torch.testing.assert_close(again, out.logits[:, -2:])
    with torch.no_grad():
        default = loaded(TOKENS, input_states=torch.tensor(s0)).logits
        torch.testing.assert_close(default, loaded(TOKENS, input_states=torch.tensor(s0), num_steps=3).logits)


def test_generation_with_and_without_a_cache(loaded) -> None:
    for options in ({}, {"num_steps": 5}, {"num_beams": 3}, {"input_states": torch.tensor(states_of(14))}):
        fast, slow = (
            loaded.generate(TOKENS, max_new_tokens=5, do_sample=False, eos_token_id=None, use_cache=cache, **options)
            for cache in (True, False)
        )
        assert fast.shape == (2, 14) and torch.equal(fast, slow), options
    sampled = loaded.generate(TOKENS, max_new_tokens=3, do_sample=True, top_p=0.9, eos_token_id=None)
    assert sampled.shape == (2, 12)


def test_a_cache_is_of_one_number_of_recurrences(loaded) -> None:
    with torch.no_grad():
        cache = loaded(TOKENS, use_cache=True, num_steps=2).past_key_values
        assert cache.get_seq_length() == 9
        with pytest.raises(ValueError, match="keep num_steps"):
            loaded(TOKENS[:, :1], past_key_values=cache, num_steps=3)


def test_padding_and_packing_change_nothing(loaded) -> None:
    with torch.no_grad():
        alone = loaded(TOKENS[1:, :6]).logits
        left = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
        padded = torch.cat([torch.full((1, 3), 258), TOKENS[1:, :6]], 1)
        batch = {"input_ids": torch.cat([TOKENS[:1], padded]), "attention_mask": left}
        logits = loaded(**batch).logits
        assert bool(logits.isfinite().all())
        torch.testing.assert_close(logits[1:, 3:], alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[:1], loaded(TOKENS[:1]).logits, rtol=1e-4, atol=1e-4)
        packed = loaded(torch.cat([TOKENS[:1], TOKENS[1:, :6]], 1), torch.tensor([[1] * 9 + [2] * 6])).logits
        torch.testing.assert_close(packed[:, 9:], alone, rtol=1e-4, atol=1e-4)
    both = loaded.generate(**batch, max_new_tokens=4, do_sample=False, eos_token_id=None)
    one = loaded.generate(TOKENS[1:, :6], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert torch.equal(both[1:, 9:], one[:, 6:])


def test_initial_states(loaded) -> None:
    """By position in evaluation, anew in training; a normal cut off at three deviations."""
    std = loaded.state_std
    positions = torch.arange(200)[None]
    drawn = loaded.initial_state(positions)
    assert torch.equal(drawn[:, 7:9], loaded.initial_state(torch.tensor([[7, 8]])))
    assert drawn.std().item() == pytest.approx(0.987 * std, rel=0.03)
    assert 2.5 * std < drawn.abs().max().item() <= 3 * std
    loaded.train()
    try:
        assert not torch.equal(loaded.initial_state(positions), loaded.initial_state(positions))
        draws = [loaded.draw() for _ in range(300)]
    finally:
        loaded.eval()
    totals = np.array([sum(draw) for draw in draws])
    assert abs(totals.mean() - 4) < 0.6 and totals.min() >= 1 and all(draw[1] == min(sum(draw), 2) for draw in draws)


def test_fine_tuning_saving_and_the_way_back(folder: Path, run: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    model.train()
    model.gradient_checkpointing_enable()
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(8):
        loss = model(TOKENS, labels=TOKENS.clone()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "tuned")
    import_run(tmp_path / "tuned", tmp_path / "back")
    back, before = load_run(tmp_path / "back"), load_run(run)
    assert back.step == 7 and back.config.model == before.config.model
    tuned = model.state_dict()["transformer.wte.weight"].numpy()
    np.testing.assert_array_equal(back.params["embedding"], tuned)
    assert not np.array_equal(before.params["embedding"], tuned)
    states = torch.tensor(huginn_sides.initial_states(before.config.model, 9))[None]
    logits = model.eval()(TOKENS, input_states=states).logits.detach()
    np.testing.assert_allclose(logits, dreamer_jax.load(tmp_path / "tuned").logits(TOKENS.numpy()), atol=1e-3)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", trust_remote_code=True)
    np.testing.assert_array_equal(again.eval()(TOKENS, input_states=states).logits.detach(), logits)


def test_checkpointing_changes_no_gradient(loaded) -> None:
    found = []
    loaded.train()
    try:
        for enabled in (False, True):
            loaded.transformer.checkpointing = enabled
            loaded.zero_grad()
            states = torch.tensor(states_of())
            loaded(TOKENS, labels=TOKENS, num_steps=(1, 2), input_states=states).loss.backward()
            found.append({name: weight.grad.clone() for name, weight in loaded.named_parameters()})
    finally:
        loaded.eval()
        loaded.transformer.checkpointing = False
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-4, atol=1e-6)


def test_official_loss_and_gradients(tmp_path: Path) -> None:
    arrays, said = official_outputs("huginn_tiny")
    tensors = {name[2:]: arrays[name] for name in arrays.files if name.startswith("w/")}
    model = huginn_sides.torch_model(write_folder(tmp_path / "folder", tensors, said["config"]))
    model.requires_grad_(True)
    tokens, s0 = torch.tensor(arrays["fwd/input_ids"]), torch.tensor(arrays["fwd/s0"])
    for key in ("train", "train_full_bptt"):
        steps = said[key]["num_steps_no_grad"], said[key]["num_steps_with_grad"]
        logits = model(tokens, input_states=s0, num_steps=steps).logits
        labels = torch.tensor(arrays["train/labels"]).flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100)
        assert loss.item() == pytest.approx(said[key]["loss"], rel=1e-5)
        model.zero_grad()
        loss.backward()
        for name, weight in model.named_parameters():
            assert weight.grad.norm().item() == pytest.approx(said[key]["grad_l2"][name], rel=1e-4), name


def test_fresh_models_have_the_initialisation_of_training() -> None:
    config = modeling_huginn.HuginnConfig(n_embd=128, n_heads=4, intermediate_size=256, vocab_size=300)
    model = modeling_huginn.HuginnForCausalLM(config)
    std, layer = (2 / (5 * 128)) ** 0.5, model.transformer.core_block[1]
    out = std / (2 * 132) ** 0.5
    gate, up = layer.mlp.fc.weight.chunk(2)
    expected = [(gate, std), (up, out), (layer.mlp.proj.weight, out), (layer.attn.proj.weight, out)]
    expected += [(layer.attn.Wqkv.weight, std), (model.transformer.wte.weight, std)]
    for weight, deviation in expected:
        assert weight.std().item() == pytest.approx(0.987 * deviation, rel=0.03)
    assert torch.equal(layer.attn.qk_bias, torch.zeros(2, 1, 4, 32))


# Verification.


@pytest.mark.slow
def test_the_command_exports_verifies_and_refuses(tmp_path: Path, capsys) -> None:
    run, out = huginn_run(tmp_path / "run", HUGINN["llama"]), tmp_path / "out"
    assert main(["export", str(run), str(out), "--dtype", "bfloat16", "--format", "huginn"]) == 0
    printed = capsys.readouterr().out
    assert "float32 logits differ by" in printed and "16 greedy tokens agree" in printed
    assert main(["import", str(out), str(tmp_path / "back")]) == 0
    assert "Huginn 1+2x3+1, step 7" in capsys.readouterr().out
    assert main(["export", str(run), str(tmp_path / "other"), "--format", "dreamer"]) == 2
    assert "--format dreamer: " in capsys.readouterr().err
    other = make_run(tmp_path / "dreamer")
    assert main(["export", str(other), str(tmp_path / "other"), "--format", "huginn"]) == 2
    assert "is of the family dreamer" in capsys.readouterr().err
    (out / "modeling_huginn.py").unlink()
    assert main(["export", str(run), str(out), "--verify-only"]) == 2
    assert "is not the one this version" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "dreamer", "out", "run"]


def compare(folder: Path, run: Path) -> verification.Finding:
    return verification.compare_outputs(folder, open_model(run), read_description(folder))


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        ("transformer.wte.weight", "embedding"),
        ("transformer.prelude.0.norm_1.weight", "prelude layer 0"),
        ("transformer.adapter.weight", "adapter"),
        ("transformer.core_block.1.attn.Wqkv.weight", "core layer 1"),
        ("transformer.ln_f.weight", "final norm"),
    ],
)
def test_one_wrong_value_is_found_and_named(run: Path, tmp_path: Path, tensor: str, part: str) -> None:
    folder = tmp_path / "folder"
    export(open_model(run), folder, "float32", False, lambda folder: None)
    its = safetensors_files.open_tensors(folder)
    for name in {tensor, "lm_head.weight"} if "wte" in tensor and "freqs_cis" in its else {tensor}:
        with its[name].path.open("r+b") as file:
            file.seek(its[name].end - 4)
            file.write(np.float32(0.123).tobytes())
    with pytest.raises(UserError, match=f"differs from the run first at {part}: the tensor {tensor}"):
        verification.verify(folder, open_model(run))


def test_wrong_computing_is_found_and_named(folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = compare(folder, run)
    assert right.mean < right.worst < 2e-5 and right.left_out < 0.5 and right.agreement is None
    rotate, update = modeling_huginn.Attention.rotate, modeling_huginn.Cache.update

    def other_pairs(self, x, step):
        self.interleaved = not self.interleaved
        turned = rotate(self, x, step)
        self.interleaved = not self.interleaved
        return turned

    def shifted(self, keys, values, layer):
        return update(self, keys, values * (1 if self.length == keys.shape[2] else -2), layer)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_huginn.Attention, "rotate", other_pairs)
        with pytest.raises(UserError, match="first in prelude"):
            compare(folder, run)
    with monkeypatch.context() as patch:
        patch.setattr(modeling_huginn.Cache, "update", shifted)
        with pytest.raises(UserError, match="doesn't generate what the run does"):
            compare(folder, run)
