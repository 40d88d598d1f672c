"""Classification of a stream as an estimator of scikit-learn and of river."""

from collections.abc import Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from numpyro_tempered.core import ArrayLike, PyTree, check_number, describe
from numpyro_tempered.estimators.base import are_rows, check_some
from numpyro_tempered.estimators.labels import LabelEstimator, check_label, normalise
from numpyro_tempered.estimators.learners import LOGISTIC, weighted
from numpyro_tempered.estimators.river import register
from numpyro_tempered.estimators.rows import Row
from numpyro_tempered.online.base import OnlineState, Rule

if TYPE_CHECKING:
    import pandas as pd


@partial(register, "Classifier")
class OnlineClassifier(ClassifierMixin, LabelEstimator):
    r"""Bayesian logistic regression of a stream, one row at a time, for scikit-learn and river.

    Each row is one round of :func:`numpyro_tempered.online.rvga` on standardised features, so that columns may
    come in raw units; an intercept is added. Scales are those of the rows so far, fixed anew each time that their
    number has doubled or a column changes that was constant; the posterior's evidence follows them, and the prior
    is that of the new scales. Of K > 2 classes each is learned against the rest, and the K probabilities are
    divided by their sum. Probabilities are averages over the posterior. Computed in double precision, whatever
    the type of the data.

    ``partial_fit`` of many rows, in pieces of any size, and ``learn_one`` of each are the same rounds. ``fit``
    starts anew, and as it has all rows at hand, takes them in a random order on the scales of all; with
    ``stream=True`` it is one ``partial_fit``.

    Rows of ``learn_one`` are dictionaries, whose names may come and go, or arrays. A feature that is absent
    counts 0, and one that comes for the first time has been 0 so far. A row that is not finite is rejected and
    counted. An entry beyond 100 standard deviations of its column counts as one of 10 in its scale. A stream that
    begins with ``learn_one`` takes any label at any time, as if its class had been there from the start; the
    classes of ``fit`` and of the first ``partial_fit`` are fixed.

    Args:
        alpha: Power on the likelihood, positive.
        prior_scale: Prior standard deviation of coefficients of standardised features; that of the intercept is 5
            times as large. None for 1 up to 200 columns, and 3/√d beyond, so that the predictor's is 3.
        covariance: "full", "diag", or None for "full" up to 200 columns and "diag" beyond, which a warning tells.
        rule: An online rule in the place of ``nt.online.rvga(alpha)``, not standardised; its scales are those of
            :func:`numpyro_tempered.online.standardise` in a stream, and those of ``fit``.
        class_weight: Powers on the likelihood by label, 1 where there is none; or "balanced", for ``fit``:
            n/(K n_k) for the n_k rows of a label.
        stream: Whether ``fit`` takes the rows in their order, on the scales of those so far.
        random_state: For the random order: an integer, a ``RandomState`` of NumPy, or None.

    Attributes:
        classes_: The labels, sorted; in a stream that begins with ``learn_one`` in the order of their appearance.
        n_features_in_: Number of columns d.
        feature_names_in_: Their names, where all are strings.
        coef_: Posterior means in the units of the data, ``(1, d)`` for two classes and ``(K, d)`` for more.
        intercept_: Those of the intercepts, ``(1,)`` or ``(K,)``.
        states_: An :class:`numpyro_tempered.online.OnlineState` for each row of ``coef_``, intercept first, on
            standardised features.

    References:
        LBB22.

    Example:
        >>> import numpyro_tempered as nt
        >>> model = nt.estimators.OnlineClassifier()
        >>> for height, answer in [(150.0, "no"), (190.0, "yes"), (155.0, "no"), (185.0, "yes")]:
        ...     model.learn_one({"height": height}, answer)
        >>> model.predict_one({"height": 188.0})
        'yes'
    """

    _expectation, _narrow = weighted(LOGISTIC), 1.0

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        prior_scale: float | None = None,
        covariance: str | None = None,
        rule: Rule | None = None,
        class_weight: Mapping[Hashable, float] | str | None = None,
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
        self.class_weight = class_weight

    def fit(
        self, X: PyTree, y: PyTree, sample_weight: PyTree = None
    ) -> "OnlineClassifier":
        """Learn rows anew, one pass over them.

        Args:
            X: Data ``(n, d)``: an array, or a table of pandas.
            y: Labels ``(n,)``.
            sample_weight: The power on the likelihood of each row, ``(n,)``; one of 2 is the row twice.

        Returns:
            The estimator itself.

        Raises:
            ValueError: If an entry is not finite, or the labels are not classes.
        """
        check_some(sample_weight)
        self.__dict__.pop("_learners", None)
        return self._learn(X, y, sample_weight, np.unique, is_table=not self.stream)

    def partial_fit(
        self,
        X: PyTree,
        y: PyTree,
        classes: ArrayLike | None = None,
        sample_weight: PyTree = None,
    ) -> "OnlineClassifier":
        """Learn rows, in their order.

        Args:
            X: Data ``(n, d)``.
            y: Labels ``(n,)``.
            classes: All the labels that will come, in the first call.
            sample_weight: The power on the likelihood of each row, ``(n,)``.

        Returns:
            The estimator itself.

        Raises:
            ValueError: If ``classes`` is missing in the first call or another in a later one, a label is none of
                them, or an entry is not finite.
        """
        self._refuse_balanced()
        if not hasattr(self, "_learners"):
            if classes is None:
                raise ValueError(
                    "classes must be passed on the first call to partial_fit."
                )
            return self._learn(
                X,
                y,
                sample_weight,
                lambda _: np.unique(np.asarray(classes)),
                is_table=False,
            )
        if classes is not None and set(np.unique(np.asarray(classes)).tolist()) != set(
            self._index
        ):
            raise ValueError(
                f"classes={describe(classes)} is not the same as on the last call, {self.classes_}."
            )
        return self._learn(X, y, sample_weight, None, is_table=False)

    def _learn(
        self,
        X: PyTree,
        y: PyTree,
        sample_weight: PyTree,
        classes_of: PyTree,
        *,
        is_table: bool,
    ) -> "OnlineClassifier":
        is_start = classes_of is not None
        rows, labels = self._validate(X, y, reset=is_start)
        check_classification_targets(labels)
        labels, weight = np.asarray(labels), self._weight(sample_weight, len(rows))
        keys = labels.tolist()
        if is_start:
            self._set_classes(classes_of(labels).tolist(), open_ended=False)
        self._check_labels(keys)
        weight = weight * self._weights_of(labels)
        if is_start:
            num_classes = len(self._index)
            self._start_rows(1 if num_classes == 2 else num_classes, is_table=is_table)
        for key in keys:
            self._add_class(key)
        codes = np.array([self._index[key] for key in keys], float)
        if is_table:
            rows, codes, weight = self._in_order(rows, codes, weight)
        else:
            rows, codes, weight = (leaf[weight > 0] for leaf in (rows, codes, weight))
        if len(rows):
            self._run(self._with_intercept(rows), codes, weight, is_table=is_table)
        return self

    def learn_one(self, x: Row, y: Hashable, w: float = 1.0) -> None:
        """Learn one row.

        Args:
            x: A dictionary of features, or numbers ``(d,)``.
            y: The label, anything that can be hashed.
            w: The power on the row's likelihood, not negative.

        Raises:
            ValueError: If the row is of another form than at the start, the label is missing, or is none of fixed
                classes. What is refused changes nothing.
            TypeError: If a feature is no number.
        """
        check_label(y)
        w = float(check_number(w, "w", "[0, inf)"))
        self._refuse_balanced()
        is_start, x = not hasattr(self, "_learners"), self._read(x)
        if not is_start:
            self._check_labels([y])
        if self.class_weight is not None:
            w *= self._weights_of(np.array([y, None], object)[:1]).item()
        if w == 0.0:
            return
        if is_start:
            self._set_classes([], open_ended=True)
            # One for the classes that have not come: all rows are against it.
            self._start_one(x, 1)
        elif isinstance(x, Mapping):
            self._add_columns(x)
        row = self._row(x)
        if are_rows(row):
            self._add_class(y)
        self._learners.learn(row, w, self._outcomes(y))

    def predict_proba(self, X: PyTree) -> np.ndarray:
        """Return predictive probabilities of the classes ``(n, K)``, in the order of ``classes_``."""
        return self._classes_of(self._pairs(X))

    def predict_log_proba(self, X: PyTree) -> np.ndarray:
        """Return logarithms of predictive probabilities ``(n, K)``."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def decision_function(self, X: PyTree) -> np.ndarray:
        """Return log odds, of the second of two classes ``(n,)``, or of each of K against the rest ``(n, K)``."""
        odds = np.diff(
            np.log(np.maximum(self._pairs(X), np.finfo(float).tiny)), axis=-1
        )[..., 0]
        return (
            odds[:, self._second()]
            if len(self._index) == 2
            else odds[:, : len(self._index)]
        )

    def predict(self, X: PyTree) -> np.ndarray:
        """Return the class of the largest probability ``(n,)``."""
        best = np.argmax(self.predict_proba(X), axis=1)
        return self.classes_[best]

    def _pairs(self, X: PyTree) -> np.ndarray:
        """Return the probabilities of -1 and +1 by each learner ``(n, L, 2)``."""
        check_is_fitted(self)
        rows = self._with_intercept(self._validate(X))
        return np.stack(self._learners.probabilities(rows), axis=1)

    def predict_proba_one(self, x: Row) -> dict[Hashable, float]:
        """Return predictive probabilities of the classes by label; none before the first datum.

        Raises:
            ValueError: If a feature is missing.
        """
        if not hasattr(self, "_learners") or not self._index:
            return {}
        row = self._row_to_predict(x)
        if len(self._index) == 2:
            learner = self._second()
            # Rounding may lead beyond 1.
            second = min(
                *self._learners.probability_one(row, slice(learner, learner + 1)), 1.0
            )
            return dict(zip(self._index, (1.0 - second, second), strict=True))
        values = np.array(
            [self._learners.probability_one(row, slice(0, len(self._index)))]
        )
        return dict(zip(self._index, normalise(values)[0].tolist(), strict=True))

    def predict_one(self, x: Row) -> Hashable:
        """Return the class of the largest probability; None before the first datum."""
        probabilities = self.predict_proba_one(x)
        return (
            max(probabilities, key=probabilities.__getitem__) if probabilities else None
        )

    def predict_proba_many(self, X: "pd.DataFrame") -> "pd.DataFrame":
        """Return predictive probabilities of the rows of a frame, a column for each label."""
        import pandas as pd

        if not hasattr(self, "_learners") or not self._index:
            return pd.DataFrame(index=getattr(X, "index", None))
        values = self._classes_of(
            np.stack(self._learners.probabilities(self._rows_to_predict(X)), axis=1)
        )
        return pd.DataFrame(
            values, index=getattr(X, "index", None), columns=list(self._index)
        )

    def predict_many(self, X: "pd.DataFrame") -> "pd.Series":
        """Return the class of the largest probability of each row of a frame."""
        probabilities = self.predict_proba_many(X)
        return (
            probabilities.idxmax(axis="columns")
            if len(probabilities.columns)
            else probabilities.squeeze()
        )

    @property
    def coef_(self) -> np.ndarray:
        """Posterior means in the units of the data."""
        return self._coefficients()[:, 1:]

    @property
    def intercept_(self) -> np.ndarray:
        """Posterior means of the intercepts in the units of the data."""
        return self._coefficients()[:, 0]

    @property
    def states_(self) -> list[OnlineState]:
        """The state of each row of ``coef_``."""
        return self._states()[self._of_classes()]

    def _coefficients(self) -> np.ndarray:
        check_is_fitted(self)
        return self._learners.coefficients()[
            self._of_classes(), : self.n_features_in_ + 1
        ]

    @property
    def _multiclass(self) -> bool:
        return True
