"""The statistics again, token by token, from the plain NumPy model of the model's own tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from dreamer_jax.config.models.dreamer import DreamerConfig
from tests.families import numpy_reference as reference

BINS = 20


class Watched(reference.Pass):
    """A forward pass that writes down what every token does at every depth."""

    def __init__(self, config: DreamerConfig, params: Any, bias: Any) -> None:
        super().__init__(config, params, bias, config.depth)
        depths = range(config.depth)
        self.scores = {name: [[] for _ in depths] for name in bias}
        self.entropies = {name: [[] for _ in depths] for name in bias}
        self.looks: list[list[np.ndarray]] = [[] for _ in depths]
        self.reads: list[list[np.ndarray]] = [[] for _ in depths]
        self.streams: list[np.ndarray] = []
        self.choices: dict[str, list[tuple[int, float]]] = {}

    def document(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        self.streams = [x]
        return super().document(x, positions)

    def mixture(self, layer, x, positions, l):
        y = super().mixture(layer, x, positions, l)
        self.streams.append(reference.rms_norm(y, layer["residual_norm"]["scale"]) if self.config.recurrent else y)
        return y

    def select(self, name, logits, l, k):
        chosen = super().select(name, logits, l, k)
        scores = 1 / (1 + np.exp(-logits))
        share = scores / scores.sum()
        self.scores[name][l] += [scores[expert] for expert in chosen]
        self.entropies[name][l].append(-np.sum(share * np.log(share)))
        return chosen

    def choose_projection(self, name, projections, x, l):
        self.choices[name] = super().choose_projection(name, projections, x, l)
        return self.choices[name]

    def depth_attention(self, weights, x, l):
        c = self.config
        out = super().depth_attention(weights, x, l)
        q, _, _ = self.heads(weights, self.choices["depth_attention"], x, c.da_heads, c.da_kv_heads, c.da_head_size)
        seen = self.depths_seen(l)
        q, keys = self.depth_rope(q, l), np.stack([self.keys[i] for i in seen])
        for token in range(len(x)):
            look = np.zeros((c.da_heads, c.depth))
            for head in range(c.da_heads):
                logits = (
                    keys[:, token, head // (c.da_heads // c.da_kv_heads)] @ q[token, head] / np.sqrt(c.da_head_size)
                )
                look[head, seen] = np.exp(logits) / np.exp(logits).sum()
            self.looks[l].append(look)
        return out

    def parameter_attention(self, layer, x, l):
        weights, c = layer["parameter_attention"], self.config
        normed = reference.rms_norm(x, layer["parameter_norm"]["scale"])
        keys = reference.rms_norm(self.slots(weights["keys"]), weights["k_norm"]["scale"])
        for token in normed @ weights["query"]:
            query = reference.rms_norm(token.reshape(1, c.pa_heads, -1), weights["q_norm"]["scale"])
            logits = np.sum(keys * self.told(query, weights, l)[0][:, None], axis=-1) / np.sqrt(c.pa_head_size)
            self.reads[l].append(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))
        return super().parameter_attention(layer, x, l)


def statistics(
    config: DreamerConfig, params: Any, bias: Any, batch: dict[str, np.ndarray], chosen: np.ndarray, texts: Any = None
):
    """What `observe_batch` returns, with lists of per-token values summed.

    Args:
        chosen: [B, S] bool, the targets the lens reads.
        texts: [M, e], of a model that attends to texts.
    """
    watched = Watched(config, reference.float64(params), reference.float64(bias))
    watched.texts = texts
    values: dict[str, list[list[float]]] = {}

    def note(name: str, l: int, numbers) -> None:
        values.setdefault(name, [[] for _ in range(config.depth)])[l].extend(np.ravel(numbers).tolist())

    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            where = np.flatnonzero(batch["segment_ids"][row] == segment)
            if not len(where):
                continue
            watched.document(watched.params["embedding"][batch["tokens"][row, where]], batch["positions"][row, where])
            read = chosen[row, where]
            answers = batch["answer_mask"][row, where][read]
            targets = batch["targets"][row, where][read]
            for l, (before, after) in enumerate(zip(watched.streams, watched.streams[1:], strict=False)):
                lengths = np.linalg.norm(before, axis=1), np.linalg.norm(after, axis=1)
                note("norm", l, lengths[1])
                note("cosine", l, np.sum(before * after, axis=1) / lengths[0] / lengths[1])
                note("distance", l, np.linalg.norm(after - before, axis=1) / lengths[0])
                final = after if config.recurrent else reference.rms_norm(after, watched.params["final_norm"]["scale"])
                logits = final[read] @ watched.params["head"].T
                right = logits.argmax(axis=1) == targets
                logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
                note("lens_loss", l, -logits[np.arange(len(targets)), targets])
                note("lens_correct", l, right)
                note("lens_answers_correct", l, right & answers)
    result = {name: np.array([np.sum(numbers) for numbers in rows]) for name, rows in values.items()}
    result["counts"] = watched.counts
    result["scores"] = {
        name: np.array([np.histogram(row, BINS, (0, 1))[0] for row in rows]) for name, rows in watched.scores.items()
    }
    result["entropy"] = {name: np.array([np.sum(row) for row in rows]) for name, rows in watched.entropies.items()}
    if config.depth_attention:
        result["depth_scores"] = np.array([np.sum(looks, axis=0) for looks in watched.looks])
    if config.pa_slots:
        result["slot_scores"] = np.array([np.sum(reads, axis=0) for reads in watched.reads])
    return result, watched.margin
