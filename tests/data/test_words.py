"""Word hashes, n-grams, MinHash keys and formula keys against plain definitions."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dreamer_jax.data.words import (
    BANDS,
    Grams,
    WordHashes,
    band_keys,
    formula_key,
    grams,
    jaccard,
    minhash,
    shingle_set,
    words,
)


def test_words_ignore_case_punctuation_and_spacing() -> None:
    assert words("Let $x_1=3$;  don't\nSTOP 4.5") == ["let", "x", "1", "3", "don", "t", "stop", "4", "5"]


def test_grams_of_many_texts_are_those_of_each() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 2**60, n).tolist() for n in (0, 1, 5, 13, 2, 0, 40)]
    many = Grams(texts)
    for length in (1, 2, 5, 13):
        values, owner = many.of(length)
        expected = [grams(np.array(text, np.uint64), length) for text in texts]
        assert values.tolist() == np.concatenate(expected).tolist()
        assert owner.tolist() == [i for i, found in enumerate(expected) for _ in found]
    with pytest.raises(ValueError, match="ascend"):
        many.of(3)
    a, b, c = (int(w) for w in texts[2][:3])
    assert len({int(grams(np.array(x, np.uint64), 3)[0]) for x in ([a, b, c], [c, b, a], [b, a, c], [a, c, b])}) == 4


def test_minhash_estimates_the_similarity() -> None:
    rng = np.random.default_rng(1)
    for shared, own in ((50, 50), (90, 10), (10, 190)):
        common = rng.integers(0, 2**63, shared).astype(np.uint64)
        sets = [np.concatenate([common, rng.integers(0, 2**63, own).astype(np.uint64)]) for _ in range(2)]
        estimates = [np.mean(minhash(sets[0]) == minhash(sets[1]))]
        expected = shared / (shared + 2 * own)
        assert abs(np.mean(estimates) - expected) < 4 * np.sqrt(expected * (1 - expected) / 128) + 0.01


TEXT = (
    "Tom has three boxes of pencils and each box holds 12 pencils. He gives $x - 4$ pencils to his sister and then "
    "buys 2 more boxes at the store-front near his house. How many pencils does he have now?"
)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("sister", "brother", True),
        ("store-front", "store front", True),
        ("pencils and", "pencils, and", True),
        ("a", "the", True),
        ("x - 4", "x + 4", False),
        ("x - 4", "y - 4", False),
        ("12", "13", False),
        ("three", "four", False),
        ("three", "Three", True),
        ("three", "THREE", True),
        ("three boxes", "three-sided boxes", True),
        ("three boxes", "four-sided boxes", False),
        ("his sister", "his sister's", True),
        ("$x - 4$", "$x-axis - 4$", False),
        ("- 4", "- f'(4)", False),
        ("$x - 4$", "$(x - 4)$", False),
        ("$x - 4$", "$\\sin x - 4$", False),
    ],
)
def test_formula_keys(old: str, new: str, same: bool) -> None:
    assert (formula_key(TEXT) == formula_key(TEXT.replace(old, new, 1))) == same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("x² + 5 = 30", "x³ + 5 = 30", False),
        ("A ∪ B has 5", "A ∩ B has 5", False),
        ("f′(x) = 2", "f″(x) = 2", False),
        ("½ of 8", "¼ of 8", False),
        ("2α + 1", "2β + 1", False),
        ("x ∈ ℝ", "x ∈ ℤ", False),
        ("⌊x⌋ = 2", "⌈x⌉ = 2", False),
        ("the mean x\u0304", "the mean x\u0302", False),
        ("a @ b", "a # b", False),
        ("🍎 + 1", "🍐 + 1", False),
        ("٣ + 1", "٤ + 1", False),
        ("α² + 1 and 0≤θ≤5", "β² + 1 and 0≤θ≤5", False),
        ("α² + 1 and 0≤θ≤5", "α² + 1 and 0≤φ≤5", False),
        ("ℵ + 1", "ℶ + 1", False),
        ("f(–2) = 5", "f(2) = 5", False),
        ("pages 3–5", "pages 3—5", True),
        ("5 Äpfel für Jörg", "5 Größen auf Öland", True),
        ("He said “5”… – then 6", 'He said "5"... then 6', True),
        ("у Пети 5 яблок", "у Васи 5 груш", True),
        ("小明有 5 个苹果。", "小红有 5 个梨！", True),
        ("5 σπίτια και", "5 δέντρα και", True),
        ("राम के पास 5 सेब हैं", "श्याम के पास 5 फल हैं", True),
        ("It costs $5", "It costs 5", True),
    ],
)
def test_formula_keys_beyond_ascii(one: str, other: str, same: bool) -> None:
    assert (formula_key(one) == formula_key(other)) == same


def test_near_duplicates_share_a_key_and_others_do_not() -> None:
    hashes = WordHashes()
    changed = TEXT.replace("sister", "brother")
    other = "An entirely different question about the area of a triangle with sides 3, 4 and 5 in the plane."
    texts = [TEXT, changed, other, "", "one", TEXT.replace("x - 4", "x + 4")]
    keys = band_keys([hashes.of(text) for text in texts], [formula_key(text) for text in texts])
    assert keys.shape == (6, BANDS)
    shared = [len(set(keys[0].tolist()) & set(row.tolist())) for row in keys]
    assert shared[0] == BANDS and shared[1] > 0 and shared[2:] == [0, 0, 0, 0]
    same_formula = band_keys([hashes.of(TEXT), hashes.of(other)], [7, 7])
    assert not set(same_formula[0].tolist()) & set(same_formula[1].tolist()), "the words count, too"
    assert len({key for row in keys for key in row.tolist()}) > 4 * BANDS, "bands don't share keys with each other"


def test_jaccard() -> None:
    def similarity(a: str, b: str) -> float:
        return jaccard(shingle_set(a), shingle_set(b))

    assert similarity("a b c d", "A, b c d!") == 1
    assert similarity("a b c d", "a b c e") == pytest.approx(1 / 3)
    assert similarity("a", "a") == 1 and similarity("a", "b") == 0


def test_hashes_are_the_same_in_every_process() -> None:
    code = (
        "from dreamer_jax.data.words import *; h = WordHashes(); "
        "print(h.of('one two'), formula_key('x - 4'), band_keys([h.of('a b c d')], [1]).sum())"
    )
    root = Path(__file__).resolve().parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and "[" in outputs.pop()


def test_word_hashes_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WordHashes, "LIMIT", 10)
    hashes = WordHashes()
    first = hashes.of("seven eight")
    for i in range(50):
        hashes.of(f"word{i}")
    assert len(hashes) <= 10 and hashes.of("seven eight") == first
