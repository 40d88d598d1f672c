"""The objective of every component: two forms of one number, at every half-step, and what it must equal."""

import functools
import itertools
import warnings
from typing import NamedTuple

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import mixture_oracles as oracle
import numpy as np
import pytest
from conftest import enable_x64, tiered
from hypothesis import given, settings
from mixture_families import FAMILIES, PSI, D, K, N, component_of, some_data
from mixture_families import GAUSSIANS as GAUSSIAN_MEAN
from scipy.special import gammaln, logsumexp
from sklearn.mixture import BayesianGaussianMixture

from numpyro_tempered.core.ascent import advance
from numpyro_tempered.mixtures.ascent import begin, step_of
from numpyro_tempered.mixtures.components import special
from numpyro_tempered.mixtures.components.diagonal_gaussian import diagonal_gaussian
from numpyro_tempered.mixtures.components.gaussian import gaussian
from numpyro_tempered.mixtures.components.spherical_gaussian import spherical_gaussian
from numpyro_tempered.mixtures.components.tied_gaussian import tied_gaussian
from numpyro_tempered.mixtures.factors import (
    TEMPERED_CAVI,
    Factors,
    MixtureProblem,
    coefficients,
    distance,
    objective,
    penalty,
    update,
)
from numpyro_tempered.mixtures.sweep import (
    accumulate,
    base_sum,
    log_joint,
    make_blocks,
    sweep,
)

NAMES = tuple(FAMILIES)
# Others take seconds each; the formulas of all families are checked one by one in test_components.
QUICK = ("poisson",)
ALPHAS = (0.1, 0.5, 1.0)
CONCENTRATION = np.array([0.5, 1.5])
ROUNDS = 2


class Steps(NamedTuple):
    """Half-steps, leading axis ROUNDS."""

    after_update: jax.Array  # F by its definition
    after_update_closed: jax.Array  # alpha H + log evidence
    after_responsibilities: jax.Array  # by its definition
    after_responsibilities_closed: jax.Array  # alpha Σ logsumexp - KL
    log_sum: jax.Array  # Σ_i logsumexp_j l_ij, log h included
    omega: jax.Array  # (ROUNDS, n, K), the responsibilities that the update was given
    posterior: object


def half_steps(component, prior, rows, weight, omega, alpha, concentration, rounds):
    """Updates and responsibilities in turn, from responsibilities ``(n, K)``."""
    history = []
    for _ in range(rounds):
        omega, steps = one_round(
            component, prior, rows, weight, omega, alpha, concentration
        )
        history.append(steps)
    return omega, jax.tree.map(lambda *leaves: np.stack(leaves), *history)


def objective_after_update(component, problem, entropy, sums):
    """F after the step of the factors: alpha H(omega) + the log evidence of the weighted statistics."""
    counts, statistics = problem.alpha * sums.counts, problem.alpha * sums.statistics
    a = problem.concentration
    weights = special.dirichlet_log_normaliser(
        a + counts
    ) - special.dirichlet_log_normaliser(a)
    evidence = component.log_evidence(problem.prior, counts, statistics)
    return problem.alpha * (entropy + problem.base) + weights + evidence


@functools.partial(jax.jit, static_argnames="component")
def one_round(component, prior, rows, weight, omega, alpha, concentration):
    blocks = make_blocks(rows, weight, rows.shape[0])
    problem = MixtureProblem(
        prior,
        jnp.asarray(concentration),
        jnp.asarray(alpha),
        base_sum(component, blocks),
    )

    def entropy_of(omega):
        return -jnp.sum(
            weight[:, None]
            * jnp.where(omega > 0, omega * jnp.log(jnp.where(omega > 0, omega, 1)), 0)
        )

    def definition(factors, joint, omega):
        inside = (
            jnp.sum(weight[:, None] * omega * joint) + entropy_of(omega) + problem.base
        )
        return problem.alpha * inside - penalty(component, problem, factors)

    sums = accumulate(component, omega.T[None, None], blocks)
    factors = update(component, problem, sums)
    mixture = coefficients(component, factors)
    joint = log_joint(component, mixture, rows.T).T
    following = jax.nn.softmax(joint, axis=1)
    swept = sweep(component, mixture, blocks)
    return following, Steps(
        definition(factors, joint, omega),
        objective_after_update(component, problem, entropy_of(omega), sums),
        definition(factors, joint, following),
        objective(component, problem, factors, swept),
        swept.log_sum + problem.base,
        omega,
        factors.posterior,
    )


