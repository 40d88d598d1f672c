"""Tempered probabilistic PCA as an estimator of scikit-learn."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted

from numpyro_tempered import ppca
from numpyro_tempered.core import check_count, check_number, double_precision
from numpyro_tempered.estimators.base import (
    Estimator,
    check_orders,
    is_one,
    make_key,
    on_host,
)
from numpyro_tempered.select.ranking import dyadic


class TemperedPCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, Estimator):
    r"""Tempered probabilistic PCA, :func:`numpyro_tempered.ppca.fit`, for scikit-learn.

    As ``PCA`` of scikit-learn, with a noise that is learned: scores along orthonormal axes, in units of the data,
    shrunk towards 0 by what of them is noise. Missing entries (NaN) are marginalised. The noise is common to all
    columns: bring columns of different kinds to one unit, by a ``StandardScaler``. Everything is computed in
    double precision, whatever the type of the data, and returned as NumPy arrays.

    Args:
        n_components: Number of factors K; several such as ``range(1, 10)``, of which the penalised ELBO selects
            one, by :func:`numpyro_tempered.ppca.select_num_factors` with the prior weights of
            :func:`numpyro_tempered.dyadic`; or None for d - 1, with which every covariance is possible, or n
            where rows are fewer. Of these ``ard`` empties those that the data do not need. With 0 among several
            the data may turn out to have no factor: then :meth:`transform` raises, since the next step of a
            pipeline would have no column.
        alpha: Power on the likelihood, positive.
        prior: A prior by :func:`numpyro_tempered.ppca.prior`; in the units of the data by default.
        ard: Whether each factor has a precision of its own, so that it can vanish.
        n_init: Starts, of which the best is taken.
        max_iter: Upper limit of sweeps.
        tol: The gain of a sweep, for each row, below which a start has converged.
        random_state: An integer for the same results in every call, a ``RandomState`` of NumPy, or None.

    Attributes:
        fit_: The :class:`numpyro_tempered.ppca.PPCAFit`.
        selection_: The :class:`numpyro_tempered.ppca.FactorSelection`, where there were several K.
        n_features_in_: Number of columns d.
        n_samples_: Number of rows n.
        feature_names_in_: Their names, where the data had names that are all strings.
        n_components_: K, or the selected one.
        components_: Orthonormal axes ``(K, d)``, the largest entry of each positive.
        explained_variance_: Variance along each axis, noise included, in decreasing order ``(K,)``.
        explained_variance_ratio_: The same as shares of the total variance, the trace of :meth:`get_covariance`,
            whose other directions have the noise alone: they sum to less than 1 unless K = d.
        singular_values_: Those of centred data with these variances: the roots of (n - 1) times them.
        noise_variance_: Variance along any other direction.
        mean_: Posterior mean of the columns' means ``(d,)``.
        converged_: Whether the best start ended by ``tol``.
        n_iter_: Sweeps of the best start.
        lower_bound_: The ELBO in nats, for all data; every constant is included.

    References:
        C19, Theorem 1, for several K.

    Example:
        >>> import numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.linspace(-2.0, 2.0, 20)[:, None] * np.ones(3) + 0.1 * np.sin(np.arange(60.0)).reshape(20, 3)
        >>> pca = nt.estimators.TemperedPCA(1).fit(x)
        >>> print(pca.components_.round(1), pca.transform([[1.0, 1.0, 1.0]]).round(1))
        [[0.6 0.6 0.6]] [[1.7]]
    """

    def __init__(
        self,
        n_components: int | Iterable[int] | None = None,
        *,
        alpha: float = 1.0,
        prior: ppca.Prior | None = None,
        ard: bool = True,
        n_init: int = 1,
        max_iter: int = 2000,
        tol: float = 1e-6,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.alpha = alpha
        self.prior = prior
        self.ard = ard
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> "TemperedPCA":
        """Fit the factors, and select K where there are several.

        Args:
            X: Data ``(n, d)``, NaN where missing: an array, or a table of pandas.
            y: Ignored.

        Returns:
            The estimator itself.

        Raises:
            TypeError: If the data are sparse, or hold dates or text, or an argument is of another kind.
            ValueError: If a column has no entry, all columns are constant, or an argument is out of its range.
        """
        # The scale of the columns takes two rows.
        rows = self._validate(X, least=2 if self.prior is None else 1, reset=True)
        several = self.n_components is not None and not is_one(self.n_components)
        orders = self._orders(rows)
        options: dict[str, Any] = {
            "alpha": self.alpha,
            "prior": self.prior,
            "ard": self.ard,
            "num_restarts": check_count(self.n_init, "n_init"),
            "max_iter": check_count(self.max_iter, "max_iter"),
            "tolerance": check_number(self.tol, "tol", "[0, inf)"),
        }
        key = make_key(self.random_state)
        with double_precision():
            if several:
                selection = ppca.select_num_factors(
                    key, rows, num_factors=orders, log_prior=dyadic, **options
                )
                self.selection_ = on_host(selection)
                fit = selection.fit
            else:
                self.__dict__.pop("selection_", None)
                fit = ppca.fit(key, rows, num_factors=orders[0], **options)
        self.fit_, self.n_samples_ = on_host(fit), len(rows)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Posterior means of the scores along ``components_`` ``(n, K)``, in units of the data.

        Raises:
            ValueError: If 0 was selected among several ``n_components``.
        """
        rows = self._rows(X)
        if "selection_" in vars(self) and self.n_components_ == 0:
            raise ValueError(
                "0 factors are selected: these data say nothing against independent columns of one noise, and "
                "there is no column to pass on. Take n_components from 1 up, such as range(1, 10)."
            )
        with double_precision():
            latent = np.asarray(ppca.transform(self.fit_, rows).loc)
        return latent @ self.fit_.loadings.T @ self.components_.T

    def inverse_transform(self, X: Any) -> np.ndarray:
        """Rows ``(n, d)`` from scores ``(n, K)``: the mean plus the axes times the scores."""
        check_is_fitted(self)
        scores = check_array(X, dtype=np.float64, ensure_min_features=0)
        if scores.shape[1] != self.n_components_:
            raise ValueError(
                f"X has {scores.shape[1]} columns; expected {self.n_components_}, the scores."
            )
        return scores @ self.components_ + self.mean_

    def get_covariance(self) -> np.ndarray:
        """Return the covariance of a row ``(d, d)``: variances along the axes, the noise in other directions."""
        excess = self.explained_variance_ - self.noise_variance_
        return self._around_noise(self.noise_variance_, excess)

    def get_precision(self) -> np.ndarray:
        """Return the inverse of :meth:`get_covariance`."""
        noise = 1.0 / self.noise_variance_
        return self._around_noise(noise, 1.0 / self.explained_variance_ - noise)

    def score_samples(self, X: Any) -> np.ndarray:
        """The log predictive density of each row ``(n,)``, in nats.

        Factors and missing entries are integrated out exactly, the other parameters by 1000 draws of their
        posterior, which are the same in each call.
        """
        rows = self._rows(X)
        with double_precision():
            return np.asarray(
                ppca.log_predictive(make_key(0), self.fit_, rows, 1000).value
            )

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of :meth:`score_samples`, for ``GridSearchCV`` and its kin."""
        return float(np.mean(self.score_samples(X)))

    def sample(self, n_samples: int = 1) -> np.ndarray:
        """Rows ``(n_samples, d)`` from the predictive distribution."""
        check_is_fitted(self)
        count = check_count(n_samples, "n_samples")
        key = make_key(self.random_state)
        with double_precision():
            return ppca.sample(key, self.fit_, count)

    @property
    def n_components_(self) -> int:
        """K."""
        return self.fit_.num_factors

    @property
    def components_(self) -> np.ndarray:
        """Orthonormal axes ``(K, d)``."""
        return ppca.principal_axes(self.fit_).directions.T

    @property
    def explained_variance_(self) -> np.ndarray:
        """Variance along each axis, noise included ``(K,)``."""
        return ppca.principal_axes(self.fit_).variances

    @property
    def explained_variance_ratio_(self) -> np.ndarray:
        """Variance along each axis as a share of the total variance ``(K,)``."""
        num_others = len(self.mean_) - self.n_components_
        variances = self.explained_variance_
        return variances / (np.sum(variances) + num_others * self.noise_variance_)

    @property
    def singular_values_(self) -> np.ndarray:
        """Singular values of centred data with these variances along the axes ``(K,)``."""
        return np.sqrt((self.n_samples_ - 1) * self.explained_variance_)

    @property
    def noise_variance_(self) -> float:
        """Variance along any other direction."""
        return self.fit_.noise_variance

    @property
    def mean_(self) -> np.ndarray:
        """Posterior mean of the columns' means ``(d,)``."""
        return self.fit_.location

    @property
    def converged_(self) -> bool:
        """Whether the best start ended by ``tol``."""
        return self.fit_.converged

    @property
    def n_iter_(self) -> int:
        """Sweeps of the best start."""
        return self.fit_.num_iter

    @property
    def lower_bound_(self) -> float:
        """The ELBO in nats, for all data."""
        return self.fit_.objective

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    def _rows(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return self._validate(X)

    def _around_noise(self, noise: float, along: np.ndarray) -> np.ndarray:
        """Return the matrix with eigenvalue ``noise``, to which ``along`` is added along the axes."""
        axes = self.components_
        return noise * np.eye(axes.shape[1]) + (axes.T * along) @ axes

    def _orders(self, rows: np.ndarray) -> list[int]:
        most = rows.shape[1]
        if self.n_components is None:
            return [max(1, min(rows.shape[0], most - 1))]
        orders = check_orders(self.n_components, 0)
        if max(orders) > most:
            raise ValueError(
                f"n_components={max(orders)} is more than n_features={most}, the columns of X."
            )
        return orders
