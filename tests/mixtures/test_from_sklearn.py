"""scikit-learn's fits taken over: the bound against its own with the constants, and against our ascent."""

import numpy as np
import pytest
from conftest import enable_x64
from scipy.special import betaln, digamma, gammaln
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import BayesianGaussianMixture, GaussianMixture

import numpyro_tempered as nt
from numpyro_tempered.mixtures import weights
from numpyro_tempered.mixtures.bridges.from_sklearn import from_sklearn
from numpyro_tempered.mixtures.components.diagonal_gaussian import diagonal_gaussian
from numpyro_tempered.mixtures.components.gaussian import gaussian
from numpyro_tempered.mixtures.components.spherical_gaussian import spherical_gaussian
from numpyro_tempered.mixtures.components.tied_gaussian import tied_gaussian

pytestmark = pytest.mark.full

DIRICHLET = {"weight_concentration_prior_type": "dirichlet_distribution"}


class Started(BayesianGaussianMixture):
    """Starts from given responsibilities."""

    def _initialize_parameters(self, X, random_state, xp=None):
        self._initialize(X, self.start)


def dropped(model, n, d):
    """What lower_bound_ leaves out, for full covariances."""
    size, a = model.n_components, model.weight_concentration_prior_
    nu = model.degrees_of_freedom_prior_
    log_det = np.linalg.slogdet(np.reshape(model.covariance_prior_, (d, d)))[1]
    wishart = (
        nu * log_det / 2
        - nu * d * np.log(2) / 2
        - sum(gammaln((nu - i) / 2) for i in range(d))
    )
    one = d / 2 * np.log(model.mean_precision_prior_) + wishart
    return (
        gammaln(size * a)
        - size * gammaln(a)
        + size * one
        - n * d / 2 * np.log(2 * np.pi)
    )


def two_groups(d, n=60):
    rng = np.random.default_rng(0)
    far = rng.random((n, 1)) < 0.4
    return rng.normal(size=(n, d)) * np.where(far, 0.7, 1.0) + np.where(
        far, 9.0, 5.0
    ), rng.dirichlet(np.ones(2), n)


def fitted(form, d, reg_covar=0.0, max_iter=300):
    x, start = two_groups(d)
    model = Started(
        n_components=2,
        covariance_type=form,
        weight_concentration_prior=0.7,
        mean_precision_prior=0.5,
        degrees_of_freedom_prior=d + 1.5,
        reg_covar=reg_covar,
        tol=1e-11,
        max_iter=max_iter,
        **DIRICHLET,
    )
    model.start = start
    return x, start, model.fit(x)


def same_prior(form, d, model):
    """Our component of the same prior."""
    nu, psi = model.degrees_of_freedom_prior_, model.covariance_prior_
    shared = {"loc": model.mean_prior_, "mean_precision": 0.5}
    return {
        "full": lambda: gaussian(d, **shared, df=nu, scale=psi),
        "tied": lambda: tied_gaussian(d, **shared, df=nu, scale=psi),
        "diag": lambda: diagonal_gaussian(
            d, **shared, concentration=nu / 2, rate=np.asarray(psi) / 2
        ),
        "spherical": lambda: spherical_gaussian(
            d, **shared, concentration=d * nu / 2, rate=d * psi / 2
        ),
    }[form]()


def ours(key, x, start, component, **options):
    options = {
        "tolerance": 1e-13,
        "num_restarts": 1,
        "init": nt.mixtures.starts.given_responsibilities(start),
        **options,
    }
    return nt.mixtures.fit(
        key, x, component, num_components=2, concentration=0.7, num_draws=0, **options
    )


