"""The JAX model applied depth by depth, keeping what every part puts out; weights are read when they are needed."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.export.description import Description
from dreamer_jax.export.names import FOLDED, Name, is_float32, names_of
from dreamer_jax.export.reading import checked_tensors
from dreamer_jax.model.dreamer import router_sizes
from dreamer_jax.model.mixture import Context, Layer
from dreamer_jax.model.operations import REFERENCE, Operations
from dreamer_jax.training.leaves import StoredModel
from pallas_kernels.depth_attention import empty_cache

TIE = 2e-5
"""Scores of the last selected and the first rejected expert nearer than this may be told apart differently."""

MAPPED_BYTES = 1 << 26
HEAD_ROWS = 16384


@dataclasses.dataclass(frozen=True)
class Trace:
    """One forward pass.

    Attributes:
        parts: (name, output [B, S, h]) in the order of the forward pass.
        logits: [B, S, V] float32.
        clean: [B, S] bool, False where a router tied at this token or an earlier one of its row.
    """

    parts: list[tuple[str, np.ndarray]]
    logits: np.ndarray
    clean: np.ndarray


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
        self.config = dataclasses.replace(model.config.model, dtype=dtype)
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
            jnp.int32(depth),
        )
        cache = None
        if config.depth_attention:
            cache = empty_cache(depth, tokens.size, config.da_kv_heads, config.da_head_size, config.dtype)
        embedding = self._global("embedding")
        x = jnp.asarray(np.asarray(embedding[tokens], np.float32)).astype(config.dtype)
        parts = [("embedding", np.asarray(x, np.float32))]
        tied = np.zeros(tokens.size, bool)
        for l in range(depth):
            params, bias = self._layer(l)
            x, cache, outputs, ties = _apply(config, params, x, jnp.int32(l), cache, bias, context)
            tied |= np.asarray(ties)
            for name in ("DA", "SA", "EA", "residual"):
                if name in outputs:
                    parts.append((f"depth {l}: {name}", np.asarray(outputs[name], np.float32)))
        if not config.recurrent:
            from dreamer_jax.model.primitives import rms_norm

            x = rms_norm(x, jnp.asarray(self._global("final_norm.scale")))
        clean = ~np.logical_or.accumulate(tied.reshape(tokens.shape), axis=1)
        return Trace(parts, self._logits(x), clean)

    def _logits(self, x: jax.Array) -> np.ndarray:
        head = self._global("head")
        rows = [jnp.asarray(head[i : i + HEAD_ROWS]).astype(x.dtype) for i in range(0, len(head), HEAD_ROWS)]
        parts = [jnp.einsum("bsh,vh->bsv", x, part, preferred_element_type=jnp.float32) for part in rows]
        return np.concatenate([np.asarray(part) for part in parts], axis=-1)

    def _global(self, leaf: str) -> np.ndarray:
        return self._values(next(name for name in self._names if name.leaf == leaf))

    def _layer(self, l: int) -> tuple[Any, dict[str, jax.Array]]:
        """(params, biases) of a depth; those of a recurrent model are kept."""
        index = None if self.config.recurrent else l
        if index not in self._layers:
            params: dict[str, Any] = {}
            bias = {}
            for name in self._names:
                if name.layer != index or not (name.item == "balancing" or name.leaf.startswith("layer")):
                    continue
                values = jax.device_put(self._values(name))  # uses mapped values where they lie
                if name.item == "balancing":
                    bias[name.leaf] = values
                    continue
                *scope, last = name.leaf.split(".")[1:]
                node = params
                for key in scope:
                    node = node.setdefault(key, {})
                node[last] = values
            self._layers = {index: (params, bias)}
        return self._layers[index]

    def _values(self, name: Name) -> np.ndarray:
        last = name.leaf.rpartition(".")[2]
        if last in FOLDED.values() and self._from_folder and not self._keep_shared:
            return np.zeros(self._model.leaf(name.item, name.leaf).shape, np.float32)
        stored = self._tensors.get(name.tensor)
        large = stored is not None and stored.end - stored.begin > MAPPED_BYTES and last not in FOLDED
        if stored is not None and (large or self._from_folder):
            return stored.array()
        leaf = self._model.leaf(name.item, name.leaf)
        values = leaf[:] if name.layer is None else leaf[name.layer]
        # The compute copy that the model would make itself, made at once: half the memory.
        return values if is_float32(name.tensor) else values.astype(jnp.dtype(self.config.dtype))


def _token_by_token(experts: Any) -> Operations:
    """The definitions, but EA gathers the matrices of one token at a time: those of all tokens don't fit.

    It gathers from `experts`, the layer's own parameters. bfloat16 is gathered as the integers it is stored in: a CPU
    has no bfloat16 gather, so the compiler would widen all experts before the loop and keep that copy.
    """

    def rows(matrices, indices):
        if matrices.dtype != jnp.bfloat16:
            return matrices[indices]
        bits = jax.lax.bitcast_convert_type(matrices, jnp.uint16)
        return jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(bits[indices]), jnp.bfloat16)

    def expert_mlp(x, indices, weights, *_):
        def one(token):
            x, indices, weights = token
            chosen = (rows(experts[name], indices).astype(x.dtype) for name in ("gate_up", "down"))
            return REFERENCE.expert_mlp(x[None], jnp.arange(len(indices))[None], weights[None], *chosen)[0]

        return jax.lax.map(one, (x, indices, weights))

    return dataclasses.replace(REFERENCE, expert_mlp=expert_mlp)


@functools.partial(jax.jit, static_argnums=0)
def _apply(config, params, x, depth, cache, bias, context):
    """The layer at one depth: x, the depth cache, outputs by name, and which tokens tie [T]."""
    (x, cache, _), kept = Layer(config, _token_by_token(params["expert_attention"])).apply(
        {"params": params}, x, depth, cache, bias, context, capture_intermediates=True, mutable=["intermediates"]
    )
    its = kept["intermediates"]
    names = {"DA": "depth_attention", "SA": "sequence_attention", "EA": "expert_attention"}
    outputs = {short: its[name]["__call__"][0][0] for short, name in names.items() if name in its}
    outputs["residual"] = x
    ties = jnp.zeros(x.shape[0] * x.shape[1], bool)
    for name, size in router_sizes(config).items():
        owner = its[name] if name == "expert_attention" else its[name]["projections"]
        scores = owner["router"]["__call__"][0] + bias[name]
        active = config.experts_per_token if name == "expert_attention" else 1
        if active < size:
            best = jax.lax.top_k(scores, active + 1)[0]
            ties |= best[:, -2] - best[:, -1] < TIE
    return x, cache, outputs, ties
