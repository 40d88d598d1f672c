r"""The weighted-observation likelihood filter (DM24): outliers count less."""

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_tempered.core import Array, CompensatedSum, PyTree, check_number, matmul
from numpyro_tempered.gaussian.expectations import base
from numpyro_tempered.gaussian.expectations.base import (
    evaluate_predictors,
    predictor_covariance,
)
from numpyro_tempered.gaussian.expectations.differentiate import (
    depends_on,
    hessian_products,
)
from numpyro_tempered.gaussian.families.base import (
    Curvature,
    Gaussian,
    Rows,
    family_of,
    square_root,
)
from numpyro_tempered.online.base import (
    Data,
    Losses,
    OnlineState,
    Rule,
    layers,
    unit_of,
)
from numpyro_tempered.online.experts.grid import scale_gradients
from numpyro_tempered.online.experts.state import Experts
from numpyro_tempered.online.stream import fill_rows, round_key
from numpyro_tempered.online.stream import step as one_round
from numpyro_tempered.online.streams.standardise import Standardisation


class Weighing(NamedTuple):
    """Memory of :func:`robust`.

    Attributes:
        memory: What the rule inside accumulates.
        total: Sum of the weights of the rounds taken, of a batch the average of its rows; compensated.
        count: Number of rounds in the sum.
    """

    memory: object
    total: CompensatedSum
    count: Array  # type: ignore[assignment]


