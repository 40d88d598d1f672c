"""For models drawn at random: the tempered density is the prior plus alpha times the likelihood, site by site."""

import contextlib

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import HealthCheck, given, settings
from numpyro import handlers
from tempered_models import density, potential

import numpyro_tempered as nt

PRIORS = {
    "real": lambda: dist.Normal(0.5, 2.0),
    "positive": lambda: dist.Gamma(2.0, 1.0),
    "unit": lambda: dist.Beta(2.0, 2.0),
    "vector": lambda: dist.Normal(0.0, 1.0).expand([3]).to_event(1),
    "simplex": lambda: dist.Dirichlet(jnp.ones(3)),
    "transformed": lambda: dist.LogNormal(0.0, 0.5),
}
LIKELIHOODS = {
    "normal": (lambda eta: dist.Normal(eta, 1.2), np.array([0.3, -1.0, 2.0, 0.7])),
    "poisson": (lambda eta: dist.Poisson(jnp.exp(eta)), np.array([0, 3, 1, 2])),
    "bernoulli": (lambda eta: dist.Bernoulli(logits=eta), np.array([0, 1, 1, 0])),
    "student": (
        lambda eta: dist.StudentT(4.0, eta, 1.0),
        np.array([0.3, -1.0, 9.0, 0.7]),
    ),
    "exponential": (
        lambda eta: dist.Exponential(jnp.exp(eta)),
        np.array([0.3, 1.0, 2.0, 0.7]),
    ),
}
WRAPPERS = ["bare", "plate", "subsample", "mask", "scale", "scope"]

models = st.fixed_dictionaries(
    {
        "priors": st.lists(st.sampled_from(sorted(PRIORS)), min_size=1, max_size=3),
        "likelihoods": st.lists(
            st.tuples(st.sampled_from(sorted(LIKELIHOODS)), st.sampled_from(WRAPPERS)),
            min_size=1,
            max_size=3,
        ),
        "factors": st.integers(0, 2),
        "seed": st.integers(0, 2**16),
    }
)
powers = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5])


@contextlib.contextmanager
def around(wrapper, i):
    with contextlib.ExitStack() as stack:
        if wrapper == "plate":
            stack.enter_context(numpyro.plate(f"plate_{i}", 4))
        elif wrapper == "subsample":
            stack.enter_context(numpyro.plate(f"plate_{i}", 10, subsample_size=4))
        elif wrapper == "mask":
            stack.enter_context(handlers.mask(mask=np.array([True, False, True, True])))
        elif wrapper == "scale":
            stack.enter_context(handlers.scale(scale=1.7))
        elif wrapper == "scope":
            stack.enter_context(handlers.scope(prefix="in"))
        yield


def build(spec):
    def model():
        eta = 0.0
        for i, name in enumerate(spec["priors"]):
            eta = eta + jnp.sum(numpyro.sample(f"theta_{i}", PRIORS[name]())) / 2
        for i in range(spec["factors"]):
            numpyro.factor(f"factor_{i}", (-1.0) ** i * eta)
        for i, (name, wrapper) in enumerate(spec["likelihoods"]):
            make, data = LIKELIHOODS[name]
            with around(wrapper, i):
                numpyro.sample(f"y_{i}", make(eta), obs=data)

    return handlers.seed(model, spec["seed"])


def parts_of(model, latents):
    """Log-density of each site of the undecorated model."""
    trace = handlers.trace(handlers.substitute(model, data=latents)).get_trace()
    parts = {"prior": 0.0}
    for name, site in trace.items():
        if site["type"] != "sample":
            continue
        scale = 1.0 if site["scale"] is None else site["scale"]
        value = float(jnp.sum(scale * site["fn"].log_prob(site["value"])))
        if site["is_observed"]:
            parts[name] = value
        else:
            parts["prior"] += value
    return parts


def check(spec, alpha, outer, policy, data, thorough):
    model = build(spec)
    trace = handlers.trace(model).get_trace()
    latents = {
        n: s["value"]
        for n, s in trace.items()
        if s["type"] == "sample" and not s["is_observed"]
    }
    parts = parts_of(model, latents)
    prior = parts.pop("prior")
    likelihood = {name for name in parts if policy or not name.startswith("factor")}
    rest = sum(value for name, value in parts.items() if name not in likelihood)

    def want(power):
        return prior + rest + sum(power(name) * parts[name] for name in likelihood)

    tempered = nt.temper(model, alpha=alpha, factors=policy)
    assert density(tempered, latents) == pytest.approx(
        want(lambda name: alpha), rel=1e-10, abs=1e-10
    )

    by_site = {name: data.draw(powers, label=name) for name in sorted(likelihood)}
    if by_site:
        mapped = nt.temper(model, by_site, factors=policy)
        assert density(mapped, latents) == pytest.approx(
            want(by_site.get), rel=1e-10, abs=1e-10
        )

    # The potential differs from the undecorated one by the likelihood alone: Jacobians cancel.
    unconstrained = numpyro.infer.util.unconstrain_fn(model, (), {}, latents)
    difference = potential(model, unconstrained) - potential(tempered, unconstrained)
    expected = sum((alpha - 1.0) * parts[name] for name in likelihood)
    assert difference == pytest.approx(expected, rel=1e-9, abs=1e-9)

    if thorough:
        nested = nt.temper(tempered, alpha=outer, factors=policy)
        assert density(nested, latents) == pytest.approx(
            want(lambda name: alpha * outer), rel=1e-10, abs=1e-10
        )
        traced = jax.jit(
            lambda a: density(nt.temper(model, alpha=a, factors=policy), latents)
        )(alpha)
        assert traced == pytest.approx(want(lambda name: alpha), rel=1e-10, abs=1e-10)


SETTINGS = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}
DRAWN = {
    "spec": models,
    "alpha": powers,
    "outer": powers,
    "policy": st.booleans(),
    "data": st.data(),
}


@pytest.mark.full
@settings(max_examples=3, **SETTINGS)
@given(**DRAWN)
def test_log_density_is_prior_plus_powers_times_likelihood(
    x64, spec, alpha, outer, policy, data
):
    check(spec, alpha, outer, policy, data, thorough=False)


@pytest.mark.slow
@settings(max_examples=60, **SETTINGS)
@given(**DRAWN)
def test_many_random_models(x64, spec, alpha, outer, policy, data):
    check(spec, alpha, outer, policy, data, thorough=True)
