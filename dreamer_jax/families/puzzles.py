"""What families that answer a question about each row have in common: classes from the states of one or two positions.

A batch of puzzles holds `read` [B, R] int32, the positions that are read, beside the usual entries; the label of a row
is the target at its first such position, the only one that counts. So the mean over targets and the share of exact
answers mean the same as elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.counting import Share
from dreamer_jax.blocks.head import Head
from dreamer_jax.blocks.memory import Bidirectional, Context, Fresh, Memory
from dreamer_jax.blocks.readout import READ, Classifier, read_states
from dreamer_jax.errors import UserError
from dreamer_jax.families.contract import Batch, Drawn, Family, Flags, Pass
from dreamer_jax.families.forward import forward
from dreamer_jax.recurrence import Stepped


class PuzzleFamily(Family):
    """A family with a classifier in place of a head; its configuration has `readout` and `classes`.

    Parameters: `classifier`, beside the model's own.
    """

    @property
    def classifier(self) -> Classifier:
        """What makes logits of the classes."""
        c = self.config
        return Classifier(c.hidden_size, c.classes, c.readout, parent=None)

    @property
    def row_entries(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """The positions that are read."""
        return {"read": ((READ[self.config.readout],), jnp.int32)}

    def init_classifier(self, key: jax.Array) -> Any:
        """The classifier's parameters, in boxes."""
        z = jnp.zeros((1, READ[self.config.readout] * self.config.hidden_size))
        return self.classifier.init(key, z)["params"]

    def hidden_states(self, params: Any, state: Any, memory: Memory, context: Context) -> jax.Array:
        """What is read off, [B, S, h], from the state after any depth."""
        return state

    def readout(self, params: Any, state: Any, memory: Memory, context: Context) -> tuple[jax.Array, Memory]:
        """The states that are read, side by side: [B, 1, R h]."""
        hidden = self.hidden_states(params, state, memory, context)
        return read_states(hidden, context.read, READ[self.config.readout])[:, None], memory

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """[..., R h] -> [..., C] float32."""
        logits: Any = self.classifier.apply({"params": params["classifier"]}, hidden)
        return logits

    def head(self, params: Any) -> jax.Array:
        """There is none."""
        raise UserError(f"models of the family {self.config.family} answer puzzles; they have no head over tokens")

    def class_logits(self, params: Any, state: Any, memory: Memory, context: Context) -> jax.Array:
        """Of every row, [B, C] float32, from the state after any depth."""
        return self.logits(params, self.readout(params, state, memory, context)[0])[:, 0]

    def loss(self, params: Any, passed: Pass, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross-entropy of the rows' labels after the last depth (silent thinking, section 3.1)."""
        logits = self.class_logits(params, passed.state, passed.memory, passed.context)
        label, counted = labels(batch)
        return jnp.sum(class_losses(logits, label) * counted), self.logged(logits, passed, label, counted)

    def logged(self, logits: jax.Array, passed: Pass, label: jax.Array, counted: jax.Array) -> dict[str, jax.Array]:
        """Sums over rows: how many are right, and how deep they went."""
        right = (jnp.argmax(logits, axis=-1) == label) & counted
        depth = jnp.broadcast_to(passed.depth, counted.shape)
        return {"accuracy": jnp.sum(right, dtype=jnp.float32), "thinking_steps": jnp.sum(depth * counted)}

    def evaluate(self, params: Any, passed: Pass, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """At the first position that is read, where a row's label is: its loss, and whether it is the likeliest."""
        logits = self.class_logits(params, passed.state, passed.memory, passed.context)
        label, _ = labels(batch)
        rows, place = jnp.arange(len(label)), batch["read"][:, 0]
        shape = batch["targets"].shape
        losses = jnp.zeros(shape, jnp.float32).at[rows, place].set(class_losses(logits, label))
        return losses, jnp.zeros(shape, bool).at[rows, place].set(jnp.argmax(logits, axis=-1) == label)


class PuzzleSolver(PuzzleFamily):
    """Any family's recurrence under a classifier; to be mixed in before it, as `dreamer_classifier` does.

    Its attention over the sequence sees both ways, or along `visible`; with `positions: none` all positions are 0. The
    embedding, the recurrence and what the family does before its head are its own; the head is left out.
    """

    @property
    def flags(self) -> Flags:
        """The family's own, less what takes a head over tokens."""
        return dataclasses.replace(super().flags, causal=False, generates=False)

    def init(self, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        """The family's parameters and state, and the classifier."""
        params, state = super().init(jax.random.fold_in(key, 0))
        params = {name: its for name, its in params.items() if name != "head"}
        return {**params, "classifier": self.init_classifier(jax.random.fold_in(key, 1))}, state

    def fresh(self, batch: int, length: int, slots: int) -> Memory:
        """The family's, in which every attention over the sequence sees both ways."""

        def is_fresh(node: Any) -> bool:
            return isinstance(node, Fresh)

        memory = super().fresh(batch, length, slots)
        return jax.tree.map(lambda node: Bidirectional() if is_fresh(node) else node, memory, is_leaf=is_fresh)

    def enter(self, params: Any, batch: Batch, memory: Memory, context: Context) -> tuple[Any, Memory]:
        """What enters the recurrence."""
        return super().enter(params, batch, memory, self._placed(context))

    def step(self, weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
        """One depth."""
        return super().step(weights, state, inputs, depth, memory, self._placed(context), tape)

    def hidden_states(self, params: Any, state: Any, memory: Memory, context: Context) -> jax.Array:
        """What the family would apply its head to."""
        return super(PuzzleFamily, self).readout(params, state, memory, self._placed(context))[0]

    def blocks(self) -> list[Share]:
        """The family's but for its head, and the classifier."""
        own = [share for share in super().blocks() if not isinstance(share.block, Head)]
        return [*own, Share("head", self.classifier, 1, 1, outside=True)]

    def _placed(self, context: Context) -> Context:
        if self.config.positions == "rope":
            return context
        return context._replace(positions=jnp.zeros_like(context.positions))


def labels(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Of every row, the label [B] int32 and whether it counts [B] bool.

    Raises:
        UserError: the batch isn't one of puzzles.
    """
    if "read" not in batch:
        raise UserError("this model answers puzzles, and these data have none; set data.source: puzzle")
    first = batch["read"][:, :1]
    label, counted = (jnp.take_along_axis(batch[name], first, axis=1)[:, 0] for name in ("targets", "loss_mask"))
    return label, counted


def class_losses(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Cross-entropy: [..., B, C] float32, [B] int32 -> [..., B]."""
    label = jnp.broadcast_to(label, logits.shape[:-1])[..., None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, label, axis=-1)[..., 0]


def logits_by_depth(family: PuzzleFamily, params: Any, model_state: Any, batch: Batch, depth: int | Drawn) -> jax.Array:
    """The classes' logits after every depth of one pass, [T, B, C] float32; zero from a run-time depth on.

    Args:
        family, params, model_state: the model.
        batch: of puzzles.
        depth: T.
    """

    def observe(step: Callable[..., Stepped]) -> Callable[..., Stepped]:
        def observed(weights, state, inputs, depth, memory, context, tape=None):
            stepped = step(weights, state, inputs, depth, memory, context, tape)
            return stepped._replace(counts=family.class_logits(params, stepped.state, stepped.memory, context))

        return observed

    return forward(family, params, model_state, batch, depth, observe=observe).counts


def accuracy_by_depth(logits: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Share of rows that are right after every depth: [T, B, C], [B] -> [T] float64."""
    return (np.argmax(logits, axis=-1) == label).mean(axis=-1)
