"""Labels of an online classifier: classes that may come late, their learners and their weights."""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from sklearn.utils.class_weight import compute_sample_weight

from numpyro_tempered.core import PyTree, check_numbers, describe
from numpyro_tempered.estimators.rows import OnlineEstimator


class LabelEstimator(OnlineEstimator):
    """An estimator with a learner for each class against the rest, or one for two classes.

    In a stream that begins with single rows the last learner is that of the classes that have not come.
    """

    class_weight: Mapping[Hashable, float] | str | None

    def _set_classes(self, labels: Sequence[Hashable], *, open_ended: bool) -> None:
        self._open_ended = open_ended
        self._index: dict[Hashable, int] = {
            label: number for number, label in enumerate(labels)
        }
        self.classes_ = _as_array(list(self._index))

    def _add_class(self, label: Hashable) -> None:
        """A learner for a label that comes for the first time: all rows so far were against it."""
        if label in self._index:
            return
        states = self._learners.states
        self._learners.load([*states[:-1], states[-1], states[-1]])
        is_plain = isinstance(label, np.number | np.bool_ | np.str_) and not isinstance(
            label, np.timedelta64
        )
        self._index[label.item() if is_plain else label] = len(self._index)  # type: ignore[attr-defined]
        self.classes_ = _as_array(list(self._index))

    def _check_labels(self, keys: list) -> None:
        """Refuse labels that are none of fixed classes."""
        unknown = [key for key in keys if key not in self._index]
        if unknown and not self._open_ended:
            raise ValueError(
                f"label {unknown[0]!r} is not one of the classes of the start, {self.classes_}."
            )

    def _outcomes(self, label: Hashable) -> list[float]:
        """Return the outcome of a row for each learner."""
        return self._outcomes_of(np.array([self._index.get(label, -1)]))[0].tolist()

    def _outcomes_of(self, codes: np.ndarray) -> np.ndarray:
        """Return the outcomes of rows ``(n, L)``, by the numbers of their classes."""
        num_learners = len(self._index) + self._open_ended
        if num_learners == 2 and not self._open_ended:
            return np.where(codes[:, None] == 1, 1.0, -1.0)
        return np.where(codes[:, None] == np.arange(num_learners), 1.0, -1.0)

    def _weights_of(self, labels: np.ndarray) -> np.ndarray:
        """Return the weights of rows by their labels."""
        if self.class_weight is None:
            return np.ones(len(labels))
        if self.class_weight == "balanced":
            return compute_sample_weight("balanced", labels)
        if not isinstance(self.class_weight, Mapping):
            raise ValueError(
                f"class_weight must be 'balanced', a mapping or None, got {self.class_weight!r}."
            )
        check_numbers(
            np.array(list(self.class_weight.values())), "class_weight", "[0, inf)"
        )
        return np.array([self.class_weight.get(key, 1.0) for key in labels.tolist()])

    def _refuse_balanced(self) -> None:
        if self.class_weight == "balanced":
            raise ValueError(
                "class_weight='balanced' counts the labels of all rows: use fit, or give a mapping."
            )

    def _begin_names(self, names: list[Hashable]) -> None:
        self._set_classes([], open_ended=True)
        self._start(len(names), names, 1, is_table=False)
        self._name()

    def _read_outcomes(self, y: PyTree) -> np.ndarray:
        """Return the labels of a frame's rows, as objects."""
        self._refuse_balanced()
        labels = np.asarray(y, object)
        for label in labels if labels.ndim == 1 else ():
            check_label(label)
        if hasattr(self, "_learners"):
            self._check_labels(labels.tolist())
        return labels

    def _learn_rows(
        self,
        full: np.ndarray,
        labels: np.ndarray,
        weight: np.ndarray,
        is_row: np.ndarray,
    ) -> None:
        for label in labels[is_row]:
            self._add_class(label)
        codes = np.array([self._index.get(label, -1) for label in labels], float)
        on = is_row & (weight > 0)
        if on.any():
            self._run(full[on], codes[on], weight[on], is_table=False)
        for row, label in zip(full[~is_row], labels[~is_row], strict=True):
            self._learners.learn(row, 1.0, self._outcomes(label))

    def _run(
        self, full: np.ndarray, codes: np.ndarray, weight: np.ndarray, *, is_table: bool
    ) -> None:
        """Learn rows that are finite, with the numbers of their classes."""
        losses = self._learners.run(
            full, weight, self._outcomes_of(codes), is_table=is_table
        )
        self._tell_rejected(losses)

    def _classes_of(self, pairs: np.ndarray) -> np.ndarray:
        if len(self._index) == 2:
            return normalise(pairs[:, self._second()])
        return normalise(pairs[:, : len(self._index), 1])

    def _of_classes(self) -> slice:
        number = len(self._index)
        return (
            slice(self._second(), self._second() + 1)
            if number == 2
            else slice(0, number)
        )

    def _second(self) -> int:
        """The learner of the second of two classes."""
        return 1 if self._open_ended else 0


def _as_array(labels: list[Hashable]) -> np.ndarray:
    """Labels as an array of their type, of objects where types differ or are no scalars."""
    if len({type(label) for label in labels}) == 1 and isinstance(
        labels[0], str | bool | int | float
    ):
        return np.array(labels)
    array = np.empty(len(labels), dtype=object)
    array[:] = labels
    return array


def normalise(values: np.ndarray) -> np.ndarray:
    """Probabilities of each class against the rest ``(n, K)``, divided by their sums."""
    total = values.sum(axis=1, keepdims=True)
    return np.divide(
        values, total, out=np.full_like(values, 1.0 / values.shape[1]), where=total > 0
    )


def check_label(label: Hashable) -> None:
    """Refuse what is no label.

    Raises:
        ValueError: If it is missing.
        TypeError: If it cannot be hashed.
    """
    if not isinstance(label, Hashable) or isinstance(label, np.ndarray):
        raise TypeError(
            f"a label must be hashable, such as a string or an integer, got {describe(label)}."
        )
    if label is None or type(label).__name__ in ("NAType", "NaTType") or label != label:
        raise ValueError(
            f"the label of a row is missing, got {label!r}: leave such rows out."
        )
