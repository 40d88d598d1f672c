"""Laws with known moments, and moments of the numbers of latents, by such a law or by draws."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to, constraints

from numpyro_tempered.core import Shape, doubles, run_program
from numpyro_tempered.handlers.likelihood import Site
from numpyro_tempered.handlers.numpyro_private import IndependentConstraint


class LocationScale(NamedTuple):
    """A Gaussian or a Student's t in flat unconstrained coordinates.

    Attributes:
        loc: Mean, ``(d,)``.
        cov: Covariance, ``(d, d)``.
        df: Degrees of freedom of the coordinates, above 2, ``(d,)``; None of a Gaussian.
        is_joint: Of a Student's t, whether it is a multivariate one, rather than a product.
    """

    loc: np.ndarray
    cov: np.ndarray
    df: np.ndarray | None = None
    is_joint: bool = False

    @property
    def is_heavy(self) -> bool:
        """Whether its tails are polynomial, under which an exponential has no mean."""
        return self.df is not None

    @property
    def products(self) -> np.ndarray:
        """Means of (x_i - m_i)² (x_j - m_j)², ``(d, d)``; infinite where they are not finite."""
        variance = np.diag(self.cov)
        gaussian = np.outer(variance, variance) + 2.0 * np.square(self.cov)
        if self.df is None:
            return gaussian
        with np.errstate(divide="ignore"):
            excess = np.where(
                self.df > 4.0, (self.df - 2.0) / np.maximum(self.df - 4.0, 0.0), np.inf
            )
        if self.is_joint:
            return np.asarray(gaussian * excess[0])
        return gaussian + np.diag(3.0 * np.square(variance) * (excess - 1.0))

    @property
    def spread(self) -> np.ndarray:
        """Variances of (x_i - m_i)(x_j - m_j), ``(d, d)``, likewise."""
        return self.products - np.square(self.cov)

    @property
    def second(self) -> float:
        """The second moment of the distance from the mean."""
        return float(np.trace(self.cov))

    @property
    def fourth(self) -> float:
        """Its fourth moment, infinite up to four degrees of freedom."""
        return float(self.products.sum())


# Where this many nodes and twice as many disagree, moments are by draws.
NUM_NODES = 64
AGREE = (1e-4, 1e-3, 1e-2)
_EXAMPLES = (
    constraints.interval(0.0, 1.0),
    constraints.unit_interval,
    constraints.simplex,
    constraints.corr_cholesky,
    constraints.corr_matrix,
)
BOUNDED = tuple(map(type, _EXAMPLES))


class Moments(NamedTuple):
    """Moments of k numbers f under a distribution.

    Attributes:
        mean: Shape ``(k,)``.
        variance: Shape ``(k,)``.
        spread: Variance of (f - mean)², shape ``(k,)``.
        exact: Which are no averages over draws, shape ``(k,)``.
        coordinate: The unconstrained coordinate that each number is itself; -1 of others.
        tame: Which are coordinates themselves, or bounded: of others, as of exponentials, squares of Gaussian
            draws have tails that no number of draws sees, and under Student's t there are no moments.
    """

    mean: np.ndarray
    variance: np.ndarray
    spread: np.ndarray
    exact: np.ndarray
    coordinate: np.ndarray
    tame: np.ndarray

    @property
    def sd(self) -> np.ndarray:
        """Standard deviations."""
        return np.sqrt(self.variance)


def of_draws(values: np.ndarray) -> Moments:
    """Moments of draws ``(S, k)``."""
    centred, size = np.square(values - values.mean(axis=0)), values.shape[1]
    of_none = np.zeros(size, bool)
    return Moments(
        values.mean(axis=0),
        centred.mean(axis=0),
        centred.var(axis=0),
        of_none,
        np.full(size, -1),
        of_none,
    )


def moments_of(
    law: LocationScale | None,
    latents: Mapping[str, Site],
    values: np.ndarray,
    moving: Collection[str] = (),
) -> Moments:
    """Moments of the numbers of all latents: exact where a number is a function of one coordinate of a Gaussian.

    NaN where that function grows so fast that neither a rule nor draws can tell. Of a Student's t those of
    coordinates are exact, those of bounded numbers by draws, and others NaN: an exponential has none.

    Args:
        law: The distribution of the coordinates where its moments are known.
        latents: The latent sites, in the order of the coordinates.
        values: Draws of the numbers, ``(S, k)``, for the others.
        moving: Latents whose support depends on others, and their numbers on other coordinates.
    """
    moments = Moments(*(np.array(part) for part in of_draws(values)))
    start = ends = 0
    for name, site in latents.items():
        support, shape = _base(site["fn"].support), np.shape(site["value"])
        size, width = (
            int(np.prod(shape)),
            int(np.prod(biject_to(site["fn"].support).inverse_shape(shape))),
        )
        numbers, coordinates = (
            np.arange(ends, ends + size),
            np.arange(start, start + width),
        )
        is_coordinate = support in (constraints.real, constraints.real_vector)
        moments.tame[numbers] = is_coordinate or isinstance(support, BOUNDED)
        if law is not None:
            loc, variance = law.loc[coordinates], np.diag(law.cov)[coordinates]
            if is_coordinate:
                moments.coordinate[numbers] = coordinates
                _set(
                    moments, numbers, (loc, variance, np.diag(law.spread)[coordinates])
                )
            elif law.is_heavy:
                _forget(moments, numbers[~moments.tame[numbers]])
            elif _is_elementwise(support) and name not in moving:
                *by_rule, agree = _by_quadrature(loc, np.sqrt(variance), site, shape)
                _set(moments, numbers[agree], [part[agree] for part in by_rule])
                # Of what no rule integrates, draws have seen no tail either.
                _forget(moments, numbers[~agree & ~moments.tame[numbers]])
        start, ends = start + width, ends + size
    return moments


def _set(moments: Moments, numbers: np.ndarray, exact: Sequence[np.ndarray]) -> None:
    """Put exact means, variances and spreads of some numbers in their places."""
    for part, values in zip(moments[:3], exact, strict=True):
        part[numbers] = values
    moments.exact[numbers] = True


def forget_untamed(moments: Moments) -> None:
    """Put NaN in the places of the numbers that have no moments under polynomial tails."""
    _forget(moments, np.flatnonzero(~moments.tame))


def _forget(moments: Moments, numbers: np.ndarray) -> None:
    """Put NaN in the places of what is not known."""
    for part in moments[:3]:
        part[numbers] = np.nan


def _by_quadrature(
    loc: np.ndarray, sd: np.ndarray, site: Site, shape: Shape
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, variance, variance of the square, and which of them two rules agree on."""
    transform, rules = biject_to(site["fn"].support), []
    for num_nodes in (NUM_NODES, 2 * NUM_NODES):
        nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
        weights = weights / weights.sum()
        z = jnp.asarray(loc + nodes[:, None] * sd).reshape(-1, *shape)
        f = doubles(run_program(transform, z)).reshape(num_nodes, -1)
        with np.errstate(
            invalid="ignore", over="ignore"
        ):  # what is not finite agrees with nothing
            mean = weights @ f
            squares = np.square(f - mean)
            variance = weights @ squares
            rules.append((mean, variance, weights @ np.square(squares - variance)))
    one, two = rules
    scales = (np.sqrt(two[1]), two[1], two[2])
    with np.errstate(invalid="ignore"):
        agree = [
            np.abs(a - b) <= tol * scale
            for a, b, tol, scale in zip(one, two, AGREE, scales, strict=True)
        ]
    return (*two, np.all([*agree, *map(np.isfinite, two)], axis=0))


def _base(support: constraints.Constraint) -> constraints.Constraint:
    while isinstance(support, IndependentConstraint):
        support = support.base_constraint
    return support


def _is_elementwise(support: constraints.Constraint) -> bool:
    """Whether each number of a value is a function of one unconstrained number."""
    transform = biject_to(support)
    return transform.domain.event_dim == 0 and transform.codomain.event_dim == 0
