"""Components by themselves: identities of their functions, densities by scipy, and what they refuse."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mixture_oracles as oracle
import numpy as np
import pytest
from conftest import enable_x64, tiered
from mixture_families import (
    ALL,
    FAMILIES,
    K,
    N,
    complete_mixed,
    component_of,
    some_data,
)
from scipy import stats
from scipy.special import digamma, gammaln

from numpyro_tempered.mixtures import fit, shard_rows
from numpyro_tempered.mixtures.bridges import sites
from numpyro_tempered.mixtures.components import special
from numpyro_tempered.mixtures.components.base import broadcast_prior, move_parameters
from numpyro_tempered.mixtures.components.bernoulli import bernoulli
from numpyro_tempered.mixtures.components.categorical import categorical
from numpyro_tempered.mixtures.components.checking import (
    _draw_with_ratio,
    _missing_identities,
    check_component,
)
from numpyro_tempered.mixtures.components.diagonal_gaussian import diagonal_gaussian
from numpyro_tempered.mixtures.components.exponential import exponential
from numpyro_tempered.mixtures.components.gaussian import gaussian
from numpyro_tempered.mixtures.components.known_variance import known_variance
from numpyro_tempered.mixtures.components.multinomial import multinomial
from numpyro_tempered.mixtures.components.poisson import poisson
from numpyro_tempered.mixtures.components.product import product
from numpyro_tempered.mixtures.components.scaling import scaled_to
from numpyro_tempered.mixtures.components.spherical_gaussian import spherical_gaussian
from numpyro_tempered.mixtures.components.tied_gaussian import tied_gaussian

NAMES = tuple(FAMILIES)
# All functions of known variances agree with each other (``test_a_wrong_function_is_named``). The product of all
# takes as long to compile as they.
PREDICTED = tiered(ALL, unit=["bernoulli", "gaussian", "multinomial", "small_product"])
EXPECTED = tiered(
    ALL,
    unit=[
        name
        for name in ALL
        if name not in ("known_variance", "product", "small_product")
    ],
)
# Compiled in seconds each; the product of all families of independent columns in half a minute.
QUICK = ("known_variance", "gaussian", "tied_gaussian", "exponential")
CHECKED = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in NAMES
]


class Given(NamedTuple):
    """A component with data, and a posterior of both."""

    component: Any
    prior: Any
    x: np.ndarray
    statistics: np.ndarray
    counts: np.ndarray
    sums: np.ndarray
    posterior: Any
    expected: list


@functools.partial(jax.jit, static_argnames="component")
def update(component, prior, rows, w):
    statistics = component.statistics(rows.T)
    counts, sums = jnp.sum(w, axis=0), w.T @ statistics.T
    return statistics, counts, sums, component.update(prior, counts, sums)


@functools.cache
def posterior_of(name, alpha=0.5):
    """A posterior in double precision, and that of the oracle."""
    component, x = component_of(name), some_data(name)
    prior = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), component.prior)
    if np.isnan(x).any():
        component = component.with_missing()
    w = alpha * np.random.default_rng(1).dirichlet(np.ones(K), size=N)
    component = component._replace(prior=None)
    with enable_x64():
        found = jax.tree.map(np.asarray, update(component, prior, x, w))
    return Given(component, prior, x, *found, oracle.posteriors(ALL[name].oracle, x, w))


class Values(NamedTuple):
    """What the functions of a component give: coefficients and divergence of its components swapped, too."""

    log_base: Any
    log_evidence: Any
    coefficients: Any
    kl: Any


@functools.partial(jax.jit, static_argnames="component")
def values_of(component, prior, rows, counts, sums, q):
    """All in one program."""
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), q)
    return Values(
        component.log_base(rows.T),
        component.log_evidence(prior, counts, sums),
        jax.vmap(component.coefficients)(both),
        jax.vmap(component.kl, (0, None))(both, prior),
    )


@functools.cache
def values_at(name):
    given = posterior_of(name)
    with enable_x64():
        return jax.tree.map(
            np.asarray, values_of(*given[:3], given.counts, given.sums, given.posterior)
        )


@pytest.mark.full
@pytest.mark.parametrize("name", CHECKED)
def test_the_functions_of_a_component_belong_together(name, key):
    x = some_data(name)
    if name == "product":
        # Its empty column has no derivative, and the form for missing entries needs complete rows beside it.
        x[:, 7] = np.linspace(-1, 1, N)
        x[:3] = complete_mixed(np.array([[1.0, -2.0], [-3.0, 0.25], [2.0, 4.0]]))
    check_component(key, component_of(name), x)


class Marked(NamedTuple):
    """Hyperparameters with factors, one a function, by which that function is wrong."""

    inner: Any
    factors: Any


FUNCTIONS = {
    "kl": "kl and log_evidence, the two forms",
    "coefficients": "coefficients and the derivatives",
    "update": "draw or update",
    "log_evidence": ".* and log_evidence",
    "log_predictive": "log_predictive and the gain",
    "coefficients_at": "distribution and coefficients_at",
    "location": "location.of and its own change",
}


@functools.cache
def marked_component():
    """Wrong by what its prior says, so that one program serves all wrongs."""
    c = component_of("known_variance")

    def factor(q, name):
        return q.factors.reshape(-1, len(FUNCTIONS))[0, list(FUNCTIONS).index(name)]

    def update(p, n, s):
        inner = c.update(p.inner, factor(p, "update") * n, s)
        return Marked(inner, jnp.broadcast_to(p.factors, (K, len(FUNCTIONS))))

    def coefficients(q):
        constant, weights = c.coefficients(q.inner)
        return constant, factor(q, "coefficients") * weights

    def coefficients_at(parameters):
        constant, weights = c.coefficients_at(parameters)
        return parameters["factor"] * constant, weights

    return c._replace(
        update=update,
        coefficients=coefficients,
        coefficients_at=coefficients_at,
        kl=lambda q, p: factor(q, "kl") * c.kl(q.inner, p.inner),
        log_evidence=lambda p, n, s: (
            factor(p, "log_evidence") * c.log_evidence(p.inner, n, s)
        ),
        log_predictive=lambda q, x: (
            factor(q, "log_predictive") * c.log_predictive(q.inner, x)
        ),
        draw=lambda sample, q: (
            c.draw(sample, q.inner) | {"factor": factor(q, "coefficients_at")}
        ),
        location=c.location._replace(
            of=lambda q: (
                jax.lax.stop_gradient(factor(q, "location")) * c.location.of(q.inner)
            )
        ),
        with_missing=None,
    )


def check_marked(key, factors):
    component = marked_component()
    wrong = component._replace(prior=Marked(component.prior, factors))
    check_component(key, wrong, some_data("known_variance"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_function_is_named(name, key):
    check_marked(key, np.ones(len(FUNCTIONS)))
    with pytest.raises(ValueError, match=f"known_variance: {FUNCTIONS[name]}"):
        check_marked(key, np.where(np.array(list(FUNCTIONS)) == name, 1.01, 1.0))


@pytest.mark.parametrize("name", tiered(["linear", "sums"], unit=["sums"]))
def test_a_wrong_function_of_a_location_is_named(name, key):
    component = component_of("known_variance")
    right = getattr(component.location, name)
    wrong = component.location._replace(
        **{name: lambda *arguments: 1.01 * right(*arguments)}
    )
    with pytest.raises(
        ValueError, match=f"known_variance: location.{name} and statistics"
    ):
        check_component(
            key, component._replace(location=wrong), some_data("known_variance")
        )


@pytest.mark.full
def test_a_wrong_log_base_is_named(key):
    component = component_of("known_variance")
    wrong = component._replace(log_base=lambda x: component.log_base(x) + 0.1)
    with pytest.raises(
        ValueError,
        match=r"known_variance: distribution and coefficients_at.*with statistics and",
    ):
        check_component(key, wrong, some_data("known_variance"))


def test_parameters_move_with_the_data_and_the_others_stay():
    parameters = {
        "loc": np.ones((5, 2, 3), np.float32),
        "precision": np.full((5, 2, 3), 2.0, np.float32),
    }
    prior, shift = (
        diagonal_gaussian(3).prior,
        np.array([[1e3, -2.0, 0.0], [5.0, 0.25, 1.0]]),
    )
    component = diagonal_gaussian(3)._replace(prior=None)
    moved = move_parameters(component, prior, parameters, shift)
    np.testing.assert_allclose(moved["loc"], np.broadcast_to(1.0 + shift, (5, 2, 3)))
    np.testing.assert_array_equal(moved["precision"], parameters["precision"])
    assert moved["loc"].dtype == np.float64
    stayed = move_parameters(component, prior, parameters, None)
    np.testing.assert_array_equal(stayed["loc"], parameters["loc"])


@pytest.mark.parametrize("wrong", [None, "log_base", "statistics"])
def test_a_form_for_missing_entries_is_held_to_its_component(wrong, x64):
    component = poisson(1, concentration=2.0)
    form = component.with_missing()
    functions = {
        "log_base": lambda x: form.log_base(x) + 0.1 * jnp.any(jnp.isnan(x), axis=0),
        "statistics": lambda x: form.statistics(jnp.where(jnp.isnan(x), 2.0, x)),
    }
    if wrong:
        component = component._replace(
            with_missing=lambda: form._replace(**{wrong: functions[wrong]})
        )
    prior = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), component.prior)
    pairs = _missing_identities(
        component._replace(prior=None), prior, jnp.array([[0.0, 3.0, 1.0]])
    )
    differ = [
        names
        for names, both in pairs.items()
        if not all(
            map(functools.partial(np.allclose, rtol=1e-9), *map(jax.tree.leaves, both))
        )
    ]
    assert differ == (["with_missing on a row of NaN and 0"] if wrong else [])


@pytest.mark.parametrize("name", PREDICTED)
def test_the_predictive_density_is_that_of_scipy(name, x64):
    given = posterior_of(name)
    expected = [
        [ALL[name].oracle.predictive(qj, row) for row in given.x]
        for qj in given.expected
    ]
    found = jax.jit(given.component.log_predictive)(given.posterior, given.x.T)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", EXPECTED)
def test_expectations_and_divergences_are_those_of_the_formulas(name):
    family, given, values = ALL[name].oracle, posterior_of(name), values_at(name)
    (constant, weights), kl = (part[0] for part in values.coefficients), values.kl[0]
    expected = [[family.expected(qj, row) for row in given.x] for qj in given.expected]
    found = constant[:, None] + weights @ given.statistics + values.log_base
    # Nothing is expected of a row without entries.
    np.testing.assert_allclose(
        np.where(np.isnan(given.x).all(axis=1), 0.0, found),
        expected,
        rtol=1e-9,
        atol=1e-11,
    )
    total = (
        family.total_kl(given.expected)
        if hasattr(family, "joint")
        else sum(map(family.kl, given.expected))
    )
    np.testing.assert_allclose(kl, total, rtol=1e-9)
    inside = given.counts @ constant + np.sum(given.sums * weights)
    np.testing.assert_allclose(values.log_evidence, inside - kl, rtol=1e-9)


@pytest.mark.full
def test_predictive_masses_of_discrete_rows_sum_to_one(x64):
    for name, rows, rtol in (
        ("multinomial", [[i, 5 - i] for i in range(6)], 1e-12),
        ("categorical", [[i, j] for i in range(2) for j in range(3)], 1e-12),
        ("poisson", [[i, np.nan] for i in range(300)], 1e-9),
    ):
        given = posterior_of(name)
        density = np.asarray(
            given.component.log_predictive(given.posterior, np.array(rows, float).T)
        )
        np.testing.assert_allclose(np.exp(density).sum(axis=1), 1, rtol=rtol)


@pytest.mark.parametrize(
    "name", tiered(["gaussian", "spherical_gaussian", "exponential"], unit=["gaussian"])
)
def test_predictive_densities_integrate_to_one(name, x64):
    """By the sinh-stretched trapezoid, which reaches into the tails of Student's t."""
    given = posterior_of(name)
    t = np.linspace(-8, 8, 401)
    nodes, slopes = np.sinh(1.5 * t), 1.5 * np.cosh(1.5 * t)
    if name == "exponential":
        nodes, slopes = np.exp(4 * t), 4 * np.exp(4 * t)
    grid = np.stack(np.meshgrid(nodes, nodes)).reshape(2, -1)
    weights = np.outer(slopes, slopes).ravel() * (t[1] - t[0]) ** 2
    total = (
        np.exp(
            np.asarray(jax.jit(given.component.log_predictive)(given.posterior, grid))
        )
        @ weights
    )
    np.testing.assert_allclose(total, 1.0, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_kl_is_the_mean_log_ratio_of_draws(name, key, x64):
    given = posterior_of(name)
    component, prior, q = given.component, given.prior, given.posterior
    priors = broadcast_prior(prior, K)
    keys = jax.random.split(key, 20_000)
    # Large batches of LAPACK's functions side by side may wait for each other for ever, in jax 0.10 on two cores.
    ratios = jax.jit(
        lambda keys: jax.lax.map(
            lambda k: _draw_with_ratio(k, component, q, priors)[1], keys, batch_size=500
        )
    )(keys)
    se = float(ratios.std()) / np.sqrt(len(keys))
    assert abs(float(ratios.mean()) - float(component.kl(q, prior))) < 5 * se


@pytest.mark.parametrize("name", EXPECTED)
def test_a_posterior_has_the_components_first(name):
    """So that components are picked and put in order by their index."""
    values = values_at(name)
    assert all(
        leaf.shape[0] == K for leaf in jax.tree.leaves(posterior_of(name).posterior)
    )
    for plain, swapped in values.coefficients:
        np.testing.assert_allclose(swapped, plain[::-1], rtol=1e-12)
    np.testing.assert_allclose(values.kl[1], values.kl[0], rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_arguments_give_the_same_functions(name):
    """What is compiled is found again by them."""
    one, other = FAMILIES[name].make(), FAMILIES[name].make()
    assert one._replace(prior=None) == other._replace(prior=None)
    hash(one._replace(prior=None))


@functools.partial(jax.jit, static_argnames="component")
def log_likelihoods(component, parameters, counts, sums):
    """Of several parameters on a leading axis."""

    def one(parameters):
        c, weights = component.coefficients_at(parameters)
        return counts @ c + jnp.sum(jnp.where(sums == 0, 0.0, sums * weights))

    return jax.vmap(one)(parameters)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "product"])
