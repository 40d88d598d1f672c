"""NumPyro emits Jacobians as observed sites: none of them is likelihood."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from scipy import integrate, special, stats
from tempered_models import Y, naive_temper, positive, positive_density, potential

import numpyro_tempered as nt


def scoped(y):
    with handlers.scope(prefix="a"):
        positive(y)


def test_jacobians_are_not_tempered(x64):
    y, alpha = np.array([1.3]), 0.1
    for u in (-1.5, 0.0, 0.4, 2.0):
        want = -(positive_density(np.exp(u), y, alpha) + u)
        assert potential(
            nt.temper(positive, alpha=alpha), {"s": u}, y
        ) == pytest.approx(want, rel=1e-12)
        outside = handlers.scope(nt.temper(positive, alpha=alpha), prefix="a")
        for model in (nt.temper(scoped, alpha=alpha), outside):
            assert potential(model, {"a/s": u}, y) == pytest.approx(want, rel=1e-12)
        # The test would see the naive handler.
        if u != 0.0:
            assert (
                abs(potential(naive_temper(positive, alpha), {"s": u}, y) - want) > 0.3
            )


SUPPORTS = {
    "positive": (
        lambda: dist.Gamma(2.0, 1.5),
        stats.gamma(2.0, scale=1 / 1.5),
        np.exp,
        lambda u: u,
    ),
    "unit interval": (
        lambda: dist.Beta(2.0, 3.0),
        stats.beta(2.0, 3.0),
        lambda u: 1 / (1 + np.exp(-u)),
        lambda u: -np.logaddexp(0, u) - np.logaddexp(0, -u),
    ),
    "interval": (
        lambda: dist.Uniform(-1.0, 3.0),
        stats.uniform(-1.0, 4.0),
        lambda u: -1 + 4 / (1 + np.exp(-u)),
        lambda u: np.log(4.0) - np.logaddexp(0, u) - np.logaddexp(0, -u),
    ),
    "greater than": (
        lambda: dist.Pareto(0.5, 2.0),
        stats.pareto(2.0, scale=0.5),
        lambda u: 0.5 + np.exp(u),
        lambda u: u,
    ),
}


@pytest.mark.parametrize("support", SUPPORTS)
def test_jacobian_of_each_support(support, x64):
    prior, reference, constrain, log_jacobian = SUPPORTS[support]

    def model():
        theta = numpyro.sample("theta", prior())
        numpyro.sample("y", dist.Normal(theta, 0.8), obs=1.1)

    u, alpha = 0.7, 0.1
    theta = constrain(u)
    want = (
        reference.logpdf(theta)
        + alpha * stats.norm.logpdf(1.1, theta, 0.8)
        + log_jacobian(u)
    )
    models = nt.temper(model, alpha=alpha), naive_temper(model, alpha)
    tempered, naive = jax.jit(lambda u: [potential(m, {"theta": u}) for m in models])(u)
    assert tempered == pytest.approx(-want, rel=1e-10)
    assert abs(naive + want) > 0.05


@pytest.mark.slow
def test_jacobian_of_a_simplex_in_a_plate(x64):
    def model(counts):
        with numpyro.plate("k", 2):
            p = numpyro.sample("p", dist.Dirichlet(jnp.array([1.5, 2.0, 0.7])))
            numpyro.sample("x", dist.Multinomial(counts.sum(-1), probs=p), obs=counts)

    u, counts = np.array([[0.3, -0.5], [1.0, 0.2]]), np.array([[3, 1, 2], [0, 4, 1]])
    transform = dist.biject_to(dist.constraints.simplex)
    p = transform(u)
    log_jacobian = float(transform.log_abs_det_jacobian(u, p).sum())
    p = np.asarray(p, float)
    log_prior = sum(stats.dirichlet.logpdf(q / q.sum(), [1.5, 2.0, 0.7]) for q in p)
    log_lik = sum(
        stats.multinomial.logpmf(c, c.sum(), q / q.sum())
        for c, q in zip(counts, p, strict=True)
    )
    want = -(log_prior + 0.1 * log_lik + log_jacobian)
    assert potential(nt.temper(model, alpha=0.1), {"p": u}, counts) == pytest.approx(
        want, rel=1e-10
    )
    assert abs(potential(naive_temper(model, 0.1), {"p": u}, counts) - want) > 0.3


def test_prior_only_potential_keeps_the_jacobian(x64):
    u = 0.7
    prior = -(stats.halfnorm.logpdf(np.exp(u)) + u)
    assert potential(nt.temper(positive, alpha=0.0), {"s": u}, Y) == pytest.approx(
        prior, rel=1e-12
    )
    # Hiding what is observed hides the Jacobian too, which goes through the whole stack.
    blocked = handlers.block(
        positive, hide_fn=lambda site: site.get("is_observed", False)
    )
    assert potential(blocked, {"s": u}, Y) == pytest.approx(prior + u, rel=1e-12)


def mean_by_quadrature(y, alpha, extra=0.0):
    """E[s] of the tempered posterior of ``positive`` times s^extra, in s itself: no Jacobian anywhere."""

    def weight(s, k):
        return s ** (k + extra) * np.exp(positive_density(s, y, alpha))

    mass, first = (
        integrate.quad(weight, 1e-9, 12.0, args=(k,), limit=400)[0] for k in (0, 1)
    )
    return first / mass


def mean_under_potential(model, y):
    """E[s] under exp(-potential) on the log scale, which is what NUTS samples."""
    grid = np.linspace(-14.0, 4.0, 4001)
    energy = np.asarray(
        jax.jit(jax.vmap(lambda u: potential(model, {"s": u}, y)))(grid)
    )
    return np.sum(special.softmax(-energy) * np.exp(grid))


# E[s] at alpha = 0.1 of the tempered posterior, and of the one weighed by s^(alpha - 1) on top, which is
# what a handler samples that tempers the Jacobian.
KNOWN_Y = np.array([1.4, -0.8, 0.6, 2.0, -1.0, 0.4])
KNOWN_MEAN, KNOWN_NAIVE = 1.132, 0.949


def test_known_answer_of_the_half_normal(x64):
    exact = mean_by_quadrature(KNOWN_Y, 0.1)
    wrong = mean_by_quadrature(KNOWN_Y, 0.1, extra=-0.9)
    assert exact == pytest.approx(KNOWN_MEAN, abs=5e-4)
    assert wrong == pytest.approx(KNOWN_NAIVE, abs=5e-4)
    assert mean_under_potential(
        nt.temper(positive, alpha=0.1), KNOWN_Y
    ) == pytest.approx(exact, rel=1e-7)
    # The grid ends at 1e-6, where the wrong density has not quite vanished.
    assert mean_under_potential(naive_temper(positive, 0.1), KNOWN_Y) == pytest.approx(
        wrong, rel=1e-4
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "chain_method", ["vectorized", pytest.param("sequential", marks=pytest.mark.slow)]
)
def test_nuts_samples_the_tempered_posterior(chain_method):
    mcmc = MCMC(
        NUTS(nt.temper(positive, alpha=0.1)),
        num_warmup=400,
        num_samples=1000,
        num_chains=4,
        chain_method=chain_method,
        progress_bar=False,
        jit_model_args=chain_method == "vectorized",
    )
    mcmc.run(jax.random.key(3), jnp.asarray(KNOWN_Y))
    s = np.asarray(mcmc.get_samples(group_by_chain=True)["s"], float)
    se = s.std() / np.sqrt(effective_sample_size(s))
    assert abs(s.mean() - mean_by_quadrature(KNOWN_Y, 0.1)) < 5 * se
    # Tempering the Jacobian would be seen at this length of run.
    assert abs(s.mean() - KNOWN_NAIVE) > 5 * se


def test_svi_and_nuts_have_one_target(x64):
    """The ELBO of a guide on the log scale, by quadrature over NUTS's potential and by SVI's own estimate."""
    model = nt.temper(positive, alpha=0.1)
    guide = AutoNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(0.1), Trace_ELBO(num_particles=20000))
    z, w = np.polynomial.hermite_e.hermegauss(60)

    @jax.jit
    def run(loc, scale):
        state = svi.init(jax.random.key(0), KNOWN_Y)
        params = {**svi.get_params(state), "s_auto_loc": loc, "s_auto_scale": scale}
        loss = svi.loss.loss(jax.random.key(1), params, model, guide, KNOWN_Y)
        energies = (
            jax.vmap(lambda u, target=target: potential(target, {"s": u}, KNOWN_Y))(
                loc + scale * z
            )
            for target in (model, naive_temper(positive, 0.1))
        )
        return loss, *energies

    loss, energy, naive = map(np.asarray, run(0.2, 0.5))
    exact = w @ energy / w.sum() - (0.5 * np.log(2 * np.pi * np.e) + np.log(0.5))
    terms = energy - 0.5 * z**2
    se = np.sqrt((w @ terms**2 / w.sum() - (w @ terms / w.sum()) ** 2) / 20000)
    assert abs(float(loss) - exact) < 5 * se
    assert abs(w @ (naive - energy) / w.sum()) > 10 * se
