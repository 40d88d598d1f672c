"""How each NumPyro algorithm of the matrix is run on a tempered model, and what it is compared with.

``check`` gives one verdict for each power. The verdicts:

- exact: the sampler's first and second moments are those of the closed form.
- equal: the outcome is that of the same algorithm, with the same key, on the model whose likelihood is
  one ``numpyro.factor("loglik", alpha * log_likelihood)``.
- untempered: the outcome is that of the undecorated model, and it should be.
- raises: the combination cannot be right, and ``temper`` says so.
- n/a: NumPyro itself refuses the undecorated model, and the tempered one is refused too.
- WRONG: none of these.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from matrix.models import MODELS, Conjugate
from numpyro import handlers
from numpyro.contrib.einstein import RBFKernel, SteinVI
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import (
    AIES,
    ESS,
    HMC,
    HMCECS,
    MCMC,
    NUTS,
    SA,
    SVI,
    BarkerMH,
    DiscreteHMCGibbs,
    MixedHMC,
    Predictive,
    Trace_ELBO,
    init_to_sample,
    log_likelihood,
    psis_diagnostic,
)
from numpyro.infer.autoguide import (
    AutoDAIS,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.calibration import vsbc_diagnostic
from numpyro.infer.util import log_density
from numpyro.optim import Adam

try:
    from numpyro.infer import CustomGibbs, DiscreteGibbs, Gibbs
    from numpyro.infer.gibbs import discrete_latent_sites
except ImportError:  # NumPyro 0.21
    Gibbs = None

import numpyro_tempered as nt

# Monte Carlo standard errors, and relative difference.
MAX_Z, MAX_DIFFERENCE = 5.0, 1e-5
# Fewer effective draws than this are no evidence.
MIN_EFFECTIVE = 100


class Cell(NamedTuple):
    """One algorithm on one model at one power.

    Attributes:
        verdict: See the module.
        value: Largest error in standard errors (exact) or largest difference (equal, untempered).
        effective: Smallest effective sample size (exact).
        note: The message of what was raised.
    """

    verdict: str
    value: float = float("nan")
    effective: float = float("nan")
    note: str = ""


# The three forms of a model.


def plain(model: Conjugate, subsample_size: int | None = None):
    """The undecorated NumPyro model."""

    def run(y=None):
        values = model.prior()
        with numpyro.plate("n", len(model.y), subsample_size=subsample_size):
            x = (
                ()
                if model.x is None
                else (numpyro.subsample(jnp.asarray(model.x), event_dim=1),)
            )
            rows = (
                None if y is None else numpyro.subsample(y, event_dim=model.y.ndim - 1)
            )
            numpyro.sample("y", model.likelihood(*values, *x), obs=rows)

    run.data = data(model)
    return run


def tempered(model: Conjugate, alpha):
    """The model under test."""
    return nt.temper(plain(model), alpha=alpha)


def written_out(model: Conjugate, alpha):
    """The tempered model by hand: the same latent sites, and the likelihood as one factor."""

    def run(y=None):
        values = model.prior()
        x = () if model.x is None else (jnp.asarray(model.x),)
        likelihood = model.likelihood(*values, *x)
        if y is None:
            with numpyro.plate("n", len(model.y)):
                numpyro.sample("y", likelihood)
        else:
            numpyro.factor("loglik", alpha * likelihood.log_prob(y).sum())

    return run


def data(model: Conjugate):
    return jnp.asarray(model.y)


# Samplers.


class Sampler(NamedTuple):
    """A kernel, from a model, and how long to run it."""

    kernel: Callable[[Any], Any]
    num_chains: int
    num_warmup: int
    num_samples: int
    ensemble: bool = False


SAMPLERS = {
    "NUTS": Sampler(NUTS, 4, 200, 600),
    "HMC": Sampler(partial(HMC, trajectory_length=1.5), 4, 200, 800),
    "BarkerMH": Sampler(partial(BarkerMH, step_size=0.1), 4, 1000, 4000),
    "SA": Sampler(SA, 4, 5000, 20_000),
    "DiscreteHMCGibbs": Sampler(
        lambda model: DiscreteHMCGibbs(NUTS(model)), 4, 200, 1500
    ),
    "MixedHMC": Sampler(
        lambda model: MixedHMC(HMC(model, trajectory_length=1.5)), 4, 200, 3000
    ),
    # From draws of the prior: a walker that starts far away is slow to come home.
    "AIES": Sampler(partial(AIES, init_strategy=init_to_sample), 24, 300, 1000, True),
    "ESS": Sampler(partial(ESS, init_strategy=init_to_sample), 24, 200, 800, True),
}


def discrete_and_nuts(model):
    """Blocks of NumPyro's own for the discrete latent and for the others."""
    return Gibbs([(DiscreteGibbs(model), discrete_latent_sites), (NUTS(model), None)])


