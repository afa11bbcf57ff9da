"""The linear map of selected experts as a CPU decodes it, against NumPy: one row, few rows, and many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_moe.in_place import linear
from pallas_kernels.dispatch.in_place import by_expert
from pallas_kernels.weights import OutputRows

RNG = np.random.default_rng(0)
COUNT = 4
MATRICES = RNG.normal(size=(COUNT, 6, 32)).astype(np.float32)  # [G, b, a]
CHOICES = {
    "one": [2],
    "one without an expert": [COUNT],
    "few": [3, 0, 0, COUNT, 1],
    "many, evenly": np.arange(64) % COUNT,
    "many, some without an expert": np.arange(70) % (COUNT + 1),
    "many, every block used": np.repeat([COUNT, 0, 1, 2, 3], [3, 1, 1, 17, 17]),  # no padding slot is in an unused one
    "many for one expert": np.full(75, 1),  # 28 in its share, and the last of its blocks is not full
}


def expected(x: np.ndarray, index: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    rows = [matrices[g] @ row if g < COUNT else np.zeros(6) for row, g in zip(x, index, strict=True)]
    return np.stack(rows)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_each_row_meets_the_matrix_of_its_expert(choice: str, form: str):
    index = np.asarray(CHOICES[choice], np.int32)
    x = RNG.normal(size=(len(index), 32)).astype(np.float32)
    weight = OutputRows.of(jnp.asarray(MATRICES, "bfloat16" if form == "bfloat16" else "float32"))
    kept = np.asarray(jnp.asarray(MATRICES, weight.matrices.dtype if form == "float32" else "bfloat16"), np.float32)
    if form == "int8":
        weight = OutputRows.in_int8(jnp.asarray(MATRICES))
        kept = np.asarray(weight.as_array(jnp.float32))
    found = jax.jit(linear)(jnp.asarray(x), jnp.asarray(index), weight)
    np.testing.assert_allclose(found, expected(x, index, kept), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choices", [[[1]], [[COUNT]], [[2, 0]], [[3], [COUNT], [3]]])
def test_an_expert_is_asked_for_its_own_rows(choices: list[list[int]]):
    """Also where a single row has a single choice, which has a loop of its own; without an expert zero."""
    x = RNG.normal(size=(len(choices), 32)).astype(np.float32)
    matrices = jnp.asarray(MATRICES)
    found = jax.jit(lambda x, i: by_expert(x, i, COUNT, COUNT, 6, lambda rows, e: jnp.tanh(rows @ matrices[e].T)))(
        jnp.asarray(x), jnp.asarray(choices, jnp.int32)
    )
    wanted = [
        [np.tanh(MATRICES[e] @ row) if e < COUNT else np.zeros(6) for e in its]
        for row, its in zip(x, choices, strict=True)
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_every_row_has_room_whatever_is_chosen():
    """Seven of twelve experts with one row more than their shares hold: as many blocks as there can be."""
    index = np.append(np.repeat(np.arange(7), 14), np.full(10, 11)).astype(np.int32)
    x, matrices = (RNG.normal(size=shape).astype(np.float32) for shape in ((108, 8), (12, 5, 8)))
    found = jax.jit(linear)(jnp.asarray(x), jnp.asarray(index), OutputRows.of(jnp.asarray(matrices)))
    np.testing.assert_allclose(found, np.einsum("ta,tba->tb", x, matrices[index]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_one_expert_for_all_rows(rows: int):
    x = RNG.normal(size=(rows, 32)).astype(np.float32)
    found = jax.jit(linear)(jnp.asarray(x), jnp.int32(3), OutputRows.of(jnp.asarray(MATRICES)))
    np.testing.assert_allclose(found, x @ MATRICES[3].T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", [[0] * 9, [0, 1, 0, 0, 1, 0, 0, 0, 0]])
def test_a_single_expert_has_room_for_all_rows(index: list[int]):
    """As those of a model of one depth are, where 1 stands for none."""
    x, matrix = (RNG.normal(size=shape).astype(np.float32) for shape in ((9, 8), (1, 5, 8)))
    found = jax.jit(linear)(jnp.asarray(x), jnp.asarray(index, jnp.int32), OutputRows.of(jnp.asarray(matrix)))
    wanted = x @ matrix[0].T * (np.asarray(index) == 0)[:, None]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
