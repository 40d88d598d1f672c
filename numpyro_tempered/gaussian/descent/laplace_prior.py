r"""Priors of independent coordinates under a Gaussian: Laplace in closed form, others by quadrature.

For a coordinate θ ~ N(m, s²) under q and the density exp(-|θ - μ| / b) / (2b), with z = (m - μ)/s,

.. math:: E_q|θ - μ| = (m - μ)\,(2Φ(z) - 1) + 2 s φ(z),

with derivative 2Φ(z) - 1 and second derivative 2φ(z)/s in m: the curvature of the kink, which no average of
second derivatives over draws can find.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array
from numpyro_tempered.gaussian.descent.base import Derivatives
from numpyro_tempered.gaussian.expectations.base import Options
from numpyro_tempered.gaussian.expectations.gauss_hermite import quadrature
from numpyro_tempered.gaussian.expectations.pinball import absolute_moments
from numpyro_tempered.gaussian.families.base import Gaussian, family_of


class LaplaceTerm(NamedTuple):
    """The negative logarithm of independent Laplace densities of some coordinates.

    Attributes:
        loc: Their locations, shape ``(d,)``; 0 for the coordinates left out.
        rate: 1/b, shape ``(d,)``; 0 for those left out.
        constant: The value at ``loc``, a scalar.
    """

    loc: Array
    rate: Array
    constant: Array


def derivatives_of_laplace(term: LaplaceTerm, q: Gaussian) -> Derivatives:
    """E_q of the term and its derivatives; the Hessian as a diagonal for a mean-field q."""
    root = family_of(q).root(q)
    variance = jnp.square(root) if root.ndim == 1 else jnp.sum(jnp.square(root), axis=1)
    moments = absolute_moments(q.loc, variance, term.loc, Options())
    hessian = term.rate * moments.second
    value = term.constant + jnp.sum(term.rate * moments.expected)
    return Derivatives(
        value,
        term.rate * moments.first,
        hessian if root.ndim == 1 else jnp.diag(hessian),
    )


# Priors of scales fall like exp(-exp(2u)) on the log-scale: more nodes than a likelihood takes.
_NODES = 64


def derivatives_of_scalars(
    potentials: Sequence[tuple[np.ndarray, Callable[[Array], Array]]], q: Gaussian
) -> Derivatives:
    """E_q of a sum of functions of single coordinates, and its derivatives.

    Args:
        potentials: Pairs of coordinates ``(k,)`` and a function of their values, elementwise.
        q: A canonical Gaussian.

    Returns:
        Its :class:`Derivatives`; the Hessian as a diagonal for a mean-field q.
    """
    places = np.concatenate([at for at, _ in potentials])
    ends = np.cumsum([len(at) for at, _ in potentials])[:-1]
    root = family_of(q).root(q)
    variance = jnp.square(root) if root.ndim == 1 else jnp.sum(jnp.square(root), axis=1)

    def losses(u: Array) -> tuple[Array, Array]:
        parts = zip(potentials, jnp.split(u, ends), strict=True)
        values = [potential(part).astype(u.dtype) for (_, potential), part in parts]
        return jnp.concatenate(values)[None, :], jnp.ones((), u.dtype)

    points, masses = np.polynomial.hermite_e.hermegauss(_NODES)
    moments = quadrature(
        points,
        masses / masses.sum(),
        losses,
        q.loc[places],
        variance[places],
        Options(),
    )
    grad = jnp.zeros_like(q.loc).at[places].add(moments.first)
    hessian = jnp.zeros_like(q.loc).at[places].add(moments.second)
    return Derivatives(
        jnp.sum(moments.expected),
        grad,
        hessian if root.ndim == 1 else jnp.diag(hessian),
    )
