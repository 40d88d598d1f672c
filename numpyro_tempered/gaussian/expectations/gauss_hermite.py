"""Gauss-Hermite quadrature over a predictor."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, check_count, one_for_equal
from numpyro_tempered.gaussian.expectations import base
from numpyro_tempered.gaussian.expectations.differentiate import (
    LossesOfPredictors,
    slopes,
)
from numpyro_tempered.gaussian.expectations.integrals import Integral, of_integral
from numpyro_tempered.gaussian.expectations.outputs import average, product_rule

# Beyond this numpy's nodes and weights overflow.
MAX_NODES = 350


@one_for_equal
def gauss_hermite(
    loss: base.Loss | None = None,
    *,
    predictor: str | None = None,
    num_nodes: int = 20,
    num_outputs: int | None = None,
) -> base.Expectation:
    r"""Expected loss of a linear predictor by quadrature, in one dimension or few.

    The predictor of a datum is u = x·θ ~ N(m·x, s²), s² = Σ σ_j² x_j². The gradient in the means is
    x E[l'(u)], in the variances x² E[l''(u)]/2, with E[l''] = E[l'(u)(u - m·x)]/s² by Stein's
    identity, valid for losses with kinks too. Fisher curvature is x² E[l'(u)²]. Exact to rounding
    for losses that are polynomials of degree up to ``2 * num_nodes - 1``, or ``num_nodes`` for Fisher
    curvature; for a wide predictor take more nodes (logistic loss at s = 5: 20 nodes err by 2.5e-3, 80 by
    5e-6).

    Two uses:

    - a bare loss, ``gauss_hermite(loss)``: data are ``x`` of shape ``(d,)`` or ``(n, d)`` and ``y``,
      scalar or ``(n,)``;
    - a NumPyro model that names its predictor by ``numpyro.deterministic("eta", ...)``,
      ``gauss_hermite(predictor="eta")``: any model whose likelihood depends on its parameters only through
      that site, datum by datum. Exact to quadrature where the predictor is affine in the
      unconstrained parameters, a local linearisation at the mean otherwise. In ``fit_gaussian`` it may depend on
      further latents, such as a scale, and have the kink of a Laplace density.

    With ``num_outputs=K`` the predictor of a datum is u in R^K: of a bare loss u_k = x·θ_k with θ of shape
    ``(K d,)``, of a model a site of shape ``(n, K)`` with n log-probabilities. The nodes are those of the
    product rule, num_nodes^K and no more than 10,000 in all, with K² numbers each for each datum; the Hessian is
    the average of the loss's own, so the loss must be twice differentiable. For classes see :func:`softmax`,
    which needs one dimension less; for larger K :func:`predictor_monte_carlo`.

    Args:
        loss: ``(u, y) -> loss`` of one datum, differentiable by JAX; scalars, or u of shape ``(K,)`` and y of
            any shape.
        predictor: Name of the model's deterministic site.
        num_nodes: Number of quadrature nodes, from 2 to 350; an even number keeps them off the mean.
        num_outputs: K, None for a scalar predictor.

    Returns:
        An :class:`Expectation`.

    Raises:
        ValueError: If not exactly one of ``loss`` and ``predictor`` is given, or ``num_nodes`` or
            ``num_outputs`` is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> cauchy = nt.expectations.gauss_hermite(lambda u, y: jnp.log1p(jnp.square(y - u)))
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> value = jax.jit(cauchy.evaluate)(q, jnp.array([3.0, 4.0]), 1.0)
        >>> print(f"{value.at_mean:.3f} {value.expected:.3f}")
        0.693 2.435
    """
    check_count(num_nodes, "num_nodes", 2, MAX_NODES)
    points, masses = np.polynomial.hermite_e.hermegauss(num_nodes)
    integral: Integral = partial(quadrature, points, masses / masses.sum())
    if num_outputs is not None:
        check_count(num_outputs, "num_outputs")
        integral = partial(
            average, product_rule(num_nodes, num_outputs, "predictor_monte_carlo")
        )
    return of_integral(
        "gauss_hermite", integral, loss, predictor=predictor, num_outputs=num_outputs
    )


def quadrature(
    points: np.ndarray,
    masses: np.ndarray,
    losses: LossesOfPredictors,
    mean: Array,
    variance: Array,
    options: base.Options,
) -> base.Moments:
    """The moments of losses of predictors u ~ N(mean, variance), ``(n,)`` each.

    ``losses`` maps predictors ``(n,)`` to losses ``(S, n)`` and their weights, which gradients carry.
    """
    dtype = mean.dtype
    # The node 0 with weight 0 gives the loss at the mean in the same vectorised pass.
    nodes = jnp.asarray(np.append(points, 0.0), dtype)[:, None]
    weights = jnp.asarray(np.append(masses, 0.0), dtype)[:, None, None]
    s, spread = base.standard_deviation(variance)
    # A mean may sit on a kink of the loss as written, where automatic differentiation picks a side (NumPyro's
    # Bernoulli by logits at 0 is one): nodes stay some roundings off it, whatever the unit of the predictor.
    info = jnp.finfo(dtype)
    off = jnp.maximum(
        8.0 * info.eps * jnp.maximum(jnp.abs(mean), s), jnp.sqrt(info.tiny)
    )
    width = jnp.maximum(jnp.where(spread, s, 0.0), off)
    u = mean[None, :] + width[None, :] * nodes

    values, first, scale = jax.vmap(lambda row: slopes(losses, row))(u)
    slope = jnp.sum(weights * first, axis=0)
    if options.curvature == "none":
        second = jnp.zeros_like(slope)
    elif options.curvature == "fisher":
        second = jnp.sum(weights * jnp.square(first), axis=0)
    else:
        stein = jnp.sum(weights * first * nodes[:, None, :], axis=0) / width[None, :]
        # For a narrow q the quotient loses its digits; the derivative beside the mean has them. It is taken where
        # the two differ by no more than rounding, of the slopes and of the nodes, makes of the quotient.
        pointwise = _curvature(losses, mean, off)
        size = jnp.sum(weights * jnp.abs(first * nodes[:, None, :]), axis=0) + jnp.abs(
            mean[None, :] * pointwise
        )
        rounding = 16.0 * info.eps * size / width[None, :]
        second = jnp.where(jnp.abs(stein - pointwise) <= rounding, pointwise, stein)
    at_mean, expected = (
        jnp.sum(values[-1], axis=0),
        jnp.sum(weights * values, axis=(0, 1)),
    )
    slope, second = (
        jnp.sum(scale[-1] * slope, axis=0),
        jnp.sum(scale[-1] * second, axis=0),
    )
    tempered = jnp.sum(scale[-1] * jnp.sum(weights * values, axis=0), axis=0)
    return base.Moments(at_mean, expected, slope, second, tempered)


def _curvature(losses: LossesOfPredictors, mean: Array, off: Array) -> Array:
    """Second derivatives in the predictors, the mean of those on both sides of ``mean``."""

    def second(u: Array) -> Array:
        return jax.jvp(lambda v: slopes(losses, v)[1], (u,), (jnp.ones_like(u),))[1]

    # One trace of the losses for both sides.
    return jnp.mean(jax.vmap(second)(jnp.stack([mean - off, mean + off])), axis=0)
