"""Classification tasks whose instances need a known number of reasoning steps: graphs, expressions, families."""

from dreamer_jax.data.puzzles.source import PuzzleSource, longest

__all__ = ["PuzzleSource", "longest"]