def custom_and_nuts(model):
    """The conditional of the discrete latent, one of three values, by hand: from the densities of all of them."""
    y = getattr(model, "fn", model).data

    def conditional(rng_key, gibbs_sites, hmc_sites):
        ((name, value),) = gibbs_sites.items()
        logits = [
            log_density(model, (y,), {}, {**hmc_sites, name: jnp.array(k)})[0]
            for k in range(3)
        ]
        return {
            name: jax.random.categorical(rng_key, jnp.stack(logits)).astype(value.dtype)
        }

    return Gibbs(
        [(CustomGibbs(conditional), discrete_latent_sites), (NUTS(model), None)]
    )


if Gibbs is not None:
    SAMPLERS |= {
        "Gibbs, DiscreteGibbs": Sampler(discrete_and_nuts, 4, 200, 1500),
        "Gibbs, CustomGibbs": Sampler(custom_and_nuts, 4, 200, 1500),
    }


def by_chain(name: str, model: Conjugate) -> bool:
    """Whether a sampler's chain is compared with that of the model written out, instead of its moments.

    NumPyro's SA proposes from a Gaussian fitted to its states. In more than one dimension it mixes more slowly
    than its autocorrelation tells, and misses the closed form of the undecorated model too.
    """
    return name == "SA" and model.num_latents > 1


def draw(sampler: Sampler, target, model: Conjugate, alphas, rng_key):
    """Draws by parameter, shape ``(alphas, draws, chains, ...)``: what MCMC does, as one program."""
    args = (data(model),)

    def at(alpha, key):
        kernel = sampler.kernel(target(model, alpha))

        def chain(key):
            state = kernel.init(key, sampler.num_warmup, None, args, {})
            step = lambda state, _: (kernel.sample(state, args, {}), state.z)  # noqa: E731
            _, z = jax.lax.scan(
                step, state, length=sampler.num_warmup + sampler.num_samples
            )
            return jax.tree.map(lambda leaf: leaf[sampler.num_warmup :], z)

        keys = jax.random.split(key, sampler.num_chains)
        z = chain(keys) if sampler.ensemble else jax.vmap(chain, out_axes=1)(keys)
        return jax.lax.map(jax.vmap(kernel.postprocess_fn(args, {})), z)

    return over(alphas, at, jax.random.split(rng_key, len(alphas)))


def over(alphas, run, rng_keys):
    """Run at each power: one program with the power as an argument, or, for a single one, as a constant."""
    # Compilation is most of the time.
    compile_ = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    if len(alphas) == 1:
        return jax.tree.map(
            lambda x: x[None], compile_(partial(run, alphas[0]))(rng_keys[0])
        )
    return compile_(jax.vmap(run))(jnp.asarray(alphas), rng_keys)


def errors(draws, wanted):
    """Largest error of first and second moments in standard errors, and smallest effective sample size.

    The series is the mean over chains: chains of an ensemble depend on each other, their mean is a
    stationary series like that of one chain.
    """
    worst, effective = 0.0, np.inf
    for name, moments in wanted.items():
        if name not in draws:
            continue
        x = np.asarray(draws[name], np.float64)
        for power, moment in zip((1, 2), moments, strict=True):
            values = x**power
            series = values.mean(1)
            variance = series.var(0) / effective_sample_size(series[None])
            if not np.all(variance > 0):
                return np.inf, 0.0
            worst = max(
                worst, np.max(np.abs(series.mean(0) - moment) / np.sqrt(variance))
            )
            effective = min(effective, np.min(values.var((0, 1)) / variance))
    return worst, effective


