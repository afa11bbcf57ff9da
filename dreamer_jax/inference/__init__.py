"""Generation and scoring: a folded model, memories, one depth step of a set of positions, and an engine on top."""

from dreamer_jax.inference.engine import Engine, Generated, Scores
from dreamer_jax.inference.model import Flight, FoldedModel, fold
from dreamer_jax.inference.samplers import SAMPLERS, Adaptive, DiffusionForcing, Lossless, Sampler, Speculative, Static
from dreamer_jax.inference.sampling import Sampling
from dreamer_jax.inference.text import LanguageModel, Likelihood, Text, tokenizer_of
from dreamer_jax.inference.tracing import Trace

__all__ = [
    "SAMPLERS",
    "Adaptive",
    "DiffusionForcing",
    "Engine",
    "Flight",
    "FoldedModel",
    "Generated",
    "LanguageModel",
    "Likelihood",
    "Lossless",
    "Sampler",
    "Sampling",
    "Scores",
    "Speculative",
    "Static",
    "Text",
    "Trace",
    "fold",
    "tokenizer_of",
]
