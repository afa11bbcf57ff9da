"""Folders: what is written, the way back, refusals, and that nothing half-done is ever left."""

import dataclasses
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dreamer_jax.cli.main import main
from dreamer_jax.data.tokenizers import ByteTokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.export import modeling_file
from dreamer_jax.export.card import write_card
from dreamer_jax.export.description import read_description
from dreamer_jax.export.reading import import_run
from dreamer_jax.export.writing import export, written_aside
from dreamer_jax.parallel import make_mesh
from dreamer_jax.runs import checkpoints, leaves, safetensors_files
from dreamer_jax.runs.checkpoints import Checkpoints
from dreamer_jax.runs.leaves import open_model
from dreamer_jax.runs.models import load_run
from dreamer_jax.training.state import create_state
from tests.export.cases import WHY_SKIPPED, make_run

ROOT = Path(__file__).resolve().parents[2]


def write(run: Path, out: Path, dtype: str = "float32", keep_shared: bool = False, shard_bytes: int = 1 << 40) -> Path:
    export(open_model(run), out, dtype, keep_shared, lambda folder: None, shard_bytes)
    return out


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "dr_da")


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(run, tmp_path_factory.mktemp("folders") / "folder")


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("variant", "dtype", "keep_shared", "left_out"),
    [
        ("DR+DA", "bfloat16", False, ()),
        ("DR", "float32", True, ()),
        ("LA", "bfloat16", False, ()),
        ("DR+DA", "bfloat16", False, ("attention_experts", "residual_norm")),
        ("DR", "float32", False, ("shared_expert", "router_depth_code")),
    ],
)
def test_there_and_back_gives_identical_bytes(
    tmp_path: Path, variant: str, dtype: str, keep_shared: bool, left_out: tuple[str, ...]
) -> None:
    run = make_run(tmp_path / "run", variant, **dict.fromkeys(left_out, False))
    first = write(run, tmp_path / "first", dtype, keep_shared)
    import_run(first, tmp_path / "back")
    second = write(tmp_path / "back", tmp_path / "second", dtype, keep_shared)
    assert files_of(first) == files_of(second)
    original, back = load_run(tmp_path / "run"), load_run(tmp_path / "back")
    assert (back.step, back.meta) == (original.step, original.meta) == (7, back.meta)
    assert dataclasses.replace(back.config, run=original.config.run) == original.config
    assert back.config.run.dir == str(tmp_path / "back")
    if keep_shared:  # float32: nothing was lost
        shared = [model.params["layer"]["sequence_attention"]["projections"] for model in (original, back)]
        for name in shared[0]["router"].keys() - {"query_norm", "keys_norm"}:
            np.testing.assert_array_equal(shared[0]["router"][name], shared[1]["router"][name])
        np.testing.assert_array_equal(shared[0]["qkv_shared"], shared[1]["qkv_shared"])
    elif original.config.model.shared_experts:
        assert not np.any(back.params["layer"]["depth_attention"]["projections"]["out_shared"])


def test_folding_and_dtypes(run: Path, tmp_path: Path) -> None:
    projections = load_run(run).params["layer"]["depth_attention"]["projections"]
    folded = np.asarray(projections["qkv"]) + np.asarray(projections["qkv_shared"])
    tensors = safetensors_files.open_tensors(write(run, tmp_path / "bfloat16", "bfloat16"))
    qkv = tensors["model.layers.0.depth_attention.projections.qkv"]
    assert qkv.dtype == "BF16"
    np.testing.assert_array_equal(qkv.array(), folded.astype(qkv.array().dtype))
    assert not any("shared" in name for name in tensors)
    wide = {name for name, tensor in tensors.items() if tensor.dtype == "F32"}
    assert wide == {n for n in tensors if n.endswith(("_norm.weight", "router.keys", "router.bias"))}
    assert all(tensors[name].begin % 64 == 0 for name in tensors if name.endswith("gate_up"))


def test_a_folder_has_everything(exported: Path) -> None:
    files = files_of(exported)
    assert set(files) == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_dreamer.py"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    }
    assert files["modeling_dreamer.py"] == modeling_file()
    config = json.loads(files["config.json"])
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_dreamer.DreamerForCausalLM"
    assert "run.dir" not in config["training_run"]["config"]
    card = files["README.md"].decode()
    for words in (
        "7 optimizer steps",
        "boolean",
        "MFLOP/token",
        "Apache License 2.0",
        "plain bytes",
        "from_pretrained",
    ):
        assert words in card


