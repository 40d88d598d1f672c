"""Tempered mixtures as an estimator of scikit-learn."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, DensityMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from numpyro_tempered import mixtures
from numpyro_tempered.core import (
    as_array,
    check_choice,
    check_count,
    check_number,
    describe,
    double_precision,
    doubles,
)
from numpyro_tempered.estimators.base import (
    Estimator,
    check_orders,
    is_one,
    make_key,
    on_host,
)
from numpyro_tempered.mixtures import components
from numpyro_tempered.mixtures.components import derived
from numpyro_tempered.mixtures.components.base import Component, check_is_component
from numpyro_tempered.mixtures.criteria import aic, bic
from numpyro_tempered.mixtures.weights import Concentration, mean

GAUSSIANS: dict[str, Callable[..., Component]] = {
    "full": components.gaussian,
    "tied": components.tied_gaussian,
    "diag": components.diagonal_gaussian,
    "spherical": components.spherical_gaussian,
}
Spec: TypeAlias = str | Component | Callable[[int], Component]


class TemperedMixture(
    ClassNamePrefixFeaturesOutMixin, TransformerMixin, DensityMixin, Estimator
):
    r"""A mixture by tempered coordinate ascent, :func:`numpyro_tempered.mixtures.fit`, for scikit-learn.

    Names of Gaussian components have a prior in the units of the data, by
    :func:`~numpyro_tempered.mixtures.components.scaled_to`, so that columns may come in raw units; only
    "spherical" needs columns of one unit. A constant column has no scale and is refused: scikit-learn's
    ``VarianceThreshold`` leaves it out. Everything is computed in double precision, whatever the type of the
    data, and returned as NumPy arrays.

    Args:
        n_components: K, or several such as ``range(1, 9)``, of which the penalised ELBO selects one, by
            :func:`numpyro_tempered.mixtures.select_num_components`; None for all K from 1 up.
        component: "full", "tied", "diag" or "spherical" for Gaussian components; a component, such as
            ``nt.mixtures.components.poisson(3)``; or a function from the number of columns to one, such as
            ``nt.mixtures.components.poisson``. Missing entries (NaN) are marginalised by Gaussians and by
            components that allow this, and refused by the others. Or a list of names, such as
            ``["tied", "full"]``, or a mapping from names of yours to any of these: the penalised ELBO selects
            among them and K.
        alpha: Power on the likelihood, positive.
        concentration: Dirichlet prior of the weights, or ``nt.mixtures.stick_breaking(gamma)``.
        fraction: The share of a column's variance that the prior expects within components, for the names alone.
        n_init: Starts, ascended side by side, of which the best is taken.
        max_iter: Upper limit of passes over the data.
        tol: The gain of a pass, for each row, below which a start has converged; 1e-8 by default.
        random_state: An integer for the same results in every call, a ``RandomState`` of NumPy, or None.
        warm_start: Whether a further fit starts from the one before, and from there alone, as that of
            ``GaussianMixture``: for data that have grown, or another ``alpha`` or ``max_iter``. For one K and one
            component, which stay.
        verbose: Whether to show progress bars; 0 shows none.

    Attributes:
        fit_: The :class:`numpyro_tempered.mixtures.MixtureFit`.
        selection_: The :class:`numpyro_tempered.mixtures.ComponentSelection`, where there were several K or
            components; of several components ``selection_.selected`` is a pair of a name and K.
        n_features_in_: Number of columns d.
        feature_names_in_: Their names, where the data had names that are all strings.
        n_components_: K, or the selected one; empty components are included.
        weights_: Posterior means of the weights, ``(K,)``.
        means_: Posterior means of the components' means ``(K, d)``, where the family has a location.
        covariances_: Inverses of the posterior means of the precisions, of Gaussian components: ``(K, d, d)`` for
            "full", ``(d, d)`` for "tied", ``(K, d)`` for "diag" and ``(K,)`` for "spherical".
        precisions_: Posterior means of the precisions, in the same shapes.
        converged_: Whether the best start ended by ``tol``.
        n_iter_: Passes over the data of the best start.
        lower_bound_: F, the bound that the ascent maximised, in nats for all data; every constant is included.

    References:
        CA18, Algorithm 1; for several K, C19, Theorem 1.

    Example:
        >>> import numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[150.0, 2e4], [152.0, 2.1e4], [190.0, 9e4], [191.0, 9.2e4]])
        >>> mixture = nt.estimators.TemperedMixture(2, component="diag", random_state=0).fit(x)
        >>> label = mixture.predict(x)
        >>> bool(label[0] == label[1] != label[2] == label[3])
        True
    """

    def __init__(
        self,
        n_components: int | Iterable[int] | None = 1,
        *,
        component: Spec | Sequence[str] | Mapping[str, Spec] = "full",
        alpha: float = 1.0,
        concentration: Concentration = 1.0,
        fraction: float = 0.1,
        n_init: int = 8,
        max_iter: int = 1000,
        tol: float | None = None,
        random_state: Any = None,
        warm_start: bool = False,
        verbose: int = 0,
    ) -> None:
        self.n_components = n_components
        self.component = component
        self.alpha = alpha
        self.concentration = concentration
        self.fraction = fraction
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.warm_start = warm_start
        self.verbose = verbose

    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None
    ) -> "TemperedMixture":
        """Fit the mixture, and select K where there are several.

        Args:
            X: Data ``(n, d)``: an array, or a table of pandas.
            y: Ignored.
            sample_weight: How often each row counts, ``(n,)``, not negative.

        Returns:
            The estimator itself.

        Raises:
            TypeError: If the data are sparse, or hold dates or text, or an argument is of another kind.
            ValueError: If the data are not of the family, a column is constant, an argument is out of its range,
                or a warm start has another K, another component or other columns than the fit before.
        """
        orders = (
            None if self.n_components is None else check_orders(self.n_components, 1)
        )
        options: dict[str, Any] = {
            "alpha": self.alpha,
            "concentration": self.concentration,
            "num_restarts": check_count(self.n_init, "n_init"),
            "max_iter": check_count(self.max_iter, "max_iter"),
            "tolerance": None
            if self.tol is None
            else check_number(self.tol, "tol", "[0, inf)"),
            "progress_bar": bool(self.verbose),
        }
        # The scale of a column takes two rows.
        specs = _specs(self.component)
        is_single = orders is not None and is_one(self.n_components) and None in specs
        last = vars(self).get("fit_") if self.warm_start else None
        if self.warm_start and not is_single:
            raise ValueError(
                "warm_start=True is for one n_components and one component, not for several."
            )
        if last is not None and [last.num_components] != orders:
            raise ValueError(
                f"warm_start=True: the last fit has {last.num_components} components, n_components is "
                f"{self.n_components}. Leave it as it was, or set warm_start=False."
            )
        rows = self._validate(X, least=2 if _names(specs) else 1, reset=last is None)
        weight = _weight(sample_weight, len(rows))
        key = make_key(self.random_state)
        with double_precision():
            families = {
                name: self._make_component(spec, rows, weight)
                for name, spec in specs.items()
            }
            options["sample_weight"] = weight
            if is_single and orders is not None:
                self.__dict__.pop("selection_", None)
                if last is not None:
                    options |= {"init": last, "num_restarts": 1}
                fit = mixtures.fit(
                    key, rows, families[None], num_components=orders[0], **options
                )
            else:
                several = families.get(None, families)
                selection = mixtures.select_num_components(
                    key,
                    rows,
                    several,
                    num_components=orders,
                    baselines=False,
                    num_samples=100,
                    **options,
                )
                self.selection_ = on_host(selection)
                fit = selection.fit
        self.fit_ = on_host(fit)
        return self

    def fit_predict(
        self, X: Any, y: Any = None, sample_weight: Any = None
    ) -> np.ndarray:
        """Fit the mixture, and the component of each row."""
        return self.fit(X, y, sample_weight=sample_weight).predict(X)

    def predict(self, X: Any) -> np.ndarray:
        """The component of the largest responsibility, ``(n,)``."""
        return np.argmax(self.predict_proba(X), axis=1)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The responsibilities of the components ``(n, K)``; rows sum to 1."""
        return self._at_rows(mixtures.responsibilities, X)

    def transform(self, X: Any) -> np.ndarray:
        """As :meth:`predict_proba`: memberships as features, for the next step of a pipeline."""
        return self.predict_proba(X)

    def score_samples(self, X: Any) -> np.ndarray:
        """The log predictive density of each row, ``(n,)`` in nats, with the parameters integrated out."""
        return self._at_rows(mixtures.log_predictive, X)

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of :meth:`score_samples`, for ``GridSearchCV`` and its kin."""
        return float(np.mean(self.score_samples(X)))

    def bic(self, X: Any) -> float:
        """-2 log L + p log n; the smallest is the best.

        log L is the sum of :meth:`score_samples` over the rows of X. There the parameters are integrated out: it
        is not the largest log-likelihood, which ``GaussianMixture`` takes, but close to it where rows are many. p
        counts the free parameters of the components and K - 1 weights. Neither alpha nor the weights of rows
        count. Several ``n_components`` are selected by another criterion, the penalised ELBO.
        """
        return bic(*self._likelihood(X))

    def aic(self, X: Any) -> float:
        """-2 log L + 2 p; the smallest is the best. log L and p are those of :meth:`bic`."""
        return aic(*self._likelihood(X)[:2])

    def sample(self, n_samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Rows ``(n_samples, d)`` from the predictive distribution, and their components ``(n_samples,)``."""
        check_is_fitted(self)
        count = check_count(n_samples, "n_samples")
        key = make_key(self.random_state)
        with double_precision():
            rows, labels = mixtures.sample(key, self.fit_, count)
        return np.asarray(rows), np.asarray(labels)

    @property
    def n_components_(self) -> int:
        """K, empty components included."""
        return self.fit_.num_components

    @property
    def weights_(self) -> np.ndarray:
        """Posterior means of the weights ``(K,)``."""
        return mean(self.fit_.factors.concentration)

    @property
    def means_(self) -> np.ndarray:
        """Posterior means of the components' means ``(K, d)``."""
        posterior = self.fit_.posterior
        if "loc" not in getattr(posterior, "_fields", ()):
            raise AttributeError(
                f"components of the family {self.fit_.component.name} have no means."
            )
        return np.asarray(posterior.loc)

    @property
    def covariances_(self) -> np.ndarray:
        """Inverses of the posterior means of the precisions."""
        name, q = self.fit_.component.name, self.fit_.posterior
        if name == "gaussian":
            return np.asarray(q.scale / q.df[:, None, None])
        if name == "tied_gaussian":
            return np.asarray(q.scale[0] / q.df[0])
        if name in ("diagonal_gaussian", "spherical_gaussian"):
            return np.asarray(q.rate / q.concentration)
        raise AttributeError(f"components of the family {name} have no covariances.")

    @property
    def precisions_(self) -> np.ndarray:
        """Posterior means of the precisions."""
        covariances = self.covariances_
        if self.fit_.component.name not in ("gaussian", "tied_gaussian"):
            return 1.0 / covariances
        root = np.linalg.solve(
            np.linalg.cholesky(covariances), np.eye(covariances.shape[-1])
        )
        return np.swapaxes(root, -1, -2) @ root

    @property
    def converged_(self) -> bool:
        """Whether the best start ended by ``tol``."""
        return self.fit_.converged

    @property
    def n_iter_(self) -> int:
        """Passes over the data of the best start."""
        return self.fit_.num_iter

    @property
    def lower_bound_(self) -> float:
        """F in nats, for all data."""
        return self.fit_.objective

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    def _allows_missing(self) -> bool:
        return all(_marginalises(spec) for spec in _specs(self.component).values())

    def _make_component(
        self, component: Spec, rows: np.ndarray, weight: np.ndarray | None
    ) -> Component:
        if not isinstance(component, str):
            component = component(rows.shape[1]) if callable(component) else component
            check_is_component(component)
            return component
        family = GAUSSIANS[check_choice(component, "component", GAUSSIANS)]
        scale = components.scaled_to(rows, fraction=self.fraction, sample_weight=weight)
        return family(rows.shape[1], **scale)

    def _at_rows(self, function: Callable[..., jax.Array], X: Any) -> np.ndarray:
        check_is_fitted(self)
        rows = self._validate(X)
        with double_precision():
            return np.asarray(function(self.fit_, rows))

    def _likelihood(self, X: Any) -> tuple[float, int, int]:
        """The log-likelihood, the number of free parameters, and the number of rows."""
        densities, k = self.score_samples(X), self.n_components_
        return (
            float(np.sum(densities)),
            k
            - 1
            + derived.num_parameters(self.fit_.component, self.fit_.problem.prior, k),
            len(densities),
        )


