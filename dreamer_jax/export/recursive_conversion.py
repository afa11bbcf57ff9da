"""From a pretrained stack of L layers to a recursive transformer of K = L / B shared ones (Bae et al., 2024).

Shared layer k starts as one of the source's layers, or as the mean of those that it stands for. With a rank, every
application gets by singular value decomposition what is nearest to the difference of its own source layer:

    W_l - W'_k = U S V^T,  down = U_r,  up = S_r V_r^T           in x W'_k + x down up, scale 1

and keeps its own norms. At full rank the model is the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from dreamer_jax.config.models.recursive import RecursiveConfig
from dreamer_jax.errors import UserError
from dreamer_jax.export.sources import Source
from dreamer_jax.recurrence.tape import merged

Init = Literal["stepwise", "average", "lower", "upper"]
FULL = "full"


class Tied(NamedTuple):
    """A shared layer and what it stands for.

    Attributes:
        chosen: the source's layer that it starts as; None: the mean.
        applied: the source's layers in whose places it is applied, in order.
    """

    chosen: int | None
    applied: tuple[int, ...]

    def __str__(self) -> str:
        places = ", ".join(map(str, self.applied))
        return f"{'the mean of them' if self.chosen is None else f'layer {self.chosen}'}, in place of {places}"


def config_of(
    source: Source, loops: int, sharing: str, rank: int | Literal["full"] = 0, share_norms: bool | None = None
) -> RecursiveConfig:
    """The section `model` of a conversion.

    Args:
        source: the pretrained stack.
        loops: B.
        sharing: see the configuration.
        rank: of the LoRA, or the largest that a matrix can have.
        share_norms: see the configuration; None: unless there is a rank.

    Raises:
        UserError: so many loops don't divide the layers.
    """
    ends = sharing.startswith("middle")
    middle = source.layers - 2 * ends
    layers, rest = divmod(middle, loops)
    if rest or layers < 1:
        which = f"the {middle} layers between the first and the last" if ends else f"{middle} layers"
        fits = ", ".join(str(n) for n in range(1, middle + 1) if middle % n == 0) or "another sharing"
        raise UserError(f"--loops {loops} does not divide {which} of {source.folder}; use one of {fits}")
    its: Any = source.settings()
    sides = source.heads * source.head_size, source.mlp_size
    number = min(source.hidden_size, max(sides)) if rank == FULL else rank
    shares = not number if share_norms is None else share_norms
    return RecursiveConfig(
        depth=loops,
        layers=layers,
        sharing=sharing,  # type: ignore[arg-type]
        rank=int(number),
        share_norms=shares,
        dtype=source.dtype,  # type: ignore[arg-type]
        **its,
    )


def tied_layers(source: Source, config: RecursiveConfig, init: Init) -> list[Tied]:
    """Which of the source's layers every shared layer starts as and stands for."""
    first, last = (1, source.layers - 2) if config.ends else (0, source.layers - 1)
    layers, loops = config.layers, config.depth
    chosen: dict[str, Any] = {
        "stepwise": [round(place) for place in np.linspace(first, last, layers).tolist()],  # halves to even
        "lower": range(first, first + layers),
        "upper": range(last - layers + 1, last + 1),
        "average": [None] * layers,
    }
    places = np.arange(first, last + 1)
    applied = places.reshape(layers, loops) if config.in_place else places.reshape(loops, layers).T
    return [Tied(*its) for its in zip(chosen[init], (tuple(row.tolist()) for row in applied), strict=True)]


def params_of(source: Source, config: RecursiveConfig, tied: list[Tied]) -> dict[str, Any]:
    """Parameters of the recursive transformer, float32."""
    pairs = [_parted(source, config, its) for its in tied]
    layers, relaxation = ([pair[side] for pair in pairs] for side in (0, 1))
    if config.in_place:
        parts = {"layers": _stacked(layers), "relaxation": _stacked(relaxation)}
    else:
        parts = {
            name: {str(k): its for k, its in enumerate(trees)}
            for name, trees in (("layers", layers), ("relaxation", relaxation))
        }
    if not config.rank and config.share_norms:
        del parts["relaxation"]
    ends = {"first": source.layer(0), "last": source.layer(source.layers - 1)} if config.ends else {}
    return source.around() | parts | ends


def _parted(source: Source, config: RecursiveConfig, tied: Tied) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the applications of a layer share, and [B, ...] what each has of its own."""
    originals = [source.layer(l) for l in tied.applied]
    if tied.chosen is None:
        shared = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *originals)
    elif tied.chosen in tied.applied:
        shared = originals[tied.applied.index(tied.chosen)]
    else:
        shared = source.layer(tied.chosen)
    own = [_changes(source, shared, original, config.rank) if config.rank else {} for original in originals]
    if not config.share_norms:
        own = [merged(its, _norms(original)) for its, original in zip(own, originals, strict=True)]
        shared = _without_norms(shared)
    return shared, _stacked(own)


def _changes(source: Source, shared: dict[str, Any], original: dict[str, Any], rank: int) -> dict[str, Any]:
    """The LoRA of every matrix of a layer."""

    def low_ranks(part: str) -> dict[str, Any]:
        own, common = (dict(_maps(source, part, tree[part])) for tree in (original, shared))
        return {f"{name}_low": nearest(own[name] - common[name], rank) for name in own}

    return {part: low_ranks(part) for part in ("attention", "feed_forward")}


def nearest(difference: np.ndarray, rank: int) -> dict[str, np.ndarray]:
    """[a, r] and [r, b] whose product is the nearest to a matrix [a, b] of all of that rank."""
    left, sizes, right = np.linalg.svd(difference, full_matrices=False)
    return {"down": left[:, :rank], "up": sizes[:rank, None] * right[:rank]}


def _maps(source: Source, part: str, leaves: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The linear maps of half a layer, [in, out]."""
    if part == "attention":
        queries, keys = source.heads * source.head_size, source.kv_heads * source.head_size
        yield from zip("qkv", np.split(leaves["qkv"], [queries, queries + keys], axis=1), strict=True)
        yield "out", leaves["out"]
        return
    yield from (("gate", leaves["gate"].T), ("up", leaves["up"].T), ("out", leaves["out"]))


def _norms(tree: dict[str, Any]) -> dict[str, Any]:
    """The norms of a layer."""
    parts = {name: _norms(node) for name, node in tree.items() if isinstance(node, dict)}
    return {name: its for name, its in parts.items() if its} | {n: v for n, v in tree.items() if n == "scale"}


def _without_norms(tree: dict[str, Any]) -> dict[str, Any]:
    """A layer but for its norms."""
    parts = {n: _without_norms(v) if isinstance(v, dict) else v for n, v in tree.items() if n != "scale"}
    return {name: its for name, its in parts.items() if not isinstance(its, dict) or its}


def _stacked(trees: list[dict[str, Any]]) -> dict[str, Any]:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
