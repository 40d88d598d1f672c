"""Scales of features that stay fixed while rows are learned, and the posterior where they are fixed anew."""

from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

# Variances, as shares of the mean square around the first row, that are rounding.
ROUNDING = 1e-15
# Squares of larger entries overflow: such rows are rejected.
LARGEST = 1e140
# Rows by which it is judged first which entries are far.
WARM = 32
# An entry beyond so many standard deviations would set the scale of all others, and counts as one at NEAR.
FAR, NEAR = 100.0, 10.0
# What a Gaussian says of a likelihood at a row beyond so many does not hold on the scales of the others.
LOST = 3000.0


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
        center: Of what is not far, ``(d,)``.
        reach: How far that goes; infinite where it is not known.
        early: The first rows, up to 32.
    """

    count: int  # type: ignore[assignment]
    first: np.ndarray
    total: np.ndarray
    square: np.ndarray
    fixed: int
    loc: np.ndarray
    scale: np.ndarray
    is_constant: np.ndarray
    center: np.ndarray
    reach: np.ndarray
    early: np.ndarray

    @classmethod
    def start(cls, size: int) -> "Scales":
        """Return the scales before any row."""
        zero, constant, inf = np.zeros(size), np.arange(size) > 0, np.full(size, np.inf)
        return cls(
            0,
            zero,
            zero,
            zero,
            0,
            zero,
            np.ones(size),
            constant,
            zero,
            inf,
            np.zeros((0, size)),
        )

    def widen(self, size: int) -> "Scales":
        """Add columns, which have been 0 so far."""
        new, old = Scales.start(size), len(self.first)
        arrays = {
            name: np.r_[getattr(self, name), getattr(new, name)[old:]]
            for name in self._fields
            if np.ndim(getattr(self, name)) == 1
        }
        return self._replace(
            early=np.pad(self.early, ((0, 0), (0, size - old))), **arrays
        )

    def add(self, rows: np.ndarray) -> "Scales":
        """Count more rows ``(n, d)``, one after the other, so that pieces add up to the same bits."""
        if self.count < WARM < self.count + len(rows):
            return self.add(rows[: WARM - self.count]).add(rows[WARM - self.count :])
        after = self if self.count else self._replace(first=rows[0])
        if self.count < WARM:
            after = after._replace(early=np.vstack([self.early, rows]))
            if self.count + len(rows) == WARM:
                # What was far is counted anew, without its distance.
                zero = np.zeros_like(self.total)
                center, reach = reach_of(after.early)
                empty = after._replace(
                    count=0, total=zero, square=zero, center=center, reach=reach
                )
                return empty._replace(first=empty.near(after.first))._count(after.early)
        return after._count(rows)

    def near(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows with far entries brought near."""
        if np.isinf(self.reach).all():
            return rows
        deviation = rows - self.center
        with np.errstate(invalid="ignore"):
            brought = self.center + np.sign(deviation) * (NEAR / FAR) * self.reach
        return np.where(np.abs(deviation) > self.reach, brought, rows)

    def _count(self, rows: np.ndarray) -> "Scales":
        differences = self.near(rows) - self.first
        if len(rows) == 1:
            total, square = (
                self.total + differences[0],
                self.square + np.square(differences[0]),
            )
            return self._replace(count=self.count + 1, total=total, square=square)
        total, square = (
            np.cumsum(np.vstack([sums, terms]), axis=0)[-1]
            for sums, terms in (
                (self.total, differences),
                (self.square, np.square(differences)),
            )
        )
        return self._replace(count=self.count + len(rows), total=total, square=square)

    def fix(self) -> "Scales":
        """Fix the scales at those of the rows so far."""
        shift, square = self.total / self.count, self.square / self.count
        is_constant = square == 0.0
        variance = np.maximum(square - np.square(shift), ROUNDING * square)
        loc, scale = self.first + shift, np.where(is_constant, 1.0, np.sqrt(variance))
        loc[0], scale[0], is_constant[0] = 0.0, 1.0, False
        fixed = self._replace(
            fixed=self.count, loc=loc, scale=scale, is_constant=is_constant
        )
        if self.count < WARM:
            return fixed
        return fixed._replace(
            center=loc, reach=np.where(is_constant, np.inf, FAR * scale)
        )

    @classmethod
    def of_table(cls, rows: np.ndarray, weight: np.ndarray) -> "Scales":
        """Return the scales of all rows of a table, that count by their weights."""
        center, reach = reach_of(rows)
        start = cls.start(rows.shape[1])._replace(
            early=rows[:WARM], count=len(rows), center=center, reach=reach
        )
        near, share = start.near(rows), weight * (len(rows) / weight.sum())
        differences = near - near[0]
        total, square = share @ differences, share @ np.square(differences)
        return start._replace(first=near[0], total=total, square=square).fix()

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return rows ``(..., d)`` on the present scales."""
        return (rows - self.loc) / self.scale

    def advance(self, rows: np.ndarray) -> tuple["Scales", int]:
        """Count the first of the rows ``(n, d)``, those to learn on the same scales, and return their number.

        Scales are fixed anew where the count has doubled, where far rows are known, and where a column changes
        that was constant, by the rows up to this one.
        """
        scales = self.add(rows[:1])
        is_due = scales.count >= 2 * self.fixed or (
            self.count < WARM <= scales.count and scales.farthest() > 1.0
        )
        if len(rows) == 1 and not is_due and not self.is_constant.any():
            return scales, 1
        moves = self._moves(rows)
        if is_due or moves[0]:
            scales = scales.fix()
            moves = scales._moves(rows)
        end = 2 * scales.fixed
        end = end if scales.count >= WARM else min(end, WARM)
        number = min(len(rows), max(end - scales.count, 1))
        stops = np.flatnonzero(moves[1:number])
        number = int(stops[0]) + 1 if len(stops) else number
        return (scales.add(rows[1:number]) if number > 1 else scales), number

    def farthest(self) -> float:
        """Return how far the entries of the first rows turn out to be, in units of what is far."""
        return float(np.max(np.abs(self.early - self.center) / self.reach, initial=0.0))

    def _moves(self, rows: np.ndarray) -> np.ndarray:
        if not self.is_constant.any():
            return np.zeros(len(rows), dtype=bool)
        return np.any(rows[:, self.is_constant] != self.loc[self.is_constant], axis=1)


def reach_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the center of the rows, and 100 standard deviations of those without the farthest sixteenth."""
    center = np.median(rows, axis=0)
    deviation = np.abs(rows - center)
    number = len(rows) - max(1, len(rows) // 16)
    rest = np.partition(deviation, max(number - 1, 0), axis=0)[:number]
    spread = np.sqrt(np.sum(np.square(rest), axis=0) / max(number, 1))
    return center, np.where(spread > 0.0, FAR * spread, np.inf)


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


def move(
    loc: np.ndarray,
    root: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    old: Scales,
    new: Scales,
) -> OnScales:
    r"""Return the posterior on new scales, with the same evidence and another prior.

    Coefficients θ of old scales are B θ' of new ones. The evidence, the precision without the prior's and the
    precision times the mean, becomes :math:`B^\top E B` and :math:`B^\top h`. The prior standard deviations are
    ``before`` for θ and ``after`` for θ'.
    """
    ratio, shift = old.scale / new.scale, (new.loc - old.loc) / new.scale
    shift[0] = 0.0
    if root.ndim == 1:
        evidence = root**-2.0 - before**-2.0
        precision = (
            after**-2.0 + evidence * np.square(ratio) + evidence[0] * np.square(shift)
        )
        # Each coefficient by itself; the intercept is the predictor at the new location.
        mean = ratio * root**-2.0 * loc / precision
        mean[0] = loc[0] + np.sum(shift * mean)
        return OnScales(mean, precision**-0.5, 0.0)
    whitened = solve_triangular(root, np.eye(len(loc)), lower=True)
    precision = whitened.T @ whitened
    change = np.diag(ratio)
    change[0] -= shift
    weighted = precision @ loc
    of_new = change.T @ weighted
    precision = change.T @ (precision - np.diag(before**-2.0)) @ change + np.diag(
        after**-2.0
    )
    # With the coordinates turned around, the inverse of the upper factor is the lower root of the covariance.
    reverse = np.linalg.cholesky((0.5 * (precision + precision.T))[::-1, ::-1])[
        ::-1, ::-1
    ]
    tril = solve_triangular(reverse.T, np.eye(len(loc)), lower=True)
    mean = tril @ (tril.T @ of_new)
    return OnScales(mean, tril, 0.5 * float(weighted @ loc - of_new @ mean))
