"""Dreamer in JAX applied depth by depth, keeping what every part puts out; weights are read when they are needed."""

from __future__ import annotations

import dataclasses
import functools
import mmap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.expert_subsets import among
from dreamer_jax.blocks.memory import Context
from dreamer_jax.blocks.norms import rms_norm
from dreamer_jax.blocks.operations import REFERENCE, Plain
from dreamer_jax.blocks.parameter_attention import slots_of
from dreamer_jax.export.form import Description, Trace
from dreamer_jax.export.names import FOLDED, Name, names_of
from dreamer_jax.export.reading import checked_tensors
from dreamer_jax.families.contract import depth_of
from dreamer_jax.families.dreamer import Dreamer
from dreamer_jax.runs.leaves import StoredModel

TIE = 2e-5
"""Scores of the last selected and the first rejected expert nearer than this may be told apart differently."""

MAPPED_BYTES = 1 << 26
GATHERED_BYTES = 1 << 24
HEAD_ROWS = 16384


class JaxSide:
    """The model of a checkpoint.

    Args:
        model: the checkpoint.
        folder: the folder made from it. Its tensors, already compared bit by bit, serve in place of large ones of
            the checkpoint, mapped from the file: that is how a model is verified that doesn't fit twice.
        description: of the folder.
        dtype: compute precision. Of a bfloat16 folder all values are used, so that both sides have the same weights.
    """

    def __init__(self, model: StoredModel, folder: Path, description: Description, dtype: str):
        self.config = dataclasses.replace(description.model, dtype=dtype)
        self._model = model
        self._tensors = checked_tensors(folder, description)
        self._from_folder = description.dtype == "bfloat16"
        self._keep_shared = description.keep_shared
        self._names = list(names_of(self.config, True))
        self._layers: dict[int | None, Any] = {}

    def trace(self, tokens: np.ndarray) -> Trace:
        """[B, S] int32 -> what each part puts out, and the logits."""
        config, depth = self.config, self.config.depth
        context = Context(
            jnp.ones(tokens.shape, jnp.int32),
            jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
        )
        family = Dreamer(config)
        memory = family.fresh(tokens.shape[0], tokens.shape[1], depth)
        if family.folds_depths is not None:
            memory = memory._replace(depths=family.folds_depths.start(*tokens.shape))
        embedding = self._global("embedding")
        x = entered = jnp.asarray(np.asarray(embedding[tokens], np.float32)).astype(config.dtype)
        parts = [("embedding", np.asarray(x, np.float32))]
        tied, every = np.zeros(tokens.size, bool), {"DA": config.da_every, "SA": config.sa_every}
        for l in range(depth):
            params, bias, matrices = self._layer(l)
            layer = functools.partial(_apply, config, params, x, entered, jnp.int32(l), memory, bias, context)
            asked = layer(jnp.zeros((tokens.size, config.hidden_size), config.dtype))[-1]
            x, memory, outputs, ties, _ = layer(_through_experts(*asked, *matrices))
            tied |= np.asarray(ties)
            for name in ("DA", "SA", "EA", "residual"):
                if name in outputs and l % every.get(name, 1) == 0:
                    parts.append((f"depth {l}: {name}", np.asarray(outputs[name], np.float32)))
        if config.decoding_size:
            x = self._decoded(x)
            parts.append(("decoding layer", np.asarray(x, np.float32)))
        if config.final_norm:
            x = rms_norm(x, jnp.asarray(self._global("final_norm.scale")))
        clean = ~np.logical_or.accumulate(tied.reshape(tokens.shape), axis=1)
        return Trace(parts, self._logits(x), clean)

    def _decoded(self, x: jax.Array) -> jax.Array:
        params: dict[str, Any] = {}
        for name in self._names:
            scope, _, rest = name.leaf.partition(".")
            if scope == "decoding":
                *inner, last = rest.split(".")
                node = params
                for key in inner:
                    node = node.setdefault(key, {})
                node[last] = jnp.asarray(self._values(name))
        its: Any = Dreamer(self.config, REFERENCE).decoding
        return its.apply({"params": params}, x)

    def _logits(self, x: jax.Array) -> np.ndarray:
        head = self._global("head")
        parts = []
        for first in range(0, len(head), HEAD_ROWS):  # one cast copy of a part of the head at a time
            rows = jnp.asarray(head[first : first + HEAD_ROWS]).astype(x.dtype)
            parts.append(np.asarray(jnp.einsum("bsh,vh->bsv", x, rows, preferred_element_type=jnp.float32)))
        return np.concatenate(parts, axis=-1)

    def _global(self, leaf: str) -> np.ndarray:
        return self._values(next(name for name in self._names if name.leaf == leaf))

    def _layer(self, l: int) -> tuple[Any, dict[str, jax.Array], list[np.ndarray]]:
        """(params, biases, the experts' matrices) of a depth; those of a recurrent model are kept."""
        index = None if self.config.recurrent else l
        if index not in self._layers:
            params: dict[str, Any] = {}
            bias, matrices = {}, {}
            for name in self._names:
                if name.layer != index or not (name.item == "balancing" or name.leaf.startswith("layer")):
                    continue
                values = self._values(name)
                if name.item == "balancing":
                    bias[name.leaf] = jnp.asarray(values)
                    continue
                *scope, last = name.leaf.split(".")[1:]
                if last in ("gate_up", "down"):
                    matrices[last], values = values, np.zeros(0, values.dtype)
                node = params
                for key in scope:
                    node = node.setdefault(key, {})
                node[last] = jax.device_put(values)  # uses mapped values where they lie
            if self.config.pa_embedding_size:
                its, texts = params["parameter_attention"], jnp.asarray(self._global("texts"))
                for leaf in ("keys", "values"):  # a bfloat16 folder's maps would round what they make
                    its[leaf] = slots_of(
                        texts, its[leaf].astype(self.config.dtype), self.config.pa_heads, self.config.dtype
                    )
            self._layers = {index: (params, bias, [matrices["gate_up"], matrices["down"]])}
        return self._layers[index]

    def _values(self, name: Name) -> np.ndarray:
        last = name.leaf.rpartition(".")[2]
        if last in FOLDED.values() and self._from_folder and not self._keep_shared:
            return np.zeros(self._model.leaf(name.item, name.leaf).shape, np.float32)
        stored = self._tensors.get(name.tensor)
        large = stored is not None and stored.end - stored.begin > MAPPED_BYTES and not name.shared
        if stored is not None and (large or self._from_folder):
            return stored.array()
        leaf = self._model.leaf(name.item, name.leaf)
        values = leaf[:] if name.layer is None else leaf[name.layer]
        # The compute copy that the model would make itself, made at once: half the memory.
        return values if name.float32 else values.astype(jnp.dtype(self.config.dtype))