def test_the_maximum_likelihood_has_the_largest_likelihood(name, x64):
    given = posterior_of(name)
    component, prior, statistics = given.component, given.prior, given.statistics
    w = np.random.default_rng(1).dirichlet(np.ones(K), size=N)
    counts, sums = w.sum(axis=0), w.T @ statistics.T
    best = jax.tree.map(
        np.asarray, jax.jit(component.maximum_likelihood)(prior, counts, sums)
    )
    others = [
        best | {parameter: values * step}
        for parameter, values in best.items()
        # Known, or bound to sum to 1.
        if not (parameter.endswith("scale") or "probs" in parameter)
        for step in (0.99, 1.01)
    ]
    if "probs" in best:
        for theta in FAMILIES[name].oracle.some_parameters():
            if name == "categorical":
                theta = [np.pad(p, (0, 3 - len(p))) for p in theta]
            others.append({"probs": np.broadcast_to(theta, best["probs"].shape)})
    every = jax.tree.map(lambda *leaves: np.stack(leaves), best, *others)
    if name == "known_variance":
        np.testing.assert_array_equal(
            best["scale"], np.broadcast_to(prior.noise, best["scale"].shape)
        )
    top, *below = np.asarray(log_likelihoods(component, every, counts, sums))
    assert len(below) >= 2
    assert max(below) < top


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bernoulli", [[0.5, 0.5]]),
        ("categorical", [[[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]]]),
        ("multinomial", [[0.5, 0.5]]),
        ("poisson", [[0.0, 0.0]]),
    ],
)
def test_the_maximum_likelihood_of_no_counts_prefers_none(name, expected):
    component = component_of(name)
    sums = np.zeros((1, len(component.statistics(some_data(name).T))), np.float32)
    values = component.maximum_likelihood(
        broadcast_prior(component.prior, 1), np.zeros(1, np.float32), sums
    )
    np.testing.assert_allclose(np.asarray(*values.values()), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "each", "shared"),
    [
        ("known_variance", 2, 0),
        ("diagonal_gaussian", 4, 0),
        ("spherical_gaussian", 3, 0),
        ("gaussian", 5, 0),
        ("tied_gaussian", 2, 3),
        ("bernoulli", 2, 0),
        ("poisson", 2, 0),
        ("exponential", 2, 0),
        ("categorical", 3, 0),
        ("multinomial", 1, 0),
        ("product", 2 + 4 + 3 + 1 + 1 + 1 + 3, 0),
    ],
)
def test_free_parameters_are_counted(name, each, shared):
    assert component_of(name).num_parameters(4) == 4 * each + shared