def check_sampler(name: str, model_name: str, alphas, rng_key) -> list[Cell]:
    """Moments against the closed form."""
    model, sampler = MODELS[model_name], SAMPLERS[name]
    if by_chain(name, model):
        return check_chain(sampler, model, alphas, rng_key)
    draws = draw(sampler, tempered, model, alphas, rng_key)
    cells = []
    for i, alpha in enumerate(alphas):
        worst, effective = errors(
            {k: v[i] for k, v in draws.items()}, model.moments(alpha)
        )
        right = worst < MAX_Z and effective > MIN_EFFECTIVE
        cells.append(Cell("exact" if right else "WRONG", worst, effective))
    return cells


def check_chain(sampler: Sampler, model: Conjugate, alphas, rng_key) -> list[Cell]:
    """A short chain, step by step."""
    short = sampler._replace(num_chains=1, num_warmup=0, num_samples=200)
    chains = [
        draw(short, target, model, alphas, rng_key)
        for target in (tempered, written_out)
    ]
    return [
        equal(*(jax.tree.map(lambda x, i=i: x[i], chain) for chain in chains))
        for i in range(len(alphas))
    ]


def difference(a, b) -> float:
    """Largest difference of two trees, relative to the size of a leaf; infinite if their shapes differ."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return np.inf
    worst = 0.0
    for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        u, v = np.asarray(u, np.float64), np.asarray(v, np.float64)
        if u.shape != v.shape or not (np.isfinite(u).all() and np.isfinite(v).all()):
            return np.inf
        worst = max(
            worst,
            np.max(np.abs(u - v), initial=0.0)
            / max(1.0, np.max(np.abs(v), initial=0.0)),
        )
    return worst


def equal(a, b, verdict: str = "equal") -> Cell:
    value = difference(a, b)
    return Cell(verdict if value < MAX_DIFFERENCE else "WRONG", value)


# Variational inference.


def guide_list(model):
    """AutoNormal on the first latent site, AutoDiagonalNormal on the others."""
    seeded = handlers.seed(model, jax.random.key(1))
    with handlers.block():
        trace = handlers.trace(seeded).get_trace()
    latents = [k for k, site in trace.items() if site["type"] == "sample" and k != "y"]
    deterministic = [k for k, site in trace.items() if site["type"] == "deterministic"]
    guide = AutoGuideList(model)
    guide.append(AutoNormal(handlers.block(seeded, hide=latents[1:] + deterministic)))
    if latents[1:]:
        guide.append(
            AutoDiagonalNormal(
                handlers.block(seeded, hide=latents[:1] + deterministic), prefix="rest"
            )
        )
    return guide


def stein(model):
    return SteinVI(
        model,
        AutoNormal(model),
        Adam(0.05),
        RBFKernel(),
        num_stein_particles=3,
        num_elbo_particles=2,
    )


def svi(make_guide, model):
    return SVI(model, make_guide(model), Adam(0.05), Trace_ELBO())


GUIDES = {
    "AutoNormal": AutoNormal,
    "AutoDiagonalNormal": AutoDiagonalNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoLowRankMultivariateNormal": AutoLowRankMultivariateNormal,
    "AutoLaplaceApproximation": AutoLaplaceApproximation,
    "AutoIAFNormal": partial(AutoIAFNormal, num_flows=1),
    "AutoDAIS": partial(AutoDAIS, K=2),
    "AutoGuideList": guide_list,
}
VARIATIONAL = {f"SVI, {name}": partial(svi, make) for name, make in GUIDES.items()} | {
    "SteinVI": stein
}


def fit(make, target, model: Conjugate, num_steps: int, alpha, rng_key):
    """Parameters after some steps, and draws of the posterior."""
    inference = make(target(model, alpha))
    init_key, draw_key = jax.random.split(rng_key)
    y = data(model)
    state = inference.init(init_key, y)
    state, losses = jax.lax.scan(
        lambda state, _: inference.update(state, y), state, length=num_steps
    )
    params = inference.get_params(state)
    if isinstance(inference, SteinVI):
        return params, losses
    return (
        params,
        losses,
        inference.guide.sample_posterior(draw_key, params, y, sample_shape=(5,)),
    )


def check_variational(name: str, model_name: str, alphas, rng_key) -> list[Cell]:
    """The fit against that of the model written out."""
    model = MODELS[model_name]
    keys = jnp.stack([rng_key] * len(alphas))
    fits = [
        over(alphas, partial(fit, VARIATIONAL[name], target, model, 60), keys)
        for target in (tempered, written_out)
    ]
    return [
        equal(*(jax.tree.map(lambda x, i=i: x[i], f) for f in fits))
        for i in range(len(alphas))
    ]


# Diagnostics and predictions, with one concrete power after the other.


def prior_draws(model: Conjugate, rng_key):
    draws = Predictive(plain(model), num_samples=20)(rng_key)
    return {k: v for k, v in draws.items() if k not in ("y", "covariance")}


def check_predictive(name: str, model_name: str, alphas, rng_key) -> list[Cell]:
    """Draws of prior and posterior predictive against those of the undecorated model."""
    model = MODELS[model_name]
    draws = prior_draws(model, rng_key)

    def run(target):
        prior = Predictive(target, num_samples=20)(rng_key)
        return prior, Predictive(target, posterior_samples=draws)(rng_key)

    want = run(plain(model))
    return [equal(run(tempered(model, alpha)), want, "untempered") for alpha in alphas]


def check_log_likelihood(name: str, model_name: str, alphas, rng_key) -> list[Cell]:
    """Pointwise log-likelihoods against those of the undecorated model."""
    model = MODELS[model_name]
    draws = prior_draws(model, rng_key)
    want = log_likelihood(plain(model), draws, data(model))
    return [
        equal(
            log_likelihood(tempered(model, alpha), draws, data(model)),
            want,
            "untempered",
        )
        for alpha in alphas
    ]


def check_psis(name: str, model_name: str, alphas, rng_key) -> list[Cell]:
    """The shape of the tail of the importance weights, against the model written out."""
    model = MODELS[model_name]

    def run(target):
        inference = svi(partial(AutoNormal, init_scale=0.5), target)
        params = inference.get_params(inference.init(rng_key, data(model)))
        return psis_diagnostic(
            rng_key, params, target, inference.guide, data(model), num_particles=400
        )

    return [
        equal(run(tempered(model, alpha)), run(written_out(model, alpha)))
        for alpha in alphas
    ]


def vsbc(target, rng_key, **kwargs):
    result = vsbc_diagnostic(
        rng_key,
        target,
        AutoNormal(target),
        Adam(0.05),
        Trace_ELBO(),
        observed_sites=["y"],
        num_simulations=4,
        num_svi_steps=50,
        num_samples=100,
        **kwargs,
    )
    return result.ranks


def check_vsbc(name: str, model_name: str, alphas, rng_key) -> list[Cell]:
    """Ranks against the model written out: NumPyro passes its data as the argument ``y``."""
    model = MODELS[model_name]
    return [
        equal(
            vsbc(tempered(model, alpha), rng_key),
            vsbc(written_out(model, alpha), rng_key),
        )
        for alpha in alphas
    ]


def by_condition(sim_data, *args, **kwargs):
    """Leaves the simulated data to ``handlers.condition``."""
    return args, kwargs


def check_vsbc_by_condition(name: str, model_name: str, alphas, rng_key) -> list[Cell]:
    """Data observed outside of the model are out of reach of ``temper``, which raises."""
    model = plain(MODELS[model_name])
    return [
        raised(
            lambda alpha=alpha: vsbc(
                nt.temper(model, alpha=alpha),
                rng_key,
                simulated_data_to_args=by_condition,
            ),
            "outside of temper",
        )
        if alpha != 1.0
        else equal(
            vsbc(
                nt.temper(model, alpha=alpha),
                rng_key,
                simulated_data_to_args=by_condition,
            ),
            vsbc(model, rng_key, simulated_data_to_args=by_condition),
            "untempered",
        )
        for alpha in alphas
    ]


def check_hmcecs(name: str, model_name: str, alphas, rng_key) -> list[Cell]:
    """HMCECS estimates the likelihood without scales: refused, unless there is no power to lose."""
    model = plain(MODELS[model_name], subsample_size=2)

    def run(target):
        mcmc = MCMC(
            HMCECS(NUTS(target)), num_warmup=2, num_samples=5, progress_bar=False
        )
        mcmc.run(rng_key, data(MODELS[model_name]))
        return mcmc.get_samples()

    return [
        equal(run(nt.temper(model, alpha=1.0)), run(model), "untempered")
        if alpha == 1.0
        else raised(lambda alpha=alpha: run(nt.temper(model, alpha=alpha)), "HMCECS")
        for alpha in alphas
    ]


def raised(run, word: str) -> Cell:
    """Whether ``temper`` raises, with a message that names the reason."""
    try:
        run()
    except ValueError as error:
        if word in str(error) and "temper" in str(error):
            return Cell("raises", note=str(error))
        return Cell("WRONG", note=repr(error))
    return Cell("WRONG", note="does not raise")


CHECKS = (
    dict.fromkeys(SAMPLERS, check_sampler)
    | dict.fromkeys(VARIATIONAL, check_variational)
    | {
        "Predictive": check_predictive,
        "log_likelihood": check_log_likelihood,
        "psis_diagnostic": check_psis,
        "vsbc_diagnostic": check_vsbc,
        "vsbc_diagnostic, by condition": check_vsbc_by_condition,
        "HMCECS": check_hmcecs,
    }
)


# What the table has to say.


def expected(name: str, model_name: str, alpha: float) -> str:
    """The verdict that is right."""
    model = MODELS[model_name]
    counts = np.issubdtype(model.y.dtype, np.integer)
    if name == "HMCECS":
        return "raises" if alpha != 1.0 else "untempered"
    if name in ("Predictive", "log_likelihood"):
        return "untempered"
    if name in (
        "DiscreteHMCGibbs",
        "MixedHMC",
        "Gibbs, DiscreteGibbs",
        "Gibbs, CustomGibbs",
    ):
        return "exact" if model.discrete else "n/a"
    if name in SAMPLERS:
        return "equal" if by_chain(name, model) else "exact"
    if model.discrete or (name == "SVI, AutoIAFNormal" and model.num_latents == 1):
        return "n/a"
    if name == "vsbc_diagnostic, by condition":
        # A guide that meets the model without its data takes them for latents.
        return "n/a" if counts else "raises" if alpha != 1.0 else "untempered"
    return "equal"


def refusal(name: str, model_name: str, target, rng_key) -> tuple[type, str] | None:
    """Type and message of what NumPyro raises on a model before it runs; None if it does not."""
    y = data(MODELS[model_name])
    try:
        if name in SAMPLERS:
            SAMPLERS[name].kernel(target).init(rng_key, 1, None, (y,), {})
        elif name in VARIATIONAL:
            VARIATIONAL[name](target).init(rng_key, y)
        elif name == "psis_diagnostic":
            svi(AutoNormal, target).init(rng_key, y)
        elif name == "vsbc_diagnostic":
            vsbc(target, rng_key)
        else:
            vsbc(target, rng_key, simulated_data_to_args=by_condition)
    except Exception as error:  # whatever NumPyro raises, in its own words
        return type(error), str(error)
    return None


def check_refusal(name: str, model_name: str, alphas, rng_key) -> list[Cell]:
    """NumPyro refuses the undecorated model, and the tempered one in the same words or in those of temper."""
    model = MODELS[model_name]
    want = refusal(name, model_name, plain(model), rng_key)
    cells = []
    for alpha in alphas:
        got = refusal(name, model_name, tempered(model, alpha), rng_key)
        right = (
            want is not None and got is not None and (got == want or "temper" in got[1])
        )
        cells.append(
            Cell("n/a" if right else "WRONG", note=f"{got}, undecorated {want}")
        )
    return cells


def check(name: str, model_name: str, alphas, rng_key) -> list[Cell]:
    """Verdicts of one algorithm on one model, one for each power.

    Args:
        name: Key of ``CHECKS``.
        model_name: Key of ``MODELS``.
        alphas: Powers; a single one is a constant of the program, several are traced.
        rng_key: Key, of the older type: ``vsbc_diagnostic`` reshapes its keys.
    """
    with warnings.catch_warnings():
        # Of NumPyro, on enumeration and on the step size of a mode.
        warnings.simplefilter("ignore")
        if expected(name, model_name, alphas[0]) == "n/a":
            return check_refusal(name, model_name, alphas, rng_key)
        return CHECKS[name](name, model_name, alphas, rng_key)
