"""The contract of a family of models: what every other room may ask of one.

A family is a model whose step is applied depth after depth. Its file holds the whole model: what enters, the step, what
leaves, and what it counts. Training, decoding, budgets, plans, analysis and export know this contract and nothing else,
so a family is added with its configuration, its file and its tests. docs/add_family.md shows how.

A pass over whole rows, as `forward` makes it:

    entered, memory = family.enter(params, batch, family.fresh(...), context)     embedding; a prelude
    state = family.start(entered, context)                                        what depth 0 gets
    for l in 0 .. L-1:                                                            the depth scan
        state, memory, outputs, counts = family.step(weights.at(l), state, inputs, depth, memory, context)
    hidden, memory = family.readout(params, state, memory, context)               a coda; the final norm
    logits = hidden @ family.head(params)

Decoding is the same with other memories (`slots`, `flight`) and positions at depths of their own.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.counting import Share
from dreamer_jax.blocks.head import logits_of
from dreamer_jax.blocks.loss import cross_entropy, token_losses
from dreamer_jax.blocks.memory import Context, Memory
from dreamer_jax.blocks.operations import Operations, operations_of
from dreamer_jax.blocks.parameters import compute_copy, roles_of
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.errors import UserError, whole
from dreamer_jax.recurrence import Stepped, Weights

PyTree = Any
KNOWLEDGE = "knowledge"
"""The collection of a model's own state that holds `texts`, embeddings [M, e] float32: data, which nothing updates."""
Batch = Mapping[str, jax.Array]
"""What data makes of rows: `tokens`, `segment_ids`, `positions`, `targets` [B, S] int32, `loss_mask`, `answer_mask` [B,
S] bool, and what else a family's data hold."""


@dataclass(frozen=True)
class Flags:
    """What a model can do; samplers and commands ask, and refuse with the reason.

    Attributes:
        causal: a position sees earlier ones only.
        generates: it has a head over a vocabulary, and memories for decoding.
        recurrent: the same weights at every depth, so that it can go deeper than trained.
        injects_inputs: a step gets the embedded input anew at every depth.
        random: in training a pass draws something of its own, with `Context.keys`.
        shares_caches: what one depth leaves in a memory may stand in for another's.
        decodable: training has read out states of several depths, so that one of any depth can be decoded.
        halts: `finished` says when a position needs no further depth, and decoding stops there.
        depths_apart: in decoding every depth keeps keys of its own, and what a position sees depends on no later ones;
            so positions that go through the depths together come to what they would one after the other.
        counts_depths: what a step does depends on the number of its depth, or on what earlier depths have kept.
        weighs_depths: the loss is made of outputs of all depths, not of the last state alone.
    """

    causal: bool = True
    generates: bool = True
    recurrent: bool = True
    injects_inputs: bool = False
    random: bool = False
    shares_caches: bool = False
    decodable: bool = False
    halts: bool = False
    depths_apart: bool = True
    counts_depths: bool = True
    weighs_depths: bool = False


@dataclass(frozen=True)
class Knob:
    """A setting by which a model is matched to another.

    Attributes:
        key: of the section `model`.
        moves: the quantity that it is searched for: "flops_per_token" or "params".
        part: of the model that it is about.
        smallest: the least value.
        fine: whether it moves by one; otherwise by `--granularity`.
    """

    key: str
    moves: str
    part: str
    smallest: int = 1
    fine: bool = False


class Drawn(NamedTuple):
    """How deep a train step goes.

    Attributes:
        depth: L; a traced scalar, at most `slots`, for one drawn anew each step; or [B] for rows with a depth each, for
            families whose loss doesn't weigh depths (`Flags.weighs_depths`).
        slots: static bound on it.
        gradient_depths: depths that are differentiated, the last ones; None for all.
        groups: rows with depths of their own are sorted into so many groups of like depth, which are computed one after
            the other, each as deep as its deepest row.
        group_depths: [groups], how deep they go where that is more.
        differentiated: of `gradient_depths` so many, a traced scalar; None for all of them.
    """

    depth: int | jax.Array
    slots: int
    gradient_depths: int | None = None
    groups: int = 1
    group_depths: jax.Array | None = None
    differentiated: jax.Array | None = None


