"""A grid of one rule, whose experts run under one vmap."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Columns,
    Params,
    PyTree,
    check_numbers,
)
from numpyro_tempered.gaussian.expectations import base
from numpyro_tempered.gaussian.families.base import Gaussian, Rows, Whitened, family_of
from numpyro_tempered.online.base import Data, OnlineState, Rule


class Grid(NamedTuple):
    """A grid of one rule; made by :func:`grid`.

    Attributes:
        factory: From options to a rule.
        constants: Options that all experts share.
        options: Options that differ, each an array ``(K,)`` with one value for each expert; ``prior_scale`` and
            ``alpha`` are among them.
        labels: Names of the experts, ``(K,)``.
    """

    factory: Callable[..., Rule]
    constants: dict[str, object]
    options: Columns
    labels: tuple[str, ...]

    def rule(self, values: Mapping[str, ArrayLike]) -> Rule:
        """The rule of one expert, whose options have these values, traced or not."""
        return self.factory(
            **self.constants,
            **{name: v for name, v in values.items() if name not in OUTER},
        )

    def values(self, index: int) -> dict[str, float]:
        """The options of one expert, as numbers."""
        return {name: values[index].item() for name, values in self.options.items()}

    def arrays(self, dtype: np.dtype) -> Params:
        """The options as arrays, real ones in this type."""
        return {
            name: jnp.asarray(v, dtype if np.issubdtype(v.dtype, np.floating) else None)
            for name, v in self.options.items()
        }


# Options of the expert that its rule does not see.
OUTER = ("prior_scale", "alpha")


def grid(
    factory: Callable[..., Rule],
    *,
    prior_scale: ArrayLike = 1.0,
    alpha: ArrayLike = 1.0,
    **options: object,
) -> Grid:
    r"""A grid of one rule: the product of all options that are sequences of numbers.

    The experts run under one ``jax.vmap``, with their options traced: a factory may be a rule's own, or any
    function of numbers that returns a rule, such as ``lambda c: nt.online.oga(lambda t: c / jnp.sqrt(t))``.

    Args:
        factory: A function that returns a rule, such as :func:`ngvi`.
        prior_scale: Factors of the prior's standard deviations, one or a sequence.
        alpha: Powers of the likelihood (tempering), one or a sequence: they multiply the gradients, the losses
            that are reported and that weigh the experts stay untempered.
        **options: Arguments of the factory. Lists, tuples, ranges and arrays ``(n,)`` are axes of the grid;
            numbers, strings, boxes and everything else are the same for all experts.

    Returns:
        A :class:`Grid`, for :func:`aggregate`.

    Raises:
        ValueError: If a sequence is empty or not of one axis, a prior scale or alpha is not positive, or the
            factory refuses an expert.
        TypeError: If a sequence is not of numbers, or the factory returns no rule.

    Example:
        >>> import numpyro_tempered as nt
        >>> grid = nt.online.grid(nt.online.ngvi, step_size=[0.5, 1.0], prior_scale=[1.0, 4.0])
        >>> grid.labels[1]
        'ngvi(step_size=0.5, prior_scale=4)'
    """
    outer = {"prior_scale": np.atleast_1d(prior_scale), "alpha": np.atleast_1d(alpha)}
    sequences = {name: value for name, value in options.items() if _is_sequence(value)}
    constants = {
        name: value for name, value in options.items() if name not in sequences
    }
    axes = {name: _axis(name, value) for name, value in (sequences | outer).items()}
    for name in OUTER:
        check_numbers(axes[name], name, "(0, inf)")
    product = np.meshgrid(*axes.values(), indexing="ij")
    unnamed = Grid(
        factory,
        constants,
        {name: p.ravel() for name, p in zip(axes, product, strict=True)},
        (),
    )
    experts = [unnamed.values(k) for k in range(product[0].size)]
    rules = [unnamed.rule(values) for values in experts]
    if not all(isinstance(rule, Rule) for rule in rules):
        raise TypeError(
            f"the factory must return an online rule, got {type(rules[0]).__name__}."
        )
    # A name has the options that differ, and the constants that the caller gave.
    varying = [name for name, values in axes.items() if len(values) > 1]
    words = [
        f"{name}={value}"
        for name, value in constants.items()
        if isinstance(value, str | int | float)
    ]
    labels = [
        f"{rule.name}({', '.join([f'{name}={values[name]:.4g}' for name in varying] + words)})"
        for rule, values in zip(rules, experts, strict=True)
    ]
    return unnamed._replace(labels=tuple(labels))


def _is_sequence(value: object) -> bool:
    # A NamedTuple, such as a box or a rate, is one value.
    is_record = isinstance(value, tuple) and hasattr(value, "_fields")
    return not is_record and (
        isinstance(value, list | tuple | range) or getattr(value, "ndim", 0) > 0
    )


def _axis(name: str, value: object) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "if":
        raise TypeError(
            f"{name} must be a sequence of numbers, got dtype {array.dtype}: give each value a grid of its own, "
            "aggregate takes several."
        )
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"{name} must be a number or a sequence of some, got shape {array.shape}."
        )
    return array


def init_experts(grid: Grid, prior: Gaussian) -> OnlineState:
    """The states of all experts before the first round, stacked."""
    # Not every family has the same covariance times a number.
    family, scales = family_of(prior), bool(np.any(grid.options["prior_scale"] != 1.0))

    def one(values: Params) -> OnlineState:
        wide = (
            family.with_root(prior.loc, family.root(prior) * values["prior_scale"])
            if scales
            else prior
        )
        return grid.rule(values).init(wide)

    return jax.vmap(one)(grid.arrays(prior.loc.dtype))


def scale_gradients(expectation: base.Expectation, alpha: Array) -> base.Expectation:
    """The expectation with its gradients multiplied by alpha, its losses as they are."""

    def evaluate(q: Gaussian, data: Data, options: base.Options) -> base.Evaluation:
        evaluation = expectation.evaluate(q, *data, **options._asdict())
        curvature = evaluation.grad_var
        scaled = (
            curvature.scaled(alpha)
            if isinstance(curvature, Rows | Whitened)
            else alpha * curvature
        )
        tempered = alpha * evaluation.objective
        return evaluation._replace(
            grad_loc=alpha * evaluation.grad_loc, grad_var=scaled, tempered=tempered
        )

    def predictors(
        unscaled: base.PredictorsAt,
        theta: Array,
        *data: PyTree,
        rng_key: Array | None,
        mask: Array | None,
    ) -> base.Predictors:
        at = unscaled(theta, *data, rng_key=rng_key, mask=mask)

        def moments(mean: Array, spread: Array) -> base.Moments:
            of_u = at.moments(mean, spread)
            first, second, tempered = (
                alpha * leaf for leaf in (of_u.first, of_u.second, of_u.objective)
            )
            return of_u._replace(first=first, second=second, tempered=tempered)

        return at._replace(moments=moments)

    of_data = (
        None
        if expectation.predictors is None
        else partial(predictors, expectation.predictors)
    )
    return expectation._replace(evaluate=base.evaluator(evaluate), predictors=of_data)