@pytest.mark.parametrize("name", NAMES)
def test_data_of_another_kind_are_refused_by_row_and_column(name):
    bad, message = FAMILIES[name].bad
    with pytest.raises((ValueError, TypeError), match=message):
        component_of(name).check(bad)


# Of text there are no arrays on the device.
@pytest.mark.parametrize(
    "name",
    tiered(
        [name for name in NAMES if name != "known_variance"],
        unit=["diagonal_gaussian", "poisson"],
    ),
)
def test_data_on_the_device_are_refused_as_well(name):
    bad, message = FAMILIES[name].bad
    with pytest.raises((ValueError, TypeError), match=message):
        component_of(name).check(jnp.asarray(bad))


@pytest.mark.parametrize(
    "name",
    tiered(
        NAMES, unit=["gaussian", "poisson", "categorical", "multinomial", "product"]
    ),
)
def test_coordinates_are_finite_without_a_spread_and_without_entries(name):
    x, coordinates = some_data(name), jax.jit(component_of(name).coordinates)
    for rows in (
        x,
        np.repeat(x[:1], N, axis=0),
        np.full_like(x, np.nan) if FAMILIES[name].missing else x,
    ):
        points = np.asarray(coordinates(np.asarray(rows, np.float32)))
        assert points.shape[0] == N
        assert np.isfinite(points).all()


