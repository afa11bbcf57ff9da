"""tokenizer.json: training, reading, fingerprints, and what is refused."""

import json
import sys
from pathlib import Path

import pytest

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.sections import Config, DataConfig
from dreamer_jax.data import load_tokenizer, open_data
from dreamer_jax.errors import UserError
from tests.data.preparing import problems, run, write_lines, write_mixture

pytest.importorskip("tokenizers")
from dreamer_jax.data.json_tokenizer import train_tokenizer
from dreamer_jax.data.mixture import load_mixture

TEXTS = ["hello world! 12345", "", " \n\t x", "na\u00efve \u4f60\u597d \U0001f600", "<|bos|> and <|eos|>", "1 + 2 = 3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    write_lines(folder / "a.jsonl", [*problems(400), b"broken\n", {"question": "q", "answer": "<think>qqqqqq"}])
    mixture = write_mixture(folder / "m.yaml", f"sources: {{a: {{path: {folder}/a.jsonl}}}}")
    train_tokenizer(load_mixture(mixture), 600, folder / "tokenizer.json")
    return folder / "tokenizer.json"


def test_round_trip_and_special_tokens(trained: Path) -> None:
    tokenizer = load_tokenizer(str(trained))
    assert tokenizer.vocab_size == 600
    special = {tokenizer.bos, tokenizer.eos, tokenizer.pad}
    assert len(special) == 3 and max(special) < 600
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not special & set(ids), "text never becomes a special token"
    assert tokenizer.decode([tokenizer.bos, *tokenizer.encode("a"), tokenizer.eos, 10**6]) == "a"
    assert tokenizer.decode(tokenizer.encode("a\ud800b\udcff")) == "a\ufffdb\ufffd", "what a terminal or JSON may send"
    text = problems(1)[0]["question"]
    assert len(tokenizer.encode(text)) < 0.5 * len(text), "it has learned the words"
    assert all(len(tokenizer.decode([i])) <= 3 for i in tokenizer.encode("1234567")), "numbers in groups of three"


def test_training_again_gives_the_same_file(trained: Path, tmp_path: Path) -> None:
    mixture = load_mixture(trained.parent / "m.yaml")
    again = train_tokenizer(mixture, 600, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == trained.read_bytes()
    assert again.fingerprint == load_tokenizer(str(trained)).fingerprint
    assert train_tokenizer(mixture, 599, tmp_path / "small.json").fingerprint != again.fingerprint
    for size in (259, 10**10, 10**23):
        with pytest.raises(UserError, match=f"--size {size}: must be from 260"):
            train_tokenizer(mixture, size, tmp_path / "other.json")


def test_what_a_tokenizer_does_not_learn_from_is_said(tmp_path: Path) -> None:
    """Records that are broken or too long, one word of which could keep the trainer for minutes."""
    texts = ["abab abab", "<think>", "x" * 50]
    write_lines(tmp_path / "a.jsonl", [{"question": "q", "answer": text} for text in texts])
    clean = "clean: {max_characters: 40, traces: strip}"
    mixture = write_mixture(tmp_path / "m.yaml", f"{clean}\nsources: {{a: {{path: {tmp_path}/a.jsonl}}}}")
    said: list[str] = []
    trained = train_tokenizer(load_mixture(mixture), 400, tmp_path / "t.json", said.append)
    assert said == [
        f"2 of 3 records were left out; the first: {tmp_path}/a.jsonl line 2 breaks off within its trace or solution",
        "fewer than --size 400: the texts have no more pairs to merge",
    ]
    assert len(trained.encode("xxxx")) == 4 and len(trained.encode("abab")) == 1


def test_all_sources_are_looked_for_before_the_first_is_read(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl.gz").write_bytes(b"not read")
    sources = f"a: {{path: {tmp_path}/broken.jsonl.gz}}, b: {{path: {tmp_path}/gone.jsonl}}"
    mixture = load_mixture(write_mixture(tmp_path / "m.yaml", f"sources: {{{sources}}}"))
    with pytest.raises(UserError, match=r"sources\.b\.path: no file .*gone\.jsonl"):
        train_tokenizer(mixture, 300, tmp_path / "t.json")


def test_missing_special_tokens_get_ids_of_their_own(trained: Path, tmp_path: Path) -> None:
    content = json.loads(trained.read_text())
    content["added_tokens"] = []
    for name in ("<|bos|>", "<|eos|>", "<|pad|>"):
        del content["model"]["vocab"][name]
    content["model"]["vocab"] = {token: i for i, token in enumerate(content["model"]["vocab"])}
    (tmp_path / "bare.json").write_text(json.dumps(content))
    bare = load_tokenizer(str(tmp_path / "bare.json"))
    assert (bare.bos, bare.eos, bare.pad) == (597, 598, 598) and bare.vocab_size == 599, "eos pads"
    assert bare.decode([bare.bos, *bare.encode("1 + 2"), bare.eos]) == "1 + 2"
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "cut.json").write_text(json.dumps(content))
    cut = load_tokenizer(str(tmp_path / "cut.json"))
    assert cut.decode(cut.encode("a long text, uncut")) == "a long text, uncut" and cut.fingerprint == bare.fingerprint


def test_the_names_of_published_tokenizers(trained: Path, tmp_path: Path) -> None:
    """Huginn's; a model of theirs has no rows for further tokens."""
    text = trained.read_text()
    for ours, theirs in (("<|bos|>", "<|begin_text|>"), ("<|eos|>", "<|end_text|>")):
        text = text.replace(ours, theirs)
    (tmp_path / "huginn.json").write_text(text)
    own, its = load_tokenizer(str(trained)), load_tokenizer(str(tmp_path / "huginn.json"))
    assert (its.bos, its.eos, its.pad, its.vocab_size) == (own.bos, own.eos, own.pad, own.vocab_size)


def test_a_token_of_another_name_is_the_one_that_lies_beside(trained: Path, tmp_path: Path) -> None:
    """As of published models whose begin and end are one token, or an end of a turn. Well-known names come first, and
    eos pads as it would without the other file."""
    text = trained.read_text().replace("<|pad|>", "<|im_end|>")
    (tmp_path / "tokenizer.json").write_text(
        text.replace("<|bos|>", "<|im_start|>").replace("<|eos|>", "<|endoftext|>")
    )
    found = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (found.bos, found.vocab_size) == (600, 601)
    for named, bos in (
        ("<|endoftext|>", 1),
        ({"content": "<|im_start|>", "lstrip": False}, 0),
        (None, 600),
        ("x|", 600),
    ):
        beside = {"bos_token": named, "eos_token": "<|im_start|>", "pad_token": "<|im_end|>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
        its = load_tokenizer(str(tmp_path / "tokenizer.json"))
        assert (its.bos, its.eos, its.pad, its.vocab_size) == (bos, 1, 1, 600 + (bos == 600))
        assert (its.fingerprint == found.fingerprint) == (bos == 600)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: isn't JSON that can be read; mend it or remove it"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_prepared_data_refuse_another_tokenizer(trained: Path, tmp_path: Path) -> None:
    mixture = trained.parent / "m.yaml"
    text = mixture.read_text()
    own = write_mixture(tmp_path / "own.yaml", f"tokenizer: {trained}\n{text}")
    report = run(own, tmp_path / "data")
    assert report["total"]["kept"] == 400

    def config(tokenizer: str) -> Config:
        data = DataConfig(source="prepared", path=str(tmp_path / "data"), tokenizer=tokenizer, heldout_records=5)
        return Config(model=DreamerConfig(vocab_size=600), data=data)

    data = open_data(config(str(trained)))
    assert data.heldout_records(1)[0].prompt.startswith("At the ")
    with pytest.raises(
        UserError, match=r"prepared with another tokenizer \(.*tokenizer.json, 600 ids.*name that tokenizer"
    ):
        open_data(config("bytes"))
    with pytest.raises(UserError, match="of other settings or another tokenizer"):
        run(mixture, tmp_path / "data")


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "empty.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    with pytest.raises(UserError, match=r"empty\.json: holds no tokens"):
        load_tokenizer(str(tmp_path / "empty.json"))
    for content in ("{", "{}", '{"model": 3}'):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UserError, match=r"not a Hugging Face tokenizer\.json"):
            load_tokenizer(str(tmp_path / "bad.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs the package tokenizers; .*\[data\]"):
        load_tokenizer(str(tmp_path / "bad.json"))