class Pass(NamedTuple):
    """What a pass over whole rows has come to.

    Attributes:
        state: after the last depth.
        outputs: of the depths, stacked; see `Stepped`.
        counts: likewise, without gradient.
        inputs: what every depth got.
        memory, context: for the readout.
        depth: L, or [B].
        states: after the last few depths, [k, ...], the last of them `state`; () unless asked for.
        left: the memory as the depths have left it, without gradient; () for rows with depths of their own.
    """

    state: PyTree
    outputs: PyTree
    counts: PyTree
    inputs: PyTree
    memory: Memory
    context: Context
    depth: jax.Array
    states: PyTree = ()
    left: PyTree = ()


class Family(abc.ABC):
    """A model of a family; sizes and operations, no arrays.

    Attributes:
        config: its section `model`.
        operations: what its blocks compute with.
        observe: whether steps return, in place of their counts, what analysis wants to know.
        parts: names that its blocks are counted under.
        cached_parts: those of them that reports show a cache of, also an empty one.
        remedies: part -> the settings that make it smaller, where that isn't the hidden size.
    """

    parts: ClassVar[tuple[str, ...]] = ()
    cached_parts: ClassVar[tuple[str, ...]] = ()
    remedies: ClassVar[Mapping[str, str]] = {}
    observed_over: ClassVar[Mapping[str, str]] = {}
    """What is observed -> the other sum of positions that it is averaged over; by default all tokens."""
    output_depths: ClassVar[int | None] = None
    """Of how many depths, the last ones, the outputs are kept for the loss; None for all."""

    def __init__(self, config: Any, operations: Operations | None = None, observe: bool = False):
        self.config = config
        self.operations = operations or operations_of(config.implementation)
        self.observe = observe

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._identity == other._identity  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), *self._identity))

    @property
    def _identity(self) -> tuple[Any, ...]:
        """What decides the programs that it is traced into."""
        return self.config, self.operations, self.observe

    # What it is.

    @property
    @abc.abstractmethod
    def flags(self) -> Flags:
        """What it can do."""

    @property
    @abc.abstractmethod
    def depth(self) -> int:
        """L as trained, or on average."""

    @property
    def differentiated(self) -> int:
        """Depths that training differentiates, the last ones."""
        return self.depth

    def check_depth(self, depth: int) -> int:
        """The depth as an int, if the model can be applied at it.

        Raises:
            UserError: it can't.
        """
        depth = whole(depth, "depth", 1)
        if not self.flags.recurrent and depth > self.depth:
            raise UserError(f"this model has {self.depth} layers and can't be applied at depth {depth}")
        return depth

    # Parameters.

    @abc.abstractmethod
    def init(self, key: jax.Array) -> tuple[PyTree, dict[str, PyTree]]:
        """Fresh parameters, float32, in boxes (`Parameter`); and the model's own state by collection, which steps see
        and `update` changes after each optimizer step, such as balancing biases."""

    @functools.cached_property
    def shapes(self) -> tuple[PyTree, dict[str, PyTree]]:
        """What `init` makes, with shapes in place of arrays."""
        return _shapes(type(self), self.config)

    @property
    def boxed(self) -> PyTree:
        """The tree of parameters' boxes, with shapes in place of arrays."""
        return self.shapes[0]

    @functools.cached_property
    def roles(self) -> PyTree:
        """The tree of parameters' roles."""
        return roles_of(self.boxed)

    @abc.abstractmethod
    def weights(self, params: PyTree) -> Weights:
        """The parameters that the depth scan takes, or of any tree like theirs that part."""

    def cast(self, params: PyTree) -> PyTree:
        """The compute copy of the parameters."""
        return compute_copy(params, self.roles, self.config.dtype)

    def cast_weights(self, weights: Weights) -> Weights:
        """The compute copy of `weights`."""
        return compute_copy(weights, self.weights(self.roles), self.config.dtype)

    def prepare(self, params: PyTree, state: dict[str, PyTree]) -> PyTree:
        """The parameters, cast or not, as the depths of a pass see them: what doesn't change from depth to depth stands
        in the place of the parameters, and of the model's own state, that it is made of. Made once a pass, before its
        first depth; the tree of roles stays the same. By default nothing is."""
        return params

    def fold(self, params: PyTree) -> PyTree:
        """The prepared parameters as decoding wants them, cast once: the same tree, perhaps less some leaves."""
        return self.cast(params)

    # A pass.

    def draw(self, key: jax.Array, step: jax.Array, rows: jax.Array) -> Drawn:
        """How deep a train step goes: a pure function of seed and step, the same on all devices; or, for rows with a
        depth each, of their numbers [B] in the global batch."""
        return Drawn(self.depth, self.depth)

    @abc.abstractmethod
    def enter(self, params: PyTree, batch: Batch, memory: Memory, context: Context) -> tuple[PyTree, Memory]:
        """What enters the recurrence, and the memory with what a prelude has left there.

        If the flags say that inputs are injected it is what every step gets as `inputs`, else those are ()."""

    @abc.abstractmethod
    def start(self, entered: PyTree, context: Context, scale: float | jax.Array = 1.0) -> PyTree:
        """The state of depth 0. A random one is drawn with the context's keys, one a row; without them, in evaluation
        and decoding, from the positions alone, so that a token starts the same way in whatever batch it comes. It is
        multiplied by `scale`."""

    def inputs(self, entered: PyTree) -> PyTree:
        """What every step gets."""
        return entered if self.flags.injects_inputs else ()

    @abc.abstractmethod
    def step(
        self,
        weights: Weights,
        state: PyTree,
        inputs: PyTree,
        depth: Depth,
        memory: Memory,
        context: Context,
        tape: PyTree | None = None,
    ) -> Stepped:
        """One depth; the same function trains and decodes. See recurrence/scan.py.

        Args:
            weights: of this depth.
            state, inputs: [B, P, ...] each.
            depth: of the positions: one for all, or in decoding [B, P].
            memory, context: see there.
            tape: in the backward pass of the depth scan, what `start_tape` made.
        """

    @property
    def row_entries(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """What its batches hold beside what every batch does: name -> (shape of a row's, dtype)."""
        return {}

    def start_tape(self, weights: Weights, tokens: int, slots: int) -> PyTree:
        """The empty tape for a scan over T tokens and L depths; see recurrence/tape.py. No array stands in it twice."""
        return {}

    def finished(self, params: PyTree, state: PyTree, before: PyTree, depth: Depth) -> jax.Array | None:
        """[B, P] bool: positions that need no further depth; None if the model never says so (`Flags.halts`).

        Args:
            params: as `fold` made them, for a rule that reads the head; that costs a product with it at every depth.
            state, before: after this depth, and before it.
            depth: l of all positions.
        """
        return None

    def readout(self, params: PyTree, state: PyTree, memory: Memory, context: Context) -> tuple[jax.Array, Memory]:
        """What the head is applied to, [B, P, `readout_size`]; `state` may be that of any depth."""
        return state, memory

    @property
    def readout_size(self) -> int:
        """Columns of what the head is applied to, and of the head: h; one more where the head has a bias."""
        return self.config.hidden_size

    def head(self, params: PyTree) -> jax.Array:
        """[V, `readout_size`]."""
        return params["head"]

    def logits(self, params: PyTree, hidden: jax.Array) -> jax.Array:
        """[..., h] -> [..., V] float32."""
        return logits_of(hidden, self.head(params))

    def stream(self, state: PyTree) -> jax.Array:
        """The residual stream [B, P, h] in a state, which analysis and early exits look at."""
        return state

    def carried(self, state: PyTree) -> jax.Array:
        """What of a state the next step starts from, [B, P, ...]: as a rule the stream. Sums that a state holds beside,
        and what is only read out, are left out: the Jacobian of a step is that of this."""
        return self.stream(state)

    def resumed(self, weights: Weights, state: PyTree) -> PyTree:
        """The state with what the next step does to it before all else, such as adding to `carried` what it makes of
        the rest; as a rule nothing. The Jacobian of a step is that of what is carried then, so this is of it too."""
        return state

    # Memories.

    @abc.abstractmethod
    def fresh(self, batch: int, length: int, slots: int) -> Memory:
        """For a pass over whole rows."""

    def slots(self, rows: int, capacity: int, depth: int) -> Any:
        """For decoding: what is kept of B rows of at most S positions, at L depths; None where nothing is. Rows are the
        second axis of every array, which a mesh divides."""
        return None

    def flight(self, batch: int, positions: int, depth: int) -> Any:
        """For decoding: what positions in flight [B, P] keep of their own depths."""
        return None

    def refill(self, params: PyTree, state: PyTree, memory: Any, depths: jax.Array, positions: jax.Array) -> Any:
        """Slots that are filled at the depths which positions [B] didn't go through. By default the latest that was
        computed stands in for the deeper ones. It asks for no experts and no feed-forward networks: how much there is
        to fill differs from device to device.

        Args:
            params: as `fold` made them.
            state: [B, 1, ...], what the positions have come to.
            memory: the slots.
            depths: [B], the last depth that was computed.
            positions: [B].
        """
        return jax.tree.map(
            lambda slots: slots.fill_deeper(depths, positions), memory, is_leaf=lambda x: hasattr(x, "fill_deeper")
        )

    # Training.

    def loss(self, params: PyTree, passed: Pass, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Sum of the loss over the targets that count, and sums to be logged; the train step divides both by their
        number. By default the cross-entropy of the next token."""
        hidden, _ = self.readout(params, passed.state, passed.memory, passed.context)
        flat = hidden.reshape(-1, hidden.shape[-1])
        return cross_entropy(flat, self.head(params), batch["targets"].reshape(-1), batch["loss_mask"].reshape(-1)), {}

    def evaluate(self, params: PyTree, passed: Pass, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Of every target, [B, S]: its loss float32, and whether it is the likeliest."""
        hidden, _ = self.readout(params, passed.state, passed.memory, passed.context)
        targets = batch["targets"]
        losses, correct = token_losses(hidden.reshape(-1, hidden.shape[-1]), self.head(params), targets.reshape(-1))
        return losses.reshape(targets.shape), correct.reshape(targets.shape)

    def update(self, state: dict[str, PyTree], counts: PyTree, step: jax.Array) -> dict[str, PyTree]:
        """The model's own state after an optimizer step, of which this is the number, from 0; counts are those of the
        global batch."""
        return state

    def log(self, state: dict[str, PyTree], counts: Mapping[str, np.ndarray]) -> dict[str, float]:
        """What metrics say of the model's own state and of the counts of a step; on the host."""
        return {}

    def choices(self, router: str, counted: int) -> int:
        """Of the experts that are counted of a router, those that it chooses among at one depth."""
        return counted

    # Counting.

    @abc.abstractmethod
    def blocks(self) -> Sequence[Share]:
        """The blocks that the model is made of, each with its share."""

    def state_elements(self) -> int:
        """Numbers per token that a state holds."""
        return self.config.hidden_size

    def describe(self) -> dict[str, Any]:
        """The settings that tell models of the family apart, for reports: key -> value."""
        return {"family": self.config.family, "depth": self.depth}

    def headline(self) -> str:
        """The same in words, such as "DR+DA, depth 8"."""
        return f"{self.config.family}, depth {self.depth}"

    def sentence(self) -> str:
        """The same with its sizes."""
        config = self.config
        sizes = f"{self.headline()}, hidden size {config.hidden_size}, vocabulary {config.vocab_size}"
        return getattr(config, "summary", sizes)

    def knobs(self) -> tuple[Knob, ...]:
        """The settings by which it is matched to another model; none if it can't be."""
        return ()

    def knob_starts(self, baseline: Family) -> dict[str, int]:
        """Knob -> where a search for the cost of `baseline` starts, whatever this model has."""
        return {knob.key: getattr(self.config, knob.key) for knob in self.knobs()}


def depth_of(index: Any, total: Any) -> Depth:
    """A `Depth` from numbers or arrays."""
    return Depth(jnp.asarray(index, jnp.int32), jnp.asarray(total, jnp.int32))


@functools.lru_cache(maxsize=32)
def _shapes(family: type[Family], config: Any) -> tuple[PyTree, dict[str, PyTree]]:
    """Of every model of these sizes, whatever it computes with: a run asks a dozen times, and tracing takes a while."""
    return jax.eval_shape(family(config).init, jax.random.key(0))
