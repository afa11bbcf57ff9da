"""Prints a line of JSON for each of some odd but legitimate shapes: a kernel's value and gradients, compiled; of
attention over pages the value.

A process of its own; argument: TOPOLOGY. Keys: `name`; `error`, None where it compiles.
A shape that doesn't fit a core's memory has to go to XLA by itself: an error is a user's first step.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.planning.topology import devices_of, parse_topology
from pallas_kernels.attention_moe import ExpertLinear
from pallas_kernels.depth_attention import DepthCache, Window
from pallas_kernels.depth_attention.api import DepthAttention
from pallas_kernels.expert_mlp import ExpertMLP
from pallas_kernels.sequence_attention.api import SequenceAttention

BF16, F32 = jnp.bfloat16, jnp.float32
EXPERTS = [
    *((1024, *sizes, F32) for sizes in ((640, 640), (640, 568), (1024, 360), (128, 2656))),
    (100, 384, 40, F32),
    (1024, 1024, 1200, BF16),
    (1024, 1024, 1128, BF16),
]
"""(tokens of three choices, hidden, size, dtype) of 6 experts."""
LINEAR = [(1024, 2560, 512), (1024, 512, 2304), (257, 640, 1920)]
"""(tokens, in, out) of 6 linear experts in float32."""
DEPTH = [(1024, 4, BF16, 8), (1024, 16, BF16, 7), (1024, 64, F32, 7), (1536, 6, BF16, 5)]
"""(tokens, heads of one key head, dtype, slots)."""
WINDOWS = [(4096, 8, BF16, 16, 4), (4096, 4, BF16, 16, 8), (1024, 10, F32, 4, 3)]
"""(tokens, heads of one key head, dtype, slots, depths that are seen)."""
SEQUENCE = [(1024, 192, F32), (1024, 320, F32), (1536, 512, BF16)]
"""(length, head size, dtype)."""
PAGED = [
    (16, 1, 8, 8, 128, F32, 32),
    (16, 1, 2, 8, 256, BF16, 32),
    (16, 1, 1, 2, 256, F32, 32),
    (16, 1, 1, 8, 256, BF16, 32),
    (64, 4, 8, 16, 128, BF16, 2048),
    (16, 64, 8, 128, 128, BF16, 32),
]
"""(rows, positions, key heads, heads, head size, dtype, pages of a row)."""


def main(topology: str) -> None:
    """Compile for one device of it."""
    device = devices_of(parse_topology(topology))[0]
    place = jax.sharding.SingleDeviceSharding(device)

    def of(*shape, dtype=F32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def like(tree):
        return jax.tree.map(lambda leaf: of(*leaf.shape, dtype=leaf.dtype), tree)

    def tape_of(mlp, pairs, gate_up):
        return like(jax.eval_shape(lambda: mlp.start_tape(pairs, gate_up, F32)))

    def report(name, operation, arguments, out):
        def step(arguments, d_out):
            value, vjp = jax.vjp(operation, *arguments)
            return value, vjp(d_out)

        tell(name, jax.jit(step).lower, arguments, out)

    def tell(name, lower, *arguments):
        error = None
        try:
            lower(*arguments).compile()
        except Exception as problem:
            error = str(problem)[:300]
        print(json.dumps({"name": name, "error": error}))

    with jax.sharding.use_abstract_mesh(jax.sharding.Mesh(np.array([device]), ("chip",)).abstract_mesh):
        for tokens, hidden, size, dtype in EXPERTS:
            mlp, matrices = ExpertMLP("auto"), ((6, 2 * size, hidden), (6, size, hidden))
            tape = tape_of(mlp, (tokens, 3), matrices[0])
            x, indices, weights = of(tokens, hidden, dtype=dtype), of(tokens, 3, dtype=jnp.int32), of(tokens, 3)

            def operation(x, weights, gate_up, down, tape, mlp=mlp, indices=indices):
                return mlp(x, jnp.zeros(indices.shape, jnp.int32), weights, gate_up, down, tape=tape)

            arguments = x, weights, *(of(*its, dtype=dtype) for its in matrices), tape
            report(f"mlp {tokens} {hidden} {size} {dtype.__name__}", operation, arguments, x)
        for tokens, inward, outward in LINEAR:
            linear = ExpertLinear("auto")

            def operation(x, score, routed, shared, linear=linear, tokens=tokens):
                return linear(x, jnp.arange(tokens, dtype=jnp.int32) % 6, score, routed, shared)

            arguments = of(tokens, inward), of(tokens), of(6, inward, outward), of(inward, outward)
            report(f"linear {tokens} {inward} {outward}", operation, arguments, of(tokens, outward))
        for tokens, heads, dtype, slots in DEPTH:
            cache = DepthCache(*(of(slots, tokens, 128, dtype=dtype) for _ in range(2)))

            def operation(q, k, v, keys, values):
                return DepthAttention("auto")(q, k, v, DepthCache(keys, values), jnp.int32(3))[0]

            q, k = of(tokens, heads, 128, dtype=dtype), of(tokens, 1, 128, dtype=dtype)
            report(
                f"depth {tokens} {heads} {dtype.__name__} {slots}", operation, (q, k, k, cache.keys, cache.values), q
            )
        for tokens, heads, dtype, slots, seen in WINDOWS:
            attention, window = DepthAttention("auto"), Window(seen)
            cache = DepthCache(*(of(slots, tokens, 128, dtype=dtype) for _ in range(2)))
            started = functools.partial(attention.start_tape, cache, heads, 128, window)

            def operation(q, k, v, tape, keys, values, attention=attention, window=window):
                return attention(q, k, v, DepthCache(keys, values), jnp.int32(3), tape, window)[0]

            q, k = of(tokens, heads, 128, dtype=dtype), of(tokens, 1, 128, dtype=dtype)
            arguments = q, k, k, like(jax.eval_shape(started)), cache.keys, cache.values
            report(f"window {tokens} {heads} {dtype.__name__} {slots} {seen}", operation, arguments, q)
        for length, size, dtype in SEQUENCE:

            def operation(q, k, v, length=length):
                return SequenceAttention("auto")(q, k, v, jnp.ones((1, length), jnp.int32))

            q, k = of(1, length, 2, size, dtype=dtype), of(1, length, 1, size, dtype=dtype)
            report(f"sequence {length} {size} {dtype.__name__}", operation, (q, k, k), q)
        for rows, positions, kv, heads, size, dtype, pages in PAGED:
            attention, at = SequenceAttention("auto"), of(rows, positions, dtype=jnp.int32)
            where = at if positions < 64 else of(dtype=jnp.int32), at, of(rows, pages, dtype=jnp.int32)
            q, both = of(rows, positions, heads, size, dtype=dtype), of(2, 1024, 16, 2 * kv, size, dtype=dtype)

            def attend(q, both, *where, attention=attention):
                return attention.over_slots(q, both, None, *where)

            name = f"paged {rows} {positions} {kv} {heads} {size} {dtype.__name__} {pages}"
            tell(name, jax.jit(attend).lower, q, both, *where)


if __name__ == "__main__":
    main(sys.argv[1])
