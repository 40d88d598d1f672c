"""The NumPyro model, guide and polish of mixtures, whose factors are given: against SciPy's densities."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy import stats
from scipy.special import logsumexp

import numpyro_tempered as nt
from numpyro_tempered.mixtures.bridges import polish as polish_module
from numpyro_tempered.mixtures.components import derived
from numpyro_tempered.mixtures.components.gaussian import NormalWishart
from numpyro_tempered.mixtures.components.known_variance import NormalMean
from numpyro_tempered.mixtures.components.product import _parameters_of
from numpyro_tempered.mixtures.factors import Factors, MixtureProblem
from numpyro_tempered.mixtures.result import MixtureFit, _dims

ALPHA, WEIGHT = 0.4, np.array([1.0, 2.0, 0.0, 0.5, 3.0, 1.5])
SHARES, CONCENTRATION = np.array([0.3, 0.7]), np.array([0.75, 1.5])
X = np.array(
    [
        [0.3, 2.0, -1.0],
        [np.nan, 0.0, 0.5],
        [1.0, 1.0, 1.0],
        3 * [np.nan],
        [2.0, np.nan, -0.5],
        [1.5, 3.0, 0.2],
    ]
)


def check_density(component, values, log_prior, of_row, x):
    """alpha times the weighted log-likelihood, and the prior; rows without an entry count as 1."""
    model = nt.temper(
        nt.mixtures.numpyro_model(component, 2, concentration=CONCENTRATION), ALPHA
    )
    found = jax.jit(lambda values: log_density(model, (x, WEIGHT), {}, values)[0])(
        {"weights": SHARES} | values
    )
    rows = [
        logsumexp([np.log(SHARES[k]) + of_row(k, row) for k in range(2)]) for row in x
    ]
    expected = (
        ALPHA * WEIGHT @ np.array(rows)
        + log_prior
        + stats.dirichlet.logpdf(SHARES, CONCENTRATION)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_the_density_of_columns_of_two_families_with_holes(x64):
    parts = {
        "size": nt.mixtures.components.known_variance(
            2, prior_loc=0.5, prior_scale=2.0, scale=0.75
        )
    }
    parts["votes"] = nt.mixtures.components.poisson(1, concentration=1.5, rate=0.25)
    component = nt.mixtures.components.product(parts, {"size": [2, 0], "votes": [1]})
    loc, rate = np.array([[0.0, 1.0], [2.0, -1.0]]), np.array([[1.5], [0.4]])
    log_prior = (
        stats.norm(0.5, 2.0).logpdf(loc).sum()
        + stats.gamma(1.5, scale=4.0).logpdf(rate).sum()
    )

    def of_row(k, row):
        columns = [
            (2, stats.norm(loc[k, 0], 0.75).logpdf),
            (0, stats.norm(loc[k, 1], 0.75).logpdf),
        ]
        columns += [(1, stats.poisson(rate[k, 0]).logpmf)]
        return sum(density(row[c]) for c, density in columns if not np.isnan(row[c]))

    check_density(
        component, {"size_loc": loc, "votes_rate": rate}, log_prior, of_row, X
    )


def test_the_density_of_correlated_columns_with_holes(x64):
    component = nt.mixtures.components.gaussian(
        3, loc=0.5, mean_precision=0.25, df=4.5, scale=np.diag([1.0, 2.0, 0.5])
    )
    rng = np.random.default_rng(0)
    loc, roots = (
        rng.normal(size=(2, 3)),
        np.tril(rng.normal(size=(2, 3, 3))) + 2.0 * np.eye(3),
    )
    precision = roots @ np.swapaxes(roots, 1, 2)
    covariance = np.linalg.inv(precision)
    log_prior = sum(
        stats.wishart(4.5, np.diag([1.0, 0.5, 2.0])).logpdf(precision[k])
        + stats.multivariate_normal(np.full(3, 0.5), covariance[k] / 0.25).logpdf(
            loc[k]
        )
        for k in range(2)
    )

    def of_row(k, row):
        seen = ~np.isnan(row)
        if not seen.any():
            return 0.0
        return stats.multivariate_normal(
            loc[k, seen], covariance[k][np.ix_(seen, seen)]
        ).logpdf(row[seen])

    check_density(component, {"loc": loc, "precision": precision}, log_prior, of_row, X)


def fit_of(component, posterior):
    prior = type(posterior)(*(np.asarray(part, np.float64) for part in component.prior))
    problem = MixtureProblem(prior, CONCENTRATION, np.asarray(ALPHA), np.asarray(0.0))
    one, factors = np.zeros(1), Factors(np.array([3.0, 6.0]), posterior)
    component = component._replace(prior=None)
    return MixtureFit(
        component,
        ALPHA,
        factors,
        problem,
        None,
        0.0,
        0.0,
        None,
        np.ones(2),
        one,
        one,
        1,
        0.0,
        True,
        1,
        0,
        6.0,
    )


def sites_of(guide, values):
    """The arguments of the distributions by site, and the shapes of parameters; values are not drawn."""
    shapes = {}

    @jax.jit
    def arguments(values):
        trace = handlers.trace(
            handlers.substitute(handlers.seed(guide, 0), values)
        ).get_trace()
        shapes.update(
            {
                name: np.shape(site["value"])
                for name, site in trace.items()
                if site["type"] == "param"
            }
        )
        fns = {
            name: site["fn"] for name, site in trace.items() if site["type"] == "sample"
        }
        names = ("concentration", "scale_tril", "loc")
        bases = {name: getattr(fn, "base_dist", fn) for name, fn in fns.items()}
        return {
            site: {n: getattr(fn, n) for n in names if hasattr(fn, n)}
            for site, fn in bases.items()
        }

    return arguments(values), shapes


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        (
            nt.mixtures.components.gaussian(3),
            {
                "loc": ["component", "feature"],
                "precision": ["component", "feature", "other_feature"],
            },
        ),
        (nt.mixtures.components.known_variance(3), {"loc": ["component", "feature"]}),
        (
            nt.mixtures.components.categorical([4, 4]),
            {"probs": ["component", "feature", "level"]},
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_dimensions_of_sites_have_names(component, expected):
    two = jax.tree.map(lambda part: np.stack([part, part]), component.prior)
    assert _dims(fit_of(component, two)) == {
        "weights": ["component"],
        "x": ["row", "feature"],
        **expected,
    }


def test_names_of_sites_are_those_of_the_part_they_begin_with():
    parts = tuple(SimpleNamespace(name=name) for name in ("a", "a_b", "c"))
    parameters = {"a_loc": 1, "a_b_loc": 2, "c_loc": 3, "a_b_scale": 4}
    found = [_parameters_of(parameters, part, parts) for part in parts]
    assert found == [{"loc": 1}, {"loc": 2, "scale": 4}, {"loc": 3}]


def test_polish_moves_locations_by_spreads_and_the_rest_by_factors(x64):
    loc, scale = (
        np.array([[0.0, 1.0], [2.0, -1.0]]),
        np.stack([np.array([[1.0, 0.3], [0.3, 2.0]]), 0.5 * np.eye(2)]),
    )
    posterior = NormalWishart(loc, np.array([2.0, 8.0]), np.array([5.0, 9.0]), scale)
    fit = fit_of(nt.mixtures.components.gaussian(2), posterior)
    values = {
        "weights": SHARES,
        "precision": np.stack([np.eye(2), 2.0 * np.eye(2)]),
        "loc": loc,
    }
    spreads = {
        "weights": 1.0,
        "precision": 1.0,
        "loc": np.array([[0.5, 1.0], [2.0, 4.0]]),
    }
    guide = polish_module.adjustable_guide(fit, spreads)
    plain, _ = sites_of(nt.mixtures.numpyro_guide(fit), values)
    start, shapes = sites_of(guide, values)
    matrices = dict.fromkeys(
        ["precision_scale_tril_factor", "loc_scale_tril_factor"], (2, 2, 2)
    )
    vectors = {
        "weights_concentration_factor": (2,),
        "precision_concentration_factor": (2,),
    }
    assert shapes == {**matrices, **vectors, "loc_loc_shift": (2, 2)}
    # Three times the concentration of the weights, and of the Wishart what is above its least.
    factor = np.stack([np.array([[2.0, 0.0], [0.5, 1.0]])] * 2)
    params = {
        **dict.fromkeys(vectors, np.full(2, 3.0)),
        **dict.fromkeys(matrices, factor),
    }
    moved, _ = sites_of(guide, {**values, **params, "loc_loc_shift": np.ones((2, 2))})
    for name, argument, after in (
        ("weights", "concentration", lambda value: 3.0 * value),
        ("precision", "concentration", lambda value: 1.0 + 3.0 * (value - 1.0)),
        ("precision", "scale_tril", lambda value: value @ factor),
        ("loc", "scale_tril", lambda value: value @ factor),
        ("loc", "loc", lambda value: value + spreads["loc"]),
    ):
        value = np.asarray(plain[name][argument])
        np.testing.assert_allclose(start[name][argument], value, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(
            moved[name][argument], after(value), rtol=1e-9, atol=1e-12
        )


def test_polish_asks_for_the_elbo_of_its_options(monkeypatch, key, x64):
    """Adam from a fiftieth to a hundredth of it, and as many draws as asked for."""
    loc, scale = np.array([[0.0, 1.0], [2.0, -1.0]]), np.array([[0.1, 0.2], [0.3, 4.0]])
    fit = fit_of(
        nt.mixtures.components.known_variance(2),
        NormalMean(loc, scale, np.ones((2, 2))),
    )
    calls = []
    monkeypatch.setattr(
        polish_module, "fit_svi", lambda *args, **options: calls.append((args, options))
    )
    more = {"num_steps": 50, "num_particles": 7, "num_draws": 60}
    nt.mixtures.polish(key, fit, X, sample_weight=WEIGHT, **more)
    monkeypatch.setattr(polish_module, "_spreads", lambda key, fit: {"loc": scale})
    nt.mixtures.polish(key, fit, X, optim="another")
    (args, options), (others, defaults) = calls
    assert (options["alpha"], options["num_steps"], options["num_particles"]) == (
        ALPHA,
        50,
        60,
    )
    assert (options["loss"].num_particles, options["progress_bar"]) == (7, False)
    assert (args[3] is X, args[4] is WEIGHT, len(others)) == (True, True, 4)
    assert (defaults["optim"], defaults["num_steps"], defaults["num_particles"]) == (
        "another",
        1000,
        1000,
    )

    @jax.jit
    def move(step):
        state = options["optim"].init({"a": jnp.zeros(())})
        return options["optim"].get_params(
            options["optim"].update({"a": 1.0}, (step, state[1]))
        )["a"]

    for step, size in ((0, 0.02), (50, 0.0002)):
        # The averages of Adam, of which the others are 0.
        first, second = 0.1 / (1 - 0.9 ** (step + 1)), 0.001 / (1 - 0.999 ** (step + 1))
        np.testing.assert_allclose(
            move(step), -size * first / np.sqrt(second), rtol=1e-4
        )
    # In units of half the width that holds 68 per cent of 200 draws: their standard errors are 8 per cent.
    values = {"weights": SHARES, "loc": loc, "loc_loc_shift": np.ones((2, 2))}
    spread = (sites_of(args[2](None), values)[0]["loc"]["loc"] - loc) / (
        stats.norm.ppf(0.84) * scale
    )
    np.testing.assert_allclose(spread, np.ones((2, 2)), atol=0.35)
    assert np.mean(spread) == pytest.approx(1.0, abs=0.15)


# A part may have columns that are not side by side, and of another family than those between them.
PARTS = {
    "size": nt.mixtures.components.known_variance(
        2, prior_loc=[0.5, -1.0], prior_scale=2.0, scale=[0.75, 0.5]
    ),
    "vote": nt.mixtures.components.bernoulli(1, ones=1.5, zeros=0.25),
    "mass": nt.mixtures.components.diagonal_gaussian(
        1, loc=3.0, mean_precision=0.5, concentration=2.0, rate=1.5
    ),
}
COLUMNS = {"size": [3, 0], "vote": [1], "mass": [2]}
ROWS = np.array([[0.3, 1.0, 2.5, -1.0], [-0.2, 0.0, 4.0, 0.5], [1.0, 1.0, 3.0, 0.1]])
PARAMETERS = {
    "size_loc": np.array([[0.0, 1.0], [2.0, -1.0]]),
    "size_scale": np.array([[0.75, 0.5], [0.75, 0.5]]),
    "vote_probs": np.array([[0.8], [0.4]]),
    "mass_loc": np.array([[3.0], [2.0]]),
    "mass_precision": np.array([[1.0], [4.0]]),
}


@pytest.fixture(scope="module")
def product():
    return nt.mixtures.components.product(PARTS, COLUMNS)


def test_a_product_has_the_densities_of_its_columns(product, x64):
    expected = (
        stats.norm(PARAMETERS["size_loc"], PARAMETERS["size_scale"])
        .logpdf(ROWS[:, None, [3, 0]])
        .sum(-1)
    )
    expected += stats.bernoulli(PARAMETERS["vote_probs"]).logpmf(ROWS[:, None, [1]])[
        ..., 0
    ]
    of_mass = stats.norm(PARAMETERS["mass_loc"], PARAMETERS["mass_precision"] ** -0.5)
    expected += of_mass.logpdf(ROWS[:, None, [2]])[..., 0]

    @jax.jit
    def both(parameters, rows):
        c, w = product.coefficients_at(parameters)
        linear = (
            c + (w @ product.statistics(rows.T)).T + product.log_base(rows.T)[:, None]
        )
        return product.distribution(parameters).log_prob(rows[:, None]), linear

    for found in both(PARAMETERS, ROWS):
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_a_product_draws_each_column_from_its_part(product, key):
    loc = np.array([[100.0, 200.0], [300.0, 400.0]])
    fn = product.distribution(
        PARAMETERS | {"size_loc": loc, "mass_loc": np.array([[500.0], [600.0]])}
    )
    draws = np.asarray(jax.jit(lambda key: fn.sample(key, (5,)))(key))
    assert draws.shape == (5, 2, 4)
    expected = [[200.0, 500.0, 100.0], [400.0, 600.0, 300.0]]
    np.testing.assert_allclose(
        draws[..., [0, 2, 3]], np.broadcast_to(expected, (5, 2, 3)), atol=5.0
    )
    assert set(np.unique(draws[..., 1])) == {0.0, 1.0}


def test_what_a_product_has_is_of_all_its_parts(product, x64):
    columns, counts = ROWS.T, np.full(1, 3.0)
    shift = np.array([1.0, 0.0, 2.0, -1.0])
    w = np.random.default_rng(0).normal(size=(2, 8))
    omega = np.array([[0.2, 0.5, 1.0], [0.8, 0.5, 2.0]])

    @jax.jit
    def compute(columns, counts, deviations):
        sums = jnp.sum(product.statistics(columns), axis=1)[None]
        alone = [
            part.log_evidence(
                part.prior,
                counts,
                jnp.sum(part.statistics(columns[index]), axis=1)[None],
            )
            for part, index in (
                (PARTS[name], np.array(COLUMNS[name])) for name in PARTS
            )
        ]
        return (
            product.maximum_likelihood(product.prior, counts, sums),
            (product.log_evidence(product.prior, counts, sums), sum(alone)),
            jax.vmap(product.statistics)(deviations),
            product.location.linear(w, deviations),
            product.location.sums(omega, deviations),
        )

    deviations = np.stack([columns, columns - shift[:, None]])
    estimates, evidences, statistics, linear, sums = compute(
        columns, counts, deviations
    )
    np.testing.assert_allclose(
        estimates["size_loc"], ROWS[:, [3, 0]].mean(axis=0)[None]
    )
    np.testing.assert_allclose(estimates["vote_probs"], [[2.0 / 3.0]])
    np.testing.assert_allclose(estimates["mass_precision"], [[1.0 / ROWS[:, 2].var()]])
    np.testing.assert_allclose(*evidences, rtol=1e-6)
    np.testing.assert_allclose(
        linear, np.einsum("kf,kfn->kn", w, statistics), rtol=1e-9
    )
    np.testing.assert_allclose(
        sums, np.einsum("kn,kfn->kf", omega, statistics), rtol=1e-9
    )
    # A vote has no place that moves.
    np.testing.assert_allclose(
        product.location.of(product.prior), [-1.0, 0.0, 3.0, 0.5]
    )
    assert product.location.columns == (0, 2, 3)


def test_a_product_completes_the_columns_of_the_parts_that_do(x64):
    """A part whose entries depend on each other by its own function, the others by their sums."""
    parts = {
        "size": nt.mixtures.components.gaussian(2),
        "votes": nt.mixtures.components.poisson(1),
    }
    form = nt.mixtures.components.product(
        parts, {"size": [2, 0], "votes": [1]}
    ).with_missing()
    size, votes = (part.with_missing() for part in parts.values())
    rng = np.random.default_rng(0)
    deviations = rng.normal(size=(2, 3, 5))
    deviations[:, 1] = rng.poisson(2.0, 5)
    deviations[:, 0, 2] = deviations[:, 2, 1] = deviations[:, 1, 3] = np.nan
    omega = rng.dirichlet(np.ones(2), size=5).T
    roots = rng.normal(size=(2, 2, 2))
    q = NormalWishart(
        np.zeros((2, 2)),
        np.ones(2),
        np.full(2, 5.0),
        roots @ np.swapaxes(roots, 1, 2) + np.eye(2),
    )
    of_size = jax.jit(derived.coefficients, static_argnums=0)(
        size._replace(prior=None), q
    )[1]
    of_votes = rng.normal(size=(2, len(votes.statistics(np.ones((1, 1))))))
    found = jax.jit(form.location.completed)(
        np.concatenate([of_size, of_votes], axis=1), omega, deviations
    )
    expected = [
        jax.jit(size.location.completed)(of_size, omega, deviations[:, [2, 0]]),
        omega @ votes.statistics(deviations[0, [1]]).T,
    ]
    np.testing.assert_allclose(found, np.concatenate(expected, axis=1), rtol=1e-10)
    assert (
        nt.mixtures.components.product(
            {"votes": parts["votes"]}, {"votes": [0]}
        ).location
        is None
    )