def robust(
    rule: Rule,
    threshold: float = 4.0,
    *,
    hard: bool = False,
    least: float | None = None,
) -> Rule:
    r"""A rule whose data count less the worse they were predicted: the filter WoLF.

    The loss of a datum is multiplied by W², a function of its residual r at q_t:

    .. math:: W^2 = \frac{1}{1 + r^2/c^2}, \qquad \text{or with ``hard``} \quad W^2 = 1\{r \le c\},

    c the ``threshold``: the inverse multi-quadratic and the thresholded Mahalanobis weights of DM24. A datum at a
    distance r counts as c²/(c² + r²) data, so that the influence of an outlier is bounded and vanishes as it
    moves away. On clean Gaussian data the posterior holds 94% of the evidence at c = 4, and 82% at c = 2.

    The residual is the deviance, r² = 2 (l - min l), the squared residual in noise standard deviations of a
    Gaussian likelihood: with unit noise DM24's y - ŷ, with another its Mahalanobis form. Where the ``least``
    value of the loss is given, l is that at the mean. Otherwise r² is the second-order approximation

    .. math:: r^2 = \frac{g^\top \Sigma g}{\operatorname{tr}(\Sigma H)}, \qquad g = E_q[\nabla l],
              \ H = E_q[\nabla^2 l],

    the Newton decrement that is free of Σ for a loss of one predictor, E[l']²/E[l''], there with the variance of
    the predictor at most 1: exact for squared losses,
    and the Pearson residual (y - μ)²/Var(y) of a generalised linear model with its canonical link. A tempered
    model has the residuals of its tempered loss. Losses without curvature (hinge, pinball) need ``least=0.0``.

    The rows of a batch are weighed one by one where the loss is one of predictors and the rule takes Hessian
    curvature; in all other cases the round has one weight, by its gradient or by the mean deviance of its rows.
    Outliers are data far from the *prediction*: a prior that is many residuals off the data slows learning, and
    the end of a run warns where the mean weight is below 1/2. Losses are reported unweighted.

    Args:
        rule: An online rule. Standardise outside: ``standardise(robust(rule))``.
        threshold: c, positive, in residuals.
        hard: Whether a datum counts whole or not at all.
        least: The least value of the loss of a datum, such as 0 of a hinge, pinball or Bernoulli loss, or
            log(τ √2π) of a Gaussian likelihood; None for the approximation.

    Returns:
        An online :class:`Rule`, whose memory is a :class:`Weighing`.

    Raises:
        ValueError: If a number is out of range; when traced, if the loss has no curvature and ``least`` is None.
        TypeError: At ``init``, if the rule is made by :func:`standardise` or :func:`aggregate`.

    References:
        DM24.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule, loss = nt.online.robust(nt.online.ngvi()), nt.expectations.squared(noise_scale=1.0)
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> x, y = jnp.ones((4, 1)), jnp.array([1.0, 2.0, 1e6, 1.5])
        >>> state, losses = nt.online.run(rule, loss, state, x, y)
        >>> print(f"{state.posterior.loc[0]:.2f}")
        1.10
    """
    check_number(threshold, "threshold", "(0, inf)")
    if least is not None:
        check_number(least, "least")

    def init(prior: Gaussian) -> OnlineState:
        state = rule.init(prior)
        for memory in layers(state):
            if isinstance(memory, Standardisation):
                raise TypeError(
                    "robust predicts from the features that it gets, which a standardised rule inside of it "
                    "changes: write standardise(robust(rule))."
                )
            if isinstance(memory, Experts):
                raise TypeError(
                    "each expert of an aggregate has its own residuals: make the rules of its grids robust."
                )
        total = CompensatedSum.start(jnp.zeros((), state.prior.loc.dtype))
        return state._replace(
            memory=Weighing(state.memory, total, jnp.zeros_like(state.count))
        )

    def weigh(square: Array) -> Array:
        scaled = square / jnp.square(jnp.asarray(threshold, square.dtype))
        # NaN stays NaN: such a round is rejected.
        inside = (scaled <= 1.0).astype(scaled.dtype)
        return (
            jnp.where(jnp.isnan(scaled), scaled, inside)
            if hard
            else 1.0 / (1.0 + scaled)
        )

    def step(
        expectation: base.Expectation,
        state: OnlineState,
        data: Data,
        rng_key: Array | None,
        mask: Array | None,
    ) -> tuple[OnlineState, Losses]:
        if least is None:
            check_curvature(expectation, state.posterior.loc, data)
        before, key = (
            state._replace(memory=state.memory.memory),
            round_key(expectation, state, rng_key),
        )
        filled = data if mask is None else fill_rows(data, mask)
        options = base.Options(key, mask=mask)
        by_row = expectation.predictors is not None and rule.curvature == "hessian"
        if by_row:
            weights = weigh(
                residuals(expectation, state.posterior, filled, options, least)
            )
            weighed = weigh_rows(expectation, weights)
        else:
            unit = unit_of(rule, state)
            weights = weigh(
                residual(expectation, state.posterior, unit, filled, options, least)
            )
            weighed = scale_gradients(expectation, weights)
        after, losses = one_round(rule, weighed, before, data, rng_key, mask)
        increase, memory = after.count - state.count, state.memory
        total = memory.total.add(jnp.where(increase > 0, mean_of(weights, mask), 0.0))
        return after._replace(
            memory=Weighing(after.memory, total, memory.count + increase)
        ), losses

    def update(evaluation: base.Evaluation, state: OnlineState) -> OnlineState:
        raise TypeError(
            "a robust rule weighs the data of a round before it evaluates them: use run or update."
        )

    return rule._replace(
        init=init,
        update=update,
        step=step,
        name=f"{rule.name}, robust",
        holds_evidence=False,
    )


def check_curvature(expectation: base.Expectation, theta: Array, data: Data) -> None:
    """Raise ValueError where the loss is piecewise linear, which leaves no residual without its least value."""
    loss = expectation.loss
    if loss is None:
        return

    def losses(theta: Array) -> tuple[Array, Array]:
        return loss(theta, *data), jnp.ones((), theta.dtype)

    if not depends_on(hessian_products(losses, theta), jnp.ones_like(theta)):
        raise ValueError(
            "the loss is piecewise linear, without the curvature that measures a residual: pass robust the least "
            "value of the loss, least=0.0 for hinge and pinball losses."
        )


def residuals(
    expectation: base.Expectation,
    q: Gaussian,
    data: Data,
    options: base.Options,
    least: float | None,
) -> Array:
    """The squared residual of each row, ``(n,)``, for a loss of predictors."""
    if expectation.predictors is None:
        raise TypeError(
            "the loss is not one of predictors, so that its rows have no residuals of their own."
        )
    at = expectation.predictors(
        q.loc, *data, rng_key=options.rng_key, mask=options.mask
    )
    of_u = at.moments(at.mean, _capped(predictor_covariance(q, at.jacobian)))
    if least is not None:
        return deviance(of_u.at_mean, least)
    first, second = of_u.first, of_u.second
    if first.ndim == 1:
        return ratio(jnp.square(first), second)
    return ratio(
        jnp.sum(jnp.square(first), axis=-1), jnp.trace(second, axis1=-2, axis2=-1)
    )


