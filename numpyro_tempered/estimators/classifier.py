"""Classification of a stream as an estimator of scikit-learn and of river."""

from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from numpyro_tempered.core.checks import describe
from numpyro_tempered.core.typing import ArrayLike, PyTree
from numpyro_tempered.estimators.learners import LOGISTIC
from numpyro_tempered.estimators.river import register
from numpyro_tempered.estimators.rows import OnlineEstimator, Row
from numpyro_tempered.online.base import OnlineState


@partial(register, "Classifier")
class OnlineClassifier(ClassifierMixin, OnlineEstimator):
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
    counted. A stream that begins with ``learn_one`` takes any label at any time, as if its class had been there
    from the start; the classes of ``fit`` and of the first ``partial_fit`` are fixed.

    Args:
        alpha: Power on the likelihood, positive.
        prior_scale: Prior standard deviation of coefficients of standardised features; that of the intercept is 5
            times as large.
        covariance: "full", "diag", or None for "full" up to 200 columns at the start and "diag" beyond.
        rule: An online rule in the place of ``nt.online.rvga(alpha)``, not standardised; its scales are those of
            :func:`numpyro_tempered.online.standardise` in a stream, and those of ``fit``.
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

    _expectation = LOGISTIC

    def fit(self, X: PyTree, y: PyTree) -> "OnlineClassifier":
        """Learn rows anew, one pass over them.

        Args:
            X: Data ``(n, d)``: an array, or a table of pandas.
            y: Labels ``(n,)``.

        Returns:
            The estimator itself.

        Raises:
            ValueError: If an entry is not finite, or the labels are not classes.
        """
        self.__dict__.pop("_learners", None)
        return self._learn(X, y, np.unique, is_table=not self.stream)

    def partial_fit(self, X: PyTree, y: PyTree, classes: ArrayLike | None = None) -> "OnlineClassifier":
        """Learn rows, in their order.

        Args:
            X: Data ``(n, d)``.
            y: Labels ``(n,)``.
            classes: All the labels that will come, in the first call.

        Returns:
            The estimator itself.

        Raises:
            ValueError: If ``classes`` is missing in the first call or another in a later one, a label is none of
                them, or an entry is not finite.
        """
        if not hasattr(self, "_learners"):
            if classes is None:
                raise ValueError("classes must be passed on the first call to partial_fit.")
            return self._learn(X, y, lambda _: np.unique(np.asarray(classes)), is_table=False)
        if classes is not None and set(np.unique(np.asarray(classes)).tolist()) != set(self._index):
            raise ValueError(f"classes={describe(classes)} is not the same as on the last call, {self.classes_}.")
        return self._learn(X, y, None, is_table=False)

    def _learn(self, X: PyTree, y: PyTree, classes_of: PyTree, *, is_table: bool) -> "OnlineClassifier":
        is_start = classes_of is not None
        rows, labels = self._validate(X, y, reset=is_start)
        check_classification_targets(labels)
        labels = np.asarray(labels)
        if is_start:
            self._set_classes(classes_of(labels).tolist(), open_ended=False)
            num_classes = len(self._index)
            self._start_rows(1 if num_classes == 2 else num_classes)
        keys = labels.tolist()
        unknown = [key for key in keys if key not in self._index]
        if unknown and not self._open_ended:
            raise ValueError(
                f"label {unknown[0]!r} is not one of the classes of the first call, {self.classes_}."
            )
        for key in unknown:
            self._add_class(key)
        if is_table:
            order = check_random_state(self.random_state).permutation(len(rows))
            rows, keys = rows[order], [keys[number] for number in order]
        full = self._with_intercept(rows)
        self._learners.run(full, np.array([self._outcomes(key) for key in keys]), is_table=is_table)
        return self

    def learn_one(self, x: Row, y: Hashable) -> None:
        """Learn one row.

        Args:
            x: A dictionary of features, or numbers ``(d,)``.
            y: The label, anything that can be hashed.

        Raises:
            ValueError: If the row is of another form than at the start, the label is missing, or is none of fixed
                classes.
        """
        if y is None or y != y:
            raise ValueError(f"the label of a row is missing, got {y!r}: leave such rows out.")
        if not hasattr(self, "_learners"):
            self._set_classes([], open_ended=True)
            # One for the classes that have not come: all rows are against it.
            self._start_one(x, 1)
        elif y not in self._index and not self._open_ended:
            raise ValueError(f"label {y!r} is not one of the classes of the start, {self.classes_}.")
        self._add_columns(x)
        row = self._row(x)
        if y not in self._index and np.isfinite(row).all():
            self._add_class(y)
        self._learners.learn(row, self._outcomes(y))

    def predict_proba(self, X: PyTree) -> np.ndarray:
        """Predictive probabilities of the classes ``(n, K)``, in the order of ``classes_``."""
        check_is_fitted(self)
        rows = self._with_intercept(self._validate(X))
        answers = self._learners.probabilities(rows)
        if len(self._index) == 2:
            return answers[self._second()]
        return _normalise(np.stack([answer[:, 1] for answer in answers[: len(self._index)]], axis=1))

    def predict(self, X: PyTree) -> np.ndarray:
        """The class of the largest probability ``(n,)``."""
        best = np.argmax(self.predict_proba(X), axis=1)
        return self.classes_[best]

    def predict_proba_one(self, x: Row) -> dict[Hashable, float]:
        """Predictive probabilities of the classes by label; empty before the first datum."""
        if not getattr(self, "_index", None):
            return {}
        row = self._row(x)
        if len(self._index) == 2:
            learner = self._second()
            (second,) = self._learners.probability_one(row, slice(learner, learner + 1))
            return dict(zip(self._index, (1.0 - second, second), strict=True))
        values = np.array([self._learners.probability_one(row, slice(0, len(self._index)))])
        return dict(zip(self._index, _normalise(values)[0].tolist(), strict=True))

    def predict_one(self, x: Row) -> Hashable:
        """The class of the largest probability; None before the first datum."""
        probabilities = self.predict_proba_one(x)
        return max(probabilities, key=probabilities.__getitem__) if probabilities else None

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
        return self._learners.coefficients()[self._of_classes(), : self.n_features_in_ + 1]

    def _of_classes(self) -> slice:
        number = len(self._index)
        return slice(self._second(), self._second() + 1) if number == 2 else slice(0, number)

    def _second(self) -> int:
        """The learner of the second of two classes."""
        return 1 if self._open_ended else 0

    def _set_classes(self, labels: Sequence[Hashable], *, open_ended: bool) -> None:
        self._open_ended = open_ended
        self._index: dict[Hashable, int] = {label: number for number, label in enumerate(labels)}
        self.classes_ = _as_array(list(self._index))

    def _add_class(self, label: Hashable) -> None:
        """A learner for a label that comes for the first time: all rows so far were against it."""
        if label in self._index:
            return
        states = self._learners.states
        self._learners.load([*states[:-1], states[-1], states[-1]])
        self._index[label.item() if isinstance(label, np.generic) else label] = len(self._index)
        self.classes_ = _as_array(list(self._index))

    def _outcomes(self, label: Hashable) -> list[float]:
        """The outcome of a row for each learner."""
        number, num_classes = self._index.get(label, -1), len(self._index)
        if num_classes == 2 and not self._open_ended:
            return [1.0 if number == 1 else -1.0]
        outcomes = [-1.0] * (num_classes + self._open_ended)
        if number >= 0:
            outcomes[number] = 1.0
        return outcomes

    @property
    def _multiclass(self) -> bool:
        return True


def _as_array(labels: list[Hashable]) -> np.ndarray:
    """Labels as an array of their type, of objects where types differ or are no scalars."""
    if len({type(label) for label in labels}) == 1 and isinstance(labels[0], str | bool | int | float):
        return np.array(labels)
    array = np.empty(len(labels), dtype=object)
    array[:] = labels
    return array


def _normalise(values: np.ndarray) -> np.ndarray:
    """Probabilities of each class against the rest ``(n, K)``, divided by their sums."""
    total = values.sum(axis=1, keepdims=True)
    return np.divide(values, total, out=np.full_like(values, 1.0 / values.shape[1]), where=total > 0)
