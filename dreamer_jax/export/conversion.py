"""From a pretrained stack to a run of another family: what all conversions share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dreamer_jax.config.loading import Setting, build
from dreamer_jax.export.form import Description, without_run
from dreamer_jax.export.reading import write_model
from dreamer_jax.export.sources import Source


def write_converted(source: Source, model: Any, out: Path, make: Callable[[], dict[str, Any]]) -> Description:
    """Write the run directory of a converted model, ready to train and to generate.

    Args:
        source: what it was made from, whose tokenizer the run has.
        model: its section `model`.
        out: the run directory; nothing may exist there.
        make: () -> its parameters, float32.

    Raises:
        UserError: `out` exists or can't be written.
    """
    values, meta = without_run(source.folder, source.length, source.dtype, source.vocab_size)
    values |= {f"model.{field.name}": getattr(model, field.name) for field in dataclasses.fields(model)}
    loaded = build({key: Setting(value, str(source.folder)) for key, value in values.items()})
    description = Description(loaded.config, loaded.origins, source.dtype, False, 0, meta)
    write_model(description, out, lambda: (make(), {}))
    return description
