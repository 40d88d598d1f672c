"""Reparameterisers: every term that they emit is prior, inside of temper and outside of it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import reparam
from numpyro.infer.autoguide import AutoDiagonalNormal
from scipy import stats
from tempered_models import (
    naive_temper,
    positive,
    positive_density,
    potential,
    trace_of,
)

import numpyro_tempered as nt

ALPHA = 0.1


def log_lik(x, y, scale=0.7):
    return float(np.sum(stats.norm.logpdf(y, x, scale)))


def observe(x, y):
    numpyro.sample("y", dist.Normal(x, 0.7), obs=y)


def location(y):
    observe(numpyro.sample("x", dist.Normal(0.5, 2.0)), y)


def student(y):
    observe(numpyro.sample("x", dist.StudentT(3.0, 0.5, 2.0)), y)


def transformed(y):
    base = dist.TransformedDistribution(
        dist.Normal(0.0, 1.0), dist.transforms.AffineTransform(0.5, 2.0)
    )
    observe(
        numpyro.sample(
            "x", dist.TransformedDistribution(base, dist.transforms.ExpTransform())
        ),
        y,
    )


def angle(y):
    observe(jnp.sin(numpyro.sample("x", dist.VonMises(0.5, 2.0))), y)


def direction(y):
    x = numpyro.sample("x", dist.ProjectedNormal(jnp.array([0.5, -0.2])))
    observe(x[0], y)


def gamma(y):
    observe(numpyro.sample("x", dist.Gamma(2.0, 1.5)), y)


def pair(y):
    observe(numpyro.sample("x", dist.Normal(0.5, 2.0).expand([2]).to_event(1)).sum(), y)


def positive_pair(y):
    observe(numpyro.sample("x", dist.Gamma(2.0, 1.5).expand([2]).to_event(1)).sum(), y)


def rotation(z):
    """The orthonormal transform of a pair: sum and difference over sqrt(2), up to signs."""
    return np.array([z[0] + z[1], z[0] - z[1]]) / np.sqrt(2.0)


def softplus(u):
    return np.logaddexp(0.0, u)


# Model, reparameteriser, its latent, its unconstrained value u, and at alpha: log prior of u and log-likelihood.
def loc_scale(centered):
    x = 0.5 + 2.0 ** (1 - centered) * (0.3 - centered * 0.5)
    prior = stats.norm.logpdf(0.3, 0.5 * centered, 2.0**centered)
    return (
        location,
        reparam.LocScaleReparam(centered),
        "x_decentered",
        0.3,
        prior,
        log_lik(x, 0.4),
    )


def explicit(model, transform, u, x, log_prior):
    return (
        model,
        reparam.ExplicitReparam(transform),
        "x_base",
        u,
        log_prior,
        log_lik(x, 0.4),
    )


CASES = {
    "LocScale 0": lambda: loc_scale(0.0),
    "LocScale 0.4": lambda: loc_scale(0.4),
    "LocScale 1": lambda: (
        location,
        reparam.LocScaleReparam(1.0),
        "x",
        0.3,
        stats.norm.logpdf(0.3, 0.5, 2.0),
        log_lik(0.3, 0.4),
    ),
    "LocScale of Student": lambda: (
        student,
        reparam.LocScaleReparam(0.0, shape_params=["df"]),
        "x_decentered",
        0.3,
        stats.t.logpdf(0.3, 3.0),
        log_lik(1.1, 0.4),
    ),
    "Transform": lambda: (
        transformed,
        reparam.TransformReparam(),
        "x_base",
        0.3,
        stats.norm.logpdf(0.3),
        log_lik(np.exp(1.1), 0.4),
    ),
    "Circular": lambda: (
        angle,
        reparam.CircularReparam(),
        "x_unwrapped",
        0.9,
        # NumPyro's Bessel function is a polynomial of single precision.
        stats.vonmises.logpdf(0.9, 2.0, loc=0.5),
        log_lik(np.sin(0.9), 0.4),
    ),
    "Circular, wrapped": lambda: (
        angle,
        reparam.CircularReparam(),
        "x_unwrapped",
        0.9 + 4 * np.pi,
        stats.vonmises.logpdf(0.9, 2.0, loc=0.5),
        log_lik(np.sin(0.9), 0.4),
    ),
    "ProjectedNormal": lambda: (
        direction,
        reparam.ProjectedNormalReparam(),
        "x_normal",
        np.array([0.3, 1.2]),
        stats.norm.logpdf([0.3, 1.2]).sum(),
        log_lik(0.8 / np.hypot(0.8, 1.0), 0.4),
    ),
    "Explicit": lambda: explicit(
        gamma,
        dist.transforms.SoftplusTransform().inv,
        0.3,
        softplus(0.3),
        stats.gamma.logpdf(softplus(0.3), 2.0, scale=1 / 1.5) - softplus(-0.3),
    ),
    "Explicit, composed": lambda: explicit(
        location,
        [dist.transforms.AffineTransform(1.0, 2.0)],
        0.3,
        -0.35,
        stats.norm.logpdf(-0.35, 0.5, 2.0) - np.log(2.0),
    ),
}
# The first releases of NumPyro that are supported have no orthonormal ones.
if hasattr(reparam, "HaarReparam"):
    Z = np.array([0.3, -0.8])
    for name in ("Haar", "DiscreteCosine"):
        suffix = {"Haar": "haar", "DiscreteCosine": "dct"}[name]
        CASES[name] = lambda name=name, suffix=suffix: (
            pair,
            getattr(reparam, f"{name}Reparam")(),
            f"x_{suffix}",
            Z,
            stats.norm.logpdf(rotation(Z), 0.5, 2.0).sum(),
            log_lik(np.sqrt(2.0) * Z[0], 0.4),
        )
    CASES["Haar of positive"] = lambda: (
        positive_pair,
        reparam.HaarReparam(),
        "x_haar",
        Z,
        (
            stats.gamma.logpdf(np.exp(rotation(Z)), 2.0, scale=1 / 1.5) + rotation(Z)
        ).sum(),
        log_lik(np.exp(rotation(Z)).sum(), 0.4),
    )


def inside(model, config, alpha):
    return nt.temper(handlers.reparam(model, config=config), alpha=alpha)


def outside(model, config, alpha):
    return handlers.reparam(nt.temper(model, alpha=alpha), config=config)


def context(model, config, alpha):
    def run(y):
        with handlers.reparam(config=config), nt.temper(alpha=alpha):
            model(y)

    return run


def strict(model, config, alpha):
    return handlers.reparam(nt.temper(model, alpha=alpha, strict=True), config=config)


WRAPS = [inside, outside, context, strict]


@pytest.mark.parametrize(
    ("case", "wrap"),
    tiered(
        itertools.product(CASES, WRAPS),
        unit=zip(CASES, itertools.cycle(WRAPS), strict=False),
    ),
)
def test_reparameterisation_is_prior(case, wrap, x64):
    model, kind, name, u, log_prior, log_likelihood = CASES[case]()
    got = jax.jit(lambda u: potential(wrap(model, {"x": kind}, ALPHA), {name: u}, 0.4))(
        u
    )
    tolerance = 1e-6 if "Circular" in case else 1e-12
    assert got == pytest.approx(-(log_prior + ALPHA * log_likelihood), rel=tolerance)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("case", tiered(["Circular", "Explicit"], unit=["Explicit"]))
def test_the_ends_of_the_path(case, alpha, x64):
    model, kind, name, u, log_prior, log_likelihood = CASES[case]()
    for wrap in (inside, outside):
        got = potential(wrap(model, {"x": kind}, alpha), {name: jnp.asarray(u)}, 0.4)
        assert got == pytest.approx(-(log_prior + alpha * log_likelihood), rel=1e-6)


def test_the_naive_handler_tempers_the_circular_prior(x64):
    model, kind, name, u, log_prior, log_likelihood = CASES["Circular"]()
    naive = naive_temper(handlers.reparam(model, config={"x": kind}), ALPHA)
    want = -(log_prior + ALPHA * log_likelihood)
    assert abs(potential(naive, {name: jnp.asarray(u)}, 0.4) - want) > 0.3


def test_a_mapping_need_not_name_what_reparameterisers_emit(x64):
    model, kind, name, u, log_prior, log_likelihood = CASES["Circular"]()
    for wrap in (inside, outside):
        got = potential(
            wrap(model, {"x": kind}, {"y": ALPHA}), {name: jnp.asarray(u)}, 0.4
        )
        assert got == pytest.approx(-(log_prior + ALPHA * log_likelihood), rel=1e-6)


def test_neutra_is_prior(key, x64):
    z, y = 0.6, np.array([1.3])
    params = {"auto_loc": np.array([0.2]), "auto_scale": np.array([0.5])}
    u = 0.2 + 0.5 * z
    want = -(positive_density(np.exp(u), y, ALPHA) + u + np.log(0.5))

    @jax.jit
    def run(params, latent):
        guide = AutoDiagonalNormal(positive)
        handlers.seed(guide, key)(y)

        def transport(model):
            return reparam.NeuTraReparam(guide, params).reparam(model)

        models = (
            transport(nt.temper(positive, alpha=ALPHA)),
            nt.temper(transport(positive), alpha=ALPHA),
            naive_temper(transport(positive), ALPHA),
        )
        return [potential(model, {"auto_shared_latent": latent}, y) for model in models]

    inside, outside, naive = run(params, np.array([z]))
    for got in (inside, outside):
        assert got == pytest.approx(want, rel=1e-12)
    assert abs(naive - want) > 0.3


def test_reparameterisers_compose(x64):
    def model(y):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        x = numpyro.sample("x", dist.Normal(0.5, s))
        phi = numpyro.sample("phi", dist.VonMises(0.5, 2.0))
        observe(x + jnp.sin(phi), y)

    config = {"x": reparam.LocScaleReparam(0.0), "phi": reparam.CircularReparam()}
    u, z, phi = 0.4, 0.3, 0.9
    x = 0.5 + np.exp(u) * z
    prior = (
        stats.halfnorm.logpdf(np.exp(u))
        + u
        + stats.norm.logpdf(z)
        + stats.vonmises.logpdf(phi, 2.0, loc=0.5)
    )
    want = -(prior + ALPHA * log_lik(x + np.sin(phi), 0.4))
    for wrap in (inside, outside, context):
        params = {"s": u, "x_decentered": z, "phi_unwrapped": phi}
        got = jax.jit(
            lambda params, wrap=wrap: potential(wrap(model, config, ALPHA), params, 0.4)
        )(params)
        assert got == pytest.approx(want, rel=1e-6)


def test_a_circular_prior_in_a_plate_and_in_a_scan(x64):
    y = jnp.array([0.4, -0.3])

    def in_plate(y):
        with numpyro.plate("n", 2):
            angle(y)

    def in_scan(y):
        scan(lambda carry, y: (angle(y), None), None, y)

    phi = np.array([0.9, -1.4])
    prior = stats.vonmises.logpdf(phi, 2.0, loc=0.5).sum()
    want = -(prior + ALPHA * log_lik(np.sin(phi), np.asarray(y)))
    config = {"x": reparam.CircularReparam()}
    for model in (
        nt.temper(handlers.reparam(in_plate, config=config), alpha=ALPHA),
        handlers.reparam(nt.temper(in_plate, alpha=ALPHA), config=config),
        nt.temper(
            lambda y: scan(
                handlers.reparam(lambda c, y: (angle(y), None), config=config), None, y
            ),
            alpha=ALPHA,
        ),
    ):
        got = jax.jit(
            lambda phi, model=model: potential(model, {"x_unwrapped": phi}, y)
        )(phi)
        assert got == pytest.approx(want, rel=1e-6)


def test_a_likelihood_factor_stays_one_beside_reparameterisers(x64):
    def model(y):
        angle(y)
        numpyro.factor("bonus", 2.0)

    config = {"x": reparam.CircularReparam()}
    for wrap in (inside, outside):
        # The unwrapped angle is improper, and cannot be drawn.
        substituted = handlers.substitute(
            wrap(model, config, ALPHA), data={"x_unwrapped": 0.9}
        )
        trace = trace_of(substituted, 0.4)
        assert trace["bonus"]["scale"] == ALPHA
        assert trace["x_factor"]["scale"] is None


def test_every_reparameteriser_of_numpyro_is_in_the_table():
    kinds = {
        kind
        for kind in vars(reparam).values()
        if isinstance(kind, type)
        and issubclass(kind, reparam.Reparam)
        and kind is not reparam.Reparam
    }
    covered = {type(CASES[case]()[1]) for case in CASES} | {reparam.NeuTraReparam}
    covered |= {base for kind in covered for base in kind.__mro__ if base in kinds}
    assert kinds == covered & kinds
