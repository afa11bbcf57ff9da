"""Whether a folder computes what its run computes: weights bit by bit, then logits, part by part, on both sides.

Routing is discrete. Where two experts tie to within float32's rounding, two right programs may choose differently,
and everything that token influences differs from there. Such positions are found on the JAX side and left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.errors import UserError
from dreamer_jax.export import modeling_file
from dreamer_jax.export.description import MODEL_FILE, Description, read_description
from dreamer_jax.export.jax_side import JaxSide, Trace
from dreamer_jax.export.names import names_of
from dreamer_jax.export.reading import checked_tensors
from dreamer_jax.export.writing import tensors_of, tokenizer_of
from dreamer_jax.runs.leaves import StoredModel

TOLERANCE = 2e-5
"""Largest difference of float32 logits, relative to the largest logit."""

AGREEMENT = 0.99
"""Share of positions whose greedy token is the same in bfloat16 that is always enough."""

ROUNDING_FACTOR = 1.5
"""Models without clear favourites agree less: rounding alone changes their choices. Then PyTorch's bfloat16 logits may
be that many times as far from the float32 ones as JAX's are, on average."""

NEW_TOKENS = 16
READ_BYTES = 1 << 36
"""Of expert matrices, all that comparing may read on one side: a minute or two."""

TEXT = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, 'and "
    "what is the use of a book,' thought Alice 'without pictures or conversation?' In 1865, 12 x 24 was 288."
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was measured.

    Attributes:
        worst: largest difference of float32 logits, relative to the largest logit.
        mean: mean difference, likewise.
        left_out: share of positions left out because a router tied.
        continuation: tokens of the greedy continuation, all of which agree.
        agreement: share of positions with the same bfloat16 greedy token; None for a float32 folder.
        rounding: mean distance of PyTorch's bfloat16 logits from the float32 ones, over that of JAX's.
    """

    worst: float
    mean: float
    left_out: float
    continuation: int
    agreement: float | None
    rounding: float | None

    def __str__(self) -> str:
        text = (
            f"float32 logits differ by {self.worst:.1e} at worst and {self.mean:.1e} on average, relative to the "
            f"largest; {self.continuation} greedy tokens agree"
        )
        if self.agreement is not None:
            text += f"; bfloat16 greedy tokens agree on {100 * self.agreement:.1f} % of positions"
            text += f", and rounding moves logits {self.rounding:.2f} times as far as in JAX"
        if self.left_out:
            text += f" ({100 * self.left_out:.1f} % of positions left out: routers tie)"
        return text


def verify(folder: Path, model: StoredModel, say: Callable[[str], None] = lambda text: None) -> Finding:
    """Compare a folder with the checkpoint it was made from.

    Args:
        folder: what `export` wrote.
        model: the checkpoint.
        say: told what is being done.

    Raises:
        UserError: they differ; the message names the first part that does.
    """
    description = read_description(folder)
    if (folder / MODEL_FILE).read_bytes() != modeling_file():
        raise UserError(f"{folder / MODEL_FILE} is not the one this version of dreamer-jax writes; export again")
    if description.config.model != dataclasses.replace(
        model.config.model, dtype=description.config.model.dtype, implementation=description.config.model.implementation
    ):
        raise UserError(f"{folder / 'config.json'} describes another model than the run {model.directory}")
    say("comparing the weights")
    compare_weights(folder, model, description)
    say("comparing what both sides compute")
    return compare_outputs(folder, model, description)


def compare_weights(folder: Path, model: StoredModel, description: Description) -> None:
    """Every tensor is bit for bit what the checkpoint gives when folded and cast."""
    stored = checked_tensors(folder, description)
    parts = {name.tensor: name.part for name in names_of(description.model, description.keep_shared)}
    for tensor in tensors_of(model, description.dtype, description.keep_shared):
        its = stored[tensor.name]
        where = f"{parts[tensor.name]}: the tensor {tensor.name}"
        if its.dtype != tensor.dtype:
            raise UserError(f"{folder} differs from the run first at {where}, which is {its.dtype}")
        rows = its.array()
        for start, piece in tensor.pieces():
            if piece.tobytes() != rows[start : start + len(piece)].tobytes():
                raise UserError(f"{folder} differs from the run first at {where}")


def compare_outputs(folder: Path, model: StoredModel, description: Description) -> Finding:
    """Both sides on random tokens and on text, in float32; in bfloat16 too when the folder is.

    One side after the other: each maps the whole file.
    """
    tokens = _tokens(model, description)
    prompt = max(1, tokens.shape[1] - NEW_TOKENS)
    there, rounded_there, continued = _torch_side(folder, tokens, prompt, description.dtype == "bfloat16")
    strict = JaxSide(model, folder, description, "float32")
    here, continuation = strict.trace(tokens), strict.trace(continued)
    del strict
    if not here.clean.any():
        raise UserError("the routers tie at every position, so nothing can be compared; was the model trained?")
    difference = np.abs(here.logits - there.logits)[here.clean] / np.abs(here.logits).max()
    if not difference.max() <= TOLERANCE:  # also when it is not a number
        raise UserError(
            f"{folder} doesn't compute what the run does: logits differ by {difference.max():.1e} of the largest, "
            f"first in {_first_difference(here, there)}"
        )
    _compare_continuation(folder, continuation, continued, prompt)
    agreement = rounding = None
    if rounded_there is not None:
        ours = JaxSide(model, folder, description, "bfloat16").trace(tokens).logits
        agreement = float((ours.argmax(-1) == rounded_there.argmax(-1)).mean())
        rounding = float(np.abs(rounded_there - here.logits).mean() / np.abs(ours - here.logits).mean())
        if agreement < AGREEMENT and not rounding <= ROUNDING_FACTOR:
            raise UserError(
                f"{folder}: bfloat16 greedy tokens agree on {100 * agreement:.1f} % of positions only, and rounding "
                f"moves logits {rounding:.2f} times as far as in JAX"
            )
    worst, mean = float(difference.max()), float(difference.mean())
    return Finding(worst, mean, 1 - float(here.clean.mean()), NEW_TOKENS, agreement, rounding)


def _torch_side(folder: Path, tokens: np.ndarray, prompt: int, bfloat16: bool):
    """(float32 trace, bfloat16 logits or None, the last row's first `prompt` tokens continued [1, prompt + new])."""
    import torch

    from dreamer_jax.export.modeling_dreamer import Dreamer

    dreamer = Dreamer.load(folder).requires_grad_(False)
    rounded = _trace(dreamer, tokens).logits if bfloat16 else None
    dreamer.compute_dtype = torch.float32
    continued = dreamer.generate(torch.tensor(tokens[-1:, :prompt]), NEW_TOKENS).numpy()
    return _trace(dreamer, tokens), rounded, continued


def _tokens(model: StoredModel, description: Description) -> np.ndarray:
    """[4, S] int32: two rows of random tokens, two of text; S as time and the trained context allow."""
    config = description.model
    read = 4 * config.depth * config.hidden_size * (3 * config.expert_size * config.experts_per_token)
    length = int(np.clip(READ_BYTES // (4 * read), 8, min(64, model.config.data.sequence_length)))
    tokenizer = tokenizer_of(description)
    text = [tokenizer.bos, *tokenizer.encode(TEXT)]
    text = np.resize(np.array(text, np.int32), (2, length))
    random = np.random.default_rng(0).integers(0, config.vocab_size, text.shape).astype(np.int32)
    return np.concatenate([random, text])


def _trace(dreamer: Any, tokens: np.ndarray) -> Trace:
    """The PyTorch side: logits, and what every part put out, in the order of the forward pass."""
    import torch

    parts: list[tuple[str, np.ndarray]] = []

    def keep(name: str, module: Any):
        def hook(_, arguments, output):
            out = output[0] if isinstance(output, tuple) else output
            where = "" if name == "embedding" else f"depth {arguments[1].depth}: "
            parts.append((where + name, out.float().numpy()))

        return module.register_forward_hook(hook)

    handles = [keep("embedding", dreamer.embedding)]
    for layer in dreamer.layers:
        named = {"DA": layer.depth_attention, "SA": layer.sequence_attention, "EA": layer.expert_attention}
        handles += [keep(name, module) for name, module in named.items() if module is not None]
        handles.append(keep("residual", layer))
    try:
        with torch.no_grad():
            logits = dreamer(torch.tensor(tokens)).numpy()
    finally:
        for handle in handles:
            handle.remove()
    return Trace(parts, logits, np.ones(tokens.shape, bool))


def _first_difference(here: Trace, there: Trace) -> str:
    for (name, ours), (_, theirs) in zip(here.parts, there.parts, strict=True):
        difference = np.abs(ours - theirs)[here.clean].max() / np.abs(ours).max()
        if not difference <= TOLERANCE:
            return name
    return "the head"


def _compare_continuation(folder: Path, here: Trace, tokens: np.ndarray, prompt: int) -> None:
    logits = here.logits[0, prompt - 1 : -1]
    chosen = np.take_along_axis(logits, tokens[0, prompt:, None], -1)[:, 0]
    behind = (logits.max(-1) - chosen) * here.clean[0, prompt - 1 : -1]
    wrong = np.flatnonzero(behind > TOLERANCE * np.abs(logits).max())
    if len(wrong):
        raise UserError(
            f"{folder} doesn't generate what the run does: greedy token {wrong[0] + 1} differs (the caches of SA or DA)"
        )
