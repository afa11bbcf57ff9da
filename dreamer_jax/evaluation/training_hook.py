"""Benchmarks during training: what `dreamer eval` does, every now and then."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.config.sections import Config
from dreamer_jax.data.tokenizers import load_tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.evaluation.opening import LONGEST_INPUT, space_in_prompt, subject_of
from dreamer_jax.evaluation.runner import Settings, choose_tasks, evaluate

Benchmarks = Callable[[int, Any, Any], dict[str, float]]
"""(step, params, model state) -> metrics by name, `eval/gsm8k/strict` and so on."""

WEIGHTS = "weights.sha256"
"""In the folder of an evaluation made in training: of what it was made."""


def during_training(config: Config) -> Benchmarks:
    """What the training loop calls every `evaluation.tasks_every` steps, by the section `evaluation`.

    Records and results lie where `dreamer eval` would put them, so that it can extend them to all questions.

    Raises:
        UserError: a task or its files are missing; here already, rather than at the first evaluation.
    """
    import jax

    if jax.process_count() > 1:
        raise UserError(
            "evaluation.tasks: benchmarks during training need a run of one process; leave it empty and use "
            "`dreamer eval RUN/checkpoints/STEP` (checkpoint.keep_every keeps checkpoints)"
        )
    chosen = choose_tasks(config.evaluation.tasks)
    settings = Settings(
        data=config.evaluation.data, shots=config.evaluation.shots, space_in_prompt=space_in_prompt(config)
    )
    tokenizer = load_tokenizer(config.data.tokenizer)
    length = max(LONGEST_INPUT, config.data.sequence_length)

    def benchmarks(step: int, params: Any, model_state: Any) -> dict[str, float]:
        from dreamer_jax.inference import Engine, LanguageModel, fold
        from dreamer_jax.parallel import make_mesh

        mesh = make_mesh(config.mesh) if config.mesh.size > 1 else None
        model = LanguageModel(Engine(fold(config.model, params, model_state), mesh=mesh), tokenizer, length)
        subject = subject_of(config, config.run.dir, step)
        _discard_of_others(subject.folder, (params, model_state))
        results = evaluate(
            model,
            chosen,
            settings,
            subject.folder,
            subject.source,
            subject.row_length,
            limit=config.evaluation.limit or None,
            renew=True,  # a run that goes on evaluates some steps again, perhaps with other settings
        )
        return {
            f"eval/{label}/{name}": number["value"]
            for label, result in results.items()
            for name, number in result["metrics"].items()
        }

    for task in chosen:  # reads the files
        task.items(settings, tokenizer, config.data.sequence_length)
    return benchmarks


def _discard_of_others(folder: Path, weights: Any) -> None:
    """Remove what a folder holds of other weights than these, as far as it says: a run that went back comes to the same
    step with other ones."""
    import jax

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(weights):
        digest.update(np.asarray(leaf).tobytes())
    file, found = folder / WEIGHTS, digest.hexdigest()
    try:
        if file.is_file() and file.read_text(encoding="utf-8") != found:
            for path in (*folder.glob("*.jsonl"), *folder.glob("results.json")):
                path.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(found, encoding="utf-8")
    except OSError as error:
        raise UserError(f"can't keep records in {folder}: {error.strerror}; make it writable") from error
