"""Memory in bytes of any model, summed over its blocks: of generating text, and of a training step.

Table 1's quantity is `generation`: the stored weights in bfloat16 and the key/value caches of one sequence of 1024
tokens. The training figures are what the recipe has to hold on one device that holds everything; temporary
buffers of a compiler are its own and are read from the compiled program elsewhere.
"""

from __future__ import annotations

from dreamer_jax.budget import analytic
from dreamer_jax.config.values import Remat
from dreamer_jax.families import Family

Bytes = dict[str, int]
SIZE = {"bfloat16": 2, "float32": 4}
MASTER = 4  # weights, gradients and optimizer state are float32


def caches(family: Family, context: int, batch: int = 1) -> Bytes:
    """Caches of generation, in bfloat16, of each part that has one: of every position, or of the newest alone.

    What belongs to the newest position is overwritten by the next token, so it doesn't grow with the context.
    """
    sizes: Bytes = dict.fromkeys((f"{part} cache" for part in family.cached_parts), 0)
    for share in family.blocks():
        kept = share.depths if share.cached is None else min(share.cached, share.depths)
        numbers = kept * (context * share.block.cache_elements() + share.block.flight_elements())
        if numbers:
            name = f"{share.part} cache"
            sizes[name] = sizes.get(name, 0) + numbers * batch * SIZE["bfloat16"]
    return sizes


def generation(family: Family, context: int, batch: int = 1, folded: bool = False) -> Bytes:
    """Weights in bfloat16 and the caches of `batch` sequences of `context` tokens.

    Args:
        family: the model.
        context: tokens of a generated sequence.
        batch: sequences generated at once.
        folded: whether the shared experts have been added into the routed ones. Table 1 compares the models as
            they are stored, unfolded: matched models then agree, which folded ones would not.
    """
    weights = int(analytic.total(analytic.parameters(family, folded))) * SIZE["bfloat16"]
    return {"weights": weights, **_untrained(family, folded), **caches(family, context, batch)}


def training(
    family: Family,
    sequence_length: int,
    batch: int,
    remat: Remat,
    deepest: analytic.Work | None = None,
    trained: int | None = None,
) -> Bytes:
    """What a training step with microbatches of `batch` rows of S tokens has to hold, if one device does it all.

    float32 weights, their gradients and AdamW's two moments of the `trained` (default: all) parameters; embeddings of
    texts; the copy of the weights in the compute type; the activations the backward pass needs under `remat`, in the
    deepest step; float32 logits of one chunk of the loss (blocks/loss.py).
    """
    count = int(analytic.total(analytic.parameters(family)))
    dtype = family.config.dtype
    logits = sum(share.block.logit_elements(batch * sequence_length) for share in family.blocks())
    return {
        "weights": count * MASTER,
        "weights, compute copy": 0 if dtype == "float32" else count * SIZE[dtype],
        "gradients": count * MASTER,
        "optimizer": 2 * (count if trained is None else trained) * MASTER,
        **_untrained(family),
        "activations": activations(family, sequence_length, batch, remat, deepest),
        "attention scores": scores(family, sequence_length, batch, remat, deepest),
        "logits": logits * MASTER,
    }


def _untrained(family: Family, folded: bool = False) -> Bytes:
    """What is stored and not trained, float32 as it is; folded there is none, and its place in the table stays."""
    return {"texts": analytic.untrained(family, folded) * SIZE["float32"]} if analytic.untrained(family) else {}


def activations(
    family: Family, sequence_length: int, batch: int, remat: Remat, deepest: analytic.Work | None = None
) -> int:
    """Bytes of the activations kept from the forward for the backward pass of B x S tokens, head and scores excluded.

    full: the state of every differentiated depth and the intermediates of the one that is recomputed; with a memory
    along depth also what it keeps of every depth and its gradient (float32). attention: also, of every depth, the
    projections into and the outputs of the attentions and the experts' gate and up. none: the intermediates of every
    depth. What a prelude or coda computes is kept whatever the policy.

    Args:
        family: the model.
        sequence_length, batch: S and B.
        remat: the policy.
        deepest: the step that goes deepest, see `training.work`; default, one to the family's depth.
    """
    element, deepest = SIZE[family.config.dtype], deepest or analytic.whole(family)[0]
    numbers, gradient = family.state_elements() * deepest.differentiated, 0.0
    for share in family.blocks():
        block = share.block
        forward, backward = analytic.applied(family, share, deepest)
        if share.outside:
            numbers += block.intermediate_elements() * share.depths
            continue
        kept = {"full": 0, "attention": block.kept_elements(), "none": block.intermediate_elements()}[remat]
        numbers += kept * backward + block.intermediate_elements() * -(-share.depths // family.depth)
        numbers += block.gradient_cache_elements() * forward
        gradient += block.gradient_cache_elements() * block.gradient_depths(round(forward))
    return batch * sequence_length * round(numbers * element + gradient * MASTER)


def scores(family: Family, sequence_length: int, batch: int, remat: Remat, deepest: analytic.Work | None = None) -> int:
    """Bytes of attention scores in float32 where they are written down: of all differentiated depths, or of the one at
    hand."""
    count, deepest = 0.0, deepest or analytic.whole(family)[0]
    for share in family.blocks():
        applied = share.depths if share.outside else -(-share.depths // family.depth)
        if remat == "none" and not share.outside:
            applied = max(applied, analytic.applied(family, share, deepest)[1])
        count += share.block.score_elements(sequence_length) * applied
    return round(count) * batch * sequence_length * SIZE["float32"]
