"""Scales of features that stay fixed while rows are learned, and the posterior where they are fixed anew."""

from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

# Variances, as shares of the mean square around the first row, that are rounding.
ROUNDING = 1e-15
# Differences beyond would overflow: such rounds are rejected.
LARGEST = 1e140


class Scales(NamedTuple):
    """Statistics of the features so far, and the scales that they were last fixed at.

    Attributes:
        count: Rows so far.
        first: The first row ``(d,)``, from which all are counted.
        total: Sums of the differences from it.
        square: Sums of their squares.
        fixed: The count at which the scales were fixed.
        loc: Of z = (x - loc)/scale, ``(d,)``; the intercept, which is first, is left as it is.
        scale: Of the same, 1 for columns that were constant.
        is_constant: Which columns were constant, without the intercept.
    """

    count: int  # type: ignore[assignment]
    first: np.ndarray
    total: np.ndarray
    square: np.ndarray
    fixed: int
    loc: np.ndarray
    scale: np.ndarray
    is_constant: np.ndarray

    @classmethod
    def start(cls, size: int) -> "Scales":
        """Before any row."""
        zero = np.zeros(size)
        return cls(0, zero, zero, zero, 0, zero, np.ones(size), np.arange(size) > 0)

    def widen(self, size: int) -> "Scales":
        """With more columns, which have been 0 so far."""
        new = Scales.start(size)
        pad = size - len(self.first)
        arrays = {
            name: np.r_[getattr(self, name), getattr(new, name)[size - pad :]]
            for name in ("first", "total", "square", "loc", "scale", "is_constant")
        }
        return self._replace(**arrays)

    def add(self, rows: np.ndarray) -> "Scales":
        """With more rows ``(n, d)``, one after the other, so that pieces add up to the same bits."""
        first = self.first if self.count else rows[0]
        with np.errstate(over="ignore"):
            differences = np.clip(rows - first, -LARGEST, LARGEST)
        if len(rows) == 1:
            total, square = self.total + differences[0], self.square + np.square(differences[0])
            return self._replace(count=self.count + 1, first=first, total=total, square=square)
        total, square = (
            np.cumsum(np.vstack([sums, terms]), axis=0)[-1]
            for sums, terms in ((self.total, differences), (self.square, np.square(differences)))
        )
        return self._replace(count=self.count + len(rows), first=first, total=total, square=square)

    def fix(self) -> "Scales":
        """With the scales of the rows so far."""
        shift, square = self.total / self.count, self.square / self.count
        is_constant = square == 0.0
        variance = np.maximum(square - np.square(shift), ROUNDING * square)
        loc, scale = self.first + shift, np.where(is_constant, 1.0, np.sqrt(variance))
        loc[0], scale[0], is_constant[0] = 0.0, 1.0, False
        return self._replace(fixed=self.count, loc=loc, scale=scale, is_constant=is_constant)

    def advance(self, rows: np.ndarray) -> tuple["Scales", int]:
        """With the first of the rows ``(n, d)``, and how many these are: those to learn on the same scales.

        Scales are fixed anew where the count has doubled, and where a column changes that was constant, by the
        rows up to this one.
        """
        scales = self.add(rows[:1])
        if len(rows) == 1 and scales.count < 2 * self.fixed and not self.is_constant.any():
            return scales, 1
        moves = self._moves(rows)
        if scales.count >= 2 * self.fixed or moves[0]:
            scales = scales.fix()
            moves = scales._moves(rows)
        number = min(len(rows), max(2 * scales.fixed - scales.count, 1))
        stops = np.flatnonzero(moves[1:number])
        number = int(stops[0]) + 1 if len(stops) else number
        return (scales.add(rows[1:number]) if number > 1 else scales), number

    def _moves(self, rows: np.ndarray) -> np.ndarray:
        if not self.is_constant.any():
            return np.zeros(len(rows), dtype=bool)
        return np.any(rows[:, self.is_constant] != self.loc[self.is_constant], axis=1)


class OnScales(NamedTuple):
    """A posterior on other scales.

    Attributes:
        loc: Means ``(d,)``.
        root: Root of the covariance ``(d, d)``, lower triangular, or standard deviations ``(d,)``.
        energy: Half of what the mean's share of the sum of squares loses, 0 for standard deviations.
    """

    loc: np.ndarray
    root: np.ndarray
    energy: float


def move(loc: np.ndarray, root: np.ndarray, prior_scale: np.ndarray, old: Scales, new: Scales) -> OnScales:
    r"""The posterior on new scales, with the same evidence and the prior of the new coefficients.

    Coefficients θ of old scales are B θ' of new ones. The evidence, the precision without the prior's and the
    precision times the mean, becomes :math:`B^\top E B` and :math:`B^\top h`.
    """
    ratio, shift = old.scale / new.scale, (new.loc - old.loc) / new.scale
    shift[0] = 0.0
    prior = prior_scale**-2.0
    if root.ndim == 1:
        evidence = root**-2.0 - prior
        evidence = evidence * np.square(ratio) + evidence[0] * np.square(shift)
        mean = loc / ratio
        mean[0] += np.sum(shift * mean)
        return OnScales(mean, (prior + evidence) ** -0.5, 0.0)
    # The root of a rule's state is not triangular.
    whitened = solve_triangular(np.transpose(np.linalg.qr(root.T, mode="r")), np.eye(len(loc)), lower=True)
    precision = whitened.T @ whitened
    change = np.diag(ratio)
    change[0] -= shift
    weighted = precision @ loc
    after = change.T @ weighted
    precision = change.T @ (precision - np.diag(prior)) @ change + np.diag(prior)
    # With the coordinates turned around, the inverse of the upper factor is the lower root of the covariance.
    reverse = np.linalg.cholesky((0.5 * (precision + precision.T))[::-1, ::-1])[::-1, ::-1]
    tril = solve_triangular(reverse.T, np.eye(len(loc)), lower=True)
    mean = tril @ (tril.T @ after)
    return OnScales(mean, tril, 0.5 * float(weighted @ loc - after @ mean))
