"""Gaussians and Student's t in flat unconstrained coordinates, whose moments are known."""

from typing import NamedTuple

import numpy as np


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