REFUSED = [
    (
        lambda: diagonal_gaussian(2, mean_precision=0.0),
        "mean_precision must be positive and finite, got 0.0",
    ),
    (lambda: diagonal_gaussian(2, loc=np.nan), "loc must be finite"),
    (
        lambda: diagonal_gaussian(2, loc=[0.0, 1.0, 2.0]),
        r"loc has shape \(3,\); expected \(\) or \(2,\)",
    ),
    (
        lambda: diagonal_gaussian(2, rate=1.0, variance=1.0),
        "give rate or variance, not both",
    ),
    (
        lambda: diagonal_gaussian(0),
        "number of columns must be an integer of at least 1, got 0",
    ),
    (
        lambda: spherical_gaussian(2, rate=[1.0, 2.0]),
        r"rate must be one number, got shape \(2,\)",
    ),
    (
        lambda: spherical_gaussian(2, variance=-1.0),
        r"variance must be positive.*and finite, got",
    ),
    (lambda: gaussian(2, df=1.0), r"df must be in \(1, inf\), got 1.0"),
    (
        lambda: gaussian(2, scale=[[1.0, 2.0], [2.0, 1.0]]),
        "scale must be symmetric and positive definite",
    ),
    (lambda: gaussian(2, scale=1.0, variance=1.0), "give scale or variance, not both"),
    (
        lambda: tied_gaussian(2, scale=np.eye(3)),
        r"scale has shape \(3, 3\); expected \(2, 2\)",
    ),
    (
        lambda: known_variance(2, scale=[1.0, 0.0]),
        r"scale must be positive.*and finite, got",
    ),
    (lambda: bernoulli(2, ones=0.0), r"ones must be positive.*and finite, got"),
    (lambda: poisson(2, rate=np.inf), "rate must be positive and finite, got inf"),
    (lambda: exponential(1, concentration="a"), "concentration must be real numbers"),
    (
        lambda: categorical([2, 0]),
        "each of the levels must be an integer of at least 1, got 0",
    ),
    (
        lambda: categorical([2.5]),
        "each of the levels must be an integer of at least 1, got 2.5",
    ),
    (
        lambda: multinomial(2, total_count=0),
        "total_count must be an integer of at least 1, got 0",
    ),
    (
        lambda: product({"a": poisson(1)}, {"b": 1}),
        r"parts are \['a'\], columns are given for \['b'\]",
    ),
    (
        lambda: product({"a": poisson(1)}, {"a": [1]}),
        r"each of the columns 0 ... d-1 must belong to one part",
    ),
    (
        lambda: product({"a": poisson(1), "b": poisson(1)}, {"a": 1, "b": [1]}),
        "all numbers or all indices",
    ),
    (
        lambda: product({"a": poisson}, {"a": 1}),
        "part 'a' is a function; expected a component",
    ),
    (
        lambda: scaled_to([[1.0, 5.1], [2.0, 5.1]]),
        "column 1 of the data has no two different values",
    ),
    (
        lambda: scaled_to([[1.0], [2.0]], fraction=0.0),
        r"fraction must be in \(0, 1\], got 0.0",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_hyperparameters_out_of_range_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_codes_of_minus_one_are_missing():
    component = categorical([2, 3])
    np.testing.assert_array_equal(
        component.check([[-1, 2], [1, -1]]), [[np.nan, 2], [1, np.nan]]
    )
    np.testing.assert_array_equal(component.check(jnp.array([[-1, 2]])), [[np.nan, 2]])


def test_masked_entries_are_missing(key):
    masked = np.ma.masked_equal([[1, -999], [2, 3]], -999)
    filled = [[1.0, np.nan], [2.0, 3.0]]
    for component in (
        diagonal_gaussian(2),
        poisson(2),
        product({"size": poisson(2)}, {"size": 2}),
    ):
        # What is masked compares as equal to anything.
        assert type(component.check(masked)) is np.ndarray
        np.testing.assert_array_equal(component.check(masked), filled)
    with pytest.raises(
        ValueError, match=r"sample_weight must be finite.*and not negative"
    ):
        fit(
            key,
            [[1, 2], [2, 3]],
            poisson(2),
            num_components=1,
            sample_weight=np.ma.masked_equal([1.0, 2.0], 2.0),
        )
    with pytest.raises(
        ValueError,
        match=r"multinomial: column 1 has missing entries \(NaN\).*the rows out",
    ):
        fit(key, masked, multinomial(2), num_components=1)
    np.testing.assert_array_equal(
        scaled_to(np.ma.masked_equal([[0, 1], [2, -999], [4, 3]], -999))["loc"], [2, 2]
    )
    rows, _ = shard_rows(masked, jax.make_mesh((1,), ("rows",)))
    np.testing.assert_array_equal(rows, filled)
    assert type(sites._on_host(masked, "x")) is np.ndarray
    np.testing.assert_array_equal(sites._on_host(masked, "x"), filled)


def test_a_product_takes_missing_entries_where_its_parts_do():
    parts = {"size": multinomial(1), "kind": categorical([2])}
    component = product(parts, {"size": 1, "kind": 1})
    assert np.isnan(component.check([[1.0, np.nan]])[0, 1])
    with pytest.raises(
        ValueError,
        match=r"part 'size', whose columns are \(0,\) .* multinomial: column 0 has missing entries",
    ):
        component.check([[np.nan, 1.0]])


def test_a_product_is_its_parts_whatever_the_order_of_columns(x64):
    parts = {"size": known_variance(2), "kind": categorical([3])}
    one = product(parts, {"size": 2, "kind": 1})
    other = product(parts, {"size": [2, 0], "kind": [1]})
    x = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, 0.0]])
    moved = x[:, [1, 2, 0]]
    np.testing.assert_array_equal(
        jax.jit(one.statistics)(x.T), jax.jit(other.statistics)(moved.T)
    )