def _weight(sample_weight: Any, num_rows: int) -> np.ndarray | None:
    """Weights of the rows; one number stands for all.

    Raises:
        TypeError: If they are not real numbers.
        ValueError: If all are zero.
    """
    if sample_weight is None:
        return None
    weight = doubles(as_array(sample_weight, "sample_weight"))
    if not weight.any():
        raise ValueError("sample_weight is zero for all rows.")
    return np.full(num_rows, weight) if weight.ndim == 0 else weight


def _specs(component: Any) -> Mapping[Any, Spec]:
    """What ``component`` names, by name; one alone by None.

    Raises:
        TypeError: If a list has other things than names.
        ValueError: If there is none, or one is named twice.
    """
    if isinstance(component, Mapping):
        specs = component
    elif isinstance(component, list | tuple) and not isinstance(component, Component):
        if not all(isinstance(name, str) for name in component):
            raise TypeError(
                f"a list of components has names alone, got {describe(component)}: give a mapping."
            )
        specs = {name: name for name in component}
    else:
        return {None: component}
    if not specs or len(specs) < len(component):
        raise ValueError(
            f"component must be different components, at least one, got {describe(component)}."
        )
    return specs


def _names(specs: Mapping[Any, Spec]) -> list[str]:
    """The names of Gaussians, whose priors are scaled to the data."""
    return [spec for spec in specs.values() if isinstance(spec, str)]


def _marginalises(component: Any) -> bool:
    if isinstance(component, str):
        return component in GAUSSIANS
    return isinstance(component, Component) and component.with_missing is not None
