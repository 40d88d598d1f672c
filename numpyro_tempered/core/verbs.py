"""Functions that run models: outside of transformations, and one thread at a time."""

import functools
import threading
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

import jax

from numpyro_tempered.core.checks import check_known

T = TypeVar("T")
P = ParamSpec("P")

# NumPyro keeps one stack of handlers for all threads: held wherever a model runs, but not where a program does.
RUNNING = threading.RLock()


def runs_models(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function that fits or judges models wait for other threads, and refuse to be transformed.

    Raises:
        TypeError: If an argument is traced, or the call is part of what is compiled.
    """

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        parts = [
            list(each.values()) if isinstance(each, Mapping) else each
            for each in (*args, *kwargs.values())
        ]
        # Under jit without a traced argument, what is made there is traced.
        check_known(
            f"{function.__name__} looks at numbers",
            parts,
            jax.device_put(0.0),
            hint=". Many fits are a Python loop, whose calls share compiled programs; nt.sparse.fit_linear, "
            "nt.sparse.fit_logistic and nt.gaussian.descent.minimise can be transformed",
        )
        with RUNNING:
            return function(*args, **kwargs)

    return alone