def _capped(spread: Array) -> Array:
    """Variances ``(n,)`` or covariances ``(n, K, K)``, scaled down to variances of at most 1.

    Under a wide prior the moments of counts are beyond any number, and all data would be outliers.
    """
    most = (
        spread
        if spread.ndim == 1
        else jnp.max(jnp.diagonal(spread, axis1=1, axis2=2), axis=1)[:, None, None]
    )
    return spread / jnp.maximum(most, 1.0)


def residual(
    expectation: base.Expectation,
    q: Gaussian,
    unit: Gaussian,
    data: Data,
    options: base.Options,
    least: float | None,
) -> Array:
    """The squared residual of a whole round, with ``unit`` for Σ."""
    if least is not None and expectation.loss is not None:
        mask = options.mask
        return mean_of(deviance(expectation.loss(q.loc, *data), least), mask)
    evaluation = expectation.evaluate(q, *data, **options._asdict())
    if least is not None:
        return deviance(evaluation.at_mean, least)
    square = family_of(unit).predictor_variance(unit, evaluation.grad_loc[None])[0]
    return ratio(square, 2.0 * trace(unit, evaluation.grad_var))


def mean_of(values: Array, mask: Array | None) -> Array:
    """The average over the rows that are on."""
    if values.ndim == 0:
        return values
    rows = base.rows_of(mask, values.shape[0])
    if rows is None:
        return jnp.mean(values)
    return jnp.sum(jnp.where(rows, values, 0.0)) / jnp.maximum(jnp.sum(rows), 1).astype(
        values.dtype
    )


def deviance(loss: Array, least: float) -> Array:
    """2 (l - least), at least 0."""
    return 2.0 * jnp.maximum(loss - jnp.asarray(least, loss.dtype), 0.0)


def ratio(square: Array, curvature: Array) -> Array:
    """Of a squared gradient to the curvature, by its size where it is negative; 0 without a gradient."""
    some = square > 0
    return jnp.where(some, square / jnp.abs(jnp.where(some, curvature, 1.0)), square)


def trace(unit: Gaussian, grad_var: Curvature) -> Array:
    """The trace of the product of a covariance and a symmetric matrix."""
    family = family_of(unit)
    if isinstance(grad_var, Rows):
        return jnp.dot(grad_var.weights, family.predictor_variance(unit, grad_var.x))
    matrix = grad_var if isinstance(grad_var, jnp.ndarray) else grad_var.dense()
    if matrix.ndim == 1:
        return jnp.dot(jnp.square(family.marginal_scale(unit)), matrix)
    root = square_root(unit)
    return jnp.sum(root * matmul(matrix, root))


def weigh_rows(expectation: base.Expectation, weights: Array) -> base.Expectation:
    """The expectation with the loss of each row multiplied by a weight ``(n,)``; its losses as they are."""
    unweighted = expectation.predictors
    if unweighted is None:
        raise TypeError(
            "the loss is not one of predictors, so that its rows have no weights of their own."
        )

    def predictors(
        theta: Array, *data: PyTree, **options: Array | None
    ) -> base.Predictors:
        at = unweighted(theta, *data, **options)

        def moments(mean: Array, spread: Array) -> base.Moments:
            of_u = at.moments(mean, spread)
            leaves = (of_u.first, of_u.second, of_u.objective)
            first, second, tempered = (
                leaf * jnp.reshape(weights, (-1,) + (1,) * (leaf.ndim - 1))
                for leaf in leaves
            )
            return of_u._replace(first=first, second=second, tempered=tempered)

        return at._replace(moments=moments)

    @base.evaluator
    def evaluate(
        q: Gaussian, data: base.Data, options: base.Options
    ) -> base.Evaluation:
        at = predictors(q.loc, *data, rng_key=options.rng_key, mask=options.mask)
        return evaluate_predictors(q, at, base.rows_of(options.mask, at.mean.shape[0]))

    return expectation._replace(evaluate=evaluate, predictors=predictors)
