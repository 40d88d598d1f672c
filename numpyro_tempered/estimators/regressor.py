"""Regression of a stream as an estimator of scikit-learn and of river."""

import math
from functools import partial

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from numpyro_tempered.core.typing import PyTree
from numpyro_tempered.estimators.learners import GAUSSIAN
from numpyro_tempered.estimators.river import register
from numpyro_tempered.estimators.rows import OnlineEstimator, Row
from numpyro_tempered.online.base import Losses, OnlineState, Rule

# The constant of the Gaussian loss.
LOG_NORMAL = 0.5 * math.log(2.0 * math.pi)


@partial(register, "Regressor")
class OnlineRegressor(RegressorMixin, OnlineEstimator):
    r"""Bayesian linear regression of a stream with a noise that is learned, for scikit-learn and river.

    The rounds are those of :class:`OnlineClassifier`, with Gaussian noise of unknown variance σ². Given σ² the
    coefficients are Gaussian with covariance σ² V, where the recursion for V does not need σ², whose posterior is
    an inverse gamma:

    .. math:: b_t = b_{t-1} + \frac{\alpha}{2} \frac{(y_t - m_{t-1}^\top z_t)^2}{1 + \alpha z_t^\top V_{t-1} z_t}

    and :math:`a_t = a_{t-1} + \alpha/2`. The predictive distribution is a Student-t with 2a degrees of freedom.
    All this is of one unit with y, so that outcomes may come in raw units; they are counted from the first.
    For "full" all of this is exact, in a stream too: where scales are fixed anew, b takes up the change of the
    prior. For "diag" and for another rule it is an approximation.

    Args:
        alpha: Power on the likelihood, positive.
        prior_scale: Prior standard deviation of coefficients of standardised features, in standard deviations of
            the noise: a ridge of penalty 1/prior_scale². That of the intercept is 5 times as large.
        covariance: "full", "diag", or None for "full" up to 200 columns at the start and "diag" beyond.
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

    _expectation = GAUSSIAN

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        prior_scale: float = 10.0,
        covariance: str | None = None,
        rule: Rule | None = None,
        stream: bool = False,
        random_state: PyTree = 0,
    ) -> None:
        super().__init__(
            alpha=alpha,
            prior_scale=prior_scale,
            covariance=covariance,
            rule=rule,
            stream=stream,
            random_state=random_state,
        )

    def fit(self, X: PyTree, y: PyTree) -> "OnlineRegressor":
        """Learn rows anew, one pass over them.

        Args:
            X: Data ``(n, d)``: an array, or a table of pandas.
            y: Outcomes ``(n,)``.

        Returns:
            The estimator itself.

        Raises:
            ValueError: If an entry is not finite.
        """
        self.__dict__.pop("_learners", None)
        return self._learn(X, y, is_table=not self.stream)

    def partial_fit(self, X: PyTree, y: PyTree) -> "OnlineRegressor":
        """Learn rows, in their order; arguments as for :meth:`fit`."""
        return self._learn(X, y, is_table=False)

    def _learn(self, X: PyTree, y: PyTree, *, is_table: bool) -> "OnlineRegressor":
        is_start = not hasattr(self, "_learners")
        rows, outcomes = self._validate(X, y, reset=is_start, y_numeric=True)
        outcomes = np.asarray(outcomes, np.float64)
        if is_start:
            self._start_rows(1)
            self._start_noise()
        if is_table:
            order = check_random_state(self.random_state).permutation(len(rows))
            rows, outcomes = rows[order], outcomes[order]
        self._set_unit(outcomes)
        scaled = (outcomes - self._center) / self._scale()
        full = self._with_intercept(rows)
        losses = self._learners.run(full, scaled[:, None], is_table=is_table)
        self._observe(losses)
        return self

    def learn_one(self, x: Row, y: float) -> None:
        """Learn one row.

        Args:
            x: A dictionary of features, or numbers ``(d,)``.
            y: The outcome. A row or an outcome that is not finite is rejected and counted.

        Raises:
            ValueError: If the row is of another form than at the start.
        """
        if not hasattr(self, "_learners"):
            self._start_one(x, 1)
            self._start_noise()
        self._add_columns(x)
        row, y = self._row(x), math.nan if y is None else float(y)
        if self._unit is None and np.isfinite(row).all():
            self._set_unit(np.array([y]))
        (losses,) = self._learners.learn(row, [(y - (self._center or 0.0)) / self._scale()])
        self._observe(losses)

    def predict(self, X: PyTree, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Predictive means ``(n,)``.

        Args:
            X: Data ``(n, d)``.
            return_std: Whether to return the standard deviations too, noise included.

        Returns:
            The means, or means and standard deviations. These are infinite while the Student-t has none, for
            the first three rows at ``alpha=1``.
        """
        check_is_fitted(self)
        (moments,) = self._learners.predict(self._with_intercept(self._validate(X)))
        mean = (self._center or 0.0) + self._scale() * moments[:, 0]
        return (mean, self._deviation(moments[:, 1])) if return_std else mean

    def predict_one(self, x: Row) -> float:
        """The predictive mean; 0 before the first datum."""
        if not hasattr(self, "_learners"):
            return 0.0
        ((mean, _),) = self._learners.predict_one(self._row(x))
        return (self._center or 0.0) + self._scale() * float(mean)

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
        return self._scale() * self._learners.coefficients()[0, : self.n_features_in_ + 1]

    def _start_noise(self) -> None:
        self._center: float | None = None
        self._unit: float | None = None
        self._noise = (0.0, 0.0)
        self._is_first = True

    def _scale(self) -> float:
        return 1.0 if self._unit is None else self._unit

    def _set_unit(self, outcomes: np.ndarray) -> None:
        """Outcomes are counted from the first, in units of the first difference from it: before, all were 0."""
        finite = outcomes[np.isfinite(outcomes)]
        if self._center is None and len(finite):
            self._center = float(finite[0])
        if self._unit is None and len(finite):
            differences = np.abs(finite - self._center)
            if differences.any():
                self._unit = float(differences[np.argmax(differences > 0)])

    def _observe(self, losses: Losses) -> None:
        """Learn the noise from the losses of rounds, (y - m·z)²/2 and half the variance of the predictor more."""
        at_mean, expected = (np.atleast_1d(np.asarray(leaf)) for leaf in losses)
        alpha, (a, b) = self.alpha, self._noise
        # On other scales the prior is another too, and the sum of squares is what stays.
        b, self._learners.energy = max(b + self._learners.energy, 0.0), 0.0
        is_finite = np.isfinite(at_mean + expected)
        if is_finite.any() and self._is_first:
            # The outcome that all are counted from tells nothing of the noise.
            is_finite[np.argmax(is_finite)], self._is_first = False, False
        square = 2.0 * np.maximum(at_mean - LOG_NORMAL, 0.0)[is_finite]
        variance = 2.0 * np.maximum(expected - at_mean, 0.0)[is_finite]
        terms = 0.5 * alpha * square / (1.0 + alpha * variance)
        # One after the other, as single rows are added.
        self._noise = (
            float(np.cumsum(np.r_[a, np.full(len(terms), 0.5 * alpha)])[-1]),
            float(np.cumsum(np.r_[b, terms])[-1]),
        )

    def _deviation(self, variance: np.ndarray) -> np.ndarray:
        a, b = self._noise
        if a <= 1.0:
            return np.full(variance.shape, math.inf)
        return self._scale() * np.sqrt(b / (a - 1.0) * (1.0 + variance))