@functools.partial(jax.jit, static_argnames="component")
def ascend(component, prior, rows, omega, alpha):
    """The optimum from some start: F and Σ logsumexp there."""
    blocks = make_blocks(rows, jnp.ones(len(rows)), len(rows))
    problem = MixtureProblem(
        prior, jnp.asarray(CONCENTRATION), alpha, base_sum(component, blocks)
    )
    start = update(
        component, problem, accumulate(component, omega.T[None, None], blocks)
    )
    state = begin(jax.tree.map(lambda leaf: leaf[None], start), 5000)
    step = step_of(
        TEMPERED_CAVI, component, problem, blocks, jnp.array(float(len(rows)))
    )
    state = advance(step, state, 5000, jnp.array(1e-13))
    best = jax.tree.map(lambda leaf: leaf[0], state.point.factors)
    log_sum = sweep(component, coefficients(component, best), blocks).log_sum
    return state.objective[0], log_sum + problem.base


def run(name, x, omega, alpha, weight=None, concentration=CONCENTRATION, rounds=ROUNDS):
    """Some rounds in double precision, as numpy."""
    component = component_of(name) if isinstance(name, str) else name
    prior = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), component.prior)
    if np.isnan(x).any():
        component = component.with_missing()
    weight = np.ones(len(x)) if weight is None else weight
    with enable_x64():
        last, steps = half_steps(
            component._replace(prior=None),
            prior,
            x,
            weight,
            omega,
            alpha,
            concentration,
            rounds,
        )
        return np.asarray(last), jax.tree.map(np.asarray, steps)


def some_responsibilities(seed=0, n=N):
    return np.random.default_rng(seed).dirichlet(np.ones(K), size=n)


# Few different numbers, so that points are duplicated, columns constant and components empty.
RAW = hnp.arrays(np.float64, (N, D), elements=st.integers(-20, 20).map(lambda i: i / 4))
LABELS = hnp.arrays(np.int64, N, elements=st.integers(0, K - 1))


@pytest.mark.parametrize("name", tiered(NAMES, unit=QUICK))
@settings(deadline=None, max_examples=12)
@given(
    raw=RAW,
    labels=LABELS,
    alpha=st.sampled_from(ALPHAS),
    softness=st.sampled_from([0.0, 0.3]),
)
def test_two_forms_agree_and_every_half_step_raises_them(
    name, raw, labels, alpha, softness
):
    omega = (1 - softness) * np.eye(K)[labels] + softness / K
    x = FAMILIES[name].data(raw)
    _, s = run(name, x, omega, alpha)
    scale = np.abs(s.after_update_closed).max() + np.abs(s.log_sum).max()
    np.testing.assert_allclose(
        s.after_update, s.after_update_closed, rtol=1e-9, atol=1e-12 * scale
    )
    np.testing.assert_allclose(
        s.after_responsibilities, s.after_responsibilities_closed, rtol=1e-9
    )
    path = np.stack(
        [s.after_update_closed, s.after_responsibilities_closed], axis=1
    ).ravel()
    assert np.diff(path).min() >= -1e-12 * scale


