"""The error bars of fits by Student's t, on posteriors that are known."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.autoguide import AutoContinuous, AutoMultivariateNormal

import numpyro_tempered as nt
from numpyro_tempered.infer.guide_laws import location_scale_of
from numpyro_tempered.infer.guides.heavy_tails import StudentT
from numpyro_tempered.infer.moments import LocationScale

KEY = jax.random.key(0)
LOC, DF = np.array([3.0, -50.0]), 6.0
TRIL = np.array([[2.0, 0.0], [8.0, 6.0]])
COV = TRIL @ TRIL.T * DF / (DF - 2.0)


def student(df=DF):
    numpyro.sample(
        "z", dist.MultivariateStudentT(df, jnp.asarray(LOC), jnp.asarray(TRIL))
    )
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=0.0)


def full(df):
    return lambda model: nt.guides.AutoMultivariateStudentT(model, df=df)


def product(df):
    return lambda model: nt.guides.AutoDiagonalStudentT(model, df=df)


@pytest.fixture(scope="module")
def unfitted():
    return nt.fit_svi(
        KEY,
        student,
        full(None),
        num_steps=2,
        optim=numpyro.optim.Adam(1e-3),
        num_particles=2,
    )


def at(fit, df, loc, tril):
    """The fit with these parameters, which no optimiser has left its noise in."""
    params = {"auto_df": df, "auto_loc": loc, "auto_scale_tril": tril}
    return fit._replace(
        params={name: jnp.asarray(value, float) for name, value in params.items()}
    )


def draws_of(df, is_joint, num_draws=400_000):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(num_draws, 2))
    if is_joint:
        return z @ TRIL.T * np.sqrt(df / rng.chisquare(df, size=(num_draws, 1)))
    return z * np.sqrt(df / rng.chisquare(df, size=z.shape))


@pytest.mark.parametrize("is_joint", [True, False])
def test_moments_of_students_t(is_joint):
    df = 30.0
    x = draws_of(df, is_joint)
    cov = (TRIL @ TRIL.T if is_joint else np.eye(2)) * df / (df - 2.0)
    law = LocationScale(np.zeros(2), cov, np.full(2, df), is_joint)
    products = np.einsum("si,sj->ij", x**2, x**2) / len(x)
    spread = products - np.square(x.T @ x / len(x))
    np.testing.assert_allclose(law.spread, spread, rtol=0.03)
    np.testing.assert_allclose(law.second, np.mean(np.sum(x**2, axis=1)), rtol=0.01)
    np.testing.assert_allclose(
        law.fourth, np.mean(np.sum(x**2, axis=1) ** 2), rtol=0.03
    )
    # Without fourth moments there is none to tell.
    heavy = law._replace(df=np.array([4.0, 4.0]))
    assert np.isinf(heavy.fourth)
    assert np.all(np.isinf(np.diag(heavy.spread)))
    assert heavy.is_heavy


def test_a_gaussian_is_the_limit():
    gaussian = LocationScale(np.zeros(2), COV)
    for is_joint, cov in ((True, COV), (False, np.diag(np.diag(COV)))):
        limit = LocationScale(np.zeros(2), cov, np.full(2, 1e9), is_joint)
        np.testing.assert_allclose(
            limit.spread, gaussian._replace(cov=cov).spread, rtol=1e-6
        )


@pytest.mark.full
def test_the_posterior_itself_has_no_error_and_exact_moments(unfitted):
    check = nt.check_fit(KEY, at(unfitted, DF, LOC, TRIL))
    assert (check.status, check.reference) == ("bounded", "fit")
    assert abs(check.divergences.d2_bound) < 1e-5
    assert check.divergences.pareto_k == -np.inf
    table = nt.table(check)
    np.testing.assert_allclose(table["mean"], LOC, rtol=1e-6)
    np.testing.assert_allclose(table["sd"], np.sqrt(np.diag(COV)), rtol=1e-6)
    np.testing.assert_allclose(
        check.data["check_covariance"]["covariance"], COV, rtol=1e-6
    )
    assert (table[["mean_bound", "sd_bound"]] < 0.01 * table["sd"].min()).all(axis=None)


@pytest.mark.full
@pytest.mark.parametrize("df", [3.0, 4.0, 5.0, 9.0])
def test_bounds_hold_where_tails_are_wrong(df, unfitted):
    scale = 0.9 * TRIL
    check = nt.check_fit(KEY, at(unfitted, df, LOC + 0.2, scale), reference=None)
    table, sd = nt.table(check), np.sqrt(np.diag(COV))
    assert check.status == "bounded"
    of_fit = np.sqrt(np.diag(scale @ scale.T) * df / (df - 2.0))
    np.testing.assert_allclose(table["sd"], of_fit, rtol=1e-5)
    assert np.all(np.abs(table["mean"] - LOC) <= table["mean_bound"])
    covariances = check.data["check_covariance"]
    if df > 4.0:
        assert np.all(np.abs(of_fit - sd) <= table["sd_bound"])
        off = np.abs(np.asarray(covariances["covariance"]) - COV)
        assert np.all(off <= np.asarray(covariances["covariance_bound"]))
        assert np.isfinite(check.w2_bound)
        assert "fourth moment" not in check.advice
    else:
        assert table["sd_bound"].isna().all()
        assert np.isnan(check.w2_bound)
        assert np.isfinite(check.w1_bound)
        assert np.isnan(np.asarray(covariances["covariance_bound"])).all()
        assert (
            "up to 4 degrees of freedom a Student's t has no fourth moment"
            in check.advice
        )
    assert np.all(
        np.abs(table["corrected_mean"] - LOC) <= 5.0 * table["corrected_mean_se"]
    )


@pytest.mark.full
def test_where_a_gaussian_has_no_bound_a_students_t_has():
    guides = {"Gaussian": AutoMultivariateNormal, "t": full(DF)}
    fits = {name: nt.fit_svi(KEY, student, guide) for name, guide in guides.items()}
    alone = {name: nt.check_fit(KEY, fit, reference=None) for name, fit in fits.items()}
    assert alone["Gaussian"].status == "unreliable"
    assert alone["t"].status == "bounded"
    assert alone["t"].divergences.d2_bound < 0.02
    assert alone["t"].divergences.pareto_k < 0.2
    np.testing.assert_allclose(
        nt.table(alone["t"])["sd"], np.sqrt(np.diag(COV)), rtol=0.05
    )
    # What covers the Gaussian's posterior is a Student's t, which is what its advice names.
    check = nt.check_fit(KEY, fits["Gaussian"])
    assert (check.status, check.reference) == ("bounded", "student_t")
    assert "AutoMultivariateStudentT" in check.advice
    assert "AutoMultivariateStudentT" not in nt.check_fit(KEY, fits["t"]).advice
    # The guide and that reference are the same family, and agree.
    table, by_guide = nt.table(check), nt.table(alone["t"])
    errors = 4.0 * np.hypot(table["corrected_mean_se"], by_guide["corrected_mean_se"])
    assert np.all(
        np.abs(table["corrected_mean"] - by_guide["corrected_mean"]) <= errors
    )
    np.testing.assert_allclose(
        table["corrected_sd"], by_guide["corrected_sd"], rtol=0.05
    )
    as_reference = nt.check_fit(KEY, fits["Gaussian"], reference=fits["t"])
    assert as_reference.status == "bounded"
    assert np.isnan(as_reference.w1_bound)


@pytest.mark.full
def test_an_exponential_has_no_mean_and_a_bounded_number_has():
    def model():
        numpyro.sample("a", dist.Normal(1.0, 1.0))
        numpyro.sample("p", dist.Beta(20.0, 20.0))
        numpyro.sample("s", dist.LogNormal(0.0, 0.3))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=0.0)

    fit = nt.fit_svi(KEY, model, product(7.0))
    check = nt.check_fit(KEY, fit)
    table = nt.table(check)
    assert check.status == "bounded"
    assert table.loc["s", ["mean", "sd", "mean_bound", "sd_bound"]].isna().all()
    assert (
        table.loc[["a", "p"], ["mean", "sd", "mean_bound", "sd_bound"]]
        .notna()
        .all(axis=None)
    )
    assert "1 of 3 have no mean that can be told under the fit" in check.advice
    # The posterior's own means are those of the draws by weights.
    np.testing.assert_allclose(
        table["corrected_mean"], [1.0, 0.5, np.exp(0.045)], atol=0.05
    )
    ax = nt.plots.plot_check(check)
    assert ax is not None


@pytest.mark.full
def test_no_number_with_a_mean():
    def model():
        numpyro.sample("s", dist.LogNormal(0.0, 0.3))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=0.0)

    check = nt.check_fit(KEY, nt.fit_svi(KEY, model, product(7.0)), reference=None)
    assert check.status == "estimated"
    assert "No number has a mean under the fit" in check.advice
    assert "nan" not in check.advice


def test_a_guide_without_a_variance_raises():
    class AutoCauchy(AutoContinuous):
        def _get_posterior(self):
            return StudentT(1.0, numpyro.param("auto_loc", self._init_latent), 1.0)

        def get_posterior(self, params):
            return StudentT(1.0, params["auto_loc"], 1.0)

    guide = AutoCauchy(student)
    with handlers.seed(rng_seed=0):
        guide()
    message = "^the guide is a Student's t of 1 degrees of freedom, which has no variance, and errors.*than 2"
    with pytest.raises(ValueError, match=message):
        location_scale_of(guide, {"auto_loc": jnp.zeros(guide.latent_dim)})
