"""Regression of a stream as an estimator of scikit-learn and of river."""

import math
from collections.abc import Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from numpyro_tempered.core import PyTree, as_array, check_number, doubles
from numpyro_tempered.estimators.base import are_rows, as_number, check_some, read_rows
from numpyro_tempered.estimators.learners import GAUSSIAN, weighted
from numpyro_tempered.estimators.river import register
from numpyro_tempered.estimators.rows import OnlineEstimator, Row
from numpyro_tempered.online.base import Losses, OnlineState

if TYPE_CHECKING:
    import pandas as pd

# Differences of outcomes, as shares of them, that are rounding.
ROUNDING = 1e-14
# Units that an outcome may be away before another unit is taken.
LARGE = 1e6


@partial(register, "Regressor")
class OnlineRegressor(RegressorMixin, OnlineEstimator):
    r"""Bayesian linear regression of a stream with a noise that is learned, for scikit-learn and river.

    The rounds are those of :class:`OnlineClassifier`, with Gaussian noise of unknown variance σ². Given σ² the
    coefficients are Gaussian with covariance σ² V, where the recursion for V does not need σ², whose posterior is
    an inverse gamma:

    .. math:: b_t = b_{t-1} + \frac{\alpha}{2} \frac{(y_t - m_{t-1}^\top z_t)^2}{1 + \alpha z_t^\top V_{t-1} z_t}

    and :math:`a_t = a_{t-1} + \alpha/2`. The predictive distribution is a Student-t with 2a degrees of freedom.
    A weight w of a row takes α w for α. All this is of one unit with y, so that outcomes may come in raw units;
    they are counted from the first.
    For "full" all of this is exact, in a stream too: where scales are fixed anew, b takes up the change of the
    prior. For "diag" and for another rule it is an approximation.

    Args:
        alpha: Power on the likelihood, positive.
        prior_scale: Prior standard deviation of coefficients of standardised features, in standard deviations of
            the noise: a ridge of penalty 1/prior_scale². That of the intercept is 5 times as large. None for 10
            up to 200 columns, and 3/√d beyond.
        covariance: "full", "diag", or None for "full" up to 200 columns and "diag" beyond, which a warning tells.
        rule: An online rule in the place of ``nt.online.rvga(alpha)``, not standardised. It sees outcomes in
            units of the first difference from the first, and a noise of one such unit.
        stream: Whether ``fit`` takes the rows in their order, on the scales of those so far.
        random_state: For the random order: an integer, a ``RandomState`` of NumPy, or None.

    Attributes:
        n_features_in_: Number of columns d.
        feature_names_in_: Their names, where all are strings.
        coef_: Posterior means in the units of the data ``(d,)``.
        intercept_: That of the intercept.
        noise_scale_: Standard deviation of the noise, √(b/a), NaN before it is known.
        states_: The :class:`numpyro_tempered.online.OnlineState`, in a list, on standardised features.

    References:
        LBB22.

    Example:
        >>> import numpyro_tempered as nt
        >>> sizes, prices = [[50.0], [60.0], [70.0], [80.0], [90.0]], [100e3, 121e3, 139e3, 160e3, 180e3]
        >>> model = nt.estimators.OnlineRegressor().fit(sizes, prices)
        >>> mean, sd = model.predict([[65.0]], return_std=True)
        >>> print(mean.round(-3), sd.round(-3))
        [130000.] [2000.]
    """

    _expectation, _narrow = weighted(GAUSSIAN), 10.0

    def fit(
        self, X: PyTree, y: PyTree, sample_weight: PyTree = None
    ) -> "OnlineRegressor":
        """Learn rows anew, one pass over them.

        Args:
            X: Data ``(n, d)``: an array, or a table of pandas.
            y: Outcomes ``(n,)``.
            sample_weight: The power on the likelihood of each row, ``(n,)``; one of 2 is the row twice.

        Returns:
            The estimator itself.

        Raises:
            ValueError: If an entry is not finite.
        """
        check_some(sample_weight)
        self.__dict__.pop("_learners", None)
        return self._learn(X, y, sample_weight, is_table=not self.stream)

    def partial_fit(
        self, X: PyTree, y: PyTree, sample_weight: PyTree = None
    ) -> "OnlineRegressor":
        """Learn rows, in their order; arguments as for :meth:`fit`."""
        return self._learn(X, y, sample_weight, is_table=False)

    def _learn(
        self, X: PyTree, y: PyTree, sample_weight: PyTree, *, is_table: bool
    ) -> "OnlineRegressor":
        is_start = not hasattr(self, "_learners")
        rows, outcomes = self._validate(
            X, read_rows(y, "y"), reset=is_start, y_numeric=True
        )
        outcomes, weight = (doubles(outcomes), self._weight(sample_weight, len(rows)))
        if is_start:
            self._start_rows(1, is_table=is_table)
            self._start_noise()
        if is_table:
            rows, outcomes, weight = self._in_order(rows, outcomes, weight)
        else:
            rows, outcomes, weight = (
                leaf[weight > 0] for leaf in (rows, outcomes, weight)
            )
        if len(rows):
            self._run(self._with_intercept(rows), outcomes, weight, is_table=is_table)
        return self

    def _run(
        self,
        full: np.ndarray,
        outcomes: np.ndarray,
        weight: np.ndarray,
        *,
        is_table: bool,
    ) -> None:
        self._set_unit(outcomes)
        scaled = (outcomes - (self._center or 0.0)) / self._scale()
        losses = self._learners.run(
            full, 0.5 * weight, scaled[:, None], is_table=is_table
        )
        self._observe(losses, weight)
        self._tell_rejected(losses)

    def learn_one(self, x: Row, y: float, w: float = 1.0) -> None:
        """Learn one row.

        Args:
            x: A dictionary of features, or numbers ``(d,)``.
            y: The outcome. A row or an outcome that is not finite is rejected and counted.
            w: The power on the row's likelihood, not negative.

        Raises:
            ValueError: If the row is of another form than at the start. What is refused changes nothing.
            TypeError: If a feature or the outcome is no number.
        """
        w = float(check_number(w, "w", "[0, inf)"))
        x, y = self._read(x), as_number(y, "the outcome")
        if w == 0.0:
            return
        if not hasattr(self, "_learners"):
            self._start_one(x, 1)
            self._start_noise()
        elif isinstance(x, Mapping):
            self._add_columns(x)
        row = self._row(x)
        if are_rows(row):
            self._set_unit(np.array([y]))
        (losses,) = self._learners.learn(
            row, 0.5 * w, [(y - (self._center or 0.0)) / self._scale()]
        )
        self._observe(losses, np.array([w]))

    def _begin_names(self, names: list[Hashable]) -> None:
        self._start(len(names), names, 1, is_table=False)
        self._start_noise()
        self._name()

    def _read_outcomes(self, y: PyTree) -> np.ndarray:
        """Return the outcomes of a frame's rows."""
        outcomes = doubles(as_array(y, "y"))
        return outcomes[:, 0] if outcomes.shape[1:] == (1,) else outcomes

    def _learn_rows(
        self,
        full: np.ndarray,
        outcomes: np.ndarray,
        weight: np.ndarray,
        is_row: np.ndarray,
    ) -> None:
        is_row &= np.isfinite(outcomes)
        on = is_row & (weight > 0)
        if on.any():
            self._run(full[on], outcomes[on], weight[on], is_table=False)
        for _ in range(int(np.sum(~is_row))):
            self._learners.learn(np.full(self._size, np.nan), 1.0, [math.nan])

    def predict(
        self, X: PyTree, return_std: bool = False
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Return predictive means ``(n,)``.

        Args:
            X: Data ``(n, d)``.
            return_std: Whether to return the standard deviations too, noise included.

        Returns:
            The means, or means and standard deviations. These are infinite while the Student-t has none, for
            the first three rows at ``alpha=1``.
        """
        check_is_fitted(self)
        mean, sd = self._answers(self._with_intercept(self._validate(X)))
        return (mean, sd) if return_std else mean

    def _answers(self, full: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (moments,) = self._learners.predict(full)
        return (self._center or 0.0) + self._scale() * moments[:, 0], self._deviation(
            moments[:, 1]
        )

    def predict_one(
        self, x: Row, return_std: bool = False
    ) -> float | tuple[float, float]:
        """Return the predictive mean; 0 before the first datum.

        Args:
            x: A dictionary of features, or numbers ``(d,)``.
            return_std: Whether to return the standard deviation too, noise included.

        Raises:
            ValueError: If a feature is missing.
        """
        if not hasattr(self, "_learners"):
            return (0.0, math.inf) if return_std else 0.0
        (of_row,) = self._learners.predict_one(self._row_to_predict(x))
        mean = (self._center or 0.0) + self._scale() * float(of_row.mean)
        return (
            (mean, self._deviation(np.asarray(of_row.variance)).item())
            if return_std
            else mean
        )

    def predict_many(self, X: "pd.DataFrame") -> "pd.Series":
        """Return the predictive means of the rows of a frame."""
        import pandas as pd

        means = (
            self._answers(self._rows_to_predict(X))[0]
            if hasattr(self, "_learners")
            else np.zeros(len(X))
        )
        return pd.Series(means, index=getattr(X, "index", None))

    @property
    def coef_(self) -> np.ndarray:
        """Posterior means in the units of the data."""
        return self._coefficients()[1:]

    @property
    def intercept_(self) -> float:
        """The posterior mean of the intercept in the units of the data."""
        return float((self._center or 0.0) + self._coefficients()[0])

    @property
    def noise_scale_(self) -> float:
        """Standard deviation of the noise."""
        check_is_fitted(self)
        a, b = self._noise
        return self._scale() * math.sqrt(b / a) if a > 0 else math.nan

    @property
    def states_(self) -> list[OnlineState]:
        """The state, in a list."""
        return self._states()

    def _coefficients(self) -> np.ndarray:
        check_is_fitted(self)
        return (
            self._scale() * self._learners.coefficients()[0, : self.n_features_in_ + 1]
        )

    def _start_noise(self) -> None:
        self._center: float | None = None
        self._unit: float | None = None
        self._noise = (0.0, 0.0)
        self._is_first = True

    def _scale(self) -> float:
        return 1.0 if self._unit is None else self._unit

    def _set_unit(self, outcomes: np.ndarray) -> None:
        """Count outcomes from the first, in units of the first difference from it that is more than rounding.

        The default rule is right in any unit, and goes on in a larger one where outcomes would be large: their
        losses have no digits left for the variance of the predictor.
        """
        finite = outcomes[np.isfinite(outcomes)]
        if not len(finite):
            return
        if self._center is None:
            self._center = float(finite[0])
        differences = np.abs(finite - self._center)
        differences[
            differences <= ROUNDING * np.maximum(np.abs(finite), abs(self._center))
        ] = 0.0
        if not differences.any():
            return
        before, moves = self._scale(), self._learners.form.moves
        if self._unit is None:
            self._unit = float(differences[np.argmax(differences > 0)])
        if moves and differences.max() > LARGE * self._unit:
            self._unit = float(differences.max())
        ratio = before / self._unit
        if moves and ratio != 1.0:
            self._learners.rescale(ratio)
            self._noise = self._noise[0], self._noise[1] * ratio**2

    def _observe(self, losses: Losses, weight: np.ndarray) -> None:
        """Learn the noise from the losses of rounds, (y - m·z)² and the variance of the predictor more."""
        at_mean, expected = (np.atleast_1d(np.asarray(leaf)) for leaf in losses)
        alpha, (a, b) = self.alpha, self._noise
        # On other scales the prior is another too, and the sum of squares is what stays.
        energy, self._learners.energy = self._learners.energy, 0.0
        b += energy
        is_finite = np.isfinite(at_mean + expected)
        if is_finite.any() and self._is_first:
            # The outcome that all are counted from tells nothing of the noise.
            is_finite[np.argmax(is_finite)], self._is_first = False, False
        power = alpha * weight[is_finite]
        at_mean, expected = at_mean[is_finite], expected[is_finite]
        terms = (
            0.5 * power * at_mean / (1.0 + power * np.maximum(expected - at_mean, 0.0))
        )
        # One after the other, as single rows are added.
        self._noise = (
            float(np.cumsum(np.r_[a, 0.5 * power])[-1]),
            max(float(np.cumsum(np.r_[b, terms])[-1]), ROUNDING * abs(energy)),
        )

    def _deviation(self, variance: np.ndarray) -> np.ndarray:
        a, b = self._noise
        if a <= 1.0:
            return np.full(variance.shape, math.inf)
        return self._scale() * np.sqrt(b / (a - 1.0) * (1.0 + variance))
