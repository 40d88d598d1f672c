"""Seven regressions of textbooks, with their models: on which of them should the likelihood be tempered?

Engel, state crime, RAND, STAR98 and Fair come with statsmodels, diabetes with scikit-learn. California housing
is downloaded by scikit-learn, or read from ``california_housing.csv.gz`` in ``data_dir``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import statsmodels.datasets as packaged
from sklearn.datasets import fetch_california_housing, load_diabetes


class Problem(NamedTuple):
    """A data set and its model.

    Attributes:
        model: NumPyro model, called with ``data``.
        data: Covariates ``(N, d)``, standardised behind a column of ones; outcomes ``(N,)``; and the numbers of
            trials ``(N,)`` where the outcomes are binomial.
        columns: Names of the d columns.
        num_train: n, the size of a training set.
        trouble: What is wrong with the model, in a few words.
    """

    model: Callable
    data: tuple[np.ndarray, ...]
    columns: list[str]
    num_train: int
    trouble: str


def coefficients(num_columns):
    """The prior of all models: N(0, 2²) for the intercept, N(0, 1) for those of standardised covariates."""
    scale = jnp.where(jnp.arange(num_columns) == 0, 2.0, 1.0)
    return numpyro.sample("coef", dist.Normal(0.0, scale).to_event(1))


def linear(x, y=None):
    """Linear regression with normal noise of unknown scale."""
    eta = x @ coefficients(x.shape[1])
    log_sigma = numpyro.sample("log_sigma", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(eta, jnp.exp(log_sigma)), obs=y)


def poisson(x, y=None):
    """Poisson regression with a logarithmic link; there is no noise parameter."""
    eta = x @ coefficients(x.shape[1])
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def binomial(x, y, trials):
    """Logistic regression of numbers of successes; there is no noise parameter."""
    eta = x @ coefficients(x.shape[1])
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.BinomialLogits(eta, trials), obs=y)


def logistic(x, y=None):
    """Logistic regression of a yes or no."""
    eta = x @ coefficients(x.shape[1])
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def engel(data_dir=None):
    """Food expenditure on income of 235 Belgian households (Engel 1857): the spread grows with the income."""
    data = packaged.engel.load_pandas().data
    return _linear(data[["income"]], data["foodexp"], 100, "spread grows with income")


def state_crime(data_dir=None):
    """Murder rate of 50 states and Washington, DC, in 2009, on four characteristics: DC is far from the rest."""
    data = packaged.statecrime.load_pandas().data
    return _linear(
        data[["hs_grad", "poverty", "single", "urban"]],
        data["murder"],
        51,
        "one outlier, DC",
    )


def california(data_dir=None):
    """Log house value of 20640 block groups of California, 1990 (Pace and Barry 1997): heavy tails, and a cap.

    Rooms and bedrooms per household, population and occupants enter by their logarithms.
    """
    if data_dir is None:
        data = fetch_california_housing(as_frame=True).frame
    else:
        raw = pd.read_csv(Path(data_dir) / "california_housing.csv.gz")
        data = pd.DataFrame(
            {
                "MedInc": raw.median_income,
                "HouseAge": raw.housing_median_age,
                "AveRooms": raw.total_rooms / raw.households,
                "AveBedrms": raw.total_bedrooms / raw.households,
                "Population": raw.population,
                "AveOccup": raw.population / raw.households,
                "Latitude": raw.latitude,
                "Longitude": raw.longitude,
                "MedHouseVal": raw.median_house_value / 1e5,
            }
        )
    x = data.drop(columns="MedHouseVal")
    skewed = ["AveRooms", "AveBedrms", "Population", "AveOccup"]
    x[skewed] = np.log(x[skewed])
    return _linear(x, np.log(data["MedHouseVal"]), 200, "heavy tails and a cap")


def rand_visits(data_dir=None):
    """Visits to a doctor in 20190 person-years of the RAND insurance experiment, variance 7 times the mean.

    Fair and poor health are one level: the latter has 1.5% of the rows, and is absent from one small sample in
    twenty, of which its coefficient then knows nothing.
    """
    data = packaged.randhie.load_pandas().data
    x = data.drop(columns=["mdvis", "hlthf", "hlthp"]).assign(
        hlthfp=data["hlthf"] + data["hlthp"]
    )
    return _problem(
        poisson, x, data["mdvis"].to_numpy(float), 200, "counts overdispersed"
    )


def star98(data_dir=None):
    """Pupils above the national median in mathematics, of all pupils, in 303 school districts of California."""
    data = packaged.star98.load_pandas().data
    x = data[["LOWINC", "PERASIAN", "PERBLACK", "PERHISP", "PCTCHRT", "PCTYRRND"]]
    above, below = data["NABOVE"].to_numpy(float), data["NBELOW"].to_numpy(float)
    return _problem(binomial, x, above, 150, "binomial overdispersed", above + below)


def fair(data_dir=None):
    """Whether a reader of Redbook has had an affair, 6366 answers (Fair 1978)."""
    data = packaged.fair.load_pandas().data
    x = data[["rate_marriage", "age", "yrs_married", "children", "religious", "educ"]]
    return _problem(
        logistic, x, (data["affairs"] > 0).to_numpy(float), 200, "nothing much"
    )


def diabetes(data_dir=None):
    """Progression of diabetes in 442 patients on ten measurements (Efron et al. 2004)."""
    data = load_diabetes(as_frame=True)
    return _linear(data.data, data.target, 200, "nothing much")


LOADERS = {
    "Engel": engel,
    "state crime": state_crime,
    "California": california,
    "RAND visits": rand_visits,
    "STAR98": star98,
    "Fair": fair,
    "diabetes": diabetes,
}


def _linear(x, y, num_train, trouble):
    """Outcomes standardised as well: means and deviations are those of all rows."""
    y = y.to_numpy(float)
    return _problem(linear, x, (y - y.mean()) / y.std(), num_train, trouble)


def _problem(model, x, y, num_train, trouble, *more):
    values = x.to_numpy(float)
    values = (values - values.mean(axis=0)) / values.std(axis=0)
    values = np.column_stack([np.ones(len(values)), values])
    return Problem(
        model, (values, y, *more), ["intercept", *x.columns], num_train, trouble
    )
