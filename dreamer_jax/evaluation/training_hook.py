"""Benchmarks during training: what `dreamer eval` does, every now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dreamer_jax.config.sections import Config
from dreamer_jax.data.tokenizers import load_tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.evaluation.opening import LONGEST_INPUT, space_in_prompt, subject_of
from dreamer_jax.evaluation.runner import Settings, choose_tasks, evaluate

Benchmarks = Callable[[int, Any, Any], dict[str, float]]
"""(step, params, model state) -> metrics by name, `eval/gsm8k/strict` and so on."""


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
    chosen = choose_tasks(config.evaluation.tasks, "evaluation.tasks")
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
        subject = subject_of(config, config.run.dir, step, (params, model_state))
        results = evaluate(
            model,
            chosen,
            settings,
            subject.folder,
            subject.source,
            subject.row_length,
            limit=config.evaluation.limit or None,
            renew=True,  # a run that goes on evaluates some steps again, perhaps with other settings or weights
        )
        return {
            f"eval/{label}/{name}": number["value"]
            for label, result in results.items()
            for name, number in result["metrics"].items()
        }

    for task in chosen:  # reads the files
        task.items(settings, tokenizer, config.data.sequence_length)
    return benchmarks
