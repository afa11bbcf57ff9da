"""The data of a trained run, for whoever measures its model by them."""

from __future__ import annotations

from dreamer_jax.config import Config
from dreamer_jax.data import Data, open_data
from dreamer_jax.errors import UserError
from dreamer_jax.runs.checkpoints import warn
from dreamer_jax.runs.models import TrainedModel


def data_of(trained: TrainedModel, config: Config | None = None) -> Data:
    """The data of a run, read with the tokenizer that its model was trained with. A warning says so where they were
    others in training. What was converted from another's model has no data that it was trained on.

    Args:
        trained: the model.
        config: the run's with another section `evaluation`, or with other data.
    Raises:
        UserError: as of `open_data`, or the tokenizer is another one now.
    """
    config = config or trained.config
    data = open_data(config)
    if trained.meta["tokenizer"] not in ("", data.tokenizer.fingerprint):
        raise UserError(
            f"data.tokenizer: {config.data.tokenizer} is not the tokenizer the run was trained with; bring the old "
            "file back, or write where it is now into the run's config.yaml"
        )
    if config.data == trained.config.data and trained.meta["data"] not in ("", data.fingerprint):
        warn(f"the data of {config.run.dir} have changed since it was trained; what is held out now may have been seen")
    return data
