"""Models that read a data frame by its columns, and rows of pandas in another order."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({"dose": RNG.normal(size=30), "arm": RNG.choice(["a", "b"], 30)})
FRAME["y"] = FRAME.dose + RNG.normal(size=30)
SHUFFLED = FRAME.sample(frac=1.0, random_state=0)


def by_columns(frame):
    arm = frame["arm"].eq("b").to_numpy() if "arm" in frame else 0
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(frame)):
        loc = slope * frame["dose"].to_numpy() + arm
        numpyro.sample("y", dist.Normal(loc, 1.0), obs=frame["y"].to_numpy())


def by_arrays(dose, y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(dose)):
        numpyro.sample("y", dist.Normal(slope * dose, 1.0), obs=y)


def exact(frame, alpha):
    target = frame["y"] - (frame["arm"] == "b" if "arm" in frame else 0)
    precision = 1.0 + alpha * (frame["dose"] ** 2).sum()
    return alpha * (frame["dose"] * target).sum() / precision, precision**-0.5


@pytest.mark.parametrize("columns", [["dose", "y"], ["dose", "arm", "y"]])
def test_a_model_may_read_a_frame(columns):
    frame = FRAME[columns].copy()
    fit = nt.fit_gaussian(KEY, by_columns, AutoNormal, frame, alpha=0.5)
    mean, sd = exact(frame, 0.5)
    assert fit.mean["slope"] == pytest.approx(mean, rel=1e-3)
    assert fit.sd["slope"] == pytest.approx(sd, rel=1e-2)
    # What its owner does to it afterwards is another frame's, and the next call sees it.
    frame["y"] *= 2.0
    np.testing.assert_allclose(fit.target.observed["y"], FRAME["y"], rtol=1e-6)
    again = nt.fit_gaussian(KEY, by_columns, AutoNormal, frame, alpha=0.5)
    assert again.mean["slope"] == pytest.approx(exact(frame, 0.5)[0], rel=1e-3)


@pytest.mark.full
def test_verbs_that_look_at_rows_take_a_frame():
    fit = nt.fit_gaussian(KEY, by_columns, AutoNormal, FRAME, alpha=0.5)
    assert nt.sandwich(KEY, fit).num_independent == 30
    assert nt.loo(fit).n_data_points == 30
    choice = nt.select_alpha(KEY, by_columns, AutoNormal, FRAME)
    assert np.isfinite(choice.alpha)


def test_a_frame_with_holes_is_refused():
    frame = FRAME.copy()
    frame.loc[3, "dose"] = np.nan
    with pytest.raises(ValueError, match="'frame' of the model has a column with NaN"):
        nt.fit_gaussian(KEY, by_columns, AutoNormal, frame)


def test_a_stream_takes_the_columns_of_a_frame():
    online = nt.OnlineVI(by_columns, nt.guides.AutoOnlineMultivariateNormal)
    with pytest.raises(TypeError, match=r"reads columns of a data frame.*to_numpy\(\)"):
        online.init(KEY, FRAME[["dose", "y"]])


def test_rounds_of_a_stream_by_frames_do_not_run_the_model_anew():
    runs = []

    def model(x, y):
        runs.append(1)
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ slope, 1.0), obs=y)

    online = nt.OnlineVI(model, nt.guides.AutoOnlineMultivariateNormal)
    rounds = [(FRAME[["dose"]][i : i + 5], FRAME.y[i : i + 5]) for i in (0, 5, 10)]
    state = online.init(KEY, *rounds[0])
    state, _ = online.update(state, *rounds[0])
    state, _ = online.update(state, *rounds[1])
    before = len(runs)
    online.update(state, *rounds[2])
    assert len(runs) == before


def test_what_is_no_column_of_numbers_is_refused_where_arrays_are_wanted():
    with pytest.raises(TypeError, match="Pass codes"):
        nt.fit_gaussian(KEY, by_arrays, AutoNormal, FRAME[["arm"]], FRAME.y)


def stream(dose, y):
    online = nt.OnlineVI(by_arrays, nt.guides.AutoOnlineMultivariateNormal)
    online.init(KEY, dose, y)


@pytest.mark.parametrize(
    "call",
    [
        lambda dose, y: nt.fit_svi(KEY, by_arrays, AutoNormal, dose, y),
        lambda dose, y: nt.fit_gaussian(KEY, by_arrays, AutoNormal, dose, y=y),
        stream,
        lambda dose, y: nt.select_alpha(
            KEY, by_arrays, AutoNormal, dose.to_numpy(), dose, groups=y
        ),
        lambda dose, y: nt.alpha.check_coverage(
            KEY, by_arrays, AutoNormal, dose.to_numpy(), dose, groups=y
        ),
        lambda dose, y: nt.sparse.fit_logistic(
            KEY, dose.to_frame(), y > 0, inclusion_prob=0.5, slab_scale=1.0
        ),
        lambda dose, y: nt.mixtures.fit(
            KEY,
            dose.to_frame(),
            nt.mixtures.components.known_variance(1, prior_scale=1.0),
            num_components=1,
            sample_weight=y.abs(),
        ),
    ],
    ids=["svi", "gaussian", "stream", "groups", "coverage", "sparse", "mixture"],
)
def test_rows_in_another_order_are_refused(call):
    with pytest.raises(ValueError, match="the same rows in another order: row 0 is"):
        call(FRAME.dose, SHUFFLED.y)


def test_rows_of_other_names_or_in_one_order_are_taken_by_their_places():
    lagged = nt.fit_gaussian(
        KEY, by_arrays, AutoNormal, FRAME.dose[1:], FRAME.y[:-1], alpha=0.5
    )
    pairs = pd.DataFrame({"dose": FRAME.dose[1:].values, "y": FRAME.y[:-1].values})
    assert lagged.mean["slope"] == pytest.approx(exact(pairs, 0.5)[0], rel=1e-3)