@pytest.mark.slow
def test_distributions_draw_rows_and_give_their_density(key):
    """As the components of NumPyro's mixtures; floating codes are taken as codes."""
    parts = {
        "size": known_variance(1),
        "kind": categorical([2, 2]),
        "times": multinomial(2, total_count=4),
    }
    component = product(parts, {"size": [1], "kind": [0, 4], "times": [2, 3]})
    q = broadcast_prior(component.prior, 3)
    keys = iter(jax.random.split(key, 20))
    parameters = component.draw(lambda name, fn: fn.sample(next(keys)), q)
    fn = component.distribution(parameters)
    rows = fn.sample(key, (5,))
    assert rows.shape == (5, 3, 5)
    component.check(rows.reshape(15, 5))
    np.testing.assert_array_equal(rows[..., 2:4].sum(axis=-1), 4)
    c, w = component.coefficients_at(parameters)
    columns = rows[:, 1].T
    expected = (
        c[:, None] + w @ component.statistics(columns) + component.log_base(columns)
    )
    np.testing.assert_allclose(fn.log_prob(rows[:, 1][:, None]).T, expected, rtol=1e-5)
    # A distribution is a pytree of its arrays.
    leaves, tree = jax.tree.flatten(fn)
    np.testing.assert_array_equal(
        jax.tree.unflatten(tree, leaves).log_prob(rows), fn.log_prob(rows)
    )


