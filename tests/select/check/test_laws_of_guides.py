"""The law that is read of a guide, and the fit that is read of a result."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

import numpyro_tempered as nt
from numpyro_tempered.infer.guide_laws import location_scale_of
from numpyro_tempered.report.draws import bind
from numpyro_tempered.select.check import reference
from numpyro_tempered.select.check.reference import _candidate, cover

KEY = jax.random.key(0)
LOC, SCALE, DF = np.array([1.0, -2.0, 3.0]), np.array([0.5, 2.0, 0.1]), 6.0
TRIL = np.array([[0.5, 0.0, 0.0], [1.0, 2.0, 0.0], [0.3, -0.4, 0.1]])
FACTOR = np.array([[1.0], [0.5], [-2.0]])
# The guides have the sites in the order of the model, and what is told of a fit has them by name.
BY_NAME = [2, 0, 1]


def model(y):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(a + b.sum(), 1.0), obs=y)


Y = np.zeros(4, np.float32)
LAWS = {
    "AutoNormal": (
        AutoNormal,
        {
            "b_auto_loc": LOC[:2],
            "b_auto_scale": SCALE[:2],
            "a_auto_loc": LOC[2],
            "a_auto_scale": SCALE[2],
        },
        np.diag(SCALE**2),
    ),
    "AutoDiagonalNormal": (
        AutoDiagonalNormal,
        {"auto_loc": LOC, "auto_scale": SCALE},
        np.diag(SCALE**2),
    ),
    "AutoMultivariateNormal": (
        AutoMultivariateNormal,
        {"auto_loc": LOC, "auto_scale_tril": TRIL},
        TRIL @ TRIL.T,
    ),
    "AutoLowRankMultivariateNormal": (
        lambda m: AutoLowRankMultivariateNormal(m, rank=1),
        {"auto_loc": LOC, "auto_cov_factor": FACTOR, "auto_scale": SCALE},
        (SCALE[:, None] * FACTOR) @ (SCALE[:, None] * FACTOR).T + np.diag(SCALE**2),
    ),
    "AutoMultivariateStudentT": (
        lambda m: nt.guides.AutoMultivariateStudentT(m, df=DF),
        {"auto_loc": LOC, "auto_scale_tril": TRIL},
        TRIL @ TRIL.T * DF / (DF - 2.0),
    ),
    "AutoDiagonalStudentT": (
        lambda m: nt.guides.AutoDiagonalStudentT(m, df=DF),
        {"auto_loc": LOC, "auto_scale": SCALE},
        np.diag(SCALE**2) * DF / (DF - 2.0),
    ),
}


def set_up(guide):
    instance = guide(model)
    with handlers.seed(rng_seed=0), handlers.block():
        instance(Y)
    return instance


@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_a_guide_is_that_of_its_params(name):
    guide, params, cov = LAWS[name]
    law = location_scale_of(
        set_up(guide),
        {key: jnp.asarray(value, jnp.float32) for key, value in params.items()},
    )
    np.testing.assert_allclose(law.loc, LOC[BY_NAME], rtol=1e-6)
    np.testing.assert_allclose(
        law.cov, cov[np.ix_(BY_NAME, BY_NAME)], rtol=1e-5, atol=1e-7
    )
    assert law.is_joint == (name == "AutoMultivariateStudentT")
    if "StudentT" in name:
        np.testing.assert_allclose(law.df, DF)
    else:
        assert law.df is None


def test_other_guides_have_no_law():
    assert location_scale_of(AutoDelta(model), {}) is None
    assert location_scale_of(model, {}) is None


def test_the_fit_of_a_stream_is_that_of_its_state():
    online = nt.OnlineVI(
        nt.temper(model, alpha=0.5), nt.guides.AutoOnlineDiagonalNormal
    )
    state, _ = online.run(KEY, Y[:, None])
    fit = bind(online.posterior(state), (Y,))
    assert fit.model is online.model
    assert fit.args[0].tolist() == Y.tolist()
    law = location_scale_of(fit.guide, fit.params)
    np.testing.assert_allclose(
        law.loc, np.asarray(state.posterior.loc)[BY_NAME], rtol=1e-6
    )
    np.testing.assert_allclose(
        np.diag(law.cov),
        np.square(state.posterior.scale)[jnp.array(BY_NAME)],
        rtol=1e-5,
    )


@pytest.mark.parametrize("is_heavy", [False, True])
def test_the_law_of_a_reference_is_that_of_its_draws(is_heavy):
    guide, params, cov = LAWS["AutoMultivariateNormal"]
    params = {key: jnp.asarray(value, jnp.float32) for key, value in params.items()}
    fit = nt.results.TemperedFit(
        nt.temper(model), set_up(guide), params, 1.0, None, None, {}, (Y,), {}, KEY
    )
    loc, cov = LOC[BY_NAME], cov[np.ix_(BY_NAME, BY_NAME)]
    draws = _candidate(KEY, loc, cov, fit.target, 4000, is_heavy=is_heavy).draws
    np.testing.assert_allclose(draws.law.loc, loc)
    sd = np.sqrt(np.diag(draws.law.cov))
    # Of 7 degrees of freedom the standard error of a variance by 4000 draws is a twenty-fifth of it.
    np.testing.assert_allclose(
        np.cov(draws.flat.T / sd[:, None]), draws.law.cov / np.outer(sd, sd), atol=0.16
    )
    assert (draws.law.df is None) != is_heavy


def test_the_cover_of_a_mixture_has_its_modes_with_heavier_tails():
    guide, params, _ = LAWS["AutoMultivariateNormal"]
    params = {key: jnp.asarray(value, jnp.float32) for key, value in params.items()}
    fit = nt.results.TemperedFit(
        nt.temper(model), set_up(guide), params, 1.0, None, None, {}, (Y,), {}, KEY
    )
    target = fit.target
    loc, root = (
        jnp.array([[3.0, 0.0, 0.0], [-3.0, 0.0, 0.0]]),
        jnp.stack([0.5 * jnp.eye(3)] * 2),
    )
    mixture = nt.gaussian.families.GaussianMixture(
        jnp.log(jnp.array([0.25, 0.75])), loc, root
    )
    start = _candidate(
        KEY, np.zeros(3), np.eye(3), target, 4000, is_heavy=False
    ).draws._replace(mixture=mixture)
    covers = cover(KEY, start, target, None)
    assert (covers.name, covers.is_mixture) == ("student_t", True)
    flat = covers.draws.flat
    left = flat[:, 0] < 0
    assert np.mean(left) == pytest.approx(0.75, abs=5 * np.sqrt(0.19 / 4000))
    # Student's t of 7 degrees of freedom has 7/5 of the variance.
    np.testing.assert_allclose(flat[left].mean(axis=0), [-3.0, 0.0, 0.0], atol=0.06)
    np.testing.assert_allclose(flat[left].var(axis=0), 0.25 * 7 / 5, rtol=0.2)


def test_a_cover_that_is_far_off_moves_to_the_moments_of_its_weighted_draws():
    guide, params, _ = LAWS["AutoMultivariateNormal"]
    params = {key: jnp.asarray(value, jnp.float32) for key, value in params.items()}
    fit = nt.results.TemperedFit(
        nt.temper(model), set_up(guide), params, 1.0, None, None, {}, (Y,), {}, KEY
    )
    target = fit.target
    exact = np.linalg.inv(np.eye(3) + 4.0 * np.ones((3, 3)))
    off, wide = np.array([0.8, -0.6, 0.7]), exact + 0.5 * np.eye(3)
    start = _candidate(KEY, off, wide, target, 4000, is_heavy=False).draws._replace(
        law=None
    )
    covers = cover(KEY, start, target, None)
    assert covers.name == "gaussian"
    # Of 4000 draws a tenth counts.
    np.testing.assert_allclose(
        covers.draws.law.loc, np.zeros(3), atol=4.0 / np.sqrt(400)
    )
    np.testing.assert_allclose(np.diag(covers.draws.law.cov), np.diag(exact), rtol=0.4)


def test_the_fit_of_a_choice_is_the_one_that_was_chosen():
    fit = nt.results.TemperedFit(model, model, {}, 1.0, None, None, {}, (Y,), {}, KEY)

    assert bind(SimpleNamespace(fit=fit)) is fit
    with pytest.raises(
        TypeError,
        match=r"^got int, which is no tempered posterior: .*by its model and arguments\.$",
    ):
        bind(3)
    with pytest.raises(
        ValueError,
        match=r"^a TemperedFit holds its data: .*1 further values, neither data nor an option\.$",
    ):
        bind(fit, (Y,))


def test_a_cover_of_draws_alone_begins_at_their_moments(monkeypatch):
    """Of a fit without a law, such as one by hand, where the curvature is not known."""
    guide, params, _ = LAWS["AutoMultivariateNormal"]
    params = {key: jnp.asarray(value, jnp.float32) for key, value in params.items()}
    fit = nt.results.TemperedFit(
        nt.temper(model), set_up(guide), params, 1.0, None, None, {}, (Y,), {}, KEY
    )
    target = fit.target
    # The posterior, a Gaussian whose precision is that of the prior and of four sums.
    exact = np.linalg.inv(np.eye(3) + 4.0 * np.ones((3, 3)))
    start = _candidate(
        KEY, np.zeros(3), exact, target, 1000, is_heavy=False
    ).draws._replace(law=None)
    asked = []
    monkeypatch.setattr(
        reference,
        "_candidate",
        lambda key, loc, cov, *_, **__: asked.append((loc, cov)),
    )
    assert cover(KEY, start, target, None) is None
    np.testing.assert_allclose(
        asked[0][0], start.flat.mean(axis=0), rtol=1e-5, atol=1e-7
    )
    np.testing.assert_allclose(asked[0][1], np.cov(start.flat.T, bias=True), rtol=1e-4)
