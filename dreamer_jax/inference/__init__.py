"""Generation and scoring: a folded model, caches, one depth step of a set of positions, and an engine on top."""

from dreamer_jax.inference.caches import Caches, State
from dreamer_jax.inference.engine import Engine, Generated, Scores
from dreamer_jax.inference.model import FoldedModel, fold
from dreamer_jax.inference.sampling import Sampling
from dreamer_jax.inference.text import Text, Writer

__all__ = ["Caches", "Engine", "FoldedModel", "Generated", "Sampling", "Scores", "State", "Text", "Writer", "fold"]
