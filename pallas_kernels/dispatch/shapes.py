"""What the counting sort costs."""

from __future__ import annotations

EXPERTS = (537, 1097)
BUNDLES = {
    "v4": {"dispatch_slots": (1398, 2627)},
    "v5e": {"dispatch_slots": (2079, 4052)},
    "v5p": {"dispatch_slots": (1170, 2207)},
}
"""TPU generation -> kernel -> VLIW bundles of a grid step (1,024 pairs) for each of `EXPERTS`, as libtpu 0.0.42
compiled it. tests/aot fails on 5 % more."""