def test_scaled_to_leaves_missing_entries_out_and_scales_with_the_data():
    x = np.array([[0.0, 10.0], [2.0, np.nan], [4.0, 30.0]])
    one, other = scaled_to(x), scaled_to(1000 * x + 5)
    np.testing.assert_allclose(one["loc"], [2.0, 20.0])
    np.testing.assert_allclose(one["variance"], 0.1 * np.array([8 / 3, 100.0]))
    np.testing.assert_allclose(other["loc"], 1000 * one["loc"] + 5)
    np.testing.assert_allclose(other["variance"], 1e6 * one["variance"])
    assert one["mean_precision"] == other["mean_precision"] == 0.1
    for family in (diagonal_gaussian, spherical_gaussian, gaussian, tied_gaussian):
        np.testing.assert_allclose(family(2, **one).prior.loc, one["loc"])
    np.testing.assert_allclose(
        np.diag(gaussian(2, df=5.0, **one).prior.scale), 5 * one["variance"], rtol=1e-6
    )


def test_components_are_shown_without_their_functions():
    assert repr(poisson(1)).startswith(
        "Component(name='poisson', prior=GammaRate(concentration="
    )
    assert "function" not in repr(gaussian(2))


def test_scaled_to_counts_rows_by_their_weights():
    x, weight = (
        np.array([[0.0, 10.0], [2.0, np.nan], [4.0, 30.0], [9.0, 9.0]]),
        np.array([2, 1, 3, 0]),
    )
    one, other = (
        scaled_to(x, sample_weight=weight),
        scaled_to(np.repeat(x, weight, axis=0)),
    )
    np.testing.assert_allclose(one["loc"], other["loc"])
    np.testing.assert_allclose(one["variance"], other["variance"])
    with pytest.raises(
        ValueError,
        match=r"column 0 of the data has no two different values.*prior by hand",
    ):
        scaled_to(x, sample_weight=[1, 0, 0, 0])
    with pytest.raises(
        ValueError, match=r"sample_weight has shape.*weight for each row"
    ):
        scaled_to(x, sample_weight=[1, 2])


