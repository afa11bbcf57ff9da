"""Whether a folder computes what its run computes: weights bit by bit, then logits, part by part, on both sides.

Routing is discrete. Where two experts tie to within float32's rounding, two right programs may choose differently,
and everything that token influences differs from there. Recurrences may enlarge what is rounded until it shows. Such
positions are found on the JAX side and left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dreamer_jax.errors import UserError
from dreamer_jax.export import modeling_file
from dreamer_jax.export.description import Description, form_of, read_description
from dreamer_jax.export.form import Trace
from dreamer_jax.export.reading import checked_tensors
from dreamer_jax.export.writing import tokenizer_of
from dreamer_jax.runs.leaves import StoredModel

TOLERANCE = 2e-5
"""Largest difference of float32 logits, relative to the largest logit."""

AGREEMENT = 0.99
"""Share of positions whose greedy token is the same in bfloat16 that is always enough."""

ROUNDING_FACTOR = 1.5
"""Models without clear favourites agree less: rounding alone changes their choices. Then PyTorch's bfloat16 logits may
be that many times as far from the float32 ones as JAX's are, on average."""

NEW_TOKENS = 16

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
        left_out: share of positions left out because rounding decides there.
        continuation: tokens of the greedy continuation, all of which agree; 0 where there are no texts.
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
        worst, mean, compared = f"{self.worst:.1e} at worst", f"{self.mean:.1e} on average", "classes"
        text = f"float32 logits differ by {worst} and {mean}, relative to the largest"
        if self.continuation:
            compared = "greedy tokens"
            text += f"; {self.continuation} {compared} agree"
        if self.agreement is not None:
            text += f"; bfloat16 {compared} agree on {100 * self.agreement:.1f} % of positions"
            text += f", and rounding moves logits {self.rounding:.2f} times as far as in JAX"
        if self.left_out:
            text += f" ({100 * self.left_out:.1f} % of positions left out: rounding decides there)"
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
    code = folder / form_of(description.config).model_file
    if not code.is_file() or code.read_bytes() != modeling_file(code.name):
        raise UserError(f"{code} is not the one this version of dreamer-jax writes; export again")
    if description.config.model != dataclasses.replace(
        model.config.model, dtype=description.config.model.dtype, implementation=description.config.model.implementation
    ):
        raise UserError(f"{folder / 'config.json'} describes another model than the run {model.directory}")
    with model.reading():
        say("comparing the weights")
        compare_weights(folder, model, description)
        say("comparing what both sides compute")
        return compare_outputs(folder, model, description)


def compare_weights(folder: Path, model: StoredModel, description: Description) -> None:
    """Every tensor is bit for bit what the checkpoint gives when folded and cast."""
    form, stored = form_of(description.config), checked_tensors(folder, description)
    parts = form.parts(description)
    for tensor in form.tensors(model, description):
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
    form, prompt = form_of(description.config), max(1, tokens.shape[1] - NEW_TOKENS)
    new = NEW_TOKENS if form.texts else 0
    there, rounded_there, continued = form.torch_side(folder, tokens, prompt, new, description.dtype == "bfloat16")
    strict = form.jax_side(model, folder, description, "float32")
    here, continuation = strict.trace(tokens), strict.trace(continued) if new else None
    del strict
    if not here.clean.any():
        raise UserError("rounding decides at every position, so nothing can be compared; was the model trained?")
    difference = np.abs(here.logits - there.logits)[here.clean] / np.abs(here.logits).max()
    if not difference.max() <= TOLERANCE:  # also when it is not a number
        raise UserError(
            f"{folder} doesn't compute what the run does: logits differ by {difference.max():.1e} of the largest, "
            f"first in {_first_difference(here, there)}"
        )
    if continuation is not None:
        _compare_continuation(folder, continuation, continued, prompt)
    agreement = rounding = None
    if rounded_there is not None:
        rounded = form.jax_side(model, folder, description, "bfloat16").trace(tokens)
        sure = rounded.clean if rounded.clean.any() else here.clean
        ours, theirs, exact = (logits[sure] for logits in (rounded.logits, rounded_there, here.logits))
        agreement = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
        rounding = float(np.abs(theirs - exact).mean() / np.abs(ours - exact).mean())
        if agreement < AGREEMENT and not rounding <= ROUNDING_FACTOR:
            raise UserError(
                f"{folder}: bfloat16 greedy tokens agree on {100 * agreement:.1f} % of positions only, and rounding "
                f"moves logits {rounding:.2f} times as far as in JAX"
            )
    worst, mean = float(difference.max()), float(difference.mean())
    return Finding(worst, mean, 1 - float(here.clean.mean()), new, agreement, rounding)


def _tokens(model: StoredModel, description: Description) -> np.ndarray:
    """[4, S] int32: two rows of random tokens, two of text where there are any; S as time and the context allow."""
    vocabulary = description.model.vocab_size
    length = min(form_of(description.config).affordable(description.model), model.config.data.sequence_length)
    random = np.random.default_rng(0).integers(0, vocabulary, (2, length)).astype(np.int32)
    if not form_of(description.config).texts:
        return np.concatenate([random, random[:, ::-1]])
    tokenizer = tokenizer_of(description)
    text = [tokenizer.bos, *tokenizer.encode(TEXT)]
    text = np.resize(np.array(text, np.int32), (2, length))
    text = np.minimum(text, vocabulary - 1)  # an imported model may come without its tokenizer
    return np.concatenate([random, text])


def _first_difference(here: Trace, there: Trace) -> str:
    for (name, ours), (_, theirs) in zip(here.parts, there.parts, strict=True):
        difference = np.abs(ours - theirs)[here.clean[:, : ours.shape[1]]].max() / np.abs(ours).max()
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
            f"{folder} doesn't generate what the run does: greedy token {wrong[0] + 1} differs (the caches)"
        )
