"""Latents of a plate whose elements are mixed: enumeration would sum another model, and is refused."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs
from numpyro.infer.util import initialize_model
from scipy import stats
from tempered_models import density, trace_of

import numpyro_tempered as nt
from numpyro_tempered.handlers.mixing import _may_mix

pytest.importorskip("funsor")

Y = np.array([0.3, -1.2, 2.5, 0.8, 0.1])
GIVEN = {"b": 0.5}


def model_of(function, prior=None):
    def model(y):
        b = numpyro.sample("b", dist.Normal())
        with numpyro.plate("n", len(y)):
            z = numpyro.sample("z", dist.Bernoulli(0.4) if prior is None else prior)
            numpyro.sample("y", dist.Normal(b * function(z), 1.0), obs=y)

    return model


MIXED = {
    "mean": lambda z: z - z.mean(-1, keepdims=True),
    "cumsum": lambda z: jnp.cumsum(z, -1),
    "reversed": lambda z: z[..., ::-1],
    "previous": lambda z: jnp.concatenate([z[..., :1], z[..., :-1]], -1),
    "first": lambda z: z + z[..., :1],
    "matrix": lambda z: z @ jnp.eye(5)[::-1],
    "one pair": lambda z: z.at[..., 3].set(z[..., 1]),
}
OWN = {
    "itself": lambda z: z,
    "by index": lambda z: jnp.array([0.0, 2.0])[z],
    "chosen": lambda z: jnp.where(z == 1, 2.0, -1.0),
    "event dimension": lambda z: (z[..., None] * jnp.ones(3)).sum(-1),
    "softmax": lambda z: jax.nn.softmax(jnp.stack([z, 1.0 - z], -1), -1)[..., 0],
}


@pytest.mark.parametrize("name", tiered(MIXED, unit=["mean", "cumsum", "one pair"]))
@pytest.mark.parametrize("is_traced", [False, True])
def test_mixed_elements_are_refused(name, is_traced):
    model = nt.marginalize(model_of(MIXED[name]))
    run = (
        jax.jit(lambda y: density(model, GIVEN, y))
        if is_traced
        else lambda y: density(model, GIVEN, y)
    )
    with pytest.raises(
        ValueError,
        match=r"site 'y' at one element of plate 'n' depends on \['z'\].*DiscreteHMCGibbs",
    ):
        run(jnp.asarray(Y))


@pytest.mark.full
@pytest.mark.parametrize("name", tiered(OWN, unit=["by index", "event dimension"]))
def test_elements_on_their_own_are_summed(name, x64):
    function = OWN[name]
    got = density(nt.marginalize(model_of(function)), GIVEN, jnp.asarray(Y))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eta = np.array([np.asarray(function(jnp.full(5, k))) for k in (0, 1)])
    log_lik = np.log(np.array([0.6, 0.4]) @ stats.norm.pdf(Y, 0.5 * eta)).sum()
    assert got == pytest.approx(stats.norm.logpdf(0.5) + log_lik, rel=1e-6)


def test_mixing_of_other_values_than_the_first_is_seen():
    model = model_of(
        lambda z: (z == 3).sum(-1, keepdims=True) + z,
        dist.Categorical(jnp.full(4, 0.25)),
    )
    with pytest.raises(
        ValueError,
        match=r"^the log-probability.*at other elements.*the latents by DiscreteHMCGibbs",
    ):
        density(nt.marginalize(model), GIVEN, jnp.asarray(Y))


@pytest.mark.parametrize(
    ("function", "may_mix"),
    [
        (lambda z: jnp.exp(-jnp.sqrt(z)) * 2.0, False),
        (jnp.sum, True),
        (jax.jit(lambda z: z * 2.0), False),
        (lambda z: jax.jit(jnp.cumsum)(z)[0], True),
        (lambda z: z + jax.jit(jnp.sum)(jnp.arange(3.0)), False),
        (lambda z: jax.jit(lambda a, b: a + jnp.sum(b))(z, jnp.arange(3.0)), False),
        (lambda z: jax.jit(lambda a, b: a + jnp.sum(b))(jnp.arange(3.0), z), True),
        (lambda z: jnp.arange(9.0)[z.astype(int)], False),
        (lambda z: z[jnp.array([2, 0, 1])], True),
        (lambda z: z[:, None] * jnp.ones((1, 2)), False),
        (lambda z: jnp.reshape(z, (3, 1)), False),
        (lambda z: jnp.reshape(jnp.broadcast_to(z, (2, 3)), (3, 2)), True),
    ],
)
def test_what_works_by_element_is_not_looked_at_further(function, may_mix):
    jaxpr = jax.make_jaxpr(function)(jnp.ones(3)).jaxpr
    assert _may_mix(jaxpr, jaxpr.invars) == may_mix


def test_elements_that_change_places_in_a_table_are_mixed():
    def turned(z):
        table = jnp.reshape(z, (*z.shape[:-1], 2, 2))
        return jnp.reshape(jnp.swapaxes(table, -1, -2), z.shape)

    with pytest.raises(
        ValueError,
        match=r"at one element of plate 'n' depends on \['z'\].*DiscreteHMCGibbs",
    ):
        density(nt.marginalize(model_of(turned)), GIVEN, jnp.asarray(Y[:4]))


def test_a_latent_that_depends_on_another_plate_element_is_refused():
    def model(y):
        with numpyro.plate("n", len(y)):
            z = numpyro.sample("z", dist.Bernoulli(0.4))
            w = numpyro.sample("w", dist.Bernoulli(0.2 + 0.5 * jnp.roll(z, 1, -1)))
            numpyro.sample("y", dist.Normal(w, 1.0), obs=y)

    with pytest.raises(
        ValueError,
        match=r"site 'w' at one element of plate 'n'.*latents by DiscreteHMCGibbs",
    ):
        density(nt.marginalize(model), {}, jnp.asarray(Y))


@pytest.mark.full
def test_each_plate_is_looked_at_along_itself():
    def model(y, axis):
        with numpyro.plate("rows", 2, dim=-2), numpyro.plate("columns", 3):
            z = numpyro.sample("z", dist.Bernoulli(0.4))
            eta = z if axis is None else z - z.mean(axis, keepdims=True)
            numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)

    y = jnp.arange(6.0).reshape(2, 3)
    for axis, plate in ((-1, "columns"), (-2, "rows")):
        with pytest.raises(ValueError, match=f"of plate '{plate}'"):
            density(nt.marginalize(model), {}, y, axis)
    assert np.isfinite(density(nt.marginalize(model), {}, y, None))


# A discrete parameter in a plate.


def selection(x, y):
    with numpyro.plate("columns", x.shape[1]):
        gamma = numpyro.sample(
            "gamma", dist.Bernoulli(0.5), infer={"enumerate": "parallel"}
        )
        beta = numpyro.sample("beta", dist.Normal())
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal((x * (gamma * beta)).sum(-1), 1.0), obs=y)


X = np.array([[1.0, 0.2], [0.5, -1.0], [-0.3, 0.7], [1.2, 0.4], [0.0, -0.6]])


def set_up(model, *args):
    with warnings.catch_warnings():
        # Of NumPyro, on enumeration.
        warnings.simplefilter("ignore")
        return initialize_model(jax.random.key(0), model, model_args=args)


def test_the_refusal_of_a_plated_parameter_names_what_samples_it():
    by_enumeration = nt.temper(selection, 0.3)
    advice = r"'gamma'.*marginalize.*DiscreteHMCGibbs\(NUTS\(temper.*discrete_parameters=\['gamma'\]"
    with pytest.raises(ValueError, match=advice):
        set_up(by_enumeration, jnp.asarray(X), jnp.asarray(Y))


def groups(y, group):
    """A discrete parameter of each of two groups, which have several data each."""
    with numpyro.plate("groups", 2):
        k = numpyro.sample("k", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
        s = numpyro.sample("s", dist.HalfNormal())
        with numpyro.plate("n", 3, dim=-2):
            numpyro.sample("y", dist.Normal(2.0 * k, s), obs=y)


@pytest.mark.full
def test_a_declared_parameter_is_summed_after_the_power(x64):
    y = np.array([[0.3, -1.2], [2.5, 0.8], [0.1, 0.4]])
    tempered = nt.temper(groups, 0.3, discrete_parameters=["k"])
    u = np.array([0.4, -0.2])
    got = set_up(tempered, jnp.asarray(y), None).potential_fn({"s": jnp.asarray(u)})
    s, k = np.exp(u), np.array([0.0, 2.0])
    log_lik = stats.norm.logpdf(y[..., None], k, s[:, None]).sum(0)
    want = (
        stats.halfnorm.logpdf(s) + u + np.log(np.exp(0.3 * log_lik) @ [0.6, 0.4])
    ).sum()
    assert float(got) == pytest.approx(-want, rel=1e-12)


def test_a_declared_parameter_whose_elements_are_mixed_is_refused():
    def cumulated(y):
        with numpyro.plate("n", len(y)):
            k = numpyro.sample(
                "k", dist.Bernoulli(0.4), infer={"enumerate": "parallel"}
            )
            numpyro.sample("y", dist.Normal(jnp.cumsum(k, -1), 1.0), obs=y)

    with pytest.raises(
        ValueError, match=r"depends on \['k'\] at other elements.*DiscreteHMCGibbs"
    ):
        set_up(nt.temper(cumulated, 0.3, discrete_parameters=["k"]), jnp.asarray(Y))
    with pytest.raises(
        ValueError,
        match=r"^the model.*no sites \['kk'\], which discrete_parameters names",
    ):
        trace_of(
            nt.temper(cumulated, 0.3, discrete_parameters=["k", "kk"]), jnp.asarray(Y)
        )
    with pytest.raises(
        TypeError, match=r"discrete_parameters must be a collection.*of names, got"
    ):
        nt.temper(cumulated, 0.3, discrete_parameters="k")


@pytest.mark.slow
def test_discrete_hmc_gibbs_selects_variables(key, x64):
    """Against the sum over the four models, each of them conjugate."""
    alpha, log_weights = 0.3, {}
    for gamma in itertools.product((0, 1), repeat=2):
        columns = X * gamma
        covariance = np.eye(5) / alpha + columns @ columns.T
        log_weights[gamma] = stats.multivariate_normal.logpdf(
            Y, np.zeros(5), covariance
        )
    weights = np.exp(np.array(list(log_weights.values())) - max(log_weights.values()))
    want = (weights[:, None] * np.array(list(log_weights))).sum(0) / weights.sum()

    def plain(x, y):
        with numpyro.handlers.infer_config(config_fn=lambda site: {"enumerate": None}):
            selection(x, y)

    mcmc = MCMC(
        DiscreteHMCGibbs(NUTS(nt.temper(plain, alpha))),
        num_warmup=500,
        num_samples=20000,
        progress_bar=False,
    )
    mcmc.run(key, jnp.asarray(X), jnp.asarray(Y))
    np.testing.assert_allclose(mcmc.get_samples()["gamma"].mean(0), want, atol=0.02)
