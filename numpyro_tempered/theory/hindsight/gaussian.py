"""The best Gaussian in hindsight, the comparator of CA19, Theorem 2."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, ArrayLike, add_repr, doubles, map_batches
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.gaussian.families.base import (
    Gaussian,
    Q,
    able,
    family_of,
    supports,
)
from numpyro_tempered.online.ball import Ball
from numpyro_tempered.online.base import Box, Data
from numpyro_tempered.theory.hindsight.base import minimise


@add_repr
class GaussianComparator(NamedTuple):
    """A Gaussian to compare a run with.

    Attributes:
        q: Its parameters.
        expected: Its expected loss in each round, shape ``(T,)``.
        kl: KL(q, prior), in nats.
    """

    q: Gaussian
    expected: np.ndarray
    kl: float


def gaussian(
    expectation: Expectation,
    prior: Gaussian,
    step_size: float,
    *data: ArrayLike,
    box: Box | None = None,
) -> GaussianComparator:
    r"""The q with the least :math:`\sum_tE_q\ell_t + \mathrm{KL}(q, \pi)/\eta`, for CA19, Theorem 2.

    The theorem's bound holds for any comparator, so for this one however well it was minimised.

    Args:
        expectation: E_q of a bare loss, in closed form or by quadrature.
        prior: π, a ``MeanField`` or ``FullRank``.
        step_size: η.
        *data: Arrays with one leading axis of T rounds.
        box: Optional bounds on a mean-field q, those that the rule ran in.

    Returns:
        A :class:`GaussianComparator`, for ``comparator`` and ``kl`` of :func:`numpyro_tempered.bounds.sva`.

    Raises:
        TypeError: If the family is another.
        ValueError: If the expectation draws random numbers, or a full covariance has a box.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> prior = nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1))
        >>> x, y = jnp.ones((4, 1)), jnp.full(4, 2.0)
        >>> best = nt.bounds.hindsight.gaussian(nt.expectations.squared(), prior, 0.5, x, y)
        >>> print(f"{best.q.loc[0]:.3f} {best.q.scale[0]:.3f}")
        1.600 0.447
    """
    if expectation.needs_key:
        raise ValueError(
            "the comparator needs a closed form or quadrature, not an expectation that draws."
        )
    arrays = jax.tree.map(jnp.asarray, data)
    if isinstance(box, Ball):
        raise ValueError(
            "the best Gaussian in a Ball is not supported: give kl and comparator of any Gaussian in it to "
            "nt.bounds.sva, such as of the best in a smaller Box, or take nt.bounds.sva_point."
        )
    if not supports(prior, "from_root"):
        raise TypeError(
            f"the comparator is a {able('from_root', 'or')}, got a prior of {type(prior).__name__}."
        )
    if family_of(prior).diagonal_only:
        lower, upper = _limits(prior, Box() if box is None else box)
    else:
        if box is not None:
            raise ValueError(
                "a box on a full covariance is not supported: leave it out."
            )
        d = prior.loc.shape[0]
        upper = np.full(d + d * (d + 1) // 2, np.inf)
        lower = -upper

    def objective(free: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = _objective(
            expectation, jnp.asarray(free), prior, step_size, arrays
        )
        return float(value), doubles(slope)

    options = {"maxiter": 2000, "maxcor": 30, "ftol": 1e-13, "gtol": 1e-10}
    q = _gaussian_at(
        jnp.asarray(minimise(objective, np.zeros(len(lower)), lower, upper, **options)),
        prior,
    )
    expected = doubles(_by_round(expectation, q, arrays))
    return GaussianComparator(q, expected, float(family_of(prior).kl(q, prior)))


def _limits(prior: Gaussian, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """The box in the free coordinates of a mean-field Gaussian."""
    centre, unit = (doubles(leaf) for leaf in (prior.loc, family_of(prior).root(prior)))
    loc, scale = (np.broadcast_to(doubles(bound), centre.shape) for bound in box)
    lower = np.concatenate([(-loc - centre) / unit, np.full(centre.shape, -np.inf)])
    return lower, np.concatenate([(loc - centre) / unit, np.log(scale / unit)])


@partial(jax.jit, static_argnums=0)
@partial(jax.value_and_grad, argnums=1)
def _objective(
    expectation: Expectation, free: Array, prior: Gaussian, step_size: float, data: Data
) -> Array:
    q = _gaussian_at(free, prior)
    kl = family_of(prior).kl(q, prior)
    return expectation.evaluate(q, *data, curvature="none").expected + kl / step_size


@partial(jax.jit, static_argnums=0)
def _by_round(expectation: Expectation, q: Gaussian, data: Data) -> Array:
    """Expected losses, ``(T,)``, one datum at a time."""

    def one(row: Data) -> Array:
        return expectation.evaluate(q, *row, curvature="none").expected

    return map_batches(one, data, 1024)


def _gaussian_at(free: Array, prior: Q) -> Q:
    """The Gaussian at free coordinates, which are 0 for the prior.

    Means in units of the prior's; the logarithm of the scale, or the factor with the logarithm of its diagonal.
    """
    d = prior.loc.shape[0]
    free = free.astype(prior.loc.dtype)
    shift, log_scale = free[:d], free[d : 2 * d]
    family = family_of(prior)
    root = family.root(family.canonical(prior))
    if root.ndim == 1:
        return family.with_root(prior.loc + root * shift, root * jnp.exp(log_scale))
    rows, columns = np.tril_indices(d, -1)
    factor = jnp.diag(jnp.exp(log_scale)).at[rows, columns].set(free[2 * d :])
    return family.with_root(prior.loc + root @ shift, root @ factor)
