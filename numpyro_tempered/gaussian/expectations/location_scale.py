"""Expected losses under location-scale families with heavier tails than the Gaussian (CA19, Proposition 1)."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    Shape,
    check_choice,
    check_count,
    check_number,
    matmul,
)
from numpyro_tempered.gaussian.expectations import base
from numpyro_tempered.gaussian.expectations.base import as_rows, linear
from numpyro_tempered.gaussian.families.base import Gaussian, family_of

# The longest step of the trapezoidal rule in log c², whose error is exp(-π²/step), and what may be cut off.
STEP, TAIL = 0.35, 1e-11


def location_scale(
    expectation: base.Expectation,
    distribution: str = "student_t",
    df: float | None = None,
    *,
    independent: bool = False,
    num_particles: int = 16,
) -> base.Expectation:
    r"""The expected loss for θ = m + S z, where z is no Gaussian but has covariance I.

    A location-scale family has one density of z for all m and S, and if the loss is convex in θ, its expectation
    is convex in (m, S); the loss L-Lipschitz and z of covariance I, it is L-Lipschitz. That is all that the
    theorems on :func:`~numpyro_tempered.online.sva`, :func:`~numpyro_tempered.online.svb` and
    :func:`~numpyro_tempered.online.oga_el` ask of the family, so these rules run with this expectation, and
    their bounds hold: a ``MeanField`` or ``FullRank`` then stands for location and scale of θ. Its KL is
    still that of Gaussians, as the measure of distance from the prior (a Student-t's is at most that of the
    Gaussians with df/(df - 2) times the squared distance of the means). Rules in natural parameters
    (:func:`~numpyro_tempered.online.ngvi`, ``ewa``, ``rvga``) would leave the family: not for them.

    z is a Gaussian of random size, z = c n, so that every predictor x·θ has the same density: with
    c² = (df - 2)/χ² a multivariate Student-t, with c² exponential a multivariate Laplace. Coordinates of z are
    uncorrelated, but large together. The integral over log c² is a trapezoidal rule, accurate to about 10^-10.

    The mean-field family proper has ``independent`` coordinates, z_j = c_j n_j with a size each, and a
    ``MeanField`` for m and σ. The predictor then has no density in closed form: the sizes are drawn, and the
    loss is integrated given them, so that value and gradients are unbiased and need an ``rng_key``. The bounds
    then hold in expectation over the draws.

    Args:
        expectation: Of a loss of a linear predictor: ``hinge()``, ``gauss_hermite(loss)`` and so on.
        distribution: ``"student_t"`` or ``"laplace"``.
        df: Degrees of freedom of the Student-t, at least 3.
        independent: Whether each coordinate of z has its own size.
        num_particles: Draws of the d sizes per round, where they are independent.

    Returns:
        An :class:`Expectation`; its ``grad_var`` is the derivative in the covariance of θ, of independent
        coordinates that in their variances.

    Raises:
        TypeError: If the expectation is not one of a linear predictor, or draws; when traced, if q is no
            ``MeanField`` and the coordinates are independent.
        ValueError: If ``distribution`` is another, or ``df`` is missing, out of range, or given for a Laplace.

    References:
        CA19, Proposition 1; J. Domke, *Provable smoothness guarantees for black-box variational inference*, 2020,
        Theorem 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> heavy = nt.expectations.location_scale(nt.expectations.hinge(), "student_t", df=4.0)
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> value = jax.jit(heavy.evaluate)(q, jnp.array([3.0, 4.0]), 1.0)
        >>> print(f"{value.at_mean:.3f} {value.expected:.3f}")
        1.000 2.320
    """
    of_predictor = getattr(expectation, "of_predictor", None)
    if of_predictor is None or expectation.needs_key:
        raise TypeError(
            "location_scale needs the expectation of a linear predictor's loss, such as hinge() or "
            "gauss_hermite(loss), in closed form or by quadrature."
        )
    if (
        check_choice(distribution, "distribution", ("student_t", "laplace"))
        == "student_t"
    ):
        if df is None:
            raise ValueError(
                "a Student-t needs df, its degrees of freedom, at least 3."
            )
        df = float(
            check_number(
                df, "df", "[3, inf)", hint="Below 3 the tails take too many nodes."
            )
        )
    elif df is not None:
        raise ValueError("a Laplace distribution has no df: leave it out.")
    if independent:
        if of_predictor.num_outputs is not None:
            raise TypeError(
                "independent coordinates are for the loss of one predictor, not of K."
            )
        return _independent(
            expectation, df, check_count(num_particles, "num_particles")
        )
    moments = _mixed_moments(of_predictor.moments, df)
    return linear(
        moments,
        of_predictor.loss,
        num_outputs=of_predictor.num_outputs,
        check=expectation.check,
        quadratic=False,
    )


@functools.lru_cache(maxsize=256)
def _independent(
    expectation: base.Expectation, df: float | None, num_particles: int
) -> base.Expectation:
    """The expectation with a size c_j for each coordinate: given these, u is N(m·x, Σ c_j² σ_j² x_j²)."""
    moments = expectation.of_predictor.moments  # type: ignore[union-attr]

    @base.evaluator
    def evaluate(
        q: Gaussian, data: base.Data, options: base.Options
    ) -> base.Evaluation:
        _refuse_fisher(options)
        if not family_of(q).diagonal_only:
            raise TypeError(
                f"independent coordinates need a MeanField for location and scale, got {family_of(q).name}: "
                "leave independent out."
            )
        x, y = as_rows(q.loc, *data)
        key = base.require_key("location_scale", options.rng_key)
        c2 = _draw_sizes(key, df, (num_particles, x.shape[-1])).astype(x.dtype)
        variance = matmul(c2 * family_of(q).marginal_scale(q) ** 2, jnp.square(x).T)
        each = jax.vmap(lambda spread: moments(matmul(x, q.loc), spread, y, options))(
            variance
        )
        mask = base.rows_of(options.mask, x.shape[0])
        at_mean = base.zero_where_off(each.at_mean[0], mask)
        expected, first = (
            base.zero_where_off(jnp.mean(leaf, axis=0), mask)
            for leaf in (each.expected, each.first)
        )
        second = each.second if mask is None else jnp.where(mask, each.second, 0.0)
        grad_var = 0.5 * jnp.mean(c2 * matmul(second, jnp.square(x)), axis=0)
        return base.Evaluation(
            jnp.sum(at_mean), jnp.sum(expected), matmul(first, x), grad_var
        )

    return base.Expectation(
        evaluate, check=expectation.check, loss=expectation.loss, needs_key=True
    )


def _draw_sizes(rng_key: Array, df: float | None, shape: Shape) -> Array:
    """Draws of c²."""
    if df is None:
        return jax.random.exponential(rng_key, shape)
    return (0.5 * df - 1.0) / jax.random.gamma(rng_key, 0.5 * df, shape)


def _refuse_fisher(options: base.Options) -> None:
    """Raise TypeError for Fisher curvature."""
    if options.curvature == "fisher":
        raise TypeError(
            "location_scale is for rules in mean and scale, which take the Hessian, not Fisher curvature."
        )


@functools.lru_cache(maxsize=256)
def _mixed_moments(moments: base.MomentsOf, df: float | None) -> base.MomentsOf:
    """Moments for a predictor mean + √variance c n: those for variances c² variance, averaged over c²."""
    sizes, masses = _student_t_rule(df) if df is not None else _laplace_rule()

    def mixed(
        mean: Array, variance: Array, y: Array, options: base.Options
    ) -> base.Moments:
        _refuse_fisher(options)
        c2, weights = (jnp.asarray(column, mean.dtype) for column in (sizes, masses))
        each = jax.vmap(lambda size: moments(mean, size * variance, y, options))(c2)

        def average(values: Array, weights: Array = weights) -> Array:
            return jnp.tensordot(weights, values, axes=1)

        # ``second`` is twice the derivative in the variance, into which c² enters as a factor.
        return each._replace(
            at_mean=each.at_mean[0],
            expected=average(each.expected),
            first=average(each.first),
            second=average(each.second, weights * c2),
            tempered=None,
        )

    return mixed


def _student_t_rule(df: float) -> tuple[np.ndarray, np.ndarray]:
    """Values of c² = (df - 2)/χ², and their masses."""
    # In t = log χ² - log df, of standard deviation √(2/df) where df is large.
    t = np.arange(
        math.log(TAIL) / (0.5 * df - 1.0) - 3.0,
        5.0,
        min(STEP, 0.6 * math.sqrt(2.0 / df)),
    )
    return _rule((df - 2.0) / df * np.exp(-t), np.exp(0.5 * df * (t - np.expm1(t))))


def _laplace_rule() -> tuple[np.ndarray, np.ndarray]:
    """Values of c², exponential with mean 1, and their masses."""
    t = np.arange(math.log(TAIL), 5.0, STEP)
    return _rule(np.exp(t), np.exp(t - np.exp(t)))


def _rule(sizes: np.ndarray, masses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nodes that count, with masses that add up to 1 and a mean of 1."""
    counts = masses * np.maximum(sizes, 1.0)
    sizes, masses = (
        sizes[counts > TAIL * counts.max()],
        masses[counts > TAIL * counts.max()],
    )
    masses = masses / masses.sum()
    return sizes / (masses @ sizes), masses
