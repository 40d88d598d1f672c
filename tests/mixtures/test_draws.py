"""Draws by NumPy's random numbers have the moments of NumPyro's distributions, and are independent."""

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from conftest import enable_x64
from mixture_families import component_of, some_data
from scipy.special import digamma, polygamma

import numpyro_tempered as nt
from numpyro_tempered.mixtures.components.base import as_dtype
from numpyro_tempered.mixtures.draws import draw_log_gamma, draw_noise, parameters_at
from numpyro_tempered.mixtures.factors import Factors

NUM_DRAWS = 40_000
CONCENTRATION = np.array([0.3, 4.0])


def factors_of(name):
    component, x = component_of(name), np.asarray(some_data(name), float)
    columns = np.asarray(component.check(x), float).T
    first = np.linspace(0.2, 0.9, columns.shape[1])
    omega = np.stack([first, 1.0 - first])
    sums = omega @ np.asarray(component.statistics(columns), float).T
    prior = as_dtype(component.prior, np.float64)
    return component._replace(prior=None), Factors(
        CONCENTRATION, component.update(prior, omega.sum(axis=1), sums)
    )


def z_scores(draws, mean, variance):
    """Of the mean and of the variance, in their own standard errors; draws come first."""
    errors = (draws - mean) ** 2
    return (
        (draws.mean(axis=0) - mean) / np.sqrt(variance / len(draws)),
        (errors.mean(axis=0) - variance) / (errors.std(axis=0) / np.sqrt(len(draws))),
    )


# One family for each kind of distribution: gammas and normals given them, a Wishart matrix, betas, a Dirichlet.
@pytest.mark.parametrize(
    "name", ["diagonal_gaussian", "gaussian", "bernoulli", "multinomial"]
)
def test_moments_of_draws(name):
    with enable_x64():
        component, factors = factors_of(name)
        log_weights, noises = draw_noise(
            jax.random.key(3), component, factors, NUM_DRAWS
        )
        # Compiled once for all draws.
        draws = jax.jit(
            jax.vmap(lambda noises: parameters_at(component, factors.posterior, noises))
        )(noises)
        draws = {site: np.asarray(value) for site, value in draws.items()}
        weights = dist.Dirichlet(CONCENTRATION)
        pairs = {"weights": (np.exp(log_weights), weights.mean, weights.variance)}
        sites = {}

        def record(site, fn):
            # Parents at one of the draws: what depends on them is compared given them below.
            sites[site] = fn
            return draws[site][0]

        component.draw(record, factors.posterior)
        for site, fn in sites.items():
            if (
                isinstance(fn, dist.Normal | dist.MultivariateNormal)
                and "precision" in draws
            ):
                continue
            pairs[site] = draws[site], fn.mean, fn.variance
        if "precision" in draws:
            # Deviations of the means are standard normal whatever the precision.
            q, precision = factors.posterior, draws["precision"]
            deviations = draws["loc"] - np.asarray(q.loc)
            if name == "gaussian":
                root = np.linalg.cholesky(precision)
                scaled = (
                    np.einsum("skji,skj->ski", root, deviations)
                    * np.sqrt(np.asarray(q.mean_precision))[:, None]
                )
            else:
                scaled = deviations * np.sqrt(np.asarray(q.mean_precision) * precision)
            pairs["loc"] = scaled, np.zeros(scaled.shape[1:]), np.ones(scaled.shape[1:])
    for site, (values, mean, variance) in pairs.items():
        for scores in z_scores(
            np.asarray(values), np.asarray(mean), np.asarray(variance)
        ):
            assert np.abs(scores).max() < 5.0, (site, scores)


@pytest.mark.full
def test_random_numbers_of_a_draw_are_independent():
    with enable_x64():
        component, factors = factors_of("product")
        log_weights, noises = draw_noise(jax.random.key(0), component, factors, 4000)
    parts = [log_weights[:, 0]]
    for _, noise in sorted(noises.items()):
        for values in (noise.log_gamma, noise.normal):
            if values is not None:
                parts.append(values.reshape(len(values), -1))
    numbers = np.column_stack(parts)
    correlation = np.corrcoef(numbers.T) - np.eye(numbers.shape[1])
    assert np.abs(correlation).max() < 6.0 / np.sqrt(4000)


def test_gammas_of_small_shape_do_not_underflow():
    shape = np.array([1e-3, 0.5, 30.0])
    draws = draw_log_gamma(np.random.default_rng(0), shape, NUM_DRAWS)
    assert np.isfinite(draws).all()
    for scores in z_scores(draws, digamma(shape), polygamma(1, shape)):
        assert np.abs(scores).max() < 5.0


def test_a_gamma_whose_shape_is_drawn_is_drawn_on_the_device():
    poisson = nt.mixtures.components.poisson(1)

    def draw(sample, q):
        shape = sample("shape", dist.Gamma(q.concentration, q.rate))
        return {"rate": sample("rate", dist.Gamma(shape, 2.0)), "shape": shape}

    chained = poisson._replace(draw=draw, prior=None)
    with enable_x64():
        q = poisson.prior.__class__(np.array([[5.0], [9.0]]), np.array([[2.0], [1.0]]))
        _, noises = draw_noise(
            jax.random.key(0), chained, Factors(CONCENTRATION, q), NUM_DRAWS
        )
        assert noises["rate"].key is not None
        assert noises["shape"].log_gamma is not None
        draws = jax.jit(jax.vmap(lambda noises: parameters_at(chained, q, noises)))(
            noises
        )
    shape, rate = (np.asarray(draws[site])[..., 0] for site in ("shape", "rate"))
    # E rate = E shape / 2; Var = E shape / 4 + Var shape / 4.
    mean = np.array([2.5, 9.0])
    variance = np.array([1.25, 9.0])
    for scores in (
        *z_scores(shape, mean, variance),
        *z_scores(rate, mean / 2, mean / 4 + variance / 4),
    ):
        assert np.abs(scores).max() < 5.0