def test_the_card_names_the_checkpoints_of_an_average(exported: Path, tmp_path: Path) -> None:
    assert b"the mean of" not in files_of(exported)["README.md"]
    write_card(tmp_path, read_description(exported), ByteTokenizer(), (1500, 7, 5))
    assert "the mean of the checkpoints after 5, 7 and 1,500 steps" in (tmp_path / "README.md").read_text()


def test_shards_and_their_index(run: Path, exported: Path, tmp_path: Path) -> None:
    folder = write(run, tmp_path / "sharded", shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = sorted({path.name for path in folder.glob("*.safetensors")})
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(names)
    whole, parts = (safetensors_files.open_tensors(path) for path in (exported, folder))
    assert list(index["weight_map"]) == sorted(whole)
    for name, tensor in whole.items():
        np.testing.assert_array_equal(parts[name].array(), tensor.array())
    import_run(folder, tmp_path / "back")
    (folder / names[1]).unlink()
    with pytest.raises(UserError, match=f"{names[1]} can't be read"):
        import_run(folder, tmp_path / "again")


def test_one_file_saved_over_several(run: Path, exported: Path, tmp_path: Path) -> None:
    """transformers' save_pretrained removes them, leaves their index, and reads the one file."""
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    from dreamer_jax.export.modeling_dreamer import Dreamer

    folder = write(run, tmp_path / "sharded", shard_bytes=20_000)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    shutil.copy(exported / "model.safetensors", folder)
    import_run(folder, tmp_path / "back")
    tokens = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(Dreamer.load(folder)(tokens), Dreamer.load(exported)(tokens), rtol=0, atol=0)


def test_the_safetensors_library_agrees(exported: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy", reason=WHY_SKIPPED)
    theirs = numpy.load_file(exported / "model.safetensors")
    ours = safetensors_files.open_tensors(exported)
    assert set(theirs) == set(ours)
    for name, values in theirs.items():
        np.testing.assert_array_equal(values, ours[name].array())


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    """One of this number, too: in a container every process may have it. What others are at stays."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = {who: f".out.partial-{socket.gethostname()}-{who}" for who in (ended.pid, os.getpid(), 1, "mine")}
    names["elsewhere"] = f".out.partial-another-host-{ended.pid}"
    for name in names.values():
        (tmp_path / name / "half").mkdir(parents=True)
    with written_aside(tmp_path / "out") as aside:
        assert aside.name == names[os.getpid()] and not list(aside.iterdir())
    assert {*os.listdir(tmp_path)} == {"out", names[1], names["mine"], names["elsewhere"]}


def test_nothing_is_left_when_verification_fails(run: Path, tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        assert (folder / "model.safetensors").exists()
        raise UserError("EA differs")

    with pytest.raises(UserError, match="EA differs"):
        export(open_model(run), tmp_path / "out", "float32", False, refuse)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["before", "opened", "read"])
def test_a_checkpoint_that_is_removed_meanwhile(run: Path, tmp_path: Path, monkeypatch, moment: str) -> None:
    """As training does with older ones: no folder of zeros appears."""
    copy = tmp_path / "runs" / "copy"
    shutil.copytree(run, copy)
    model = open_model(copy)

    def removing(real):
        def removed(*arguments):
            if (copy / "checkpoints" / "7").exists():
                model.found.folders.remove(7)
            return real(*arguments)

        return removed

    if moment == "before":
        model.found.folders.remove(7)
    else:
        name = "leaf" if moment == "opened" else "__getitem__"
        cls = leaves.StoredModel if moment == "opened" else leaves.Leaf
        monkeypatch.setattr(cls, name, removing(getattr(cls, name)))
    with pytest.raises(UserError, match=r"checkpoints/7 was removed while it was read"):
        export(model, tmp_path / "out", "float32", False, lambda folder: None)
    assert os.listdir(tmp_path) == ["runs"]


@pytest.mark.parametrize("where", ["known before", "in the background"])
def test_nothing_is_left_of_an_import_onto_a_full_disk(
    exported: Path, tmp_path: Path, capfd, monkeypatch, where
) -> None:
    def full(*_):
        raise OSError(28, "No space left on device")

    place, name = (Checkpoints, "_probe") if where == "known before" else (checkpoints, "write_manifest")
    monkeypatch.setattr(place, name, full)
    assert main(["import", str(exported), str(tmp_path / "back")]) == 2
    said = capfd.readouterr()
    assert "can't write there: the checkpoint was not saved: " in said.err and "No space left on device" in said.err
    assert "training goes on" not in said.err and not said.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_an_existing_path_is_refused_and_kept(run: Path, exported: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
    elif kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to("nowhere")
    for action in (lambda: write(run, out), lambda: import_run(exported, out)):
        with pytest.raises(UserError, match="exists; name a path that doesn't"):
            action()
    assert os.listdir(tmp_path) == ["out"]


def test_truncated_files_are_refused(copy: Path, tmp_path: Path) -> None:
    path = copy / "model.safetensors"
    whole = path.read_bytes()
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    for size in (0, 7, 100, length, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="truncated"):
            import_run(copy, tmp_path / "back")
    path.write_bytes(whole + b"\0")
    with pytest.raises(UserError, match="truncated or altered"):
        import_run(copy, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def rewrite(path: Path, change) -> None:
    """Change the header of a safetensors file."""
    whole = path.read_bytes()
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8:length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[length:])


def swap_offsets(header: dict) -> None:
    header["model.embedding.weight"]["data_offsets"][0] += 4


def overlap(header: dict) -> None:
    header["model.head.weight"]["data_offsets"] = header["model.embedding.weight"]["data_offsets"]


def other_shape(header: dict) -> None:
    header["model.embedding.weight"]["shape"].reverse()


def other_dtype(header: dict) -> None:
    header["model.embedding.weight"]["dtype"] = "I32"


def negative(header: dict) -> None:
    entry = header["model.embedding.weight"]
    entry["shape"] = [-n for n in entry["shape"]]


def listed_dtype(header: dict) -> None:
    header["model.embedding.weight"]["dtype"] = ["F32"]


def rename(header: dict) -> None:
    header["model.body.weight"] = header.pop("model.embedding.weight")


def nonsense(header: dict) -> None:
    header["model.embedding.weight"] = [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_offsets, "contradicts itself"),
        (overlap, "truncated or altered"),
        (other_shape, "has shape .* where config.json asks for"),
        (other_dtype, "only F32, BF16 and F16"),
        (listed_dtype, "only F32, BF16 and F16"),
        (negative, "contradicts itself"),
        (rename, "model.embedding.weight is missing"),
        (nonsense, "contradicts itself"),
    ],
)
def test_altered_headers_are_refused(copy: Path, tmp_path: Path, change, message: str) -> None:
    rewrite(copy / "model.safetensors", change)
    with pytest.raises(UserError, match=message):
        import_run(copy, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_float16_is_widened(copy: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {name: its.half() for name, its in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    content = json.loads((copy / "config.json").read_text()) | {"dtype": "float16"}  # as transformers writes it
    (copy / "config.json").write_text(json.dumps(content))
    import_run(copy, tmp_path / "back")
    embedding = load_run(tmp_path / "back").params["embedding"]
    np.testing.assert_array_equal(embedding, tensors["model.embedding.weight"].float().numpy())


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(copy: Path, tmp_path: Path, number: float) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    tensors["model.embedding.weight"][3, 1] = number
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"{copy}: embedding holds numbers that aren't finite"):
        import_run(copy, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("nested", [b"[", b'{"a":'])
def test_a_header_of_brackets_is_refused(copy: Path, tmp_path: Path, nested: bytes) -> None:
    text = nested * 100_000
    (copy / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(UserError, match="the header is broken"):
        import_run(copy, tmp_path / "back")


@pytest.mark.parametrize("name", ["../model.safetensors", "x\0y", "\ud800", ""])
def test_an_index_names_files_of_its_folder(copy: Path, tmp_path: Path, name: str) -> None:
    index = {"weight_map": {"model.embedding.weight": name}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="is not the name of a file in this folder"):
        import_run(copy, tmp_path / "back")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "newer than this version"),
        ({"format_version": None}, "must be a number"),
        ({"model_type": "llama"}, "those that can be read are dreamer, huginn_raven.*dreamer convert"),
        ({"dtype": "float64"}, "dtype must be bfloat16, float16 or float32"),
        ({"depth": 4}, "has shape"),
        ({"depth": -1}, "too small"),
        ({"depth": "3"}, "model.depth can't be '3'"),
        ({"variant": "GPT"}, "model.variant can't be 'GPT'"),
        ({"keep_shared": True}, "qkv_shared is missing"),
        ({"training_run": {"config": {"model.depht": 3}}}, "unknown setting 'model.depht'"),
        ({"training_run": {"step": -1}}, "training_run is damaged"),
        ({"training_run": {"step": 10**18}}, "training_run is damaged"),
        ({"training_run": "x"}, "training_run is damaged"),
        ({"training_run": {"meta": "x"}}, "training_run is damaged"),
        ({"training_run": {"meta": {"data": ""}}}, "training_run is damaged"),
        ({"training_run": {"config": "x"}}, "training_run is damaged"),
        ({"training_run": {"config": {"training.steps": 10**18}}}, "training.steps can't be 10"),
        ({"dtype": ["float32"]}, "dtype must be bfloat16, float16 or float32"),
        ({"depth": 10**30}, "model.depth can't be 10"),
    ],
)
def test_configurations_that_cannot_be_are_refused(copy: Path, tmp_path: Path, changes: dict, message: str) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        import_run(copy, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_the_code_of_a_folder_is_not_executed_on_import(copy: Path, tmp_path: Path) -> None:
    (copy / "modeling_dreamer.py").write_text("raise SystemExit('executed')")
    import_run(copy, tmp_path / "back")
    assert load_run(tmp_path / "back").step == 7


def test_a_folder_without_its_run_is_imported_with_defaults(copy: Path, tmp_path: Path) -> None:
    path = copy / "config.json"
    content = json.loads(path.read_text())
    del content["training_run"]
    path.write_text(json.dumps(content))
    assert read_description(copy).step == 0
    import_run(copy, tmp_path / "back")
    assert load_run(tmp_path / "back").config.model.num_experts == 7


def test_a_run_resumes_from_an_import_with_a_fresh_optimizer(exported: Path, tmp_path: Path) -> None:
    import_run(exported, tmp_path / "back")
    model = load_run(tmp_path / "back")
    fresh = create_state(model.config, make_mesh(model.config.mesh))
    saved = Checkpoints(tmp_path / "back", model.config.checkpoint, model.meta)
    try:
        state = saved.restore(fresh)
    finally:
        saved.close()
    assert int(state.step) == 7
    np.testing.assert_array_equal(state.params["head"], model.params["head"])
    for ours, theirs in zip(jax.tree.leaves(state.optimizer), jax.tree.leaves(fresh.optimizer), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_training_goes_on_after_an_import(tmp_path: Path) -> None:
    from dreamer_jax.config import load_config
    from dreamer_jax.training.loop import train

    folder = write(make_run(tmp_path / "run", depth=2, step=3), tmp_path / "folder", keep_shared=True)
    import_run(folder, tmp_path / "back")
    overrides = ["--training.steps=4", "--evaluation.every=100"]
    assert train(load_config(tmp_path / "back" / "config.yaml", overrides)) == 0
    assert load_run(tmp_path / "back").step == 4


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = open_model(make_run(tmp_path / "run", "LA", tokenizer="0" * 64))
    with pytest.raises(UserError, match="not the tokenizer the run was trained with"):
        export(other, tmp_path / "out", "float32", False, lambda folder: None)


def test_what_was_trained_with_copies_is_refused(run: Path, tmp_path: Path) -> None:
    """The folder would read each token once."""
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "config.yaml"
    path.write_text(path.read_text().replace("copies: 1", "copies: 2"))
    model = open_model(copy)
    assert model.config.data.copies == 2
    with pytest.raises(UserError, match=r"trained with data\.copies 2"):
        export(model, tmp_path / "out", "float32", False, lambda folder: None)
    assert not (tmp_path / "out").exists()


def test_no_pickle_and_no_dependency_beyond_torch(exported: Path) -> None:
    sources = [*(ROOT / "dreamer_jax" / "export").glob("*.py"), ROOT / "dreamer_jax" / "runs" / "leaves.py"]
    for path in sources:
        text = path.read_text()
        for word in ("pickle", "torch.load", "torch.save", "eval(", "exec("):
            assert word not in text.replace(".eval(", ""), (path, word)
    pytest.importorskip("torch", reason=WHY_SKIPPED)
    code = (
        "import sys; sys.modules['transformers'] = None; sys.modules['jax'] = None; sys.modules['dreamer_jax'] = None\n"
        "import torch; from modeling_dreamer import Dreamer\n"
        "print(Dreamer.load('.').generate(torch.tensor([[256, 65]]), 3).shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=exported, env={"PATH": ""}, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("torch.Size([1, 5])\n", 0), done.stderr
