"""Who can see whom: later tokens, other documents, other rows and padding must not change a token's logits."""

import numpy as np
import pytest

from tests.families.cases import (
    POSITIONS,
    REAL,
    SEGMENT_IDS,
    jitted_forward,
    random_tokens,
    random_weights,
    relative_error,
    small_config,
)

TOLERANCE = 1e-5  # relative to the largest logit: only rounding may differ


@pytest.fixture(scope="module", params=["LA+DA", "DR+DA"])
def logits_of(request):
    """(tokens, segment_ids, positions) -> logits [B, S, V] of a random model."""
    config = small_config(request.param)
    params, bias = random_weights(config)

    def run(tokens, segment_ids=SEGMENT_IDS, positions=POSITIONS):
        return np.asarray(jitted_forward(config)(params, bias, tokens, segment_ids, positions, config.depth).logits)

    return run


@pytest.fixture
def tokens():
    """[B, S] int32."""
    return random_tokens(small_config())


def changed(after, before):
    """[B, S] bool: which tokens' logits differ by more than rounding."""
    return np.abs(after - before).max(-1) > TOLERANCE * np.abs(before).max()


def test_a_token_changes_only_its_own_future(logits_of, tokens):
    """For every real token j: nothing before j, no other document, no other row; and j itself does change."""
    before = logits_of(tokens)
    for row, j in np.argwhere(REAL):
        edited = tokens.copy()
        edited[row, j] = (tokens[row, j] + 1) % small_config().vocab_size
        difference = changed(logits_of(edited), before)
        may_change = np.zeros_like(REAL)
        may_change[row, j:] = SEGMENT_IDS[row, j:] == SEGMENT_IDS[row, j]
        assert not np.any(difference & ~may_change), (row, j, np.argwhere(difference & ~may_change))
        assert np.all(difference[may_change]), (row, j)  # every later token of the document sees the change


def test_padding_changes_nothing(logits_of, tokens):
    """Other tokens in the padding leave every real token's logits as they were."""
    edited = np.where(REAL, tokens, (tokens + 5) % small_config().vocab_size)
    assert np.any(edited != tokens)
    assert not np.any(changed(logits_of(edited), logits_of(tokens)) & REAL)


def test_permuting_the_batch_permutes_the_outputs(logits_of, tokens):
    """Rows don't meet, not even through the experts' buffers."""
    order = np.array([2, 0, 1])
    permuted = logits_of(tokens[order], SEGMENT_IDS[order], POSITIONS[order])
    assert relative_error(permuted[REAL[order]], logits_of(tokens)[order][REAL[order]]) < TOLERANCE


def test_packing_is_the_same_as_a_row_of_its_own(logits_of, tokens):
    """Every packed document alone at the start of an otherwise padded row gives the same logits."""
    packed = logits_of(tokens)
    for row, document in {(row, int(SEGMENT_IDS[row, j])) for row, j in np.argwhere(REAL)}:
        where = np.flatnonzero(SEGMENT_IDS[row] == document)
        alone, segments = np.zeros_like(tokens), np.zeros_like(SEGMENT_IDS)
        alone[0, : len(where)], segments[0, : len(where)] = tokens[row, where], 1
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        logits = logits_of(alone, segments, positions)[0, : len(where)]
        assert relative_error(logits, packed[row, where]) < TOLERANCE, (row, document)


def test_position_inside_the_document_counts(logits_of, tokens):
    """RoPE is relative: shifting a document's positions changes nothing, stretching them does."""
    before = logits_of(tokens)
    shifted = logits_of(tokens, positions=POSITIONS + 7)
    stretched = logits_of(tokens, positions=POSITIONS * 2)
    assert not np.any(changed(shifted, before) & REAL)
    assert np.any(changed(stretched, before) & REAL)
