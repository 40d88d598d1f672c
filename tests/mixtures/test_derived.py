"""What seven functions of a component are enough for: the rest follows, and is that of the closed forms."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import enable_x64, tiered
from jax.scipy.special import gammaln
from mixture_families import component_of, some_data
from scipy import stats

import numpyro_tempered as nt
from numpyro_tempered.mixtures.components import derived
from numpyro_tempered.mixtures.components.base import as_dtype, missing_form
from numpyro_tempered.mixtures.components.columnwise import Column
from numpyro_tempered.mixtures.components.diagonal_gaussian import COLUMN, NormalGamma

CLOSED_FORMS = (
    "coefficients",
    "kl",
    "log_predictive",
    "coefficients_at",
    "num_parameters",
    "coordinates",
)
# Families whose log evidence has derivatives where there are no data, and whose sites are their parameters.
SMOOTH = ["bernoulli", "poisson", "exponential", "multinomial"]


def without_closed_forms(component):
    return component._replace(**dict.fromkeys(CLOSED_FORMS))


def update(p, count, sums):
    """The normal-gamma posterior without a mean of the data."""
    total, squares = sums
    kappa = p.mean_precision + count
    first = p.mean_precision * p.loc
    loc = (first + total) / kappa
    rate = p.rate + 0.5 * (squares + first * p.loc - jnp.square(first + total) / kappa)
    return NormalGamma(loc, kappa, p.concentration + 0.5 * count, rate)


def log_evidence(p, count, sums):
    def log_normaliser(q):
        return (
            gammaln(q.concentration)
            - q.concentration * jnp.log(q.rate)
            - 0.5 * jnp.log(q.mean_precision)
        )

    return log_normaliser(update(p, count, sums)) - log_normaliser(p)


SEVEN = Column(
    statistics=COLUMN.statistics,
    log_base=COLUMN.log_base,
    update=update,
    log_evidence=log_evidence,
    draw=COLUMN.draw,
    distribution=COLUMN.distribution,
    num_statistics=2,
)


def seven(dim, coefficients_at=None, **hyperparameters):
    prior = nt.mixtures.components.diagonal_gaussian(dim, **hyperparameters).prior
    return nt.mixtures.components.columnwise(
        "seven", prior, SEVEN._replace(coefficients_at=coefficients_at)
    )


@partial(jax.jit, static_argnames="component")
def values_of(q, prior, columns, parameters, *, component):
    return {
        "coefficients": derived.coefficients(component, q),
        "kl": derived.kl(component, q, prior),
        "log_predictive": derived.log_predictive(component, q, columns),
        "coefficients_at": derived.coefficients_at(component, q, parameters),
    }


@partial(jax.jit, static_argnames="component")
def posterior_and_draw(prior, columns, *, component):
    first = jnp.linspace(0.2, 0.9, columns.shape[1])
    omega = jnp.stack([first, 1.0 - first])
    q = component.update(
        prior, omega.sum(axis=1), omega @ component.statistics(columns).T
    )
    return q, component.draw(lambda name, fn: fn.sample(jax.random.key(1)), q)


def compare(closed, bare, x):
    prior, rows = as_dtype(closed.prior, jnp.float64), closed.check(x)
    closed, bare = (
        missing_form(each, rows)._replace(prior=None) for each in (closed, bare)
    )
    columns = np.asarray(rows, float).T
    q, parameters = posterior_and_draw(prior, columns, component=closed)
    expected, ours = (
        values_of(q, prior, columns, parameters, component=each)
        for each in (closed, bare)
    )
    for name in expected:
        for right, value in zip(
            *map(jax.tree.leaves, (expected[name], ours[name])), strict=True
        ):
            tolerance = 1e-11 * float(np.max(np.abs(right)))
            np.testing.assert_allclose(
                value, right, rtol=0, atol=tolerance, err_msg=name
            )
    assert derived.num_parameters(bare, prior, 3) == derived.num_parameters(
        closed, prior, 3
    )


@pytest.mark.full
@pytest.mark.parametrize("name", SMOOTH)
def test_derived_functions_are_the_closed_forms(name, x64):
    component = component_of(name)
    compare(component, without_closed_forms(component), some_data(name))


@pytest.mark.parametrize("missing", tiered([False, True], unit=[False]))
def test_a_normal_gamma_column_of_seven_functions(missing, x64):
    x = np.random.default_rng(0).normal(3.0, 2.0, size=(9, 2))
    if missing:
        x[1, 0] = np.nan
    hyperparameters = {
        "loc": [1.0, 2.0],
        "mean_precision": 0.5,
        "concentration": 2.0,
        "rate": 3.0,
    }
    compare(
        nt.mixtures.components.diagonal_gaussian(2, **hyperparameters),
        seven(2, **hyperparameters),
        x,
    )


def two_clusters(n=60, dim=2):
    rng = np.random.default_rng(1)
    return rng.normal(size=(n, dim)) + 5.0 * rng.integers(2, size=(n, 1))


@pytest.mark.full
@pytest.mark.parametrize("name", ["array", "chunks", "product", "float32"])
def test_fits_are_those_of_the_closed_forms(name):
    x, key = two_clusters(), jax.random.key(0)
    closed, bare = (
        nt.mixtures.components.diagonal_gaussian(2, loc=2.0),
        seven(2, loc=2.0),
    )
    options = {"num_components": 2, "num_restarts": 2, "alpha": 0.5, "num_draws": 20}
    fit = nt.mixtures.fit
    if name == "chunks":
        fit, x = nt.mixtures.fit, [x[:40], x[40:]]
    if name == "product":
        # Beside a part whose components share a parameter.
        closed, bare = (
            nt.mixtures.components.product(
                {"a": nt.mixtures.components.tied_gaussian(1), "b": each},
                {"a": 1, "b": 1},
            )
            for each in (
                nt.mixtures.components.diagonal_gaussian(1),
                seven(1, coefficients_at=COLUMN.coefficients_at),
            )
        )
    x64 = contextlib.nullcontext() if name == "float32" else enable_x64()
    with x64:
        # The statistics of a family with a location are about its components, and its draws are others.
        expected = fit(key, x, closed._replace(location=None), **options)
        ours = fit(key, x, bare, **options)
        density = [
            nt.mixtures.log_predictive(each, two_clusters())
            for each in (ours, expected)
        ]
    rtol = 1e-5 if name == "float32" else 1e-9
    assert ours.objective == pytest.approx(expected.objective, rel=rtol)
    assert ours.kl == pytest.approx(expected.kl, rel=10 * rtol)
    assert ours.bound.value == pytest.approx(expected.bound.value, rel=10 * rtol)
    np.testing.assert_allclose(*density, rtol=100 * rtol)


@pytest.mark.full
def test_em_by_seven_functions(x64):
    x, key = np.abs(two_clusters()), jax.random.key(0)
    closed = nt.mixtures.components.poisson(2)
    results = [
        nt.mixtures.em(key, np.round(x), each, num_components=2, num_restarts=2)
        for each in (
            closed,
            without_closed_forms(closed)._replace(coordinates=closed.coordinates),
        )
    ]
    assert results[1].log_likelihood == pytest.approx(
        results[0].log_likelihood, rel=1e-12
    )
    assert results[1].bic == pytest.approx(results[0].bic, rel=1e-12)


@pytest.mark.parametrize(
    "name", tiered(["gaussian", "diagonal_gaussian"], unit=["diagonal_gaussian"])
)
def test_a_mean_of_no_data_is_refused(name):
    bare = without_closed_forms(component_of(name))
    with pytest.raises(
        ValueError,
        match=f"{name}: log_evidence has no derivatives at counts and sums of 0",
    ):
        nt.mixtures.fit(jax.random.key(0), two_clusters(), bare, num_components=2)


def test_a_part_of_a_product_needs_coefficients_at():
    with pytest.raises(
        ValueError,
        match=r"product: part 'b' leaves out coefficients_at.*a product needs",
    ):
        nt.mixtures.components.product(
            {"a": nt.mixtures.components.gaussian(1), "b": seven(1)}, {"a": 1, "b": 1}
        )


def test_the_density_of_parameters_needs_their_names():
    component, density = component_of("poisson"), derived.log_density
    rate = component.draw(lambda name, fn: fn.mean, component.prior)["rate"]
    # A gamma distribution of each column, at its mean.
    a, b = (np.asarray(part, float) for part in component.prior)
    expected = stats.gamma(a, scale=1 / b).logpdf(a / b).sum()
    np.testing.assert_allclose(
        density(component, component.prior, {"rate": rate}), expected, rtol=1e-5
    )
    with pytest.raises(
        ValueError,
        match=r"poisson: draw has the site 'rate', the parameters are \['loc'\]",
    ):
        density(component, component.prior, {"loc": rate})


@pytest.mark.full
def test_sites_that_are_no_parameters_are_refused():
    bare = without_closed_forms(component_of("categorical"))
    with pytest.raises(ValueError, match="categorical: draw has the site 'probs_of_2'"):
        nt.mixtures.fit(
            jax.random.key(0),
            some_data("categorical"),
            bare,
            num_components=2,
            num_restarts=1,
        )
