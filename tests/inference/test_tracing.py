"""What a trace writes down, against the text and the counts of plain and traced generation."""

from __future__ import annotations

import functools

import pytest

from dreamer_jax.errors import UserError
from dreamer_jax.inference import Adaptive, Engine, FoldedModel, Lossless, Sampling, Speculative
from dreamer_jax.inference.batches import Generated
from dreamer_jax.inference.tracing import trace
from tests.inference.test_samplers import NEW, another, counting, model_of, wide  # noqa: F401 (a fixture of the module)

PROMPT = [1, 2, 3]


@functools.cache
def model() -> FoldedModel:
    """Weights whose guesses are sometimes right."""
    return another(model_of("ouro"), 6)


@functools.cache
def plain() -> Generated:
    (row,) = Engine(model()).generate([PROMPT], NEW)
    return row


def by_entry(found):
    """Entry -> its cells."""
    entries: dict[int, list] = {}
    for cell in found.cells:
        entries.setdefault(cell.entry, []).append(cell)
    return entries


def test_a_wave_is_written_down_cell_by_cell():
    """All guesses are right: position 3 + i enters after i steps and goes one depth further in each."""
    found = trace(Engine(counting(), Lossless(1)), [9, 9, 2], 6)
    expected = {(i + depth, 3 + i, depth + 1, 3 + i, 4 + i) for i in range(5) for depth in range(5)}
    assert {(its.step, its.position, its.depth, its.token, its.predicted) for its in found.cells} == expected
    assert len(found.cells) == 25 and found.tokens == [9, 9, *range(2, 9)]


@pytest.mark.slow_but("speculative")
@pytest.mark.parametrize("sampler", [Lossless(1), Speculative(2, 1)], ids=["lossless", "speculative"])
def test_the_last_entries_make_the_text(sampler):
    """Guesses are right and wrong: the text is that of plain decoding, every cell and step
    that was counted is there, and the last entry at each position carried its token through all depths to the next."""
    found = trace(Engine(model(), sampler), PROMPT, NEW)
    assert found.row.tokens == plain().tokens and 0 < found.row.accepted < found.row.drafted
    assert len(found.cells) == found.row.work and found.cells[-1].step + 1 == found.row.steps
    entries, text = by_entry(found), dict(enumerate(found.tokens))
    last = {cell.position: cell.entry for cell in found.cells}
    for position in range(len(PROMPT), len(PROMPT) + NEW - 1):
        cells = entries[last[position]]
        assert [cell.depth for cell in cells] == list(range(1, 4))
        assert [cell.step - cells[0].step for cell in cells] == list(range(3))
        assert cells[0].token == text[position] and cells[-1].predicted == text[position + 1]
    wrong = [cells for cells in entries.values() if text.get(cells[0].position) != cells[0].token]
    assert wrong


def test_tokens_that_stop_early_have_fewer_cells():
    """Also drawn, and in more than one block: each token's cells are the depths that the row says."""
    sampler, sampling = Adaptive("latent-diff", 0.9), Sampling(1.0, seed=1)
    found = trace(Engine(model(), sampler), PROMPT, NEW, sampling, finished=lambda row, tokens: False)
    assert [len(cells) for cells in by_entry(found).values()] == found.row.depths[1:]
    assert 1 < sum(found.row.depths[1:]) < 3 * (NEW - 1)


def test_a_mesh_is_refused():
    engine = Engine(model())
    engine.mesh = object()  # type: ignore[assignment]
    with pytest.raises(UserError, match="a trace is of one device"):
        trace(engine, PROMPT, 2)
