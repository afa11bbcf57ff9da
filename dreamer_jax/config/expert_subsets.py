"""Which experts a depth of Dreamer may choose among: the subsets that section 4.2 of its paper suggests."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["all", "sliding", "hierarchical"]
GOLDEN = (5**0.5 - 1) / 2


class Part(NamedTuple):
    """A stretch of the list of experts, and the window of it that a group of adjacent depths has.

    Attributes:
        first: its first place.
        size: places.
        window: places that one group has.
        groups: of depths. Their windows are spread evenly from the first place to the last and leave none out.
    """

    first: int
    size: int
    window: int
    groups: int


@dataclass(frozen=True)
class ExpertSubsets:
    """Of E experts in a list, those that each of L depths may choose among; as many at every depth.

    sliding: one window, which begins at place 0 at depth 0 and ends at the last place at depth L - 1: depth l has the
    places from floor(l (E - n) / (L - 1)) on, n = ceil(share E). Adjacent depths share most of it.

    hierarchical: the list is cut in m + 1 equal parts, m = ceil(log2 L). The first is every depth's. The second is
    divided between the two halves of the depths, the next among the four quarters, and so on; of the last each depth
    has some of its own. With 32 depths one half of the experts can be chosen at eight depths or more, and a third at
    one or two: about what the paper found where every depth had all ("a subset of experts should be selectable from
    all depths", those of "only two or three depths" at adjacent ones).

    Depths beyond L have the subset of the last: begun anew, a window would give them the experts of the first depths.

    Place p of the list is expert p s mod E, s being next to 0.618 E and without a common divisor: any stretch of the
    list then has as many experts on one device as on another, when devices divide the experts in order.

    Attributes:
        kind: see above.
        num_experts: E.
        depth: L, the trained depth.
        share: of all experts, those that a depth of `sliding` has.
    """

    kind: Kind
    num_experts: int
    depth: int
    share: float

    @property
    def parts(self) -> tuple[Part, ...]:
        """See the class."""
        experts = self.num_experts
        if self.kind == "all":
            return (Part(0, experts, experts, 1),)
        if self.kind == "sliding":
            return (Part(0, experts, math.ceil(self.share * experts - 1e-9), self.depth),)
        last, found = math.ceil(math.log2(self.depth)), []
        for j in range(last + 1):
            first, groups = j * experts // (last + 1), min(2**j, self.depth)
            size = (j + 1) * experts // (last + 1) - first
            found.append(Part(first, size, -(-size // groups), groups))
        return tuple(found)

    @property
    def size(self) -> int:
        """n: experts of a depth."""
        return sum(part.window for part in self.parts)

    @property
    def stride(self) -> int:
        """s."""
        stride = max(1, round(GOLDEN * self.num_experts))
        while math.gcd(stride, self.num_experts) > 1:
            stride += 1
        return stride

    @functools.cached_property
    def by_depth(self) -> tuple[tuple[int, ...], ...]:
        """The experts of each depth, [L, n]."""
        return tuple(self._at(depth) for depth in range(self.depth))

    def _at(self, depth: int) -> tuple[int, ...]:
        places = []
        for part in self.parts:
            group = depth * part.groups // self.depth
            begin = part.first + group * (part.size - part.window) // max(part.groups - 1, 1)
            places += range(begin, begin + part.window)
        return tuple(place * self.stride % self.num_experts for place in places)
