"""Logistic log-likelihood of a label, by Gauss-Hermite quadrature."""

from functools import partial

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, one_for_equal
from numpyro_tempered.gaussian.expectations import base
from numpyro_tempered.gaussian.expectations.gauss_hermite import gauss_hermite

_check = partial(base.check_labels, name="logistic")


@one_for_equal
def logistic(num_nodes: int = 20) -> base.Expectation:
    r"""Expected negative log-likelihood of a label, :math:`E_q[\log(1 + e^{-y\, x^\top\theta})]`.

    It is :func:`gauss_hermite` of this loss, with its error: for a predictor of standard deviation 5, 20 nodes
    err by 2.5e-3 and 80 by 5e-6.

    Data are ``x`` of shape ``(d,)`` or ``(n, d)`` and labels ``y`` in {-1, 1}, scalar or ``(n,)``; the losses of
    a batch are summed.

    Args:
        num_nodes: Number of quadrature nodes, from 2 to 350.

    Returns:
        An :class:`Expectation`. It raises ValueError on other labels; where labels are traced and cannot be read,
        another label makes the loss NaN and the round rejected.

    Raises:
        ValueError: If ``num_nodes`` is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> value = jax.jit(nt.expectations.logistic().evaluate)(q, jnp.array([3.0, 4.0]), 1.0)
        >>> print(f"{value.at_mean:.3f} {value.expected:.3f}")
        0.693 2.123
    """
    return gauss_hermite(_loss, num_nodes=num_nodes)._replace(check=_check)


def _loss(u: Array, y: Array) -> Array:
    # A label other than -1 or 1 has no logistic loss.
    return jax.nn.softplus(-jnp.where(jnp.abs(y) == 1.0, y, jnp.nan) * u)