@pytest.mark.parametrize(
    ("name", "alpha"), tiered(itertools.product(NAMES, ALPHAS), unit=[("poisson", 0.1)])
)
def test_objective_and_responsibilities_are_those_of_the_printed_formulas(name, alpha):
    x, weight = some_data(name), np.arange(N) % 3 + 0.5
    _, s = run(name, x, some_responsibilities(), alpha, weight)
    family = FAMILIES[name].oracle
    for t in (0, ROUNDS - 1):
        expected = oracle.objective(family, x, weight, s.omega[t], alpha, CONCENTRATION)
        np.testing.assert_allclose(s.after_update_closed[t], expected, rtol=1e-9)
    following = oracle.best_responsibilities(
        family, x, weight, s.omega[0], alpha, CONCENTRATION
    )
    np.testing.assert_allclose(s.omega[1], following, rtol=1e-8, atol=1e-12)


def weights_evidence(total, alpha):
    """The log of B(a + alpha N) / B(a), all data in the first component."""
    after = CONCENTRATION + alpha * total * np.eye(K)[0]
    return (gammaln(after).sum() - gammaln(after.sum())) - (
        gammaln(CONCENTRATION).sum() - gammaln(CONCENTRATION.sum())
    )


@pytest.mark.parametrize(
    "name", tiered([name for name in NAMES if name != "tied_gaussian"], unit=QUICK)
)
def test_one_component_has_the_tempered_evidence(name):
    x, alpha = some_data(name), 0.3
    _, s = run(name, x, np.eye(K)[np.zeros(N, int)], alpha)
    evidence = s.after_update_closed[0] - weights_evidence(N, alpha)
    expected = oracle.log_evidences(FAMILIES[name].oracle, x, np.full(N, alpha))
    np.testing.assert_allclose(evidence, expected, rtol=1e-9)


@pytest.mark.full
def test_one_tied_component_is_an_untied_one():
    """The other component is at its prior, and adds nothing to the shared precision."""
    x, omega = some_data("gaussian"), np.eye(K)[np.zeros(N, int)]
    _, tied = run("tied_gaussian", x, omega, 0.3)
    _, untied = run("gaussian", x, omega, 0.3)
    np.testing.assert_allclose(
        tied.after_update_closed[0], untied.after_update_closed[0], rtol=1e-12
    )


@pytest.mark.parametrize(
    ("name", "low", "high"),
    tiered(
        [
            ("known_variance", -15, 15),
            ("bernoulli", 1e-9, 1 - 1e-9),
            ("poisson", 1e-9, 30),
            ("exponential", 1e-9, 30),
        ],
        unit=[("poisson", 1e-9, 30)],
    ),
)
def test_the_evidence_is_the_integral_of_the_tempered_likelihood(name, low, high):
    """Column by column, by quadrature over the parameter."""
    x, alpha, family = some_data(name), 0.3, FAMILIES[name].oracle
    _, s = run(name, x, np.eye(K)[np.zeros(N, int)], alpha)
    prior = family.prior(1)[0]
    expected = 0.0
    for column in x.T:
        values, times = np.unique(column, return_counts=True)

        def log_value(theta, values=values, times=times):
            likelihood = sum(
                k * family.column_log_density(theta, v)
                for v, k in zip(values, times, strict=True)
            )
            return alpha * likelihood + family.column_log_prior(theta, prior)

        expected += log_integral(log_value, low, high)
    np.testing.assert_allclose(
        s.after_update_closed[0] - weights_evidence(N, alpha), expected, rtol=1e-9
    )


def log_integral(log_value, low, high):
    """The log of the integral of exp(log_value) over an interval, by the tanh-sinh rule."""
    step = 1e-3
    t = np.arange(-3200, 3201) * step
    stretched = np.pi / 2 * np.sinh(t)
    nodes = low + (high - low) * 0.5 * (1 + np.tanh(stretched))
    slopes = (high - low) * 0.25 * np.pi * np.cosh(t) / np.cosh(stretched) ** 2
    inside = (nodes > low) & (nodes < high)
    return logsumexp(log_value(nodes[inside]) + np.log(slopes[inside] * step))


