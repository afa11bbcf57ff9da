"""What near duplicates are, chains of them, plain text, and corpora of many parts."""

import random
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dreamer_jax.data import deduplication, filtering
from dreamer_jax.data.deduplication import CONFIRMED, key_ranges, resolve
from dreamer_jax.data.words import jaccard, shingle_set
from tests.data.preparing import contents, problems, run, texts, write_lines, write_mixture

WORDS = [f"{a}{b}" for a in ("ba", "ce", "di", "fo", "gu", "ha") for b in ("lar", "men", "nis", "pot", "rus", "tel")]


def sentence(rng: random.Random, n: int) -> list[str]:
    return [rng.choice(WORDS) for _ in range(n)]


def prepared(folder: Path, records: list[dict[str, str]], more: str = "") -> list[str]:
    write_lines(folder / "a.jsonl", records)
    mixture = write_mixture(folder / "m.yaml", f"sources: {{a: {{path: {folder}/a.jsonl}}}}\n{more}")
    run(mixture, folder / "out")
    return texts(folder / "out")


def test_only_pairs_over_the_threshold_are_dropped(tmp_path: Path) -> None:
    """60 pairs of 0.5 to 0.95 similarity: nearly all are candidates, and the exact similarity decides."""
    rng = random.Random(0)
    pairs = []
    for i in range(60):
        words = sentence(rng, 120)
        changed = list(words)
        for place in rng.sample(range(120), 1 + i // 5):
            changed[place] = rng.choice(WORDS)
        pairs.append((" ".join(words), " ".join(changed)))
    records = [{"question": question, "answer": "yes"} for pair in pairs for question in pair]
    kept = set(prepared(tmp_path, records))
    similar = [jaccard(shingle_set(f"{first}\nyes"), shingle_set(f"{second}\nyes")) >= 0.7 for first, second in pairs]
    assert 10 < sum(similar) < 50
    assert [f"{second}\nyes" not in kept for _, second in pairs] == similar
    assert all(f"{first}\nyes" in kept for first, _ in pairs)


def test_the_answer_counts(tmp_path: Path) -> None:
    rng = random.Random(1)
    long, other = " ".join(sentence(rng, 80)), " ".join(sentence(rng, 80))
    records = [
        {"question": "Who came first?", "answer": long},
        {"question": "When was that, then?", "answer": long},  # nearly all of the record is the same
        {"question": "Who came first?", "answer": other},  # a second answer to a question is none
    ]
    assert prepared(tmp_path, records) == [f"Who came first?\n{long}", f"Who came first?\n{other}"]


def test_a_chain_keeps_what_has_no_kept_duplicate(tmp_path: Path) -> None:
    a, b, c = 5, 6, (1 << 32) | 2

    def pairs(found: list[tuple[int, int]]) -> np.ndarray:
        return np.array([(later, earlier, 0.8) for later, earlier in found], CONFIRMED)

    def dropped(*found: list[tuple[int, int]]) -> list[tuple[int, int]]:
        paths = [tmp_path / f"{i}.npy" for i in range(len(found))]
        for path, own in zip(paths, found, strict=True):
            np.save(path, pairs(own))
        return [(int(pair["later"]), int(pair["earlier"])) for pair in resolve(paths)]

    assert dropped([(b, a)], [(c, b)]) == [(b, a)], "c is like b only, which is gone"
    assert dropped([(b, a)], [(c, a), (c, b)]) == [(b, a), (c, a)]
    assert dropped([]) == []


def test_records_of_one_key_are_compared_with_the_first_and_the_last_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = np.zeros(40, [("key", "<u8"), ("id", "<i8")])
    found["id"] = np.arange(40)[::-1]
    monkeypatch.setattr(deduplication, "_gather", lambda *_: found)
    deduplication.find_candidates([], 0, 0, np.zeros(0, np.int64), tmp_path / "pairs.npy")
    pairs = np.load(tmp_path / "pairs.npy").tolist()
    assert [earlier for later, earlier in pairs if later == 10] == list(range(10))
    assert [earlier for later, earlier in pairs if later == 39] == [*range(16), *range(23, 39)]


def test_large_groups_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = np.zeros(32 * 2000, [("key", "<u8"), ("id", "<i8")])  # records that are alike in every band
    found["key"], found["id"] = np.divmod(np.arange(len(found)), 2000)
    monkeypatch.setattr(deduplication, "_gather", lambda *_: found)
    monkeypatch.setattr(deduplication, "PENDING", 100_000)
    tracemalloc.start()
    deduplication.find_candidates([], 0, 0, np.zeros(0, np.int64), tmp_path / "pairs.npy")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.load(tmp_path / "pairs.npy")) == sum(
        len({*range(min(i, 16)), *range(max(0, i - 16), i)}) for i in range(2000)
    )
    assert most < 50e6, "2 million pairs as numbers of Python were 200 MB"


def test_key_ranges_cover_all_keys() -> None:
    for keys in (0, 1, 2_000_001, 50_000_000):
        ranges = key_ranges(keys)
        assert ranges[0][0] == 0 and ranges[-1][1] == 2**64 - 1
        assert all(last + 1 == first for (_, last), (first, _) in pairwise(ranges))


def test_plain_text_is_searched_for_questions(tmp_path: Path) -> None:
    test = problems(1, seed=8)[0]
    write_lines(tmp_path / "test.jsonl", [test])
    pages = [f"Page {i}. " + " ".join(sentence(random.Random(i), 50)) for i in range(5)]
    pages[3] += " " + test["question"]
    write_lines(tmp_path / "a.jsonl", [{"text": page} for page in pages])
    mixture = write_mixture(
        tmp_path / "m.yaml",
        f"""\
        sources: {{a: {{path: {tmp_path}/a.jsonl, prompt: "", completion: "{{text}}"}}}}
        decontaminate: {{benchmarks: {{test: {{path: {tmp_path}/test.jsonl}}}}}}
        """,
    )
    run(mixture, tmp_path / "out")
    assert texts(tmp_path / "out") == pages[:3] + pages[4:]


def test_many_parts_give_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = problems(1200)
    records += records[100:110] + [
        dict(r, question=r["question"].replace("How many", "How much")) for r in records[:20]
    ]
    write_lines(tmp_path / "a.jsonl", records)
    mixture = write_mixture(tmp_path / "m.yaml", f"sources: {{a: {{path: {tmp_path}/a.jsonl}}}}")
    run(mixture, tmp_path / "one")
    monkeypatch.setattr(filtering, "PART_RECORDS", 500)
    monkeypatch.setattr(filtering, "BATCH_RECORDS", 100)
    run(mixture, tmp_path / "many")
    assert (
        texts(tmp_path / "many")
        == texts(tmp_path / "one")
        == [f"{r['question']}\n{r['answer']}" for r in records[:1200]]
    )
    shards = [name for name in contents(tmp_path / "many") if name.endswith("array_record")]
    assert len(shards) == 3, "of 500, 500, and 200 of the last 230 records"
