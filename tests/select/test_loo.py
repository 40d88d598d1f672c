"""Leave-one-out cross-validation of tempered posteriors."""

import re
import warnings

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoNormal
from oracles import log_normal_density, tempered_normal_posterior

import numpyro_tempered as nt
from numpyro_tempered.report.arviz import assemble, dataset, group, group_names
from numpyro_tempered.select.loo import loo

# The model's noise is half of the truth's: the powers matter.
Y = 1.0 + 2.0 * np.random.default_rng(0).normal(size=20)
PRIOR_SD, NOISE_SD, ALPHA = 1.0, 1.0, 0.3
NUM_DRAWS = 4000


def model(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, PRIOR_SD))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, NOISE_SD), obs=y)


def exact_loo(y, alpha):
    """log p(y_i | the others) of each datum: the tempered posterior of the others is a Gaussian."""
    held_out = []
    for i, datum in enumerate(y):
        mean, sd = tempered_normal_posterior(
            np.delete(y, i), alpha, 0.0, PRIOR_SD, NOISE_SD
        )
        held_out.append(log_normal_density(datum, mean, np.hypot(sd, NOISE_SD)))
    return np.array(held_out)


def posterior_draws(alpha, num_chains=1, seed=1):
    mean, sd = tempered_normal_posterior(Y, alpha, 0.0, PRIOR_SD, NOISE_SD)
    normal = np.random.default_rng(seed).normal(
        size=(num_chains, NUM_DRAWS // num_chains)
    )
    return {"theta": mean + sd * normal}


def arviz_data(alpha, num_chains=1, of=model, y=Y, **kwargs):
    draws = posterior_draws(alpha, num_chains)
    return nt.to_inference_data(
        draws, nt.temper(of, alpha=alpha), y, group_by_chain=True, **kwargs
    )


def elpd(result):
    return result.elpd if hasattr(result, "elpd") else result.elpd_loo


def elpd_i(result):
    return np.asarray(result.elpd_i if hasattr(result, "elpd_i") else result.loo_i)


def p_loo(result):
    return result.p if hasattr(result, "p") else result.p_loo


def quiet(function, *args, **kwargs):
    """A call whose large Pareto k are not the subject."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Estimated shape parameter of Pareto", UserWarning
        )
        return function(*args, **kwargs)


# Five standard deviations of the sum, and of the worst datum, over 50 seeds.
@pytest.mark.parametrize(
    ("alpha", "tolerance", "of_datum"),
    tiered(
        [(0.1, 0.28, 0.22), (ALPHA, 0.06, 0.13), (0.7, 0.16, 0.1)],
        unit=[(ALPHA, 0.06, 0.13)],
    ),
)
def test_conjugate_normal_by_exact_draws(x64, alpha, tolerance, of_datum):
    data = arviz_data(alpha)
    exact = exact_loo(Y, alpha)
    assert abs(elpd(loo(data)) - exact.sum()) < tolerance
    np.testing.assert_allclose(elpd_i(loo(data)), exact, atol=of_datum)
    named = arviz_data(alpha, log_lik="log_likelihood")
    assert abs(elpd(quiet(az.loo, named)) - exact.sum()) > 1.0
    assert elpd(loo(named)) == elpd(loo(data))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: nt.temper(model, alpha=1.0), "log_likelihood"),
        (lambda: nt.temper(model, alpha={"y": 1.0}), "log_likelihood"),
        (lambda: nt.temper(model, alpha=ALPHA), "untempered_log_likelihood"),
        (lambda: nt.temper(model, alpha={"y": ALPHA}), "untempered_log_likelihood"),
        (
            lambda: handlers.scale(nt.temper(model, alpha=1.0), 2.0),
            "untempered_log_likelihood",
        ),
        (
            lambda: nt.temper(nt.robust(model, beta=0.3, unit=1.0), alpha=1.0),
            "untempered_log_likelihood",
        ),
    ],
    ids=["1", "1 by site", "tempered", "by site", "scaled", "robust"],
)
def test_arviz_reads_no_log_likelihood_that_it_would_misuse(change, name):
    draws = {"theta": np.linspace(-1.0, 1.0, 30)}
    data = nt.to_inference_data(draws, change(), Y)
    assert [each for each in group_names(data) if "likelihood" in each] == [name]
    if name != "log_likelihood":
        with pytest.raises((TypeError, KeyError, ValueError, AttributeError)):
            az.loo(data)


def test_what_is_true_asks_for_the_name_by_the_power():
    data = arviz_data(ALPHA, log_lik=np.True_)
    assert "untempered_log_likelihood" in group_names(data)


def test_another_name_of_the_log_likelihood_is_refused():
    with pytest.raises(
        ValueError, match="must be True, False or 'log_likelihood', got"
    ):
        arviz_data(ALPHA, log_lik="posterior")


def test_weights_are_the_inverse_likelihood_to_the_power(x64):
    # Without smoothing: the ratio of two sums, which smoothing of light tails hardly moves.
    data = arviz_data(ALPHA)
    log_lik = np.asarray(data["untempered_log_likelihood"]["y"])[0]
    log_sum = np.logaddexp.reduce
    raw = log_sum((1 - ALPHA) * log_lik, axis=0) - log_sum(-ALPHA * log_lik, axis=0)
    np.testing.assert_allclose(elpd_i(loo(data)), raw, atol=1e-3)


@pytest.mark.parametrize("num_chains", tiered([1, 4], unit=[4]))
def test_alpha_one_is_arviz(num_chains):
    data = arviz_data(1.0, num_chains)
    ours, theirs = loo(data), az.loo(data)
    assert (elpd(ours), ours.se, p_loo(ours)) == (
        elpd(theirs),
        theirs.se,
        p_loo(theirs),
    )
    np.testing.assert_array_equal(elpd_i(ours), elpd_i(theirs))
    np.testing.assert_array_equal(ours.pareto_k, theirs.pareto_k)
    assert str(ours) == str(theirs)


def test_alpha_zero_weighs_prior_draws_equally(x64):
    def whole_numbers(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, PRIOR_SD))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Delta(jnp.round(theta)), obs=y)

    # Every draw has likelihood 0 at some datum.
    data = arviz_data(0.0, of=whole_numbers, y=jnp.array([-1.0, 0.0]))
    result = loo(data)
    likelihood = np.round(posterior_draws(0.0)["theta"][0])[:, None] == np.array(
        [-1.0, 0.0]
    )
    np.testing.assert_allclose(elpd_i(result), np.log(likelihood.mean(0)), rtol=1e-10)
    np.testing.assert_array_equal(result.pareto_k, 0.0)
    assert p_loo(result) == pytest.approx(0.0, abs=1e-10)


def fitted(kind):
    if kind == "svi":
        return nt.fit_svi(
            jax.random.key(2), model, AutoNormal, Y, alpha=ALPHA, num_particles=20
        )
    kernel = NUTS(nt.temper(model, alpha=ALPHA))
    mcmc = MCMC(kernel, num_warmup=300, num_samples=3000, progress_bar=False)
    mcmc.run(jax.random.key(3), jnp.asarray(Y))
    return mcmc


@pytest.mark.full
@pytest.mark.parametrize("kind", ["svi", "nuts"])
def test_conjugate_normal_by_numpyro(kind):
    data = nt.to_inference_data(
        fitted(kind), **({"num_samples": NUM_DRAWS} if kind == "svi" else {})
    )
    exact = exact_loo(Y, ALPHA).sum()
    assert abs(elpd(loo(data)) - exact) < 0.1
    named = nt.to_inference_data(fitted(kind), log_lik="log_likelihood")
    assert abs(elpd(quiet(az.loo, named)) - exact) > 1.0


@pytest.mark.filterwarnings(
    "ignore:The inplace keyword in DataFrame"
)  # ArviZ 0.23 with pandas 3
def test_compare_and_print():
    # The tempered posterior predicts better here; each result is at its own power.
    results = {"tempered": loo(arviz_data(ALPHA)), "bayes": loo(arviz_data(1.0))}
    table = az.compare(
        results, **({"round_to": "none"} if not hasattr(az, "psislw") else {})
    )
    assert list(table.index) == ["tempered", "bayes"]
    column = table["elpd_loo"] if "elpd_loo" in table else table["elpd"]
    for name, result in results.items():
        assert column[name] == pytest.approx(elpd(result), rel=1e-6)
        assert re.search(r"elpd_loo +-4\d\.\d", str(result))


def test_pointwise_can_be_left_out():
    result = loo(arviz_data(ALPHA), pointwise=False)
    assert getattr(result, "elpd_i", None) is None
    assert "loo_i" not in getattr(result, "index", ())
    assert elpd(result) == elpd(loo(arviz_data(ALPHA)))


def two_sites(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, PRIOR_SD))
    with nt.temper(alpha=ALPHA), numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, NOISE_SD), obs=y)
    with nt.temper(alpha=0.5), numpyro.plate("m", 3):
        numpyro.sample("other", dist.Normal(theta, 3.0), obs=y[:3])


def test_powers_that_differ_by_site(x64):
    data = arviz_data(1.0, of=two_sites)
    for name, power in {"y": ALPHA, "other": 0.5}.items():
        assert elpd(loo(data, var_name=name)) == elpd(
            loo(data, var_name=name, alpha=power)
        )
        assert elpd(loo(data, var_name=name)) != elpd(
            loo(data, var_name=name, alpha=0.4)
        )


def test_scales_of_the_model_count_as_power(x64):
    def scaled(y):
        with handlers.scale(scale=3.0):
            numpyro.sample(
                "y",
                dist.Normal(numpyro.sample("theta", dist.Normal()), 1.0).expand(
                    [len(y)]
                ),
                obs=y,
            )

    draws, tempered = posterior_draws(ALPHA), nt.temper(scaled, alpha=ALPHA / 3.0)
    # The latent stands inside the scale, which does not matter to its draws here.
    data = nt.to_inference_data(draws, tempered, Y, group_by_chain=True)
    assert elpd(loo(data)) == pytest.approx(elpd(loo(arviz_data(ALPHA))), rel=1e-12)

    def by_datum(y):
        theta = numpyro.sample("theta", dist.Normal())
        with handlers.scale(scale=jnp.arange(1.0, 1.0 + len(y))):
            numpyro.sample("y", dist.Normal(theta, 1.0).expand([len(y)]), obs=y)

    data = nt.to_inference_data(draws, by_datum, Y, group_by_chain=True)
    with pytest.raises(
        ValueError,
        match=r"^the powers or.*differ from datum to datum.*loo takes one power",
    ):
        loo(data)
    assert np.isfinite(elpd(loo(data, alpha=ALPHA)))


@pytest.mark.parametrize("by_hand", tiered([True, False], unit=[True]))
def test_events_and_two_batch_dimensions(by_hand, x64):
    y = np.random.default_rng(4).normal(size=(3, 2, 2))

    def vectors(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, PRIOR_SD))
        with numpyro.plate("columns", 2), numpyro.plate("rows", 3):
            numpyro.sample(
                "y", dist.MultivariateNormal(theta * jnp.ones(2), jnp.eye(2)), obs=y
            )

    mean, sd = tempered_normal_posterior(y, ALPHA, 0.0, PRIOR_SD, NOISE_SD)
    draws = {"theta": mean + sd * np.random.default_rng(5).normal(size=NUM_DRAWS)}
    if by_hand:
        log_lik = log_normal_density(
            y, draws["theta"][:, None, None, None], NOISE_SD
        ).sum(-1)
        groups = {
            "posterior": {"theta": draws["theta"][None]},
            "log_likelihood": {"y": log_lik[None]},
        }
        dims = {"y": ["row", "column"]}
        data = assemble(
            {
                name: dataset(of, ("chain", "draw"), None, dims, {})
                for name, of in groups.items()
            },
            {"alpha": ALPHA},
        )
    else:
        data = nt.to_inference_data(
            draws,
            nt.temper(vectors, alpha=ALPHA),
            y,
            dims={"y": ["row", "column", "coordinate"]},
        )
    result = loo(data)
    exact = np.empty((3, 2))
    for index in np.ndindex(3, 2):
        others = np.concatenate([y[i] for i in np.ndindex(3, 2) if i != index])
        m, s = tempered_normal_posterior(others, ALPHA, 0.0, PRIOR_SD, NOISE_SD)
        # The two coordinates of the vector that is left out share theta.
        first, second = y[index]
        weight = s**2 / (s**2 + NOISE_SD**2)
        exact[index] = log_normal_density(
            first, m, np.hypot(s, NOISE_SD)
        ) + log_normal_density(
            second,
            m + weight * (first - m),
            np.hypot(s * np.sqrt(1 - weight), NOISE_SD),
        )
    assert elpd_i(result).shape == (3, 2)
    np.testing.assert_allclose(elpd_i(result), exact, atol=0.05)


def test_one_site_for_all_data():
    def joint(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, PRIOR_SD))
        numpyro.sample(
            "y", dist.Normal(theta, NOISE_SD).expand([len(y)]).to_event(1), obs=y
        )

    with pytest.warns(UserWarning, match="point-wise LOO is the same"):
        result = quiet(loo, arviz_data(0.1, of=joint))
    assert result.n_data_points == 1
    assert np.isfinite(elpd(result))


def test_an_outlier_warns_as_arviz_does():
    y = np.append(Y, 30.0)
    data = arviz_data(1.0, y=y)
    with pytest.warns(UserWarning, match="Estimated shape parameter of Pareto"):
        result = loo(data)
    assert result.warning
    # Prior draws, as those of a power near 0, are near their leave-one-out posteriors.
    assert not loo(data, alpha=0.001).warning


def test_data_without_a_tail(x64):
    def idle(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, PRIOR_SD))
        with numpyro.plate("n", len(y)):
            mean = jnp.where(jnp.arange(len(y)) != 2, theta, y)
            numpyro.sample("y", dist.Normal(mean, NOISE_SD), obs=y)

    result, unmasked = loo(arviz_data(ALPHA, of=idle)), loo(arviz_data(ALPHA))
    assert elpd_i(result)[2] == pytest.approx(-np.log(NOISE_SD * np.sqrt(2.0 * np.pi)))
    assert result.pareto_k[2] == 0.0
    np.testing.assert_allclose(
        np.delete(elpd_i(result), 2), np.delete(elpd_i(unmasked), 2), rtol=1e-12
    )


def test_a_discrete_posterior_has_equal_largest_weights(x64):
    data = nt.to_inference_data(
        {"theta": np.tile([0.0, 1.0], 50)}, nt.temper(model, alpha=ALPHA), Y
    )
    with pytest.warns(UserWarning, match="Estimated shape parameter of Pareto"):
        result = loo(data)
    log_lik = np.asarray(data["untempered_log_likelihood"]["y"])[0]
    log_sum = np.logaddexp.reduce
    exact = log_sum((1 - ALPHA) * log_lik, axis=0) - log_sum(-ALPHA * log_lik, axis=0)
    np.testing.assert_allclose(elpd_i(result), exact, rtol=1e-10)
    assert np.all(np.isinf(result.pareto_k))


def with_values(function):
    """Data whose log-likelihood has been tampered with."""
    data = arviz_data(ALPHA)
    changed = group(data, "untempered_log_likelihood").copy(deep=True)
    function(changed["y"].values)
    return assemble(
        {"posterior": group(data, "posterior"), "log_likelihood": changed}, data.attrs
    )


def put(value):
    def change(values):
        values[0, 3, 5] = value

    return change


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (
            lambda: arviz_data(ALPHA, log_lik=False),
            {},
            ValueError,
            r"no log_likelihood group.*to_inference_data",
        ),
        (
            lambda: arviz_data(1.0, of=two_sites),
            {},
            ValueError,
            r"several observed sites, \['other', 'y'\]",
        ),
        (
            lambda: arviz_data(ALPHA),
            {"var_name": "z"},
            ValueError,
            r"no 'z', only \['y'\]",
        ),
        (lambda: with_values(put(np.nan)), {}, ValueError, "NaN"),
        (lambda: with_values(put(np.inf)), {}, ValueError, r"\+inf"),
        (
            lambda: with_values(put(-np.inf)),
            {},
            ValueError,
            r"-inf in some draws.*draws of the posterior",
        ),
        (
            lambda: arviz_data(ALPHA),
            {"alpha": -1.0},
            ValueError,
            r"alpha must be.*and finite, got",
        ),
        (
            lambda: posterior_draws(ALPHA),
            {},
            TypeError,
            r"draws are followed by their tempered model",
        ),
        (
            lambda: nt.to_inference_data({"theta": np.arange(24.0)}, model, Y),
            {},
            ValueError,
            r"^loo needs.*at least 25 draws.* got 24",
        ),
    ],
)
def test_what_has_no_loo_is_refused(make, options, error, message):
    data = make()
    with pytest.raises(error, match=message):
        loo(data, **options)


def test_alpha_must_be_known():
    data = az.from_dict(
        **(
            {
                "posterior": {"theta": np.zeros((1, 30))},
                "log_likelihood": {"y": np.ones((1, 30, 2))},
            }
            if hasattr(az, "psislw")
            else {
                "data": {
                    "posterior": {"theta": np.zeros((1, 30))},
                    "log_likelihood": {"y": np.ones((1, 30, 2))},
                }
            }
        )
    )
    with pytest.raises(
        ValueError, match=r"no attribute alpha for site 'y'.*or pass alpha"
    ):
        loo(data)


def test_a_posterior_of_one_point_has_no_loo():
    with pytest.raises(
        ValueError,
        match=r"^the log-likelihood of site 'y' is the same in all draws.*AutoDelta.*no leave-one-out",
    ):
        loo(nt.to_inference_data({"theta": np.zeros(30)}, model, Y))


def test_attributes_of_a_group_will_do():
    data = arviz_data(ALPHA)
    expected = elpd(loo(data))
    del data.attrs["alpha"]
    assert elpd(loo(data)) == expected
