"""A grid of one rule, whose members run under one vmap."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.expectations.base import Evaluation, Expectation
from numpyro_tempered.gaussian.families.base import Rows
from numpyro_tempered.online.base import OnlineState, Rule


class Sweep(NamedTuple):
    """A grid of one rule; made by :func:`sweep`.

    Attributes:
        factory: From options to a rule.
        fixed: Options that all members share.
        swept: Options that differ, each an array ``(K,)`` with one value a member; ``prior_scale`` and ``alpha``
            are among them.
        labels: Names of the members, ``(K,)``.
    """

    factory: Callable[..., Rule]
    fixed: dict[str, Any]
    swept: dict[str, np.ndarray]
    labels: tuple[str, ...]

    def rule(self, values: dict[str, Any]) -> Rule:
        """The rule of one member, whose swept options have these values, traced or not."""
        return self.factory(**self.fixed, **{name: v for name, v in values.items() if name not in AROUND})

    def values(self, dtype: Any) -> dict[str, Array]:
        """The swept options as arrays, real ones in this type."""
        return {
            name: jnp.asarray(v, dtype if np.issubdtype(v.dtype, np.floating) else None)
            for name, v in self.swept.items()
        }


# Options of the member that its rule does not see.
AROUND = ("prior_scale", "alpha")


def sweep(factory: Callable[..., Rule], *, prior_scale: Any = 1.0, alpha: Any = 1.0, **options: Any) -> Sweep:
    r"""A grid of one rule: the product of all options that are sequences of numbers.

    The members run under one ``jax.vmap``, with their options traced: a factory may be a rule's own, or any
    function of numbers that returns a rule, such as ``lambda c: nt.online.oga(lambda t: c / jnp.sqrt(t))``.

    Args:
        factory: A function that returns a rule, such as :func:`ngvi`.
        prior_scale: Factors of the prior's standard deviations, one or a sequence.
        alpha: Powers of the likelihood (tempering), one or a sequence: they multiply the gradients, the losses
            that are reported and weighed stay untempered.
        **options: Arguments of the factory. Lists, tuples, ranges and arrays ``(n,)`` are swept; numbers,
            strings, boxes and everything else are the same for all members.

    Returns:
        A :class:`Sweep`, for :func:`aggregate`.

    Raises:
        ValueError: If a sequence is empty or not of one axis, a prior scale or alpha is not positive, or the
            factory refuses a member.
        TypeError: If a sequence is not of numbers, or the factory returns no rule.

    Example:
        >>> import numpyro_tempered as nt
        >>> grid = nt.online.sweep(nt.online.ngvi, step_size=[0.5, 1.0], prior_scale=[1.0, 4.0])
        >>> grid.labels[1]
        'ngvi(step_size=0.5, prior_scale=4)'
    """
    axes, fixed = {}, {}
    for name, value in {**options, "prior_scale": prior_scale, "alpha": alpha}.items():
        if name in AROUND or _is_sequence(value):
            axes[name] = _numbers(name, np.atleast_1d(value) if name in AROUND else value)
        else:
            fixed[name] = value
    for name in AROUND:
        if not (np.all(axes[name] > 0) and np.all(np.isfinite(axes[name]))):
            raise ValueError(f"{name} must be positive and finite, got {axes[name]}.")
    product = np.meshgrid(*axes.values(), indexing="ij")
    swept = {name: grid.ravel() for name, grid in zip(axes, product, strict=True)}
    made = Sweep(factory, fixed, swept, ())
    rules = [made.rule(values) for values in _rows(swept)]
    if not all(isinstance(rule, Rule) for rule in rules):
        raise TypeError(f"the factory must return an online rule, got {type(rules[0]).__name__}.")
    # What all members share is not worth a word in their names.
    named = [name for name, values in axes.items() if len(values) > 1]
    words = [f"{name}={value}" for name, value in fixed.items() if isinstance(value, str | int | float)]
    labels = [
        f"{rule.name}({', '.join([f'{name}={values[name]:.4g}' for name in named] + words)})"
        for rule, values in zip(rules, _rows(swept), strict=True)
    ]
    return made._replace(labels=tuple(labels))


def _is_sequence(value: Any) -> bool:
    # A NamedTuple, such as a box or a rate, is one value.
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return False
    return isinstance(value, list | tuple | range) or (hasattr(value, "ndim") and value.ndim > 0)


def _numbers(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "if":
        raise TypeError(
            f"{name} is a sequence of what are not numbers: give each value a sweep of its own, "
            "aggregate takes several."
        )
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a number or a sequence of some, got shape {array.shape}.")
    return array


def _rows(swept: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    size = len(next(iter(swept.values())))
    return [{name: values[k].item() for name, values in swept.items()} for k in range(size)]


def init_members(grid: Sweep, prior: Any) -> OnlineState:
    """The states of all members before the first round, stacked."""

    def one(values: dict[str, Array]) -> OnlineState:
        return grid.rule(values).init(widen(prior, values["prior_scale"]))

    return jax.vmap(one)(grid.values(prior.loc.dtype))


def widen(prior: Any, factor: Array) -> Any:
    """A MeanField or FullRank prior with its standard deviations multiplied."""
    loc, spread = prior
    return type(prior)(loc, spread * factor)


def tempered(expectation: Expectation, alpha: Array) -> Expectation:
    """The expectation with its gradients multiplied by alpha, its losses as they are."""

    def evaluate(*args: Any, **options: Any) -> Evaluation:
        found = expectation.evaluate(*args, **options)
        curvature = found.grad_var
        if isinstance(curvature, Rows):
            curvature = curvature._replace(weights=alpha * curvature.weights)
        else:
            curvature = alpha * curvature
        return found._replace(grad_loc=alpha * found.grad_loc, grad_var=curvature)

    return expectation._replace(evaluate=evaluate)
