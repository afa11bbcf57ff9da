"""Folders in transformers: the auto classes, generation, pipelines, training, saving, tokenizers."""

import base64
import copy
import importlib
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from dreamer_jax.data.json_tokenizer import JsonTokenizer
from dreamer_jax.data.tokenizers import ByteTokenizer, RankTokenizer, Tokenizer, load_tokenizer
from dreamer_jax.export.reading import import_run
from dreamer_jax.export.tokenizer_files import merges, write_tokenizer
from dreamer_jax.export.writing import export
from dreamer_jax.runs.leaves import open_model
from dreamer_jax.runs.models import load_run
from tests.export.cases import WHY_SKIPPED, make_run
from tests.outside import LLAMA3, write_rank_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
transformers = pytest.importorskip("transformers", reason=WHY_SKIPPED)

from dreamer_jax.export.modeling_dreamer import Dreamer  # noqa: E402

TEXTS = ["true and (not false)", "wörld  12345\n\n\tx", "", " leading", "<|end_of_text|> is text", "日本語 🙂 don't"]


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory):
    """Where transformers copies a folder's code to: not the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        place = str(tmp_path_factory.mktemp("modules"))
        for module in (transformers.dynamic_module_utils, transformers.utils.hub, transformers.utils):
            patch.setattr(module, "HF_MODULES_CACHE", place, raising=False)
        yield place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("export")
    run = make_run(root / "run")
    export(open_model(run), root / "folder", "bfloat16", True, lambda folder: None)
    return root / "folder"


@pytest.fixture(scope="module")
def loaded(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")


def prompts(loaded):
    tokens = torch.randint(0, 256, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    tokens[1, :2], mask[1, :2] = 258, 0
    return {"input_ids": tokens, "attention_mask": mask}


def test_the_auto_class_loads_what_the_file_alone_loads(folder: Path, loaded) -> None:
    alone = Dreamer.load(folder)
    assert not loaded.training and loaded.dtype == torch.bfloat16
    state = loaded.model.state_dict()
    for name, values in alone.state_dict().items():
        assert values.dtype == state[name].dtype and torch.equal(values, state[name]), name
    router = loaded.model.layers[0].expert_attention.router
    assert {router.keys.dtype, router.bias.dtype, router.keys_norm.weight.dtype} == {torch.float32}
    batch = prompts(loaded)
    with torch.no_grad():
        logits = loaded(**batch).logits
        assert torch.equal(logits, alone(batch["input_ids"], batch["attention_mask"]))
        torch.testing.assert_close(loaded(**batch, logits_to_keep=1).logits, logits[:, -1:])
        assert loaded(**batch, use_cache=True).past_key_values.get_seq_length() == 6


def test_generate(folder: Path, loaded) -> None:
    batch, alone = prompts(loaded), Dreamer.load(folder)
    for options in ({}, {"depth": 5}):
        theirs = loaded.generate(**batch, max_new_tokens=5, eos_token_id=None, **options)
        ours = alone.generate(batch["input_ids"], 5, segment_ids=batch["attention_mask"], **options)
        assert torch.equal(theirs, ours)
        slow = loaded.generate(**batch, max_new_tokens=5, eos_token_id=None, use_cache=False, **options)
        assert torch.equal(theirs, slow)
    beams = loaded.generate(**batch, max_new_tokens=5, num_beams=3, eos_token_id=None)
    slow = loaded.generate(**batch, max_new_tokens=5, num_beams=3, eos_token_id=None, use_cache=False)
    assert torch.equal(beams, slow)  # the cache follows the beams
    sampled = loaded.generate(**batch, max_new_tokens=5, do_sample=True, top_p=0.9, eos_token_id=None)
    assert sampled.shape == (2, 11)


def test_pipeline(folder: Path, loaded) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    generate = transformers.pipeline("text-generation", model=str(folder), trust_remote_code=True, dtype="auto")
    said = generate("true", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    tokens = tokenizer("true", return_tensors="pt")
    assert said == tokenizer.decode(loaded.generate(**tokens, max_new_tokens=4)[0], skip_special_tokens=True)


OURO = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
HUGINN = {"n_embd": 32, "n_heads": 4, "intermediate_size": 48, "mean_recurrence": 3}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *((family, {"hidden_size": 32}) for family in ("algoformer", "cotformer", "dreamer", "moeut", "ponder")),
        ("universal", {"hidden_size": 32}),
        *(("ouro", OURO), ("huginn", HUGINN), ("huginn", {**HUGINN, "tie_embeddings": False})),
    ],
)
def test_more_tokens(family: str, sizes: dict, tmp_path: Path) -> None:
    """The embedding grows, and the head where it is another; what is saved is loaded as it was."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    code, name = importlib.import_module(f"dreamer_jax.export.modeling_{family}"), family.capitalize()
    config, cls = getattr(code, f"{name}Config")(vocab_size=40, **sizes), getattr(code, f"{name}ForCausalLM")
    cls(config).to(torch.bfloat16).save_pretrained(tmp_path / "less")
    model = cls.from_pretrained(tmp_path / "less", dtype="auto")
    tokens = torch.tensor([[1, 2, 39, 3]])
    with torch.no_grad():
        before = model(tokens).logits
        model.resize_token_embeddings(50)
        after = model(tokens).logits
        if family != "ponder":  # which ponders on all tokens
            assert torch.equal(after[..., :40], before)
        tokens = torch.tensor([[1, 2, 49, 3]])
        model.save_pretrained(tmp_path / "more")
        again = cls.from_pretrained(tmp_path / "more", dtype="auto")
        assert again.dtype == model.dtype == torch.bfloat16
        assert {k: v.dtype for k, v in again.state_dict().items()} == {
            k: v.dtype for k, v in model.state_dict().items()
        }
        assert torch.equal(again(tokens).logits, model(tokens).logits) and after.shape[-1] == 50
        written = [
            each.generate(tokens, max_new_tokens=3, eos_token_id=None, pad_token_id=0) for each in (model, again)
        ]
        assert torch.equal(*written) and written[0].shape == (1, 7)
    model = cls.from_pretrained(tmp_path / "more", dtype=torch.float32)
    model.resize_token_embeddings(45)
    (model.model if family == "dreamer" else model).compute_dtype = torch.bfloat16
    model.train()(tokens[:, :2], labels=tokens[:, :2]).loss.backward()
    head = model.get_output_embeddings() or model.get_input_embeddings()
    assert head.weight.shape[0] == 45 and head.weight.grad is not None


