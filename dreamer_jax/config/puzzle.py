"""The section `data.puzzle`: classification tasks whose instances need a known number of reasoning steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dreamer_jax.config.values import require, require_positive


@dataclass(frozen=True)
class PuzzleConfig:
    """The three tasks of "Thinking Deeper, Not Longer" (data.source puzzle); see docs/frontier.md."""

    task: Literal["graph", "boolean", "family"] = "graph"
    """graph: is there a directed path from source to target. boolean: the value of a nested expression. family:
    whether a relation follows from shuffled sentences."""
    easiest: int = 1
    """Shallowest instances of training, in hops, nestings or links; drawn uniformly from here to difficulty."""
    difficulty: int = 5
    """Deepest instances of training."""
    nodes: int = 16
    """Nodes of every graph; at least three more than its hops."""
    negatives: Literal["swap", "leaky"] = "swap"
    """Graphs without a path. swap: two edges exchange their ends, so that all degrees are those of a graph with one.
    leaky: an edge of the path is missing, which the numbers of edges show a little."""
    facts: int = 12
    """Sentences of a family, the links of its chain among them; the others lead nowhere."""
    names: int = 40
    """Names that the people of families are drawn from; at least two more than facts."""
    voices: Literal["both", "parent"] = "both"
    """How families are told. both: "Bob is the parent of Ann" or "Ann is the child of Bob", as it falls. parent: always
    the first, so that the order of both names says it all."""
    contradiction_rate: float = 0.0
    """Share of families in which one sentence says the opposite of a link, so that the answer can't be known; not of
    those whose chain takes all sentences."""

    def __post_init__(self) -> None:
        require_positive(self, "data.puzzle", allow_zero=("contradiction_rate",))
        require(
            self.easiest <= self.difficulty,
            "data.puzzle.easiest",
            f"{self.easiest} is more than data.puzzle.difficulty {self.difficulty}",
        )
        require(self.contradiction_rate <= 1, "data.puzzle.contradiction_rate", "is a share, at most 1")
