"""Kernels that condition on latents themselves: the Gibbs family has the tempered target, HMCECS is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import HMC, HMCECS, MCMC, NUTS, DiscreteHMCGibbs, HMCGibbs, MixedHMC
from scipy import integrate, stats
from scipy.special import logsumexp
from tempered_models import Y

import numpyro_tempered as nt

ALPHA = 0.2
WEIGHTS = np.array([0.4, 0.6])


def switch(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    k = numpyro.sample("k", dist.Categorical(jnp.asarray(WEIGHTS)))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(2.0 * k, s), obs=y)


def switch_moments(jacobian=0.0):
    """E[s] and P(k = 1) of the tempered posterior times s^jacobian."""

    def weight(s, k, power):
        log_lik = stats.norm.logpdf(Y, 2.0 * k, s).sum()
        return (
            s ** (power + jacobian)
            * WEIGHTS[k]
            * np.exp(stats.halfnorm.logpdf(s) + ALPHA * log_lik)
        )

    parts = np.array(
        [
            [
                integrate.quad(weight, 1e-9, 12.0, args=(k, p), limit=400)[0]
                for p in (0, 1)
            ]
            for k in (0, 1)
        ]
    )
    return parts[:, 1].sum() / parts[:, 0].sum(), parts[1, 0] / parts[:, 0].sum()


def draws(kernel, *args, num_samples=4000):
    mcmc = MCMC(kernel, num_warmup=500, num_samples=num_samples, progress_bar=False)
    mcmc.run(jax.random.key(5), *args)
    return {
        name: np.asarray(x, float)
        for name, x in mcmc.get_samples(group_by_chain=True).items()
    }


def agrees(x, want):
    return abs(x.mean() - want) < 5 * x.std() / np.sqrt(effective_sample_size(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        lambda model: DiscreteHMCGibbs(NUTS(model)),
        lambda model: DiscreteHMCGibbs(NUTS(model), modified=True),
        lambda model: MixedHMC(
            HMC(model, trajectory_length=1.5), num_discrete_updates=5
        ),
    ],
    ids=["DiscreteHMCGibbs", "modified", "MixedHMC"],
)
def test_a_global_discrete_latent(kernel):
    sampled = draws(kernel(nt.temper(switch, alpha=ALPHA)), jnp.asarray(Y))
    mean, probability = switch_moments()
    assert agrees(sampled["s"], mean)
    assert agrees(sampled["k"], probability)
    # Neither the untempered target nor one with a tempered Jacobian would pass.
    assert not agrees(sampled["s"], switch_moments(ALPHA - 1.0)[0])
    log_lik = [stats.norm.logpdf(Y, 2.0 * k, mean).sum() for k in (0, 1)]
    bayes = np.exp(np.log(WEIGHTS) + log_lik - logsumexp(np.log(WEIGHTS) + log_lik))[1]
    assert not agrees(sampled["k"], bayes)


@pytest.mark.slow
def test_gibbs_with_a_conditional_of_the_user():
    """The user's conditional is the tempered one; the other site keeps the tempered potential."""

    def model(y):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu, s), obs=y)

    def conditional(rng_key, gibbs_sites, hmc_sites):
        precision = ALPHA * len(Y) / hmc_sites["s"] ** 2
        mean, sd = (
            precision * Y.mean() / (1.0 + precision),
            1.0 / jnp.sqrt(1.0 + precision),
        )
        return {"mu": mean + sd * jax.random.normal(rng_key)}

    kernel = HMCGibbs(
        NUTS(nt.temper(model, alpha=ALPHA)), gibbs_fn=conditional, gibbs_sites=["mu"]
    )
    sampled = draws(kernel, jnp.asarray(Y), num_samples=8000)

    def moment(power, jacobian=0.0):
        def weight(s, mu):
            log_lik = stats.norm.logpdf(Y, mu, s).sum()
            log_prior = stats.halfnorm.logpdf(s) + stats.norm.logpdf(mu)
            return s ** (power + jacobian) * np.exp(log_prior + ALPHA * log_lik)

        s, mu = np.linspace(1e-3, 7.0, 400), np.linspace(-5.0, 5.0, 201)
        return sum(weight(a, b) for a in s for b in mu)

    assert agrees(sampled["s"], moment(1) / moment(0))
    assert not agrees(sampled["s"], moment(1, ALPHA - 1.0) / moment(0, ALPHA - 1.0))


def subsampled(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y), subsample_size=2):
        batch = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=batch)


@pytest.mark.full
@pytest.mark.parametrize(
    "alpha", tiered([0.1, 0.0, {"y": 0.1}], unit=[{"y": 0.1}]), ids=str
)
def test_energy_conserving_subsampling_is_refused(alpha):
    def run(alpha):
        proxy = HMCECS.taylor_proxy({"theta": jnp.array(0.0)})
        kernel = HMCECS(NUTS(nt.temper(subsampled, alpha)), num_blocks=2, proxy=proxy)
        MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False).run(
            jax.random.key(0), jnp.asarray(Y)
        )

    with pytest.raises(
        ValueError, match=r"HMCECS ignores the scale of site 'y'.*untempered posterior"
    ):
        run(alpha)


@pytest.mark.slow
def test_energy_conserving_subsampling_runs_without_a_power():
    proxy = HMCECS.taylor_proxy({"theta": jnp.array(0.0)})
    kernel = HMCECS(NUTS(nt.temper(subsampled, 1.0)), num_blocks=2, proxy=proxy)
    MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False).run(
        jax.random.key(0), jnp.asarray(Y)
    )
