"""Rows of the online estimators: arrays, tables, and dictionaries of features whose names may come and go."""

from collections.abc import Hashable, Mapping
from typing import TypeAlias

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import validation

from numpyro_tempered.core.checks import check_choice, check_number, check_record, describe
from numpyro_tempered.core.typing import ArrayLike, PyTree
from numpyro_tempered.estimators.learners import MAX_FULL, Form, Learners, standardised
from numpyro_tempered.estimators.river import RiverEstimator
from numpyro_tempered.estimators.scales import Scales
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.online.base import OnlineState, Rule
from numpyro_tempered.online.rules.rvga import rvga

# Features by name, or numbers in the order of the columns.
Row: TypeAlias = Mapping[Hashable, float] | ArrayLike


class OnlineEstimator(BaseEstimator, RiverEstimator):
    """What the classifier and the regressor share: parameters, rows with an intercept first, and states."""

    _expectation: Expectation

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        prior_scale: float = 1.0,
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

    def _form(self, num_features: int) -> Form:
        """The form of the states.

        Raises:
            TypeError: If the rule is none.
            ValueError: If a parameter is out of its range, or two of them contradict.
        """
        alpha = float(check_number(self.alpha, "alpha", "(0, inf)"))
        scale = float(check_number(self.prior_scale, "prior_scale", "(0, inf)"))
        if self.covariance is not None:
            check_choice(self.covariance, "covariance", ("full", "diag"))
        is_full = num_features <= MAX_FULL if self.covariance is None else self.covariance == "full"
        if self.rule is None:
            return Form(standardised(rvga(alpha)), is_full, scale, moves=True)
        check_record(self.rule, "rule", Rule, "nt.online.ngvi()")
        if self.rule.features is not None:
            raise ValueError("features are standardised in any case: give the rule inside of standardise().")
        if alpha != 1.0:
            raise ValueError(f"alpha = {alpha:g} is for the default rule: give step_size to the rule instead.")
        return Form(standardised(self.rule), is_full, scale, moves=False)

    def _validate(
        self, X: PyTree, y: PyTree = "no_validation", *, reset: bool = False, **options: bool
    ) -> PyTree:
        """Rows in double precision, and outcomes where they are to come, by scikit-learn's rules."""
        if hasattr(validation, "validate_data"):
            return validation.validate_data(self, X, y, dtype=np.float64, reset=reset, **options)
        # scikit-learn 1.5.
        return self._validate_data(X, y, dtype=np.float64, reset=reset, **options)

    def _start(self, num_features: int, names: list[Hashable] | None, num_learners: int) -> None:
        """States before any datum."""
        form = self._form(num_features)
        state = form.start(num_features + 1)
        self._columns = None if names is None else {name: column + 1 for column, name in enumerate(names)}
        self._size = num_features + 1
        self._learners = Learners(form, self._expectation, [state] * num_learners, Scales.start(self._size))

    def _start_rows(self, num_learners: int) -> None:
        names = getattr(self, "feature_names_in_", None)
        self._start(self.n_features_in_, None if names is None else names.tolist(), num_learners)

    def _start_one(self, x: Row, num_learners: int) -> None:
        if isinstance(x, Mapping):
            self._start(len(x), list(x), num_learners)
            self._name()
            return
        values = np.asarray(x, np.float64)
        if values.ndim != 1 or not len(values):
            raise ValueError(f"a row must be a dict of features or have shape (d,), got shape {values.shape}.")
        self.n_features_in_ = len(values)
        self._start(len(values), None, num_learners)

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

    def _row(self, x: Row) -> np.ndarray:
        """The row of one datum; features without a column are left out.

        Raises:
            ValueError: If its length is not that of the columns, or names come where columns have none.
        """
        row = np.zeros(self._size)
        row[0] = 1.0
        if not isinstance(x, Mapping):
            values = np.asarray(x, np.float64)
            if values.shape != (self.n_features_in_,):
                raise ValueError(
                    f"a row has shape ({self.n_features_in_},), as at the start, got {values.shape}."
                )
            row[1 : self.n_features_in_ + 1] = values
            return row
        if self._columns is None:
            raise ValueError(f"the columns of the start have no names, got {describe(x)}: give a row of numbers.")
        for name, value in x.items():
            column = self._columns.get(name)
            if column is not None:
                row[column] = np.nan if value is None else value
        return row

    def _add_columns(self, x: Row) -> None:
        """Columns for names that come for the first time, which have been 0 so far."""
        if not isinstance(x, Mapping) or self._columns is None or self._columns.keys() >= x.keys():
            return
        if not self._learners.can_widen:
            raise ValueError(
                f"another rule than the default has the scales of fit, and {list(x)} are not all of its "
                "features: begin with learn_one or partial_fit."
            )
        for name in x:
            self._columns.setdefault(name, len(self._columns) + 1)
        self._name()
        if self._size <= len(self._columns):
            # Columns to spare, whose coefficients stay at their prior: not every name compiles.
            self._size = 1 << len(self._columns).bit_length()
            self._learners.widen(self._size)

    def _states(self) -> list[OnlineState]:
        """The states without columns to spare."""
        size = self.n_features_in_ + 1
        return [self._learners.form.narrow(state, size) for state in self._learners.states]

    def __getstate__(self) -> dict[str, PyTree]:
        state = dict(super().__getstate__())
        if "_learners" in state:
            # Programs and buffers are made anew where they are loaded.
            learners = state["_learners"]
            state["_learners"] = learners.form.is_full, learners.form.scale, learners.states, learners.scales
        return state

    def __setstate__(self, state: dict[str, PyTree]) -> None:
        super().__setstate__(state)
        if "_learners" in state:
            is_full, scale, states, scales = state["_learners"]
            form = self._form(self.n_features_in_)._replace(is_full=is_full, scale=scale)
            self._learners = Learners(form, self._expectation, states, scales)