@pytest.mark.parametrize(("form", "d"), [("full", 2), ("diag", 1), ("spherical", 1)])
def test_bound_is_that_of_our_ascent_and_scikit_learns_with_its_constants(
    form, d, key, x64
):
    x, start, model = fitted(form, d)
    fit, own = (
        from_sklearn(key, model, x, num_draws=0),
        ours(key, x, start, same_prior(form, d, model)),
    )
    assert fit.objective == pytest.approx(own.objective, rel=1e-8)
    assert fit.objective == pytest.approx(
        model.lower_bound_ + dropped(model, len(x), d), rel=1e-8
    )
    np.testing.assert_allclose(fit.counts, own.counts, rtol=1e-4)
    np.testing.assert_allclose(fit.posterior.loc, own.posterior.loc, rtol=1e-4)
    assert fit.bound is None
    assert fit.converged
    assert (fit.num_best, fit.num_iter) == (1, model.n_iter_)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_default_weights_are_sticks_of_which_the_last_is_whole(size, key, x64):
    x, _ = two_groups(2)
    model = BayesianGaussianMixture(
        n_components=size,
        weight_concentration_prior=0.7,
        reg_covar=0.0,
        tol=1e-11,
        max_iter=2000,
        random_state=0,
    ).fit(x)
    fit = from_sklearn(key, model, x, num_draws=0)
    # Theirs, with the constants of the components and of a stick for each.
    weightless = dropped(model, len(x), 2) - (gammaln(size * 0.7) - size * gammaln(0.7))
    theirs = model.lower_bound_ + weightless + size * np.log(0.7)
    # Their last stick is no part of our model: its expected log and its divergence.
    a, b = (each[-1] for each in model.weight_concentration_)
    share = model.predict_proba(x)[:, -1]
    divergence = (a - 1) * (digamma(a) - digamma(a + b)) - betaln(a, b) + betaln(1, 0.7)
    more = np.sum(np.log1p(share * np.expm1(digamma(a + b) - digamma(a)))) + divergence
    assert more >= 0
    assert fit.objective == pytest.approx(theirs + more, rel=1e-8)
    assert nt.mixtures.predict(fit, x).tolist() == model.predict(x).tolist()
    assert weights.mean(fit.factors.concentration).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("form", ["diag", "spherical", "tied"])
def test_other_forms_are_factors_whose_bound_our_ascent_raises(form, key, x64):
    with pytest.warns(ConvergenceWarning):
        x, start, model = fitted(form, 2, max_iter=5)
    fit = from_sklearn(key, model, x, num_draws=0)
    component = same_prior(form, 2, model)
    own = ours(key, x, start, component, init=fit)
    # The ascent begins at the bound of the factors taken over.
    assert own.trace[0] == pytest.approx(fit.objective, rel=1e-9)
    assert own.objective > fit.objective
    assert not fit.converged


def test_regularisation_lowers_the_bound(key, x64):
    x, _, plain = fitted("full", 2)
    _, _, regularised = fitted("full", 2, reg_covar=0.3)
    bounds = [
        from_sklearn(key, model, x, num_draws=0).objective
        for model in (plain, regularised)
    ]
    assert bounds[1] < bounds[0] - 0.1


def test_lower_bound_prefers_four_components_where_the_bound_prefers_three(key):
    rng = np.random.default_rng(1)
    x = np.concatenate(
        [rng.normal(size=(50, 2)) + centre for centre in [(0, 0), (5, 0), (2.5, 5)]]
    )
    lower_bounds, objectives = {}, {}
    for size in (2, 3, 4):
        model = BayesianGaussianMixture(
            n_components=size,
            mean_precision_prior=0.01,
            degrees_of_freedom_prior=2.0,
            covariance_prior=0.1 * np.eye(2),
            tol=1e-4,
            max_iter=1000,
            random_state=0,
            **DIRICHLET,
        ).fit(x)
        lower_bounds[size] = model.lower_bound_
        objectives[size] = from_sklearn(key, model, x, num_draws=0).objective
    assert max(lower_bounds, key=lower_bounds.get) == 4
    assert max(objectives, key=objectives.get) == 3


def test_results_take_part_in_what_fits_do(key):
    x, _, model = fitted("full", 2)
    fit = from_sklearn(key, model, x.astype(np.float32), num_draws=20)
    assert fit.objective < fit.bound.value
    labels = nt.mixtures.predict(fit, x.astype(np.float32))
    np.testing.assert_array_equal(labels, model.predict(x))


def test_refusals_say_what_to_do(key):
    x, _ = two_groups(2)
    with pytest.raises(
        TypeError, match="got a GaussianMixture: an EM fit has no factors"
    ):
        from_sklearn(key, GaussianMixture(2), x)
    with pytest.raises(ValueError, match="not fitted"):
        from_sklearn(key, BayesianGaussianMixture(n_components=2), x)
    with enable_x64():
        _, _, model = fitted("full", 2)
        with pytest.raises(ValueError, match=r"\(n, 2\)"):
            from_sklearn(key, model, x[:, :1])
        with pytest.raises(ValueError, match="missing entries"):
            from_sklearn(key, model, np.where(x > 9, np.nan, x))
