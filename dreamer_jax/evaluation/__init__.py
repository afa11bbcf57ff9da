"""Benchmarks: tasks and their files, scoring, resumable records, lm-eval's harness, comparing runs.

Importing this costs next to nothing: what needs JAX or an extra is loaded when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dreamer_jax.evaluation.adapter import LMEvalAdapter
    from dreamer_jax.evaluation.opening import load_language_model
    from dreamer_jax.evaluation.runner import Settings, evaluate
    from dreamer_jax.evaluation.training_hook import during_training

_HOMES = {
    "LMEvalAdapter": "adapter",
    "Settings": "runner",
    "during_training": "training_hook",
    "evaluate": "runner",
    "load_language_model": "opening",
}

__all__ = ["LMEvalAdapter", "Settings", "during_training", "evaluate", "load_language_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
