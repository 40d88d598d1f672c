"""The factors and priors of scikit-learn's fits that are taken over, by their means; no bound is computed."""

import numpy as np
import pytest
from scipy.special import digamma
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import BayesianGaussianMixture, GaussianMixture

import numpyro_tempered as nt
from numpyro_tempered.mixtures.bridges import from_sklearn as module
from numpyro_tempered.mixtures.result import MixtureFit

D, K = 2, 3
X = (
    np.random.default_rng(0).normal(size=(40, D))
    + 6.0 * (np.arange(40) % 3 > 0)[:, None]
)


def fitted(form, kind="dirichlet_distribution"):
    model = BayesianGaussianMixture(
        n_components=K,
        covariance_type=form,
        weight_concentration_prior=0.7,
        weight_concentration_prior_type=kind,
        mean_precision_prior=0.5,
        degrees_of_freedom_prior=D + 1.5,
        max_iter=3,
        random_state=0,
    )
    with pytest.warns(ConvergenceWarning):
        return model.fit(X)


@pytest.fixture
def taken_over(monkeypatch, key):
    """From a model to the fit, with 7 for the bound of its factors."""

    def evaluate(rng_key, source, problem, settings, outcome, num_samples):
        history, one = outcome.history, np.ones(1)
        return MixtureFit(
            source.component if hasattr(source, "component") else None,
            settings.alpha,
            outcome.factors,
            problem,
            X.mean(axis=0),
            objective=7.0,
            kl=0.0,
            bound=num_samples,
            counts=np.ones(K),
            trace=one,
            restart_objectives=one,
            num_best=1,
            spread=0.0,
            converged=history.converged,
            num_iter=history.num_iter,
            num_moves=0,
            total=40.0,
        )

    monkeypatch.setattr(module, "evaluate", evaluate)
    return lambda model: nt.mixtures.from_sklearn(key, model, X, num_draws=5)


@pytest.mark.parametrize("form", ["full", "tied", "diag", "spherical"])
def test_factors_and_priors_have_the_means_of_scikit_learn(form, taken_over, x64):
    model = fitted(form)
    fit, df = taken_over(model), model.degrees_of_freedom_
    q, p = fit.factors.posterior, fit.problem.prior
    # Both are of data less their mean.
    np.testing.assert_allclose(q.loc + X.mean(axis=0), model.means_)
    np.testing.assert_allclose(p.loc + X.mean(axis=0), model.mean_prior_, atol=1e-12)
    np.testing.assert_allclose(fit.factors.concentration, model.weight_concentration_)
    np.testing.assert_allclose(fit.problem.concentration, np.full(K, 0.7))
    prior_df = D + 1.5
    if form in ("full", "tied"):
        np.testing.assert_allclose(q.mean_precision, model.mean_precision_)
        np.testing.assert_allclose(p.mean_precision, 0.5)
        np.testing.assert_allclose(q.df, np.broadcast_to(df, (K,)))
        precisions = np.asarray(q.df)[:, None, None] * np.linalg.inv(q.scale)
        np.testing.assert_allclose(
            precisions, np.broadcast_to(model.precisions_, (K, D, D))
        )
        assert p.df == prior_df
        np.testing.assert_allclose(p.scale, model.covariance_prior_)
    else:
        # Of the gammas of d columns that share a precision one has d times the half degrees of freedom.
        times = D if form == "spherical" else 1
        np.testing.assert_allclose(
            q.mean_precision, np.tile(model.mean_precision_[:, None], (1, D))
        )
        np.testing.assert_allclose(p.mean_precision, np.full(D, 0.5))
        concentration = np.asarray(q.concentration)
        np.testing.assert_allclose(concentration.reshape(K, -1)[:, 0], 0.5 * times * df)
        np.testing.assert_allclose(q.concentration / q.rate, model.precisions_)
        np.testing.assert_allclose(p.concentration, 0.5 * times * prior_df)
        np.testing.assert_allclose(p.rate, 0.5 * times * model.covariance_prior_)
    assert (fit.objective, fit.trace, fit.restart_objectives, fit.bound) == (
        7.0,
        [7.0],
        [7.0],
        5,
    )
    assert (fit.converged, fit.num_iter, fit.alpha) == (False, 3, 1.0)


def test_sticks_have_the_expected_logarithms_of_scikit_learn_but_for_the_last(
    taken_over, x64
):
    model = fitted("full", "dirichlet_process")
    fit = taken_over(model)
    a, b = model.weight_concentration_
    last = digamma(a[-1]) - digamma(a[-1] + b[-1])
    expected = model._estimate_log_weights() - np.array([0.0, 0.0, last])
    ones, zeros = np.asarray(fit.factors.concentration).T
    before = np.cumsum(digamma(zeros[:-1]) - digamma(ones[:-1] + zeros[:-1]))
    np.testing.assert_allclose(
        digamma(ones) - digamma(ones + zeros) + np.append(0.0, before), expected
    )
    np.testing.assert_allclose(
        fit.problem.concentration, [[1.0, 0.7], [1.0, 0.7], [1.0, 0.0]]
    )


def test_what_is_no_fit_is_refused(key):
    with pytest.raises(
        TypeError, match="got a GaussianMixture: an EM fit has no factors"
    ):
        nt.mixtures.from_sklearn(key, GaussianMixture(2), X)
    with pytest.raises(
        ValueError,
        match=r"^this BayesianGaussianMixture is.*not fitted: call its fit first",
    ):
        nt.mixtures.from_sklearn(key, BayesianGaussianMixture(n_components=2), X)
    with pytest.raises(
        ValueError,
        match=r"missing entries \(NaN\), which scikit-learn cannot.*been fitted to",
    ):
        nt.mixtures.from_sklearn(key, fitted("diag"), np.where(X > 6, np.nan, X))
