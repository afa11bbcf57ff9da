"""FLOPs of the matrix products of a lowered program, read from its StableHLO.

XLA's own cost analysis counts the body of a loop once whatever its trip count, so the module is walked here: loops
are multiplied by their trip counts, calls are followed, and a region that is manual over mesh axes is
multiplied by their size, so that the result is the work of all devices together.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo

Bindings = dict[tuple[Any, int], tuple[Any, Any]]
"""(block, argument number) -> the value passed for it, or a number, and the bindings that value is read under."""

_PASS_THROUGH = ("stablehlo.convert", "stablehlo.reshape", "stablehlo.optimization_barrier")
_ARITHMETIC = {
    "stablehlo.add": operator.add,
    "stablehlo.subtract": operator.sub,
    "stablehlo.multiply": operator.mul,
    "stablehlo.remainder": lambda a, b: int(math.fmod(a, b)),
}
_UNCOUNTED = ("stablehlo.convolution", "chlo.ragged_dot", "stablehlo.dot")


def matmul_flops(lowered: jax.stages.Lowered) -> int:
    """2 per multiply-add of every `dot_general` the program executes.

    Of the branches of a conditional that one counts which a fixed counter of a loop chooses; else the most expensive.

    Raises:
        ValueError: a loop's trip count isn't fixed by the program, or it holds a product this counter doesn't know.
    """
    module = lowered.compiler_ir("stablehlo")
    if module is None:
        raise ValueError("this program can't be lowered to StableHLO")
    with module.context:
        return _Counter(module).count_main()


class _Counter:
    def __init__(self, module: Any):
        operations = [each.operation for each in module.body.operations]
        self._functions = {_symbol(op, "sym_name"): op for op in operations if op.name == "func.func"}
        self._meshes = {_symbol(op, "sym_name"): _axis_sizes(op) for op in operations if op.name == "sdy.mesh"}

    def count_main(self) -> int:
        return self._block(_entry(self._functions["main"]), {})

    def _block(self, block: Any, bindings: Bindings) -> int:
        return sum(self._operation(each.operation, bindings) for each in block.operations)

    def _operation(self, op: Any, bindings: Bindings) -> int:
        if op.name == "stablehlo.dot_general":
            return _dot_flops(op)
        if op.name in _UNCOUNTED:
            raise ValueError(f"the program holds {op.name}, which isn't counted; write it as dot_general")
        if op.name == "func.call":
            block = _entry(self._functions[_symbol(op, "callee")])
            return self._block(block, _bind(block, op.operands, bindings))
        if op.name == "stablehlo.while":
            return self._loop(op, bindings)
        if op.name in ("stablehlo.case", "stablehlo.if"):
            return self._conditional(op, bindings)
        if op.name == "sdy.manual_computation":
            block = op.regions[0].blocks[0]
            return self._devices(op) * self._block(block, _bind(block, op.operands, bindings))
        return sum(self._block(block, bindings) for region in op.regions for block in region.blocks)

    def _loop(self, op: Any, bindings: Bindings) -> int:
        body, inside, trips = op.regions[1].blocks[0], _bind_invariant(op, bindings), self._trips(op, bindings)
        if not self._has_conditionals(body):
            return trips * self._block(body, inside)
        # One branch may be taken in some of the iterations, and another in others, as a counter says.
        count, values = 0, self._known(op.operands, bindings)
        for _ in range(trips):
            turn = inside | {(body, number): (value, {}) for number, value in values.items()}
            count += self._block(body, turn)
            values = self._known(_last(body).operands, turn)
        return count

    def _known(self, values: Any, bindings: Bindings) -> dict[int, int]:
        """Of these values the integers that the program fixes, by place."""
        found = {}
        for number, value in enumerate(values):
            if str(value.type) == "tensor<i32>":
                with contextlib.suppress(ValueError):
                    found[number] = self._integer(value, bindings)
        return found

    def _conditional(self, op: Any, bindings: Bindings) -> int:
        try:
            chosen = self._integer(op.operands[0], bindings)
        except ValueError:  # it depends on an input of the program
            return max(self._block(region.blocks[0], bindings) for region in op.regions)
        if op.name == "stablehlo.if":
            chosen = 1 - chosen
        chosen = chosen if 0 <= chosen < len(op.regions) else len(op.regions) - 1
        return self._block(op.regions[chosen].blocks[0], bindings)

    def _has_conditionals(self, block: Any) -> bool:
        for each in block.operations:
            op = each.operation
            called = [_entry(self._functions[_symbol(op, "callee")])] if op.name == "func.call" else []
            inner = [inner for region in op.regions for inner in region.blocks]
            if op.name in ("stablehlo.case", "stablehlo.if") or any(map(self._has_conditionals, (*called, *inner))):
                return True
        return False

    def _trips(self, loop: Any, bindings: Bindings) -> int:
        """Iterations of `while (i < limit)` with i growing by a constant: the loops jax makes of scan and fori_loop."""
        condition, body = (region.blocks[0] for region in loop.regions)
        test = _last(condition).operands[0].owner
        if (
            _is_block(test)
            or test.name != "stablehlo.compare"
            or "LT" not in str(test.attributes["comparison_direction"])
        ):
            raise ValueError("a loop of the program doesn't count up to a limit, so its trip count isn't known")
        counter = test.operands[0]
        if not _is_block(counter.owner):
            raise ValueError("a loop of the program tests something other than its counter")
        number = ir.BlockArgument(counter).arg_number
        limit = self._integer(test.operands[1], _bind(condition, loop.operands, bindings))
        start = self._integer(loop.operands[number], bindings)
        update = _last(body).operands[number].owner
        if _is_block(update) or update.name != "stablehlo.add":
            raise ValueError("a loop of the program doesn't count by a constant step")
        step = self._integer(next(each for each in update.operands if each != body.arguments[number]), {})
        return max(0, -(-(limit - start) // step))

    def _integer(self, value: Any, bindings: Bindings) -> int:
        """The number that an integer or truth value stands for."""
        if isinstance(value, int):
            return value
        owner = value.owner
        if _is_block(owner):
            key = (owner, ir.BlockArgument(value).arg_number)
            if key in bindings:
                return self._integer(*bindings[key])
        elif owner.name == "stablehlo.constant":
            return int(ir.DenseIntElementsAttr(owner.attributes["value"])[0])
        elif owner.name in _PASS_THROUGH:
            return self._integer(owner.operands[0], bindings)
        elif owner.name == "func.call":
            block = _entry(self._functions[_symbol(owner, "callee")])
            returned = _last(block).operands[ir.OpResult(value).result_number]
            return self._integer(returned, _bind(block, owner.operands, bindings))
        elif owner.name in _ARITHMETIC:
            return _ARITHMETIC[owner.name](*(self._integer(each, bindings) for each in owner.operands))
        elif owner.name == "stablehlo.compare" and "EQ" in str(owner.attributes["comparison_direction"]):
            return int(operator.eq(*(self._integer(each, bindings) for each in owner.operands)))
        raise ValueError("a loop's trip count depends on an input of the program; count it at a fixed depth")

    def _devices(self, op: Any) -> int:
        """Devices that each execute the region: the product of its manual axes."""
        sizes = {axis: size for mesh in self._meshes.values() for axis, size in mesh.items()}
        manual = re.findall(r'"([^"]+)"', str(op.attributes["manual_axes"]))
        return math.prod(sizes[axis] for axis in manual)


def _dot_flops(op: Any) -> int:
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    left = ir.RankedTensorType(op.operands[0].type).shape
    contracted = math.prod(left[axis] for axis in numbers.lhs_contracting_dimensions)
    return 2 * contracted * math.prod(ir.RankedTensorType(op.results[0].type).shape)


def _bind(block: Any, values: Any, bindings: Bindings) -> Bindings:
    """The bindings inside a region: what is visible outside, and each argument bound to the value passed for it."""
    passed = {(block, number): (value, bindings) for number, value in enumerate(values)}
    return {**bindings, **passed}


def _bind_invariant(loop: Any, bindings: Bindings) -> Bindings:
    """As `_bind`, for a loop's body: only arguments that no iteration changes keep their first value."""
    body = loop.regions[1].blocks[0]
    inside = dict(bindings)
    for number, (value, returned) in enumerate(zip(loop.operands, _last(body).operands, strict=True)):
        if returned == body.arguments[number]:
            inside[(body, number)] = (value, bindings)
    return inside


def _is_block(owner: Any) -> bool:
    return isinstance(owner, ir.Block)


def _entry(function: Any) -> Any:
    return function.regions[0].blocks[0]


def _last(block: Any) -> Any:
    return block.operations[len(block.operations) - 1].operation


def _symbol(op: Any, name: str) -> str:
    return str(op.attributes[name]).strip('@"')


def _axis_sizes(mesh: Any) -> dict[str, int]:
    axes = sdy.MeshAttr(mesh.attributes["mesh"]).axes
    parsed = [sdy.MeshAxisAttr(axis) for axis in axes]
    return {axis.name: axis.size for axis in parsed}