RECURSIVE = {"hidden_size": 32, "heads": 4, "kv_heads": 2, "head_size": 8, "mlp_size": 48}


EVERY = [
    *((family, {"hidden_size": 32}) for family in ("algoformer", "cotformer", "dreamer", "moeut", "ponder")),
    *(("universal", {"hidden_size": 32}), ("ouro", OURO), ("huginn", HUGINN), ("recursive", RECURSIVE)),
]


def small(family: str, sizes: dict):
    """A fresh model of a family, for evaluation."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    code, name = importlib.import_module(f"dreamer_jax.export.modeling_{family}"), family.capitalize()
    return getattr(code, f"{name}ForCausalLM")(getattr(code, f"{name}Config")(vocab_size=40, **sizes)).eval()


@pytest.mark.parametrize(("family", "sizes"), EVERY)
def test_calls_are_as_of_other_models(family: str, sizes: dict) -> None:
    """A cache comes without being asked for, with gradients too, and going on from it is exact; hidden states come out
    of `forward` and of `generate`; the last of them is what the head gets."""
    model, tokens = small(family, sizes), torch.tensor([[1, 2, 3, 4, 5]])
    whole = model(tokens, use_cache=False, output_hidden_states=True)
    assert whole.past_key_values is None and whole.logits.requires_grad
    out = model(tokens[:, :3])
    assert torch.allclose(out.logits, whole.logits[:, :3], atol=1e-5)
    out = model(tokens[:, 3:], past_key_values=out.past_key_values)
    assert torch.allclose(out.logits, whole.logits[:, 3:], atol=1e-5)
    assert model(tokens, labels=tokens).past_key_values is None  # a loss needs none
    assert model.train()(tokens).past_key_values is None
    model.eval()
    model.config.use_cache, model.config.output_hidden_states = False, True
    with torch.no_grad():
        out = model(tokens)
    assert out.past_key_values is None and len(out.hidden_states) == len(whole.hidden_states) > 2
    for ours, its in zip(out.hidden_states, whole.hidden_states, strict=True):
        assert torch.equal(ours, its) and ours.shape == (1, 5, 32)
    model.config.use_cache, model.config.output_hidden_states = True, False
    if family == "recursive":
        matrix = model.embedding if model.head is None else model.head
    else:
        matrix = (model.get_output_embeddings() or model.get_input_embeddings()).weight
    logits = whole.hidden_states[-1] @ matrix.T
    assert family == "moeut" or torch.allclose(logits, whole.logits, atol=1e-5)
    assert torch.equal(model(tokens, logits_to_keep=torch.tensor([1, 3])).logits, model(tokens).logits[:, [1, 3]])
    loss, logits, *_ = model(tokens, labels=tokens, return_dict=False)
    assert loss.ndim == 0 and torch.equal(logits, model(tokens).logits)
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    said = model.generate(tokens, return_dict_in_generate=True, output_hidden_states=True, **options)
    assert [its[-1].shape for its in said.hidden_states] == [(1, 5, 32), (1, 1, 32)]


@pytest.mark.parametrize(("family", "sizes"), EVERY)
def test_what_would_be_passed_over_is_refused(family: str, sizes: dict) -> None:
    """Options of other families and typing errors, masks and depths that can't be, and weights that aren't there."""
    model, tokens = small(family, sizes), torch.tensor([[1, 2, 3, 4]])
    own = {"ouro": "total_ut_steps", "huginn": "num_steps", "recursive": None}.get(family, "depth")
    for name in {"depth", "num_steps", "total_ut_steps", "detph", "output_attentions"} - {own}:
        with pytest.raises(TypeError, match=f"ForCausalLM has no option '{name}'"):
            model(tokens, **{name: 2})
        model(tokens, **{name: None})
    if own:
        assert not torch.equal(model(tokens, **{own: 1}).logits, model(tokens, **{own: 2}).logits)
        with pytest.raises(ValueError, match="-2"):
            model(tokens, **{own: -2})
    cache = model(tokens).past_key_values
    for mask in (torch.ones(1, 1, 4, 4), torch.ones(1, 3), torch.ones(3, 4)):
        with pytest.raises(ValueError, match=r"attention_mask is .*; with what the cache holds it is \[1, 4\]"):
            model(tokens, attention_mask=mask)
    with pytest.raises(ValueError, match=r"it is \[1, 8\]"):
        model(tokens, attention_mask=torch.ones(1, 4), past_key_values=cache)
    owner, name = (model, "embedding") if family == "recursive" else (model.get_input_embeddings(), "weight")
    setattr(owner, name, torch.nn.Parameter(getattr(owner, name).to("meta")))
    with pytest.raises(ValueError, match="weights are offloaded or on several devices"):
        model(tokens)


def test_a_hook_on_the_head_is_called() -> None:
    """So adapters (PEFT) on it do what they are there for."""
    model, seen = small("dreamer", {"hidden_size": 32}), []
    model.get_output_embeddings().register_forward_hook(lambda _, its, out: seen.append(out) or out + 1)
    plain = model(torch.tensor([[1, 2]])).logits
    assert torch.equal(plain, seen[0] + 1) and torch.equal(model.model(torch.tensor([[1, 2]])), plain)


@pytest.mark.parametrize(("family", "sizes"), EVERY)
def test_generation_goes_on_from_a_cache(family: str, sizes: dict) -> None:
    """What one call of `generate` has left is taken by the next, with more tokens behind it, also padded rows; or
    these tokens alone, with the mask of all."""
    model = small(family, sizes)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    fed: list[int] = []
    model.register_forward_pre_hook(lambda _, __, named: fed.append(named["input_ids"].shape[1]), with_kwargs=True)
    said = model.generate(
        torch.tensor([[1, 2, 3], [0, 0, 4]]), attention_mask=mask, return_dict_in_generate=True, **options
    )
    tokens, mask = (
        torch.nn.functional.pad(said.sequences, (0, 2), value=5),
        torch.nn.functional.pad(mask, (0, 5), value=1),
    )
    again, held = copy.deepcopy(said.past_key_values), said.past_key_values.get_seq_length()
    fast, slow = (
        model.generate(tokens, attention_mask=mask, **its, **options)
        for its in ({"past_key_values": said.past_key_values}, {"use_cache": False})
    )
    assert fast.shape == (2, 11) and torch.equal(fast, slow)
    assert fed == [3, 1, 1, 3, 1, 1, 8, 9, 10]  # whatever the cache doesn't hold, then what there is without one
    new = model.generate(tokens[:, held:], attention_mask=mask, past_key_values=again, **options)
    assert torch.equal(new, fast[:, held:]) and fed[9:] == [3, 1, 1]
    with pytest.raises(ValueError, match="the mask of the whole text"):
        model.generate(tokens[:, held:], attention_mask=mask[:, held:], past_key_values=again, **options)


@pytest.mark.parametrize("family", ["cotformer", "dreamer", "universal"])
def test_the_cache_by_both_its_names(family: str) -> None:
    """transformers 5.24 renamed it."""
    torch.manual_seed(0)
    code, name = importlib.import_module(f"dreamer_jax.export.modeling_{family}"), family.capitalize()
    model = getattr(code, f"{name}ForCausalLM")(getattr(code, f"{name}Config")(vocab_size=40, hidden_size=32)).eval()
    tokens, found = torch.tensor([[1, 2, 3, 4]]), {}
    with torch.no_grad():
        for argument in ("past_key_values", "cache"):
            kept = code.Cache()
            model(tokens[:, :3], **{argument: kept})
            assert kept.get_seq_length() == 3
            found[argument] = model(tokens[:, 3:], **{argument: kept}).logits
    assert torch.equal(found["past_key_values"], found["cache"])


def test_fine_tuning_saving_and_the_way_back(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    model.train()
    model.gradient_checkpointing_enable()
    assert model.model.gradient_checkpointing
    batch = prompts(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(4):
        loss = model(**batch, labels=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.model.update_balancing()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "tuned")
    import_run(tmp_path / "tuned", tmp_path / "back")
    back, before = load_run(tmp_path / "back"), model.state_dict()
    np.testing.assert_array_equal(back.params["head"], before["model.head.weight"].numpy())
    gate_up = back.params["layer"]["expert_attention"]["gate_up"]
    np.testing.assert_array_equal(gate_up, before["model.layers.0.expert_attention.gate_up"].numpy())
    bias = before["model.layers.0.expert_attention.router.bias"].numpy()
    np.testing.assert_array_equal(back.model_state["balancing"]["expert_attention"], bias)
    assert back.step == 7 and back.config.data.task == "boolean"


def test_fresh_models_have_the_initialisation_of_training(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True, hidden_size=64, num_experts=50)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True).float()
    experts = model.model.layers[0].expert_attention
    assert experts.gate_up.std().item() == pytest.approx((1 / (5 * 64)) ** 0.5, rel=0.05)
    assert experts.down.std().item() == pytest.approx((1 / (2.5 * 64 * 3 * 3)) ** 0.5, rel=0.05)
    assert torch.equal(experts.router.bias, torch.zeros(50))


def test_a_configuration_from_the_future_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        os.link(path, tmp_path / path.name)
    content = json.loads((folder / "config.json").read_text()) | {"format_version": 2}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(content))
    for load in (
        Dreamer.load,
        lambda path: transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True),
    ):
        with pytest.raises(ValueError, match="this folder has format 2; this file reads up to 1"):
            load(tmp_path)


def same_ids(folder: Path, tokenizer: Tokenizer, spec: str) -> None:
    write_tokenizer(folder, tokenizer, spec, 64)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    rng = random.Random(0)
    noise = ["".join(rng.choices(" abcxyz019\n\t'.,üß漢🙂ARS", k=40)) for _ in range(50)]
    for text in TEXTS + noise:
        assert theirs(text).input_ids == [tokenizer.bos, *tokenizer.encode(text)], text
        assert theirs.decode(tokenizer.encode(text)) == text
    ids = (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, theirs.model_max_length)
    assert ids == (tokenizer.bos, tokenizer.eos, tokenizer.pad, 64)
    assert theirs.decode([tokenizer.bos, *tokenizer.encode("ab"), tokenizer.eos], skip_special_tokens=True) == "ab"


def test_the_byte_tokenizer(tmp_path: Path) -> None:
    same_ids(tmp_path, ByteTokenizer(), "bytes")


def toy_ranks() -> dict[bytes, int]:
    words = [b"th", b"the", b" t", b" the", b"12", b"123", b"an", b"and", b" a", b" and", b"not", b"ab", b"abc"]
    words += ["ü".encode(), "漢".encode()[:2], "漢".encode(), b"tr", b"ue", b"true", b"xy", b"xyz", b"no"]
    return {token: rank for rank, token in enumerate([*(bytes([b]) for b in range(256)), *words])}


def test_a_rank_file_and_its_licences(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    path = source / "tokenizer.model"
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in toy_ranks().items()]
    path.write_bytes(b"\n".join(lines) + b"\n")
    (source / "NOTICE").write_text("kept")
    folder = tmp_path / "folder"
    folder.mkdir()
    same_ids(folder, load_tokenizer(str(path)), str(path))
    assert (folder / "tokenizer-NOTICE").read_text() == "kept"


def test_merges_are_in_the_order_of_the_ranks() -> None:
    assert merges({b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"abc": 4, b"ab": 5}) == [["b", "c"], ["a", "bc"], ["a", "b"]]
    assert isinstance(RankTokenizer(toy_ranks()), RankTokenizer)


def test_a_tokenizer_json_without_special_tokens(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    plain = tmp_path / "plain"
    plain.mkdir()
    write_tokenizer(plain, ByteTokenizer(), "bytes", 64)
    content = json.loads((plain / "tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][:1]
    source = tmp_path / "source.json"
    source.write_text(json.dumps(content))
    folder = tmp_path / "folder"
    folder.mkdir()
    same_ids(folder, JsonTokenizer(source), str(source))


def test_a_trained_rank_file(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = tmp_path / "folder"
    folder.mkdir()
    path = str(write_rank_file(tmp_path))
    same_ids(folder, load_tokenizer(path), path)


@pytest.mark.llama3
def test_the_llama_3_tokenizer(tmp_path: Path) -> None:
    same_ids(tmp_path, load_tokenizer(str(LLAMA3)), str(LLAMA3))
