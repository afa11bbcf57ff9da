"""The model of a run, and where its evaluation belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from dreamer_jax.config.sections import Config
from dreamer_jax.families import build
from dreamer_jax.inference import Engine, LanguageModel, Sampler, Sampling, Static, tokenizer_of
from dreamer_jax.runs.folders import run_and_step
from dreamer_jax.runs.models import changed, load_run

LONGEST_INPUT = 2048
"""Default of the most tokens a request takes, or the run's row length where that is more."""


class Subject(NamedTuple):
    """Which model is evaluated, and where that is kept.

    folder: RUN/evaluation/step-N, with the depth, the precision and the rule of the cache in its name where they aren't
        the run's, the number of checkpoints that its weights are the mean of, the sampler if texts aren't generated
        by `Static`, and how tokens are drawn if they are.
    source: what identifies the model: step, tokens trained on, depth, precision; and the others where they are named.
    row_length: S of the run.
    space_in_prompt: whether the prompts that the run was trained on end in a space, see `Settings`.
    """

    folder: Path
    source: dict[str, Any]
    row_length: int
    space_in_prompt: bool


def subject_of(
    config: Config,
    directory: str,
    step: int,
    depth: int | None = None,
    dtype: str | None = None,
    average: int = 1,
    sampler: Sampler | None = None,
    cache: str | None = None,
    sampling: Sampling | None = None,
) -> Subject:
    """Where an evaluation of a checkpoint belongs; a bucket's is kept in a folder of that name here."""
    trained = build(config.model).depth
    depth, dtype = depth or trained, dtype or config.model.dtype
    name = f"step-{step}"
    name += f"-depth-{depth}" if depth != trained else ""
    name += f"-{dtype}" if dtype != config.model.dtype else ""
    label = (sampler or Static()).label
    named = {
        "average": average if average > 1 else None,
        "cache": cache if cache != getattr(config.model, "cache", None) else None,
        "sampler": label if label != Static().label else None,
        "sampling": sampling.label if sampling is not None else None,
    }
    named = {key: value for key, value in named.items() if value}
    for key, value in named.items():
        name += f"-{key}-{value}" if key in ("average", "cache") else f"-{value}"
    tokens = step * config.training.batch_size * config.data.sequence_length
    source = {"step": step, "tokens": tokens, "depth": depth, "dtype": dtype}
    source |= named
    folder = Path(directory.partition("://")[2] or directory) / "evaluation" / name
    return Subject(folder, source, config.data.sequence_length, space_in_prompt(config))


def space_in_prompt(config: Config) -> bool:
    """Whether prompts end in a space by the run's template; prepared data don't tell, and built-in tasks have none."""
    return config.data.source == "jsonl" and config.data.prompt.endswith(" ")


def open_model(
    run: str,
    *,
    depth: int | None = None,
    dtype: str | None = None,
    average: int = 1,
    tokenizer: str | None = None,
    max_length: int | None = None,
    batch_size: int = 16,
    sampler: Sampler | None = None,
    sampling: Sampling | None = None,
    cache: str | None = None,
    mesh: Any = None,
) -> tuple[LanguageModel, Subject]:
    """The model of a run directory, or of one checkpoint in it, and where its evaluation belongs.

    Args:
        run: as `runs.models.load_run` takes it.
        depth: depths to apply, instead of the trained number.
        dtype: compute precision, instead of the run's.
        average: checkpoints to average the weights of.
        tokenizer: where its file is now, if not where the run's configuration says.
        max_length, batch_size: as of `LanguageModel`.
        sampler: how tokens that are generated go through the depths.
        sampling: how they are chosen; greedy by default. It only says where the records belong.
        cache: which keys of other tokens' depths a token sees, instead of the run's `model.cache`.
        mesh: a `jax.sharding.Mesh` of devices that share the work, as `inference.Engine` takes it; None for one.

    Raises:
        UserError: no such run, or a tokenizer other than the one the run was trained with.
    """
    original = load_run(run, average=average)
    trained = changed(original, cache=cache)
    length = max_length or max(LONGEST_INPUT, trained.config.data.sequence_length)
    engine = Engine.of(trained, depth=depth, dtype=dtype, sampler=sampler, mesh=mesh)
    model = LanguageModel(engine, tokenizer_of(trained, tokenizer), length, batch_size)
    own = run_and_step(run)[0], trained.step, depth, dtype, average, sampler, cache, sampling
    return model, subject_of(original.config, *own)


def load_language_model(run: str, **options: Any) -> LanguageModel:
    """The model alone; see `open_model`."""
    return open_model(run, **options)[0]
