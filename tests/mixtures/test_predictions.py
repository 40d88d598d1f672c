"""What a fitted mixture says of data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import enable_x64, tiered
from scipy.special import logsumexp
from scipy.stats import multivariate_t, norm

import numpyro_tempered as nt

CENTRES = np.array([[-6.0, 0.0], [0.0, 5.0], [6.0, 0.0]])
SIZES = (20, 60, 40)


def draw(seed=3):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(3), SIZES)
    return CENTRES[labels] + rng.normal(size=(sum(SIZES), 2)), labels


@pytest.fixture(scope="module")
def data():
    return draw()


COMPONENTS = {
    "gaussian": lambda: nt.mixtures.components.gaussian(2, mean_precision=0.1, df=4.0),
    # Compiled in half of the time.
    "known_variance": lambda: nt.mixtures.components.known_variance(2, prior_scale=8.0),
}


@pytest.fixture(
    scope="module",
    params=tiered(
        ["known_variance-labels", "gaussian-labels", "gaussian-default"],
        unit=["known_variance-labels"],
    ),
)
def fit(data, request):
    x, labels = data
    component, start = request.param.split("-")
    options = {}
    if start == "labels":
        # Of which a fifth are wrong.
        wrong = np.where(np.arange(len(x)) % 5 == 0, (labels + 1) % 3, labels)
        options = {
            "num_restarts": 1,
            "init": nt.mixtures.starts.given_responsibilities(wrong),
        }
    with enable_x64():
        return nt.mixtures.fit(
            jax.random.key(0),
            x,
            COMPONENTS[component](),
            num_components=3,
            alpha=0.5,
            num_draws=0,
            **options,
        )


def predictive_oracle(fit, x):
    """By scipy: Student's t of a normal-Wishart posterior, a Gaussian where variances are known."""
    q, a = fit.posterior, np.asarray(fit.factors.concentration)
    parts = []
    for j in range(3):
        if not hasattr(q, "df"):
            density = (
                norm(q.loc[j], np.sqrt(1.0 + np.square(q.scale[j])))
                .logpdf(x)
                .sum(axis=1)
            )
            parts.append(np.log(a[j] / a.sum()) + density)
            continue
        df = float(q.df[j]) - 1.0
        shape = np.asarray(q.scale[j]) * (1.0 + 1.0 / float(q.mean_precision[j])) / df
        parts.append(
            np.log(a[j] / a.sum())
            + multivariate_t(np.asarray(q.loc[j]), shape, df).logpdf(x)
        )
    return logsumexp(parts, axis=0)


