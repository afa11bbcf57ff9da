"""Text to batches: tokenizers, task generators, JSONL, packing, and the grain pipeline. NumPy only, no JAX."""

from dreamer_jax.data.pipeline import Data, open_data
from dreamer_jax.data.records import Batch, Record
from dreamer_jax.data.tasks import TASKS, generate
from dreamer_jax.data.tokenizers import Tokenizer, load_tokenizer

__all__ = ["TASKS", "Batch", "Data", "Record", "Tokenizer", "generate", "load_tokenizer", "open_data"]
