"""About how many operations a program does, and how it is compiled for so many."""

import math
import os
from typing import Any

import jax
import jax.extend.core

# Programs of at most this many operations on single numbers, in all their runs, lose tens of milliseconds without
# LLVM's passes, which take a tenth of a second or more. A loop of unknown length counts as this many rounds.
FEW_OPERATIONS, ROUNDS = 5e7, 30
# What loses at level 0 as many additions do, as measured.
_FACTORS = {
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "digamma", "erf_inv"),
        25,
    ),
    **dict.fromkeys(("lgamma", "bessel_i0e", "bessel_i1e"), 50),
    "sort": 100,
    **dict.fromkeys(
        ("igamma", "igammac", "regularized_incomplete_beta", "polygamma", "zeta"), 500
    ),
    "random_gamma": 1500,
}


def compiler_options(num_operations: float) -> dict[str, int] | None:
    """On a CPU the passes of LLVM's first level alone: a third less to compile, and as fast.

    For few operations, on single numbers and in all runs, none at all: another third less, and up to eight times
    as long to run.
    """
    is_set = "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", "")
    if is_set or jax.default_backend() != "cpu":
        return None
    return {"xla_backend_optimization_level": int(num_operations > FEW_OPERATIONS)}


def count_operations(jaxpr: Any) -> float:
    """About how many operations on single numbers a program does."""
    total = 0.0
    for equation in jaxpr.eqns:
        parts = jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda part: isinstance(
                part, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr
            ),
        )
        inner = [
            getattr(part, "jaxpr", part) for part in parts if hasattr(part, "eqns")
        ]
        if inner:
            rounds = equation.params.get(
                "length", ROUNDS if equation.primitive.name == "while" else 1
            )
            total += rounds * sum(map(count_operations, inner))
        else:
            total += sum(map(_size, equation.outvars)) * _factor(equation)
    return total


def _size(variable: Any) -> int:
    return math.prod(getattr(variable.aval, "shape", ()))


def _factor(equation: Any) -> int:
    """How many operations a number of its result takes."""
    name = equation.primitive.name
    if name == "dot_general":
        (axes, _), _ = equation.params["dimension_numbers"]
        return math.prod(equation.invars[0].aval.shape[axis] for axis in axes)
    return _FACTORS.get(name, 1)
