"""Which shapes the kernels of sequence attention take."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.tiles import Generation

LANES = 128
CUDNN_LARGEST_HEAD = 128


def unsupported(shape: tuple[int, ...], kv_heads: int) -> str | None:
    """Why the kernels don't take queries [B, S, n, d] of this shape, or None if it does."""
    _, length, heads, size = shape
    if length % LANES:
        return f"a sequence of {length} is not a multiple of {LANES}"
    if 2 * padded_head(size) > 3 * size:
        return f"a head size of {size} would have to be padded to {padded_head(size)}"
    if heads % kv_heads:
        return f"{kv_heads} key heads don't divide {heads} heads"
    return None


def padded_head(size: int) -> int:
    """The head size that they compute with: the next multiple of half a register's lanes."""
    half = LANES // 2
    return -(-size // half) * half


def largest_block(size: int, dtype: jnp.dtype | str, target: Generation) -> int:
    """The queries and keys of a block that a core has room for with heads of this size: half for each doubling, and
    float32 is one."""
    block, head = target.sequence_block, target.sequence_head
    wide = padded_head(size) * jnp.dtype(dtype).itemsize // 2
    while head < wide and block > LANES:
        block, head = block // 2, 2 * head
    return block


def block_of(length: int, largest: int) -> int:
    """The largest multiple of a register's lanes that divides the sequence, at most `largest`."""
    return max(size for size in range(LANES, largest + 1, LANES) if length % size == 0)


def pairs_of(length: int, block: int) -> list[tuple[int, int]]:
    """The blocks of queries, each with its own block of keys, then with those before it in their order."""
    return [(row, column) for row in range(length // block) for column in (row, *range(row))]


def fits_cudnn(shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Whether cuDNN's flash attention takes queries [B, S, n, d] of this shape and dtype, with gradients."""
    _, length, _, size = shape
    return dtype in (jnp.bfloat16, jnp.float16) and size % 8 == 0 and size <= CUDNN_LARGEST_HEAD and length % 2 == 0


BUNDLES = {
    "v4": {"sequence_attention_forward": (12541,), "splash_mha_dkv": (13769,)},
    "v5e": {"sequence_attention_forward": (8276,), "splash_mha_dkv": (10451,)},
    "v5p": {"sequence_attention_forward": (8322,), "splash_mha_dkv": (10423,)},
}
"""TPU generation -> kernel -> VLIW bundles of a grid step with all its branches, of which it takes one or two, as jax
0.10.2 and libtpu 0.0.42 compiled the gradient at S = 4096, d = 128, bfloat16. tests/aot fails on 5 % more."""
