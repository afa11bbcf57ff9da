"""What is said of batches without data is what the data make."""

import pytest

from dreamer_jax.config import Config, load_config
from dreamer_jax.data import open_data
from dreamer_jax.training.batch import batch_entries
from tests.training.cases import tiny_config


def task(**changes) -> Config:
    data = {"data__source": "task", "data__task": "arithmetic", "data__difficulty": 2, "data__sequence_length": 64}
    return tiny_config(model__vocab_size=259, **data, **changes)


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (task(), set()),
        (task(data__copies=2), set()),
        (task(recurrence__draw="fixed", recurrence__steps=1.0), {"step_targets"}),
        (load_config("graph_laptop").config, {"read", "visible"}),
        (load_config("boolean_laptop").config, {"read"}),
    ],
    ids=["text", "copies", "steps", "graphs", "puzzles"],
)
def test_batches_hold_what_is_said_of_them(config: Config, more: set[str]) -> None:
    batch = open_data(config).batch_at(0)
    assert {name: (its.shape, its.dtype) for name, its in batch.items()} == batch_entries(config)
    assert more == batch.keys() - {"tokens", "targets", "segment_ids", "positions", "loss_mask", "answer_mask"}