@pytest.mark.parametrize("num_rows", [100, 100_000])
def test_scaled_to_sees_a_constant_where_many_rows_round_its_mean(num_rows):
    with pytest.raises(
        ValueError,
        match=r"column 0 of the data has no two different values.*prior by hand",
    ):
        scaled_to(np.full((num_rows, 1), 3.3))


# Digits of float32 where the data are many.
LARGE = np.array([0.25, 3.0, 15.0, 17.0, 400.0, 1e6])


SPECIAL = pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            lambda a: special.log_gamma_slack(a)[0],
            lambda a: a * digamma(a) - gammaln(a) - a,
        ),
        (
            special.stirling_error,
            lambda a: gammaln(a) - (a - 0.5) * np.log(a) + a - 0.5 * np.log(2 * np.pi),
        ),
        (
            lambda a: special.log_choose(a, 3.0 + 0 * a),
            lambda a: np.log(a * (a + 1) * (a + 2) / 6),
        ),
        (special.log_gamma_half_step, lambda a: gammaln(a + 0.5) - gammaln(a)),
    ],
)


# In double precision they are in the divergences and predictive densities above.
@SPECIAL
def test_special_functions_keep_their_digits_in_single_precision(function, expected):
    single = jax.jit(function)(np.asarray(LARGE, np.float32))
    # Below 16 terms of up to 40 are subtracted, each rounded to 2e-6.
    np.testing.assert_allclose(single, expected(LARGE), rtol=3e-6, atol=1e-5)


