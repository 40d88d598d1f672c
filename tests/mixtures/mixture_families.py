"""The table of families that the tests of mixtures run over: a new component is one row."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import mixture_oracles as oracle
import numpy as np

from numpyro_tempered.mixtures.components.bernoulli import bernoulli
from numpyro_tempered.mixtures.components.categorical import categorical
from numpyro_tempered.mixtures.components.diagonal_gaussian import diagonal_gaussian
from numpyro_tempered.mixtures.components.exponential import exponential
from numpyro_tempered.mixtures.components.gaussian import gaussian
from numpyro_tempered.mixtures.components.known_variance import known_variance
from numpyro_tempered.mixtures.components.multinomial import multinomial
from numpyro_tempered.mixtures.components.poisson import poisson
from numpyro_tempered.mixtures.components.product import product
from numpyro_tempered.mixtures.components.spherical_gaussian import spherical_gaussian
from numpyro_tempered.mixtures.components.tied_gaussian import tied_gaussian

# Every test has data of this shape and K = 2, so that a component is compiled once.
N, D, K = 12, 2, 2
# Hyperparameters are exact in float32.
PSI = np.array([[1.0, 0.25], [0.25, 2.0]])


class Family(NamedTuple):
    """One row of the table.

    Attributes:
        make: The component.
        oracle: The same family by the printed formulas.
        data: Numbers ``(n, 2)`` from -5 to 5 to data of the family.
        missing: Whether entries may be missing.
        bad: Data that are not of the family, and what the error names.
    """

    make: Callable[[], Any]
    oracle: Any
    data: Callable[[np.ndarray], np.ndarray]
    missing: bool
    bad: tuple[Any, str]


def counts(raw):
    return np.floor(np.abs(raw))


def codes(raw):
    return np.stack([raw[:, 0] > 0, np.floor(np.abs(raw[:, 1])) % 3], axis=1).astype(
        float
    )


def complete_mixed(raw):
    """Columns of every family whose columns may be missing, in an order that is not theirs."""
    parts = [
        raw,
        raw + 1,
        raw[::-1],
        raw[:, :1] > 0.5,
        counts(raw)[:, 1:],
        np.exp(0.5 * raw[:, :1]),
        codes(raw),
    ]
    return np.concatenate(parts, axis=1).astype(float)[:, ::-1]


def mixed(raw):
    """The same with holes."""
    return with_holes(complete_mixed(raw))


def with_holes(x, empty=7):
    """Some entries missing, of one row all, and of one column all."""
    x = np.array(x, float)
    row, column = np.indices(x.shape)
    x[(row + 2 * column) % 5 == 1] = np.nan
    x[4] = np.nan
    x[:, empty] = np.nan
    return x


def make_mixed():
    parts = {
        "a": known_variance(2, prior_loc=0.5, prior_scale=2.0, scale=0.75),
        "b": diagonal_gaussian(
            2, loc=0.5, mean_precision=0.25, concentration=1.5, rate=0.75
        ),
        "c": spherical_gaussian(
            2, loc=0.5, mean_precision=0.25, concentration=1.5, rate=0.75
        ),
        "d": bernoulli(1, ones=0.5, zeros=2.0),
        # A name that begins with another part's.
        "a_b": poisson(1, concentration=1.5, rate=0.25),
        "e": exponential(1, concentration=1.5, rate=0.25),
        "f": categorical([3, 2], concentration=0.75),
    }
    return product(parts, dict(zip(parts, MIXED_COLUMNS, strict=True)))


MIXED_COLUMNS = ([10, 9], [8, 7], [6, 5], [4], [3], [2], [0, 1])
GAUSSIAN = (0.5, 0.25, 1.5, 0.75)
MIXED = oracle.Product(
    list(
        zip(
            (
                oracle.KnownVariance(0.5, 2.0, 0.75),
                oracle.NormalInverseGamma(*GAUSSIAN),
                oracle.Spherical(*GAUSSIAN),
                oracle.Bernoulli(0.5, 2.0),
                oracle.Poisson(1.5, 0.25),
                oracle.Exponential(1.5, 0.25),
                oracle.Categorical((3, 2), 0.75),
            ),
            MIXED_COLUMNS,
            strict=True,
        )
    )
)
GAUSSIANS = {"loc": 0.5, "mean_precision": 0.25}
FAMILIES = {
    "known_variance": Family(
        lambda: known_variance(D, prior_loc=0.5, prior_scale=2.0, scale=0.75),
        oracle.KnownVariance(0.5, 2.0, 0.75),
        lambda raw: raw,
        True,
        ([["a", "b"]], "dtype <U1"),
    ),
    "diagonal_gaussian": Family(
        lambda: diagonal_gaussian(D, **GAUSSIANS, concentration=1.5, rate=0.75),
        oracle.NormalInverseGamma(*GAUSSIAN),
        lambda raw: raw,
        True,
        ([[0.0, 1.0], [2.0, np.inf]], "row 1, column 1 of the data is inf"),
    ),
    "spherical_gaussian": Family(
        lambda: spherical_gaussian(D, **GAUSSIANS, concentration=1.5, rate=0.75),
        oracle.Spherical(*GAUSSIAN),
        lambda raw: raw,
        True,
        ([[1j, 1.0]], "complex"),
    ),
    "gaussian": Family(
        lambda: gaussian(D, **GAUSSIANS, df=2.5, scale=PSI),
        oracle.NormalInverseWishart([0.5, 0.5], 0.25, 2.5, PSI),
        lambda raw: raw,
        True,
        ([[0.0, 1.0, 2.0]], r"shape \(1, 3\); \(n, 2\)"),
    ),
    "tied_gaussian": Family(
        lambda: tied_gaussian(D, **GAUSSIANS, df=2.5, scale=PSI),
        oracle.Tied([0.5, 0.5], 0.25, 2.5, PSI),
        lambda raw: raw,
        True,
        (np.zeros((0, 2)), r"shape \(0, 2\)"),
    ),
    "bernoulli": Family(
        lambda: bernoulli(D, ones=0.5, zeros=2.0),
        oracle.Bernoulli(0.5, 2.0),
        lambda raw: (raw > 0.5).astype(float),
        True,
        ([[0, 1], [1, 2]], "row 1, column 1 of the data is 2; expected 0 or 1"),
    ),
    "poisson": Family(
        lambda: poisson(D, concentration=1.5, rate=0.25),
        oracle.Poisson(1.5, 0.25),
        counts,
        True,
        ([[0, 1], [-1, 2]], "row 1, column 0 of the data is -1; expected a count"),
    ),
    "exponential": Family(
        lambda: exponential(D, concentration=1.5, rate=0.25),
        oracle.Exponential(1.5, 0.25),
        lambda raw: np.exp(0.5 * raw),
        True,
        ([[0.5, -0.5]], "row 0, column 1 of the data is -0.5"),
    ),
    "categorical": Family(
        lambda: categorical([2, 3], concentration=0.75),
        oracle.Categorical((2, 3), 0.75),
        codes,
        True,
        (
            [[1, 2], [2, 0]],
            r"row 1, column 0 of the data is 2; expected a code .* levels \(2, 3\)",
        ),
    ),
    "multinomial": Family(
        lambda: multinomial(D, concentration=0.75),
        oracle.Multinomial(0.75),
        counts,
        False,
        ([[0.0, 1.5]], "row 0, column 1 of the data is 1.5; expected a count"),
    ),
    "product": Family(
        make_mixed,
        MIXED,
        mixed,
        True,
        (
            np.ones((3, 11)) - 2 * np.eye(11)[4:7],
            "part 'd', whose columns are .*row 0, column 0 of the data is -1",
        ),
    ),
}


# Compiled in a tenth of the time of the product of all.
SMALL_PRODUCT = Family(
    lambda: product(
        {
            "a": known_variance(2, prior_loc=0.5, prior_scale=2.0, scale=0.75),
            "a_b": categorical([3], concentration=0.75),
        },
        {"a": [2, 0], "a_b": [1]},
    ),
    oracle.Product(
        [
            (oracle.KnownVariance(0.5, 2.0, 0.75), [2, 0]),
            (oracle.Categorical((3,), 0.75), [1]),
        ]
    ),
    lambda raw: with_holes(
        np.stack([raw[:, 1], codes(raw)[:, 1], raw[:, 0]], axis=1), empty=[]
    ),
    True,
    (
        [[0.0, 3.0, 0.0]],
        "part 'a_b', whose columns are .*row 0, column 0 of the data is 3",
    ),
)
ALL = FAMILIES | {"small_product": SMALL_PRODUCT}


@functools.lru_cache
def component_of(name):
    """The component of a row; always the same, so that it is compiled once."""
    return ALL[name].make()


def some_data(name, seed=0, n=N):
    """Two groups."""
    rng = np.random.default_rng(seed)
    return ALL[name].data(
        np.clip(
            rng.normal(size=(n, D)) + np.where(rng.random((n, 1)) < 0.5, -2, 2), -5, 5
        )
    )