@pytest.mark.parametrize(
    "name", tiered(["known_variance", "gaussian"], unit=["known_variance"])
)
def test_the_derivative_in_alpha_is_the_log_sum_and_the_optimum_is_convex(name, x64):
    component, x, step = component_of(name), some_data(name), 1e-3
    prior = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), component.prior)
    omega = some_responsibilities()

    def optimum(alpha):
        return jax.tree.map(
            float,
            ascend(component._replace(prior=None), prior, x, omega, np.float64(alpha)),
        )

    middle, slope = optimum(0.5)
    below, above = optimum(0.5 - step)[0], optimum(0.5 + step)[0]
    # Central differences are off by step² / 6 times the third derivative.
    np.testing.assert_allclose((above - below) / (2 * step), slope, rtol=1e-5)
    assert above + below >= 2 * middle - 1e-10
    values = [optimum(alpha)[0] for alpha in np.linspace(0.2, 1.0, 5)]
    assert np.diff(values, 2).min() > 0


@pytest.mark.parametrize("name", tiered(NAMES, unit=["poisson"]))
def test_a_weight_of_two_is_a_row_twice_and_alpha_counts_as_weight(name):
    half, omega = some_data(name, n=N // 2), some_responsibilities(n=N // 2)
    x, omega = np.concatenate([half, half]), np.concatenate([omega, omega])
    once = np.repeat([2.0, 0.0], N // 2)
    _, twice = run(name, x, omega, 0.5)
    _, weighted = run(name, x, omega, 0.5, once)
    np.testing.assert_allclose(
        weighted.after_responsibilities, twice.after_responsibilities, rtol=1e-11
    )
    # alpha = 1/2 on weights of 2 updates as alpha = 1 on weights of 1, and F's sum over the data is as large.
    _, doubled = run(name, x, omega, 0.5, np.full(N, 2.0))
    _, whole = run(name, x, omega, 1.0)
    np.testing.assert_allclose(
        doubled.after_responsibilities, whole.after_responsibilities, rtol=1e-11
    )


GAUSSIANS = (
    "known_variance",
    "diagonal_gaussian",
    "spherical_gaussian",
    "gaussian",
    "tied_gaussian",
)
DEGENERATE = {
    "duplicates": lambda raw: np.zeros_like(raw) + raw[0],
    "a constant column": lambda raw: raw * [1.0, 0.0],
    "a tiny scale": lambda raw: 1e-12 * raw,
    "far from the prior": lambda raw: raw + 100.0,
}


@pytest.mark.full
@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("name", GAUSSIANS)
def test_degenerate_gaussian_data_leave_both_forms_finite_and_equal(name, case):
    x = DEGENERATE[case](some_data(name))
    _, s = run(name, x, np.eye(K)[np.arange(N) % K], 0.5)
    assert np.isfinite(s.after_update).all()
    np.testing.assert_allclose(s.after_update, s.after_update_closed, rtol=1e-9)
    np.testing.assert_allclose(
        s.after_responsibilities, s.after_responsibilities_closed, rtol=1e-9
    )


@pytest.mark.parametrize("name", tiered(NAMES, unit=QUICK))
def test_an_empty_component_is_at_its_prior_and_costs_nothing_of_its_own(name):
    x = some_data(name)
    _, s = run(name, x, np.eye(K)[np.zeros(N, int)], 0.5)
    if name == "tied_gaussian":
        assert np.isfinite(s.after_update_closed).all()
        return
    prior = jax.tree.leaves(component_of(name).prior)
    for leaf, start in zip(jax.tree.leaves(s.posterior), prior, strict=True):
        np.testing.assert_allclose(
            leaf[0, 1], np.asarray(start, np.float64), rtol=1e-12
        )


@pytest.mark.parametrize(
    "name", tiered([name for name in NAMES if name != "tied_gaussian"], unit=QUICK)
)
def test_a_step_of_the_factors_raises_the_objective_by_their_divergence(name, x64):
    component, alpha = component_of(name), 0.5
    x = some_data(name)
    _, s = run(name, x, some_responsibilities(), alpha)
    form = (component.with_missing() if np.isnan(x).any() else component)._replace(
        prior=None
    )
    steps = Factors(CONCENTRATION + alpha * s.omega.sum(axis=1), s.posterior)
    before, after = (jax.tree.map(lambda leaf, t=t: leaf[t], steps) for t in (0, 1))
    rise = jax.jit(distance, static_argnames="component")(form, before, after)
    np.testing.assert_allclose(
        s.after_update[1] - s.after_responsibilities[0], rise, rtol=1e-6
    )


# scikit-learn's bound is F after its M step, without these constants.


class GivenStart(BayesianGaussianMixture):
    """scikit-learn from given responsibilities."""

    def __init__(self, resp=None, **settings):
        self.resp = resp
        super().__init__(**settings)

    def _initialize_parameters(self, x, *args, **kwargs):
        self._initialize(x, self.resp)


def scikit_learn(
    x, omega, covariance_type, max_iter, a, loc, mean_precision, df, scale
):
    model = GivenStart(
        resp=omega,
        n_components=omega.shape[1],
        covariance_type=covariance_type,
        weight_concentration_prior_type="dirichlet_distribution",
        weight_concentration_prior=a,
        mean_prior=loc,
        mean_precision_prior=mean_precision,
        degrees_of_freedom_prior=df,
        covariance_prior=scale,
        reg_covar=0.0,
        tol=0.0,
        max_iter=max_iter,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has not converged
        return model.fit(x)


def constants(n, d, num_components, a, mean_precision, df, log_det, num_precisions):
    """What has to be added to scikit-learn's bound."""
    weights = gammaln(num_components * a) - num_components * gammaln(a)
    wishart = 0.5 * df * (log_det - d * np.log(2)) - sum(
        gammaln(0.5 * (df - i)) for i in range(d)
    )
    means = 0.5 * num_components * d * np.log(mean_precision)
    return weights + means + num_precisions * wishart - 0.5 * n * d * np.log(2 * np.pi)


@pytest.mark.full
@pytest.mark.parametrize("covariance_type", ["full", "diag", "spherical", "tied"])
def test_scikit_learn_ascends_the_same_objective(covariance_type):
    """For two and more columns its diag and spherical take the digammas of a full Wishart, and tied counts n / K
    data for the one precision, which is no coordinate ascent: so these have one column, or one component."""
    d = 2 if covariance_type in ("full", "tied") else 1
    a, kappa, df, psi = 0.75, 0.25, 2.5, PSI[:d, :d]
    if covariance_type == "full":
        component, scale = gaussian(2, **GAUSSIAN_MEAN, df=df, scale=psi), psi
    elif covariance_type == "tied":
        component, scale = tied_gaussian(2, **GAUSSIAN_MEAN, df=df, scale=psi), psi
    else:
        family = {"diag": diagonal_gaussian, "spherical": spherical_gaussian}[
            covariance_type
        ]
        component = family(1, **GAUSSIAN_MEAN, concentration=df / 2, rate=psi[0, 0] / 2)
        scale = psi[0] if covariance_type == "diag" else psi[0, 0]
    x, omega = some_data("gaussian")[:, :d], some_responsibilities()
    k = 1 if covariance_type == "tied" else K
    omega = np.ones((N, 1)) if k == 1 else omega
    last, s = run(component, x, omega, 1.0, concentration=np.full(k, a), rounds=9)
    offset = constants(N, d, k, a, kappa, df, np.linalg.slogdet(psi)[1], k)
    bounds = []
    for t in range(1, 9):
        model = scikit_learn(
            x, omega, covariance_type, t, a, np.full(d, 0.5), kappa, df, scale
        )
        bounds.append(np.ravel(model.lower_bound_)[0] + offset)
    np.testing.assert_allclose(s.after_update_closed[1:], bounds, rtol=1e-8)
    np.testing.assert_allclose(s.posterior.loc[-1], model.means_, rtol=1e-5)
    np.testing.assert_allclose(last, model.predict_proba(x), atol=1e-5)