def test_responsibilities_are_those_that_the_sums_were_made_of(fit, data, x64):
    omega = nt.mixtures.responsibilities(fit, data[0])
    np.testing.assert_allclose(omega.sum(axis=1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(omega.sum(axis=0), fit.counts, rtol=1e-10)


def test_the_labels_are_found(fit, data, x64):
    found, labels = np.asarray(nt.mixtures.predict(fit, data[0])), data[1]
    table = np.array(
        [[np.sum((found == j) & (labels == k)) for k in range(3)] for j in range(3)]
    )
    assert table.max(axis=0).sum() >= 0.98 * len(labels)


# As many as are fitted: one shape is compiled.
ROWS = np.random.default_rng(0).normal(size=(sum(SIZES), 2)) * 8.0


def test_the_predictive_density_is_that_of_the_components(fit, x64):
    x = ROWS
    np.testing.assert_allclose(
        nt.mixtures.log_predictive(fit, x), predictive_oracle(fit, x), rtol=1e-10
    )


def test_the_predictive_density_is_not_that_of_expected_logarithms(fit, x64):
    # exp(E log q) integrates to less than 1, and is lower everywhere by Jensen's inequality.
    @jax.jit
    def expected_log_density(posterior, rows):
        constant, weights = fit.component.coefficients(posterior)
        return (
            constant[:, None]
            + weights @ fit.component.statistics(rows.T)
            - jnp.log(2.0 * jnp.pi)
        )

    share = np.asarray(fit.factors.concentration / fit.factors.concentration.sum())
    expected = np.asarray(expected_log_density(fit.posterior, ROWS))
    plug_in = logsumexp(np.log(share)[:, None] + expected, axis=0)
    assert np.all(np.asarray(nt.mixtures.log_predictive(fit, ROWS)) > plug_in)


@pytest.mark.full
def test_draws_have_the_moments_of_the_predictive(fit, x64):
    rows, labels = nt.mixtures.sample(jax.random.key(1), fit, 10_000)
    a, q = np.asarray(fit.factors.concentration), fit.posterior
    share = a / a.sum()
    np.testing.assert_allclose(
        np.bincount(labels, minlength=3) / 10_000, share, atol=5 * 0.5 / 100
    )
    np.testing.assert_allclose(
        rows.mean(axis=0),
        share @ np.asarray(q.loc),
        atol=5 * rows.std(axis=0).max() / 100,
    )


@pytest.mark.parametrize(
    "fit",
    tiered(
        ["known_variance-labels", "gaussian-labels", "gaussian-default"],
        unit=["known_variance-labels"],
    ),
    indirect=True,
)
def test_parameters_are_drawn_in_the_coordinates_of_the_data(fit, x64):
    draws = nt.mixtures.sample_posterior(jax.random.key(2), fit, 2000)
    assert draws["weights"].shape == (2000, 3)
    if hasattr(fit.posterior, "df"):
        assert draws["precision"].shape == (2000, 3, 2, 2)
    a = np.asarray(fit.factors.concentration)
    np.testing.assert_allclose(
        draws["weights"].mean(axis=0),
        a / a.sum(),
        atol=5 * 0.5 / np.sqrt(2000 * a.sum()),
    )
    se = draws["loc"].std(axis=0) / np.sqrt(2000)
    np.testing.assert_array_less(
        np.abs(draws["loc"].mean(axis=0) - fit.posterior.loc), 5 * se
    )
    np.testing.assert_allclose(draws["weights"].sum(axis=1), 1.0, rtol=1e-10)


def test_relabelling_changes_nothing_else(fit, data, x64):
    ordered = nt.mixtures.relabel(fit)
    assert np.all(np.diff(ordered.counts) <= 0)
    reverse = nt.mixtures.relabel(ordered, [2, 1, 0])
    np.testing.assert_array_equal(reverse.posterior.loc, ordered.posterior.loc[::-1])
    np.testing.assert_array_equal(
        reverse.problem.concentration, ordered.problem.concentration[::-1]
    )
    uneven = fit._replace(
        problem=fit.problem._replace(concentration=np.array([0.5, 1.0, 2.0]))
    )
    turned = nt.mixtures.relabel(uneven, [2, 0, 1])
    np.testing.assert_array_equal(turned.problem.concentration, [2.0, 0.5, 1.0])
    for each in (ordered, reverse):
        np.testing.assert_allclose(
            nt.mixtures.log_predictive(each, data[0]),
            nt.mixtures.log_predictive(fit, data[0]),
            rtol=1e-12,
        )


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [1, 2, 3], [True, False, True]])
def test_relabelling_takes_a_permutation(fit, order):
    with pytest.raises(
        ValueError, match=r"^order must be a.*permutation of 0 \.\.\. 2"
    ):
        nt.mixtures.relabel(fit, order)


@pytest.mark.full
def test_fresh_rows_may_have_missing_entries_where_the_family_allows(data):
    component = nt.mixtures.components.diagonal_gaussian(2, mean_precision=0.1)
    fit = nt.mixtures.fit(
        jax.random.key(0), data[0], component, num_components=3, num_draws=0
    )
    rows = np.array([[-6.0, np.nan], [np.nan, np.nan]])
    density = np.asarray(nt.mixtures.log_predictive(fit, rows))
    grid = np.linspace(-60.0, 60.0, 20_001)
    both = np.stack([np.full_like(grid, -6.0), grid], axis=1)
    marginal = np.exp(
        np.asarray(nt.mixtures.log_predictive(fit, both), np.float64)
    ).sum() * (grid[1] - grid[0])
    np.testing.assert_allclose(density[0], np.log(marginal), atol=1e-3)
    np.testing.assert_allclose(density[1], 0.0, atol=1e-6)
    assert np.all(np.isfinite(nt.mixtures.responsibilities(fit, rows)))


def test_fresh_rows_are_checked(fit):
    with pytest.raises(ValueError, match=r"shape \(4, 3\); \(n, 2\)"):
        nt.mixtures.log_predictive(fit, np.zeros((4, 3)))
    # A family that allows none.
    whole = fit._replace(
        component=nt.mixtures.components.multinomial(2)._replace(prior=None)
    )
    with pytest.raises(
        ValueError, match=r"^multinomial: column.*missing entries.*leave the rows out"
    ):
        nt.mixtures.responsibilities(whole, np.array([[np.nan, 0.0]]))


def test_methods_compile_and_map_over_rows(fit, data, x64):
    rows = data[0]
    together = nt.mixtures.log_predictive(fit, rows)
    mapped = jax.vmap(lambda row: nt.mixtures.log_predictive(fit, row[None])[0])(rows)
    np.testing.assert_allclose(mapped, together, rtol=1e-5)


@pytest.mark.full
def test_single_precision_stays_single_beside_double(data, x64):
    component = nt.mixtures.components.known_variance(2, prior_scale=10.0)
    x = data[0].astype(np.float32)
    fit = nt.mixtures.fit(
        jax.random.key(0), x, component, num_components=2, num_draws=0
    )
    assert fit.trace.dtype == np.float32
    assert nt.mixtures.log_predictive(fit, x).dtype == np.float32
