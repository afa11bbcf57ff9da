"""From a pretrained stack to latent recurrent depth, "retrofitting" (McLeish et al., 2025).

Some of the source's layers become the prelude, some the core, some the coda; the rest is dropped. New is the adapter,
core input = A [s ; e]. At A = [0 | I] the state is not looked at, so that after any number of recurrences

    coda(core(e)) = the chosen layers, one after the other

and training starts from a model that computes what its layers did. No norm stands between core and coda.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.config.sections import TrainingConfig
from dreamer_jax.errors import UserError
from dreamer_jax.export.sources import Source

Adapter = Literal["identity", "random"]
STATE_STD = (2 / (5 * 5280)) ** 0.5
"""Of the initial state of published retrofitted models: that of Huginn's embedding, whatever their own width."""
CURRICULUM = 0.25
"""Share of training over which the published TinyLlama's recurrences grow."""


class Split(NamedTuple):
    """Numbers of the source's layers, in the order in which they are applied."""

    prelude: tuple[int, ...]
    core: tuple[int, ...]
    coda: tuple[int, ...]


def split_of(source: Source, prelude: int | tuple[int, ...], core: Any, coda: Any, influence: Any = None) -> Split:
    """The layers that are asked for.

    Args:
        source: the pretrained stack.
        prelude, core, coda: numbers of layers, or how many. So many are the first ones, the last ones, and those just
            before the coda, as published: 4, 8 and 4 of TinyLlama's 22 layers are 0-3, 10-17 and 18-21.
        influence: [layers], of every layer of the source; then so many are those of most influence, in their order.

    Raises:
        UserError: there are no such layers.
    """
    asked: dict[str, Any] = {"--prelude": prelude, "--core": core, "--coda": coda}
    if not core:
        raise UserError("--core 0: what is applied again and again needs a layer at least")
    if any(isinstance(its, tuple) for its in asked.values()):
        asked = {option: its or () for option, its in asked.items()}  # none of them is a list too
    listed = [isinstance(its, tuple) for its in asked.values()]
    last = source.layers - 1
    if all(listed):
        for option, layers in asked.items():
            for l in layers:
                if l > last:
                    raise UserError(f"{option} names layer {l}, but the layers of {source.folder} are 0 to {last}")
        return Split(*asked.values())
    if any(listed):
        raise UserError("--prelude, --core and --coda are all lists of layers (a single one is 3-3), or all numbers")
    counts = list(asked.values())
    if sum(counts) > source.layers:
        raise UserError(f"--prelude, --core and --coda are {sum(counts)} layers; {source.folder} has {source.layers}")
    if influence is None:
        dropped = source.layers - sum(counts)
        kept = [*range(counts[0]), *range(counts[0] + dropped, source.layers)]
    else:
        kept = sorted(np.argsort(-np.asarray(influence), kind="stable")[: sum(counts)].tolist())
    ends = counts[0], counts[0] + counts[1]
    return Split(tuple(kept[: ends[0]]), tuple(kept[ends[0] : ends[1]]), tuple(kept[ends[1] :]))


def config_of(source: Source, split: Split) -> HuginnConfig:
    """The section `model` of a conversion, with a curriculum for the run's own number of steps."""
    return HuginnConfig(
        prelude_layers=len(split.prelude),
        core_layers=len(split.core),
        coda_layers=len(split.coda),
        coda_norm=False,
        embedding_scale=1.0,
        state_std=STATE_STD,
        curriculum_steps=int(CURRICULUM * TrainingConfig().steps),
        dtype=source.dtype,  # type: ignore[arg-type]
        **source.settings(),
    )


def params_of(source: Source, split: Split, adapter: Adapter = "identity", seed: int = 0) -> dict[str, Any]:
    """Parameters of the retrofitted model, float32.

    Args:
        source: the pretrained stack.
        split: which of its layers.
        adapter: [0 | I]; or random, uniform within 1 / sqrt(2h), as published Llamas start.
        seed: of the random one.
    """
    h = source.hidden_size
    if adapter == "identity":
        matrix = np.concatenate([np.zeros((h, h), np.float32), np.eye(h, dtype=np.float32)])
    else:
        bound = (2 * h) ** -0.5
        matrix = np.random.default_rng(seed).uniform(-bound, bound, (2 * h, h)).astype(np.float32)
    stacks = {part: {str(i): source.layer(l) for i, l in enumerate(its)} for part, its in split._asdict().items()}
    return source.around() | stacks | {"adapter": matrix}