@pytest.mark.full
@SPECIAL
def test_special_functions_keep_their_digits(function, expected):
    single = jax.jit(function)(np.asarray(LARGE, np.float32))
    with enable_x64():
        double = jax.jit(function)(LARGE)
    # scipy's differences leave 1e-10 at 10^6.
    np.testing.assert_allclose(double, expected(LARGE), rtol=1e-9, atol=3e-9)
    # Below 16 terms of up to 40 are subtracted, each rounded to 2e-6.
    np.testing.assert_allclose(single, double, rtol=3e-6, atol=1e-5)


def test_points_without_a_spread_far_from_zero_leave_a_matrix_that_is_positive_definite():
    """The sums of products and the products of the sums are as large: their difference is rounding."""
    component, rng = (
        gaussian(2, mean_precision=1e-8, scale=1e-6),
        np.random.default_rng(0),
    )
    # Sums that are rounded once.
    counts, places = (
        rng.uniform(20.0, 40.0, size=100).astype(np.float32),
        rng.uniform(-1e3, 1e3, size=(100, 2)),
    )
    products = np.stack(
        [places[:, 0] ** 2, places[:, 0] * places[:, 1], places[:, 1] ** 2], axis=1
    )
    sums = (counts[:, None] * np.hstack([places, products])).astype(np.float32)
    scale = np.asarray(
        component.update(component.prior, counts, sums).scale, np.float64
    )
    assert np.linalg.eigvalsh(scale).min() > 0.0
    # Some units in the last place of the sums, and no more.
    assert np.all(
        np.abs(scale).max(axis=(1, 2))
        < 16 * np.finfo(np.float32).eps * np.abs(sums).max(axis=1)
    )
    assert np.isfinite(
        component.maximum_likelihood(component.prior, counts, sums)["precision"]
    ).all()


@pytest.mark.full
def test_divergences_keep_their_digits_at_a_million_data():
    """A difference of log-gammas of 10^7 would leave a nat."""
    counts = np.array([1e6, 3e5])
    cases = {
        "gaussian": np.array([[0.5, -0.25, 1.0, 0.5, 2.0]] * 2) * counts[:, None],
        "tied_gaussian": np.array([[0.5, -0.25, 1.0, 0.5, 2.0]] * 2) * counts[:, None],
        "poisson": np.array([[2.0, 7.0]] * 2) * counts[:, None],
        "categorical": np.array([[0.25, 0.75, 0.5, 0.25, 0.25]] * 2) * counts[:, None],
        "multinomial": np.array([[2.0, 7.0]] * 2) * counts[:, None],
    }
    for name, sums in cases.items():
        component, values = component_of(name), []
        for dtype, context in (
            (jnp.float32, functools.partial(jax.numpy_dtype_promotion, "standard")),
            (jnp.float64, enable_x64),
        ):
            with context():
                prior = jax.tree.map(
                    lambda leaf, dtype=dtype: jnp.asarray(np.asarray(leaf), dtype),
                    component.prior,
                )
                q = component.update(
                    prior, jnp.asarray(counts, dtype), jnp.asarray(sums, dtype)
                )
                values.append(float(component.kl(q, prior)))
        np.testing.assert_allclose(values[0], values[1], rtol=2e-5, err_msg=name)


def test_predictive_masses_keep_their_digits_at_a_million_data():
    component = poisson(1)
    q = component.prior._replace(
        concentration=np.float32([[7e6]]), rate=np.float32([[1e6]])
    )
    value = jax.jit(component.log_predictive)(q, np.float32([[5.0]]))
    np.testing.assert_allclose(
        value[0, 0], stats.nbinom.logpmf(5, 7e6, 1e6 / (1e6 + 1)), atol=1e-5
    )


def test_one_row_has_the_predictive_density_that_it_has_among_others(x64):
    component = spherical_gaussian(3)
    rows = np.random.default_rng(5).normal(size=(3, 4))
    q = broadcast_prior(component.prior, 2)
    np.testing.assert_allclose(
        component.log_predictive(q, rows[:, :1]),
        component.log_predictive(q, rows)[:, :1],
        rtol=1e-6,
    )
