"""Posteriors and data that are not their own, and what each datum counts."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.select.check.posteriors import split_r_hat
from numpyro_tempered.select.evidence import largest_r_hat

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(3.0, 1.0, (24, 2))
Y = X @ [1.0, -1.0] + RNG.normal(size=24)
WEIGHT = np.full(24, 2.0)


def mixture(**options):
    component = nt.mixtures.components.known_variance(2, prior_scale=9.0)
    return nt.mixtures.fit(
        KEY, X, component, num_components=1, num_restarts=1, num_draws=4, **options
    )


@pytest.fixture(scope="module")
def fits():
    slab = {"inclusion_prob": 0.5, "slab_scale": 1.0, "intercept_scale": 5.0}
    return {
        "mixture": mixture(alpha=0.5),
        "weighted": mixture(sample_weight=WEIGHT),
        "ppca": nt.ppca.fit(KEY, X, num_factors=1, num_restarts=1),
        "sparse": nt.sparse.fit_linear(
            KEY, X, Y, **slab, noise_prior=(2.0, 2.0), num_restarts=1
        ),
    }


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("mixture", (X + 9.0,), {}, "column means"),
        ("mixture", (X[:9],), {}, "total weight 9, those of the fit 24"),
        ("mixture", (X,), {"sample_weight": WEIGHT}, "total weight 48"),
        ("weighted", (X,), {}, "total weight 24, those of the fit 48"),
        ("ppca", (X + 9.0,), {}, "column means"),
        ("ppca", (X[:9],), {}, "18 entries"),
        ("sparse", (X + 9.0, Y), {}, "off those of the fit"),
        ("sparse", (X[:9], Y), {}, "x has 9 rows"),
        ("sparse", (X, 2.0 * Y), {}, "number, mean and root mean square"),
    ],
)
def test_data_that_are_not_those_of_the_fit_are_refused(
    fits, name, data, options, message
):
    with pytest.raises(ValueError, match=message):
        fits[name].on(*data, **options)


def test_those_of_the_fit_are_taken_however_they_come(fits):
    frame = pd.DataFrame(X, columns=["a", "b"])
    values = fits["mixture"].on(X).evaluate().elbo.value
    for same in (frame, X.tolist(), jnp.asarray(X)):
        assert fits["mixture"].on(same).evaluate().elbo.value == values
        fits["ppca"].on(same)
        fits["sparse"].on(same, Y)
    fits["weighted"].on(X, sample_weight=WEIGHT)


def test_columns_that_are_not_moved_are_not_compared_by_their_means():
    component = nt.mixtures.components.product(
        {
            "a": nt.mixtures.components.known_variance(1, prior_scale=9.0),
            "b": nt.mixtures.components.poisson(1),
        },
        {"a": [0], "b": [1]},
    )
    rows = np.column_stack([X[:, 0], RNG.poisson(4.0, 24)])
    fit = nt.mixtures.fit(
        KEY, rows, component, num_components=1, num_restarts=1, num_draws=2
    )
    assert fit.centre[1] == 0.0
    fit.on(rows)
    with pytest.raises(ValueError, match="column means"):
        fit.on(rows + np.array([9.0, 0.0]))


def test_moments_at_the_data_are_those_of_the_fit(fits):
    bound = fits["sparse"].on(X, Y)
    for at_data, alone in (
        (bound.mean, fits["sparse"].mean),
        (bound.sd, fits["sparse"].sd),
    ):
        jax.tree.map(np.testing.assert_array_equal, at_data, alone)


@pytest.mark.full
def test_a_mixture_of_one_component_starts_a_stream(fits):
    model = nt.mixtures.numpyro_model(
        nt.mixtures.components.known_variance(2, prior_scale=9.0), num_components=1
    )
    online = nt.OnlineVI(model, nt.guides.AutoOnlineMultivariateNormal)
    start = online.init(KEY, X[:1], prior=fits["mixture"].on(X))
    np.testing.assert_allclose(start.posterior.loc, X.mean(axis=0), atol=0.2)


def masked(y, on, scale=1.0):
    loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
    with (
        numpyro.handlers.scale(scale=scale),
        numpyro.handlers.mask(mask=on),
        numpyro.plate("n", len(y)),
    ):
        numpyro.sample("y", dist.Normal(loc, 1.0), obs=y)


def test_compare_refuses_other_masks_and_scales_and_looks_under_none():
    on = np.arange(24) < 16

    def fit(y, mask, scale=1.0):
        return nt.fit_gaussian(KEY, masked, AutoNormal, y, mask, scale)

    under = np.where(on, Y, 99.0)
    one, two = fit(Y, on), fit(under, on)
    assert one.elbo.value == two.elbo.value
    assert nt.compare({"one": one, "two": two}) is not None
    for other in (fit(Y, np.ones(24, bool)), fit(Y, on, 0.5)):
        with pytest.raises(ValueError, match="the masks or scales of site 'y' differ"):
            nt.compare({"one": one, "other": other})


def test_chains_that_are_stuck_apart_have_not_converged():
    def model(y):
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    target = nt.results.Target(model, (1.0,), {}, KEY)
    stuck = {"loc": jnp.stack([jnp.full(50, -3.0), jnp.full(50, 5.0)])}
    constant = {"loc": jnp.full((2, 50), 5.0)}
    assert nt.results.SampledPosterior(stuck, target).converged is False
    assert nt.results.SampledPosterior(constant, target).converged is True
    grid = {name: np.asarray(draws)[:, :, None] for name, draws in stuck.items()}
    assert largest_r_hat([grid["loc"]]) == [np.inf]
    assert largest_r_hat([np.zeros((2, 50, 1))]) == [1.0]
    # Halves of one chain, by 0.1: too near for a variance of 1 in the place of none.
    halves = {"loc": jnp.concatenate([jnp.zeros(25), jnp.full(25, 0.1)])[None]}
    assert split_r_hat(halves) > 1e3
    assert split_r_hat({"loc": jnp.zeros((1, 50))}) == 1.0


@pytest.mark.filterwarnings("ignore:the fit has not converged")
def test_loo_refuses_local_plates():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
        with numpyro.plate("n", len(y)):
            z = numpyro.sample("z", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(z, 1.0), obs=y)

    fit = nt.fit_svi(
        KEY, model, AutoNormal, Y, alpha=0.5, local_plates=["n"], num_steps=50
    )
    data = nt.to_inference_data(fit)
    for posterior in (fit, data):
        with pytest.raises(
            ValueError, match=r"latent sites \['z'\] are in local plates"
        ):
            nt.loo(posterior)


@pytest.mark.full
def test_a_marginalised_model_predicts_where_its_latents_are_enumerated():
    def model(y, size=4):
        p = numpyro.sample("p", dist.Beta(5.0, 2.0))
        with numpyro.plate("n", size if y is None else len(y)):
            z = numpyro.sample("z", dist.Bernoulli(p), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Normal(9.0 * z, 1.0), obs=y)

    y = jnp.array([0.0, 9.0, 9.0, 9.0, 9.0, 0.0])
    fit = nt.fit_gaussian(KEY, nt.marginalize(model), AutoNormal, y, alpha=0.5)
    draws = fit.predict(KEY, None)
    assert draws["y"].shape == (1000, 4)
    np.testing.assert_allclose(draws["y"].mean(), 9.0 * fit.mean["p"], atol=0.4)


class WithELBO(nt.results.SampledPosterior):
    """Draws that take part in a comparison."""

    elbo = nt.results.TemperedELBO(-1.0, 0.0, -1.0, 0.0)
    converged = None


def comparable(model, *data, seed=0):
    target = nt.results.Target(model, data, {}, jax.random.key(seed))
    draws = {"loc": jnp.linspace(-1.0, 1.0, 30)[None]}
    return WithELBO(draws, target)


def test_fits_of_other_rows_of_the_same_data_are_compared_and_of_others_are_not():
    def model(y, size=6):
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        with numpyro.plate("n", len(y), subsample_size=size):
            part = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(loc, 1.0), obs=part)

    y = jnp.asarray(Y)
    one, same = comparable(model, y), comparable(model, y, 8, seed=1)
    assert not jnp.array_equal(one.target.observed["y"], same.target.observed["y"][:6])
    with pytest.warns(UserWarning, match="log_likelihood group.*is left out"):
        assert nt.compare({"one": one, "same": same}).attrs["selected"] == "one"
    with (
        pytest.warns(UserWarning, match="log_likelihood group.*is left out"),
        pytest.raises(ValueError, match=r"a plate of the model subsamples.*pass draws"),
    ):
        nt.loo(one)
    draws = {name: values[0] for name, values in one.samples.items()}
    assert nt.loo(draws, model, y, None).n_data_points == len(Y)
    # Other data where neither has looked.
    seen = np.isin(np.asarray(y), one.target.observed["y"])
    other = comparable(model, jnp.where(seen, y, 0.0))
    np.testing.assert_array_equal(one.target.observed["y"], other.target.observed["y"])
    with pytest.raises(ValueError, match="values of site 'y' differ"):
        nt.compare({"one": one, "other": other})


def censored(y, at, form):
    loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(loc, 1.0), obs=y[y < at])
    terms = jax.scipy.stats.norm.logsf(at, loc) * np.ones(np.sum(y >= at))
    if form == "factor":
        numpyro.factor("censored", terms)


def test_data_in_factors_are_not_left_out_in_silence():
    whole, part = (comparable(censored, Y, 1.0, form) for form in ("factor", "none"))
    message = r"likelihood factors \['censored'\] and fits\['part'\] \[\]"
    with pytest.raises(ValueError, match=message):
        nt.compare({"whole": whole, "part": part})
    assert nt.compare({"whole": whole, "again": whole}) is not None

    class Own(WithELBO):
        """Of somebody who says no more than what is observed."""

        def summarise_data(self):
            return nt.results.DataSummary(observed=self.target.observed)

    own = Own(whole.samples, whole.target)
    assert nt.compare({"whole": whole, "own": own}) is not None
    with pytest.raises(
        ValueError, match=r"factors \['censored'\] are terms of the lik"
    ):
        nt.loo(whole)
    assert nt.loo(whole, var_name="y").n_data_points == np.sum(Y < 1.0)
    assert nt.loo(part).n_data_points == np.sum(Y < 1.0)
