"""Arithmetic in single precision: a pass that Numba runs over the user's functions, and the operators that it puts in.

Numba's own rules, which are numpy's, make a float64 of an int and a float32. Then one whole number in a formula would
double the width of all that follows, and halve the lanes that a vector instruction steps.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv)
COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
BY_FUNCTION = (operator.mod, operator.floordiv, operator.pow)  # those of floats are calls of the C library otherwise


def is_number(kind: Any) -> bool:
    """Say whether a type of Numba's is a real number or a bool."""
    from numba import types

    return isinstance(kind, types.Integer | types.Float | types.Boolean)


def is_single(kinds: Any, divides: bool = False) -> bool:
    """Say whether an operation on such numbers is done in 32 bits."""
    from numba import types

    return all(map(is_number, kinds)) and (divides or any(isinstance(kind, types.Float) for kind in kinds))


@functools.cache
def operators() -> dict[Any, Any]:
    """Return the operators that stand in for Python's."""
    from shoal.compiled.single.functions import floor_divided, power, remainder

    made = {one: _operator(one) for one in (*ARITHMETIC, *COMPARISONS)}
    return {**made, operator.mod: remainder(), operator.floordiv: floor_divided(), operator.pow: power()}


def _operator(function: Any) -> Any:
    from numba import types
    from numba.extending import intrinsic

    compares = function in COMPARISONS

    def build(typing_context: Any, a: Any, b: Any) -> Any:
        kinds = [types.unliteral(kind) for kind in (a, b)]
        if is_single(kinds, function is operator.truediv):
            own = (types.boolean if compares else types.float32)(types.float32, types.float32)
        else:
            own = typing_context.resolve_function_type(function, (a, b), {})
            if own is None:
                return None

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pairs = zip(args, signature.args, own.args, strict=True)
            given = [context.cast(builder, value, kind, wanted) for value, kind, wanted in pairs]
            return context.get_function(function, own)(builder, given)

        return own.return_type(a, b), generate

    return intrinsic(build)


@functools.cache
def compiler_class() -> Any:
    """Return Numba's compiler with one more pass."""
    from numba.core import ir, postproc
    from numba.core.compiler import CompilerBase, DefaultPassBuilder
    from numba.core.compiler_machinery import FunctionPass, register_pass
    from numba.core.ir_utils import mk_unique_var
    from numba.core.untyped_passes import IRProcessing

    @register_pass(mutates_CFG=False, analysis_only=False)
    class Narrow(FunctionPass):  # type: ignore[misc]
        """Replaces operators by those for single precision."""

        _name = "shoal_single_precision"

        def __init__(self) -> None:
            FunctionPass.__init__(self)

        def run_pass(self, state: Any) -> bool:
            for block in state.func_ir.blocks.values():
                block.body = [new for one in block.body for new in self._replaced(block, one, state.func_ir)]
            postproc.PostProcessor(state.func_ir).run()
            return True

        def _replaced(self, block: Any, statement: Any, func_ir: Any) -> list[Any]:
            value = getattr(statement, "value", None)
            if not isinstance(value, ir.Expr) or value.op not in ("binop", "inplace_binop"):
                return [statement]
            function = value.fn if value.op == "binop" else value.immutable_fn
            if function not in operators():
                return [statement]
            name = ir.Var(block.scope, mk_unique_var("shoal_operator"), statement.loc)
            found = ir.FreeVar(0, function.__name__, operators()[function], statement.loc)
            func_ir._definitions[name.name].append(found)
            call = ir.Expr.call(name, (value.lhs, value.rhs), (), statement.loc)
            definitions = func_ir._definitions[statement.target.name]
            definitions[:] = [call if one is value else one for one in definitions]
            statement.value = call
            return [ir.Assign(found, name, statement.loc), statement]

    class Compiler(CompilerBase):  # type: ignore[misc]
        """Compiles the user's functions in single precision."""

        def define_pipelines(self) -> list[Any]:
            builder = DefaultPassBuilder.define_nopython_pipeline(self.state)
            builder.add_pass_after(Narrow, IRProcessing)
            builder.finalize()
            return [builder]

    return Compiler
