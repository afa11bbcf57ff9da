"""Rows hold each document once, are well filled, and say where everything is."""

import threading
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamer_jax.data.packing import EpochRows, assemble, permutation, plan_rows
from dreamer_jax.data.records import Document, Documents, TokenStore

BOS, EOS, PAD = 256, 257, 258


def document(prompt: list[int], completion: list[int]) -> Document:
    return Document(np.array([BOS, *prompt, *completion, EOS], np.int32), len(prompt))


@given(st.lists(st.integers(1, 20), max_size=80))
def test_plan_holds_each_document_once_and_never_overfills(lengths: list[int]) -> None:
    plan = plan_rows(np.array(lengths, np.int64), 20)
    members = [int(i) for row in range(len(plan)) for i in plan[row]]
    assert sorted(members) == list(range(len(lengths)))
    for row in range(len(plan)):
        assert 0 < sum(lengths[i] for i in plan[row]) <= 20
        assert list(plan[row]) == sorted(plan[row])


def test_best_fit_by_hand() -> None:
    # Rows of 10: 6 opens row 0, 8 opens row 1; 2 goes to row 1 (tighter), 3 to row 0, 4 opens row 2, 1 fills row 0.
    plan = plan_rows(np.array([6, 8, 2, 3, 4, 1]), 10)
    assert [plan[row].tolist() for row in range(len(plan))] == [[0, 3, 5], [1, 2], [4]]


def test_open_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dreamer_jax.data.packing.OPEN_ROWS", 2)
    # The third row closes the fullest of the open ones (row 1, 1 place left), so the 1 goes to row 2.
    plan = plan_rows(np.array([5, 9, 8, 1]), 10)
    assert [plan[row].tolist() for row in range(len(plan))] == [[0], [1], [2, 3]]


def test_fill_of_a_realistic_set() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(4.9, 0.45, 7000), 20, 500).astype(np.int64)
    assert lengths.sum() / (len(plan_rows(lengths, 512)) * 512) > 0.93


def test_permutation_is_pinned() -> None:
    """The order of the documents must not change with NumPy's version or ours."""
    assert permutation(8, 0, 0).tolist() == PINNED
    assert permutation(8, 0, 1).tolist() != PINNED
    assert sorted(permutation(1000, 3).tolist()) == list(range(1000))


PINNED = [3, 2, 1, 6, 0, 7, 4, 5]


def test_each_document_once_an_epoch_and_epochs_differ() -> None:
    lengths = np.random.default_rng(1).integers(1, 30, 200)
    rows, start, epochs = EpochRows(lengths, 30, seed=5), 0, []
    for epoch in range(4):
        stop = start + rows.rows_in_epoch(epoch)
        epochs.append([int(i) for row in range(start, stop) for i in rows.row(row)])
        assert sorted(epochs[-1]) == list(range(200))
        start = stop
    assert len({tuple(order) for order in epochs}) == 4


def test_rows_do_not_depend_on_what_was_asked_before() -> None:
    lengths = np.random.default_rng(2).integers(1, 30, 50)
    straight = EpochRows(lengths, 30, seed=0)
    expected = [straight.row(r).tolist() for r in range(300)]
    jumping = EpochRows(lengths, 30, seed=0)
    for r in np.random.default_rng(3).permutation(300):
        assert jumping.row(int(r)).tolist() == expected[r]
    assert [EpochRows(lengths, 30, seed=1).row(r).tolist() for r in range(300)] != expected


def test_rows_from_many_threads() -> None:
    lengths = np.random.default_rng(2).integers(1, 30, 50)
    rows, results = EpochRows(lengths, 30, seed=0), {}

    def ask(thread: int) -> None:
        results[thread] = [rows.row(r).tolist() for r in range(thread * 50, thread * 50 + 100)]

    threads = [threading.Thread(target=ask, args=(t,)) for t in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = EpochRows(lengths, 30, seed=0)
    for thread in range(6):
        assert results[thread] == [alone.row(r).tolist() for r in range(thread * 50, thread * 50 + 100)]


def test_assemble_by_hand() -> None:
    rows = [[document([1, 2], [3]), document([4], [5, 6])], [document([], [7])]]
    batch = assemble(rows, 10, PAD, answer_only=False)
    assert batch["tokens"][0].tolist() == [BOS, 1, 2, 3, BOS, 4, 5, 6, PAD, PAD]
    assert batch["targets"][0].tolist() == [1, 2, 3, EOS, 4, 5, 6, EOS, PAD, PAD]
    assert batch["segment_ids"][0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 0, 0]
    assert batch["positions"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 0]
    assert batch["answer_mask"][0].astype(int).tolist() == [0, 0, 1, 1, 0, 1, 1, 1, 0, 0]
    assert batch["loss_mask"][0].astype(int).tolist() == [1] * 8 + [0, 0]
    assert batch["answer_mask"][1].astype(int).tolist() == [1, 1] + [0] * 8
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        **dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), ((2, 10), np.int32)),
        **dict.fromkeys(("loss_mask", "answer_mask"), ((2, 10), np.bool_)),
    }
    answers = assemble(rows, 10, PAD, answer_only=True)
    assert (answers["loss_mask"] == answers["answer_mask"]).all()
    assert (answers["answer_mask"] == batch["answer_mask"]).all()
    with pytest.raises(ValueError, match="row 0 holds more than 7"):
        assemble(rows, 7, PAD, answer_only=False)


def test_documents_split_or_leave_out_long_records() -> None:
    store = TokenStore()
    store.add([BOS, *range(11), EOS], 0)  # 12 inputs
    store.add([BOS, 50, EOS], 0)
    store.add([BOS, *range(100, 107), EOS], 0)  # 8 inputs: two pieces of 5 and 3
    assert isinstance(store.tokens, array)
    records = np.array([2, 1, 0])
    pieces = Documents(store, records, 5, split=True)
    texts = [pieces[i].tokens.tolist() for i in range(len(pieces))]
    assert texts == [
        [BOS, 100, 101, 102, 103, 104],
        [104, 105, 106, EOS],
        [BOS, 50, EOS],
        [BOS, 0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8, 9],
        [9, 10, EOS],
    ]
    assert pieces.lengths.tolist() == [len(text) - 1 for text in texts]
    assert pieces.too_long == 0
    whole = Documents(store, records, 8, split=False)
    assert [whole[i].tokens[1] for i in range(len(whole))] == [100, 50]
    assert whole.too_long == 1
    assert len(Documents(TokenStore(), np.zeros(0, np.int64), 8, split=True)) == 0
