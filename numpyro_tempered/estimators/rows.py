"""Rows of the online estimators: arrays, tables, and dictionaries of features whose names may come and go."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state, validation

from numpyro_tempered.core import (
    ArrayLike,
    PyTree,
    as_array,
    check_choice,
    check_number,
    check_numbers,
    check_record,
    describe,
    doubles,
    warn_caller,
)
from numpyro_tempered.estimators.base import (
    are_rows,
    as_number,
    place,
    read_rows,
    rows_of,
)
from numpyro_tempered.estimators.learners import MAX_FULL, Form, Learners, running
from numpyro_tempered.estimators.river import RiverEstimator
from numpyro_tempered.estimators.scales import LARGEST, Scales
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.online.base import Losses, OnlineState, Rule
from numpyro_tempered.online.rules.rvga import rvga
from numpyro_tempered.online.streams.findings import StreamWarning

if TYPE_CHECKING:
    import pandas as pd

# Features by name, or numbers in the order of the columns.
Row: TypeAlias = Mapping[Hashable, float] | ArrayLike
# The prior standard deviation of the predictor of a wide row, whatever its number of columns.
WIDE_PREDICTOR = 3.0


class OnlineEstimator(BaseEstimator, RiverEstimator):
    """What the classifier and the regressor share: parameters, rows with an intercept first, and states."""

    _expectation: Expectation
    # The default of the prior's scale, up to 200 columns.
    _narrow: float
    # What differs between labels and numbers, of frames: how they are read, a start, and rounds.
    _read_outcomes: Callable[[PyTree], np.ndarray]
    _begin_names: Callable[[list[Hashable]], None]
    _learn_rows: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        prior_scale: float | None = None,
        covariance: str | None = None,
        rule: Rule | None = None,
        stream: bool = False,
        random_state: PyTree = 0,
    ) -> None:
        self.alpha = alpha
        self.prior_scale = prior_scale
        self.covariance = covariance
        self.rule = rule
        self.stream = stream
        self.random_state = random_state

    def _form(self, num_features: int, *, is_table: bool = False) -> Form:
        """Return the form of the states.

        Raises:
            TypeError: If the rule is none.
            ValueError: If a parameter is out of its range, or two of them contradict.
        """
        alpha = float(check_number(self.alpha, "alpha", "(0, inf)"))
        is_wide = num_features > MAX_FULL
        scale = (
            self._narrow if not is_wide else WIDE_PREDICTOR / math.sqrt(num_features)
        )
        if self.prior_scale is not None:
            scale = float(check_number(self.prior_scale, "prior_scale", "(0, inf)"))
        if self.covariance is not None:
            check_choice(self.covariance, "covariance", ("full", "diag"))
        is_full = not is_wide if self.covariance is None else self.covariance == "full"
        if self.rule is None:
            return Form(rvga(alpha), is_full, scale, moves=True, runs=False)
        check_record(self.rule, "rule", Rule, "nt.online.ngvi()")
        if self.rule.features is not None:
            raise ValueError(
                "features are standardised in any case: give the rule inside of standardise()."
            )
        if alpha != 1.0:
            raise ValueError(
                f"alpha = {alpha:g} is for the default rule: give step_size to the rule instead."
            )
        return Form(
            self.rule if is_table else running(self.rule),
            is_full,
            scale,
            moves=False,
            runs=not is_table,
        )

    def _tell_width(self, num_features: int, form: Form) -> None:
        """Say what the defaults are for more than 200 columns, where they decide."""
        defaults = []
        if self.covariance is None:
            defaults.append(
                "covariance='diag' (a full one would take time in the square of the columns)"
            )
        if self.prior_scale is None:
            defaults.append(f"prior_scale={form.scale:.2g} (3/sqrt(d))")
        if num_features > MAX_FULL and defaults:
            text = f"{num_features} columns: for more than {MAX_FULL} the default is {' and '.join(defaults)}."
            warn_caller(f"{text} Pass them to choose.", UserWarning)

    def _validate(
        self,
        X: PyTree,
        y: PyTree = "no_validation",
        *,
        reset: bool = False,
        **options: bool,
    ) -> PyTree:
        """Return rows in double precision, and outcomes where they are to come, by scikit-learn's rules.

        Raises:
            ValueError: If an entry is so large that its square overflows.
        """
        X = read_rows(X)
        if hasattr(validation, "validate_data"):
            checked = validation.validate_data(
                self, X, y, dtype=np.float64, reset=reset, **options
            )
        else:
            # scikit-learn 1.5.
            checked = self._validate_data(
                X, y, dtype=np.float64, reset=reset, **options
            )
        rows = checked[0] if isinstance(checked, tuple) else checked
        if np.size(rows) and np.abs(rows).max() > LARGEST:
            row, column = np.unravel_index(int(np.argmax(np.abs(rows))), rows.shape)
            raise ValueError(
                f"X[{row}, {column}] is {rows[row, column]:g}; entries must be at most {LARGEST:g}."
            )
        return checked

    def _weight(self, sample_weight: PyTree, num_rows: int) -> np.ndarray:
        """Return the weights of rows, 1 by default.

        Raises:
            ValueError: If there is not one for each row, or one is negative or not finite.
        """
        if sample_weight is None:
            return np.ones(num_rows)
        weight = doubles(as_array(sample_weight, "sample_weight"))
        weight = np.full(num_rows, weight) if weight.ndim == 0 else weight
        if weight.shape != (num_rows,):
            raise ValueError(
                f"sample_weight has shape {weight.shape}; expected ({num_rows},), one for each row."
            )
        check_numbers(weight, "sample_weight", "[0, inf)")
        return weight

    def _weights_of(self, outcomes: PyTree) -> np.ndarray:
        """Return the weights of rows by their outcomes."""
        return np.ones(len(outcomes))

    def _start(
        self,
        num_features: int,
        names: list[Hashable] | None,
        num_learners: int,
        is_table: bool,
    ) -> None:
        """Begin with states before any datum."""
        form = self._form(num_features, is_table=is_table)
        self._tell_width(num_features, form)
        state = form.start(num_features + 1)
        self._columns = (
            None
            if names is None
            else {name: column + 1 for column, name in enumerate(names)}
        )
        self._size = num_features + 1
        self._learners = Learners(
            form, self._expectation, [state] * num_learners, Scales.start(self._size)
        )

    def _start_rows(self, num_learners: int, *, is_table: bool) -> None:
        names = getattr(self, "feature_names_in_", None)
        self._start(
            self.n_features_in_,
            None if names is None else names.tolist(),
            num_learners,
            is_table,
        )

    def _start_one(self, x: Row, num_learners: int) -> None:
        if isinstance(x, Mapping):
            self._start(len(x), list(x), num_learners, False)
            self._name()
            return
        (size,) = np.shape(x)
        self.n_features_in_ = size
        self._start(size, None, num_learners, False)

    def _tell_rejected(self, losses: Losses) -> None:
        """Warn of rows that the rounds have rejected."""
        number, total = (
            int(np.sum(~np.isfinite(losses.at_mean + losses.expected))),
            len(losses.at_mean),
        )
        if number:
            warn_caller(
                f"{number} of {total} rows were rejected: their loss is not finite, by features or outcomes too "
                "far from the others.",
                StreamWarning,
            )

    def _name(self) -> None:
        names = list(self._columns or ())
        self.n_features_in_ = len(names)
        if names and all(isinstance(name, str) for name in names):
            self.feature_names_in_ = np.empty(len(names), dtype=object)
            self.feature_names_in_[:] = names
        else:
            self.__dict__.pop("feature_names_in_", None)

    def _with_intercept(self, rows: np.ndarray) -> np.ndarray:
        full = np.zeros((len(rows), self._size))
        full[:, 0], full[:, 1 : rows.shape[1] + 1] = 1.0, rows
        return full

    def _read(self, x: Row) -> Row:
        """Return one row as numbers, by name or in order; a missing one is NaN.

        Raises:
            TypeError: If a feature is no number.
            ValueError: If it has another form than at the start.
        """
        if isinstance(x, Mapping):
            if getattr(self, "_learners", None) is not None and self._columns is None:
                raise ValueError(
                    f"the columns of the start have no names, got {describe(x)}: give a row of numbers."
                )
            return {
                name: value
                if type(value) is float
                else as_number(value, f"feature {name!r}")
                for name, value in x.items()
            }
        values = doubles(as_array(x, "a row"))
        expected = (
            getattr(self, "n_features_in_", None)
            if hasattr(self, "_learners")
            else None
        )
        if expected is not None and values.shape != (expected,):
            raise ValueError(
                f"a row has shape ({expected},), as at the start, got {values.shape}."
            )
        if values.ndim != 1 or not len(values):
            raise ValueError(
                f"a row must be a dict of features or have shape (d,), got shape {values.shape}."
            )
        return values

    def _row(self, x: Row) -> np.ndarray:
        """Return the row of one datum, from :meth:`_read`; features without a column are left out."""
        row = np.zeros(self._size)
        row[0] = 1.0
        if not isinstance(x, Mapping):
            row[1 : self.n_features_in_ + 1] = x
            return row
        for name, value in x.items():
            column = self._columns.get(name)  # type: ignore[union-attr]
            if column is not None:
                row[column] = value
        return row

    def _row_to_predict(self, x: Row) -> np.ndarray:
        """Return the row of one datum to predict.

        Raises:
            ValueError: If an entry is missing, infinite or too large.
        """
        row = self._row(self._read(x))
        (bad,) = np.nonzero(~(np.abs(row) <= LARGEST))
        if len(bad):
            names = dict(enumerate(self._columns, 1)) if self._columns else {}
            name = names.get(int(bad[0]), int(bad[0]) - 1)
            raise ValueError(
                f"feature {name!r} is {row[bad[0]]:g}: fill missing features in before a prediction."
            )
        return row

    def learn_many(self, X: "pd.DataFrame", y: "pd.Series", w: PyTree = None) -> None:
        """Learn the rows of a frame in their order, as ``learn_one`` of each; columns and labels may be new.

        Args:
            X: A frame of pandas.
            y: The outcomes.
            w: The power on the likelihood of each row.

        Raises:
            ValueError: As ``learn_one``.
            TypeError: If ``X`` is no frame, or holds other things than numbers.
        """
        rows, weight, outcomes = (
            rows_of(X),
            self._weight(w, len(X)),
            self._read_outcomes(y),
        )
        if np.shape(outcomes) != (len(rows),):
            raise ValueError(
                f"y has shape {np.shape(outcomes)}; expected ({len(rows)},), one for each row."
            )
        weight, names = weight * self._weights_of(outcomes), list(X.columns)
        if not hasattr(self, "_learners"):
            self._begin_names(names)
        if self._columns is None:
            raise ValueError(
                "the columns of the start have no names: partial_fit takes arrays."
            )
        self._add_columns(names)
        full = place(rows, names, self._columns, self._size)
        self._learn_rows(full, outcomes, weight, are_rows(full))

    def _rows_to_predict(self, X: "pd.DataFrame") -> np.ndarray:
        """Return the full rows of a frame to predict; columns that have not come are left out.

        Raises:
            ValueError: If an entry is missing, infinite or too large.
        """
        rows = rows_of(X)
        if not are_rows(rows).all():
            raise ValueError(
                "X has missing or infinite entries: fill them in before a prediction."
            )
        if self._columns is None:
            # Columns without names are told apart by their order.
            return self._with_intercept(self._validate(X))
        return place(rows, list(X.columns), self._columns, self._size)

    def _add_columns(self, names: Iterable[Hashable]) -> None:
        """Add columns for names that come for the first time, which have been 0 so far."""
        if self._columns is None or self._columns.keys() >= set(names):
            return
        form = self._learners.form
        if not form.moves and not form.runs:
            raise ValueError(
                f"another rule than the default has the scales of fit, and {list(names)} are not all of its "
                "features: begin with learn_one or partial_fit."
            )
        for name in names:
            self._columns.setdefault(name, len(self._columns) + 1)
        self._name()
        if self._size <= len(self._columns):
            # Columns to spare, whose coefficients stay at their prior: not every name compiles.
            self._size = 1 << len(self._columns).bit_length()
            self._learners.widen(self._size)
        if form.moves and len(self._columns) > MAX_FULL:
            wide = self._form(self._size)
            if form.is_full != wide.is_full:
                self._tell_width(len(self._columns), wide)
            if wide != form:
                self._learners.move(wide, self._learners.scales)

    def _in_order(
        self, rows: np.ndarray, outcomes: np.ndarray, weight: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a table's rows in a random order; rows that are there twice are one of twice the weight.

        So a weight is the same as rows that are repeated, to the last bit.
        """
        random = check_random_state(self.random_state)
        key = np.zeros(len(rows))
        # Elementwise, so that equal rows have equal sums.
        factors = np.random.default_rng(0).normal(size=rows.shape[1] + 1)
        for column, factor in zip((*rows.T, outcomes), factors, strict=True):
            key = key + factor * column
        order = np.argsort(key, kind="stable")
        same = np.diff(key[order]) == 0.0
        one, two = order[:-1][same], order[1:][same]
        same[same] = np.all(rows[one] == rows[two], axis=1) & (
            outcomes[one] == outcomes[two]
        )
        if not same.any() and (weight == 1.0).all():
            order = random.permutation(len(rows))
            return rows[order], outcomes[order], weight
        first = np.flatnonzero(np.r_[True, ~same])
        total = np.add.reduceat(weight[order], first)
        first, total = first[total > 0], total[total > 0]
        shuffled = random.permutation(len(first))
        defaults = order[first[shuffled]]
        return rows[defaults], outcomes[defaults], total[shuffled]

    def _states(self) -> list[OnlineState]:
        """Return the states without columns to spare."""
        size = self.n_features_in_ + 1
        return [
            self._learners.form.narrow(state, size) for state in self._learners.states
        ]

    def __getstate__(self) -> dict[str, PyTree]:
        state = dict(super().__getstate__())
        if "_learners" in state:
            # Programs and buffers are made anew where they are loaded.
            learners = state["_learners"]
            state["_learners"] = (
                learners.form._replace(rule=None),
                learners.states,
                learners.scales,
            )
        return state

    def __setstate__(self, state: dict[str, PyTree]) -> None:
        super().__setstate__(state)
        if "_learners" in state:
            form, states, scales = state["_learners"]
            rule = self._form(self.n_features_in_, is_table=not form.runs).rule
            self._learners = Learners(
                form._replace(rule=rule), self._expectation, states, scales
            )
