"""Mixture files: strict reading with file and line."""

from pathlib import Path

import pytest

from dreamer_jax.data.mixture import load_mixture
from dreamer_jax.errors import ConfigError

GOOD = """\
tokenizer: bytes
sources:
  gsm8k:
    path: train.jsonl
    fields:
      question: problem
    weight: 2e-1
  text.v1: {path: a.txt, prompt: "", completion: "{text}", weight: 1}
clean:
  traces: keep
decontaminate:
  benchmarks:
    math: {path: test.jsonl, text: "{problem}"}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mixture.yaml"
    path.write_text(text)
    return path


def test_a_mixture(tmp_path: Path) -> None:
    mixture = load_mixture(write(tmp_path, GOOD))
    assert list(mixture.sources) == ["gsm8k", "text.v1"]
    assert mixture.sources["gsm8k"].weight == 0.2 and mixture.sources["gsm8k"].fields == {"question": "problem"}
    assert mixture.clean.traces == "keep" and mixture.deduplicate.exact
    assert mixture.decontaminate.benchmarks["math"].text == "{problem}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    path: train", "    pth: train", r"4: unknown key 'sources.gsm8k.pth'; did you mean 'sources.gsm8k.path'"),
        ("clean:", "cleaning:", r"9: unknown key 'cleaning'; did you mean 'clean'"),
        ("  traces: keep", "  traces: strap", r"10: clean.traces: expected one of strip, keep, got 'strap'.*'strip'"),
        ("2e-1", "two", r"7: sources.gsm8k.weight: expected a number, got 'two'"),
        ("2e-1", "-1", r"7: sources.gsm8k.weight: -1 is negative"),
        ("    weight: 2e-1", "    epochs: 0", r"7: sources.gsm8k.epochs: 0 has no meaning; leave the source out"),
        ("weight: 1}", "tokens: 0.0}", r"8: sources.text.v1.tokens: 0 has no meaning"),
        ("weight: 1}", "weight: 1, records: -3}", r"8: sources.text.v1.records: -3 is negative; 0 reads all"),
        ("    weight: 2e-1", "", r"3: sources.gsm8k: has no weight while sources.text.v1 has one"),
        ("weight: 1}", "weight: 1, epochs: 2}", r"8: sources.text.v1.epochs: the source also has weight"),
        ("  text.v1:", "  gsm8k:", r"8: 'sources.gsm8k' is set twice, first on line 3"),
        ("  text.v1:", "  a/b:", r"8: sources.a/b: a name has letters"),
        ("path: a.txt, ", "", r"8: sources.text.v1.path: is empty"),
        ("    fields:\n      question: problem", "    fields: problem", r"5: sources.gsm8k.fields: expected names"),
        ("tokenizer: bytes", "tokenizer: [bytes]", r"1: tokenizer: expected one value, got a list"),
        ("clean:\n", "deduplicate: {threshold: 1.5}\nclean:\n", r"9: deduplicate.threshold: 1.5 is not above 0"),
    ],
)
def test_mistakes(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=rf"mixture\.yaml:{message}"):
        load_mixture(write(tmp_path, GOOD.replace(old, new, 1)))


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        load_mixture(write(tmp_path, ""))
    with pytest.raises(ConfigError, match="name at least one source"):
        load_mixture(write(tmp_path, "tokenizer: bytes\n"))