def _through_experts(x, indices, weights, gate_up: np.ndarray, down: np.ndarray) -> jax.Array:
    """EA's experts by their definition, [T, h] -> [T, h].

    Only the matrices that a few tokens chose are read at a time, from the mapped file; XLA never holds all of them.
    """
    x, indices, weights = (np.asarray(values) for values in (x, indices, weights))
    active = indices.shape[1]
    tokens = max(1, GATHERED_BYTES // (active * (gate_up[0].nbytes + down[0].nbytes)))
    parts = []
    for first in range(0, len(x), tokens):
        part = slice(first, first + tokens)
        chosen = indices[part].ravel()
        parts.append(_chosen_experts(x[part], weights[part], gate_up[chosen], down[chosen]))
    for matrices in (gate_up, down):
        _forget(matrices)
    return jnp.concatenate(parts)


def _forget(array: Any) -> None:
    """Give back the memory of a mapped file's pages; they are read again when they are needed."""
    while isinstance(array, np.ndarray):
        array = array.base
    if isinstance(array, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # Linux
        array.madvise(mmap.MADV_DONTNEED)


@jax.jit
def _chosen_experts(x: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """[t, h], [t, k], and the matrices of each choice [t k, ...] -> [t, h]."""
    each = jnp.arange(weights.size).reshape(weights.shape)
    return REFERENCE.expert_mlp(x, each, weights, gate_up.astype(x.dtype), down.astype(x.dtype))


def _token_by_token(x, index, score, routed, shared) -> jax.Array:
    """The reference `expert_linear`, which gathers a matrix for every token, a token at a time."""
    bits = jax.lax.bitcast_convert_type(routed, {2: jnp.uint16, 4: jnp.uint32}[routed.dtype.itemsize])

    def one(token):
        x, index, score = token
        # Bits, because a CPU widens bfloat16 for its products, and would widen all of `routed` before the loop.
        own = jax.lax.bitcast_convert_type(jax.lax.dynamic_index_in_dim(bits, index), routed.dtype)
        return REFERENCE.expert_linear(x[None], jnp.zeros(1, jnp.int32), score[None], own, shared)[0]

    return jax.lax.map(one, (x, index, score))


@functools.partial(jax.jit, static_argnums=0)
def _apply(config, params, x, entered, depth, memory, bias, context, answer):
    """The layer at one depth, where EA's experts answer `answer` [T, h].

    Returns:
        x, the memory, outputs by name, which tokens tie [T], and what the experts were asked: (x, indices,
        weights), the input of the reference `expert_mlp`.
    """
    asked = []

    def expert_mlp(*arguments):
        asked.append(arguments[:3])
        return answer

    replaced = {"expert_mlp": Plain(expert_mlp), "expert_linear": Plain(_token_by_token)}
    model = Dreamer(config, dataclasses.replace(REFERENCE, **replaced))
    at = depth_of(depth, config.depth)
    arguments = x, at, memory, bias, context, None, entered
    (x, memory, _, _), kept = model.layer.apply(
        {"params": params}, *arguments, capture_intermediates=True, mutable=["intermediates"]
    )
    its = kept["intermediates"]
    names = {"DA": "depth_attention", "SA": "sequence_attention", "EA": "expert_attention"}
    outputs = {short: its[name]["__call__"][0][0] for short, name in names.items() if name in its}
    outputs["residual"] = x
    ties = jnp.zeros(x.shape[0] * x.shape[1], bool)
    for name, router in model.routers.items():
        eligible = among(router.subsets, at)
        owner: Any = its[name]
        owner = owner.get("projections", owner)
        scores = owner["router"]["__call__"][0] + (bias[name] if eligible is None else bias[name][eligible])
        active = router.selected
        if active < scores.shape[1]:
            best = jax.lax.top_k(scores, active + 1)[0]
            ties |= best[:, -2] - best[:, -1] < TIE
    return x, memory, outputs, ties, asked[0]
