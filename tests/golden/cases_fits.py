"""Golden cases of fits to whole data: fit_svi, fit_gaussian, descent, networks, sparse regression, PCA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.optim import Adam

import numpyro_tempered as nt
from golden.table import (
    KEY,
    LABEL,
    PRIORS,
    SIGN,
    D,
    X,
    Y,
    case,
    full_rank,
    labels,
    linear,
    location,
    logistic,
    mean_field,
    network,
    sparse_weights,
)

# Of few steps, and of what a fit to part of the rows leaves out.
WARNED = [UserWarning]


def of_fit(fit):
    """What a fit leaves."""
    return {
        "losses": fit.losses,
        "params": fit.params,
        "elbo": fit.elbo,
        "convergence": fit.convergence,
    }


def draws_of(fit):
    draws = fit.sample_posterior(fit.rng_key, (5,))
    return {name: value[None] for name, value in draws.items()}


# By NumPyro's SVI.

BRIEF = {"num_steps": 150, "num_particles": 50, "progress_bar": False}


def own_guide(x, y):
    loc = numpyro.param("loc", jnp.zeros(D))
    numpyro.sample("w", dist.Normal(loc, 0.2).to_event(1))


def two_sites(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 3.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        numpyro.sample("z", dist.Normal(theta, 2.0), obs=y)


def local(y):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("n", len(y)):
        each = numpyro.sample("each", dist.Normal(0.0, scale))
        numpyro.sample("y", dist.Normal(each, 1.0), obs=y)


STUDENT = nt.guides.AutoMultivariateStudentT
FITS = {
    "mean field": (linear, AutoNormal, (X, Y), {"alpha": 0.5}),
    "mean field, until it has settled": (
        location,
        AutoNormal,
        (Y,),
        {"num_steps": None},
    ),
    "diagonal, restarts": (location, AutoDiagonalNormal, (Y,), {"num_restarts": 2}),
    "full rank": (linear, AutoMultivariateNormal, (X, Y), {}),
    "low rank": (linear, AutoLowRankMultivariateNormal, (X, Y), {}),
    "student t, diagonal": (location, nt.guides.AutoDiagonalStudentT, (Y,), {}),
    "student t": (location, STUDENT, (Y,), {"alpha": 0.5}),
    "student t, df free": (location, functools.partial(STUDENT, df=None), (Y,), {}),
    "laplace": (location, AutoLaplaceApproximation, (Y,), {}),
    "point": (location, AutoDelta, (Y,), {}),
    "flow": (location, functools.partial(AutoIAFNormal, num_flows=1), (Y,), {}),
    "guide of one's own": (linear, lambda model: own_guide, (X, Y), {}),
    "adam": (linear, AutoNormal, (X, Y), {"optim": Adam(0.05)}),
    "optax": (
        linear,
        AutoNormal,
        (X, Y),
        {"optim": optax.adam(0.05), "loss": TraceMeanField_ELBO()},
    ),
    "part of the rows": (linear, AutoNormal, (X, Y), {"size": 10}),
    "powers by site": (two_sites, AutoNormal, (Y,), {"alpha": {"y": 0.5, "z": 0.25}}),
    "local latents": (local, AutoNormal, (Y,), {"alpha": 0.5, "local_plates": ["n"]}),
    "discrete latents": (nt.marginalize(labels), AutoNormal, (Y,), {"alpha": 0.5}),
    "robust": (nt.robust(location, beta=0.3, unit=1.0), AutoNormal, (Y,), {}),
    "spike and slab": (
        sparse_weights,
        nt.guides.AutoSpikeAndSlab,
        (X, Y),
        {"alpha": 0.5},
    ),
    "ivon": (
        network,
        nt.guides.AutoNetworkNormal,
        (X, Y),
        {"optim": nt.optim.IVON, "alpha": 0.5},
    ),
}
for name, (model, guide, data, options) in FITS.items():

    @case(f"svi {name}", model, guide, data, options, ignore=WARNED)
    def fit_svi(model, guide, data, options):
        fit = nt.fit_svi(KEY, model, guide, *data, **(BRIEF | options))
        return of_fit(fit) | {"draws": draws_of(fit)}


@functools.cache
def spike_fit():
    return nt.fit_svi(KEY, sparse_weights, nt.guides.AutoSpikeAndSlab, X, Y, **BRIEF)


@case("gates rounded", ignore=WARNED)
def round_gates():
    return of_fit(
        nt.sparse.round_and_refit(KEY, spike_fit(), num_steps=50, num_particles=50)
    )


@case("support", ignore=WARNED)
def fit_support():
    guide = nt.guides.AutoSpikeAndSlab
    return of_fit(
        nt.sparse.fit_support(
            KEY, sparse_weights, guide, X, Y, num_steps=50, num_particles=50
        )
    )


# Rules as optimisers.

ONLINE = nt.guides.AutoOnlineDiagonalNormal
TEMPERED = nt.temper(logistic, alpha=0.5)
OPTIMISERS = {
    "sva": lambda guide: nt.optim.SVA(guide, step_size=0.1),
    "svb": lambda guide: nt.optim.SVB(guide, step_size=0.1),
    "ngvi": nt.optim.NGVI,
    "natural gradient": nt.optim.NaturalGradient,
    "forward backward": nt.optim.ForwardBackward,
}
for name, optimiser in OPTIMISERS.items():

    @case(f"optimiser {name}", optimiser)
    def run_optimiser(optimiser):
        guide = ONLINE(TEMPERED)
        loss = nt.optim.ExpectedNLL(nt.expectations.gauss_hermite(predictor="eta"))
        svi = SVI(TEMPERED, guide, optimiser(guide), loss)
        result = svi.run(KEY, 20, X, LABEL, progress_bar=False)
        return {"losses": result.losses, "params": result.params}


@case("optimiser ivon of optax")
def run_optax_ivon():
    ivon = nt.optim.scale_by_ivon(num_data=40, alpha=0.5, b2=0.9, prior_precision=2.0)
    optimiser = optax.chain(ivon, optax.scale_by_learning_rate(0.1))
    x, y = jnp.asarray(X), jnp.asarray(Y)

    def step(carry, key):
        mean, state = carry
        weights = nt.optim.sample_ivon(key, mean, state, noise=nt.optim.quick_noise)
        grads = jax.grad(lambda w: jnp.mean(0.5 * (y - x @ w) ** 2))(weights)
        updates, state = optimiser.update(grads, state, mean, weights=weights)
        return (optax.apply_updates(mean, updates), state), mean

    start = jnp.zeros(D)
    (mean, state), path = jax.lax.scan(
        step, (start, optimiser.init(start)), jax.random.split(KEY, 20)
    )
    return {
        "path": path,
        "mean": mean,
        "state": state,
        "draws": nt.optim.sample_ivon(KEY, mean, state, 3),
    }


@case("start of a network")
def start_network():
    return {"layers": nt.guides.start_relu_network(KEY, X, Y, (4,), num_candidates=50)}


@case("sampler")
def run_nuts():
    mcmc = MCMC(NUTS(TEMPERED), num_warmup=20, num_samples=5, progress_bar=False)
    mcmc.run(KEY, X, LABEL)
    return {"draws": mcmc.get_samples()}


@case("elbo")
def evaluate_elbo():
    guide = AutoNormal(TEMPERED)
    svi = SVI(TEMPERED, guide, Adam(0.1), Trace_ELBO())
    state = svi.init(KEY, X, LABEL)
    return {"loss": svi.evaluate(state, X, LABEL), "params": svi.get_params(state)}


# The best Gaussian.

AT_ETA = nt.expectations.gauss_hermite(predictor="eta")
METHODS = {
    "natural gradient": nt.gaussian.descent.natural_gradient(),
    "natural gradient, undamped": nt.gaussian.descent.natural_gradient(
        damping=1.0, backtrack=False
    ),
    "forward backward": nt.gaussian.descent.forward_backward(),
    "forward backward, plain": nt.gaussian.descent.forward_backward(
        step_size=0.01, whiten=False
    ),
}


def two_modes(y):
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    numpyro.sample("y", dist.Normal(theta**2, 1.0), obs=y)


GAUSSIAN_FITS = {
    "mean field": (
        logistic,
        AutoNormal,
        (X, LABEL),
        {"expectation": AT_ETA, "alpha": 0.5},
    ),
    "full rank": (
        logistic,
        AutoMultivariateNormal,
        (X, LABEL),
        {"expectation": AT_ETA},
    ),
    "draws": (logistic, AutoMultivariateNormal, (X, LABEL), {"num_draws": 32}),
    "forward backward": (
        logistic,
        AutoDiagonalNormal,
        (X, LABEL),
        {"expectation": AT_ETA, "method": METHODS["forward backward"]},
    ),
    "two modes": (two_modes, AutoNormal, (np.array(4.0),), {"num_components": 2}),
    "restarts": (two_modes, AutoNormal, (np.array(4.0),), {"num_restarts": 2}),
}


@functools.cache
def gaussian_fit(name):
    model, guide, data, options = GAUSSIAN_FITS[name]
    return nt.fit_gaussian(
        KEY, model, guide, *data, max_evaluations=30, num_particles=50, **options
    )


for name in GAUSSIAN_FITS:

    @case(f"gaussian {name}", name, ignore=WARNED)
    def fit_gaussian(name):
        return of_fit(gaussian_fit(name)) | {"draws": draws_of(gaussian_fit(name))}


@case("linear response", ignore=WARNED)
def respond():
    fit = nt.linear_response(
        KEY, gaussian_fit("mean field"), num_draws=32, num_particles=50
    )
    return of_fit(fit)


LOGISTIC = nt.expectations.logistic()
for name, method in METHODS.items():
    for family in ("mean field", "full rank"):

        @case(f"descent {name}, {family}", method, family)
        def minimise(method, family):
            prior = PRIORS[family]()
            objective = nt.gaussian.descent.objective(
                LOGISTIC, prior, X, SIGN, alpha=0.5
            )
            result = nt.gaussian.descent.minimise(
                objective, prior, method=method, max_evaluations=20
            )
            q = result.posterior
            bounds = [
                nt.gaussian.descent.stationarity(q, result.derivatives),
                nt.gaussian.descent.gap_bound(q, result.derivatives, 0.4),
            ]
            return {
                "trace": result.trace,
                "posterior": q,
                "result": result,
                "bounds": bounds,
            }


def bimodal(theta, _):
    modes = jnp.array([-2.0, 2.0])
    return -jax.nn.logsumexp(-2.0 * (theta - modes) ** 2, b=jnp.array([0.3, 0.7]))


@case("descent of a mixture")
def minimise_mixture():
    logits, loc = jnp.log(jnp.array([0.5, 0.5])), jnp.array([[-1.0], [1.0]])
    init = nt.gaussian.families.GaussianMixture(logits, loc, jnp.ones((2, 1)))
    nodes = np.linspace(-2.0, 2.0, 16)[:, None]
    result = nt.gaussian.descent.minimise_mixture(
        bimodal, init, nodes, max_evaluations=30
    )
    return {"trace": result.trace, "posterior": result.posterior, "result": result}


@case("flow")
def follow_flow():
    def quadratic(q):
        return nt.gaussian.descent.Derivatives(
            0.5 * jnp.sum(q.loc**2 + q.scale**2), q.loc, jnp.ones_like(q.loc)
        )

    path = nt.gaussian.descent.flow(quadratic, mean_field(), jnp.array([0.0, 0.5, 1.0]))
    return {
        "path": path,
        "distance": nt.gaussian.descent.wasserstein(full_rank(), full_rank(scale=2.0)),
    }


# Sparse regression.

SLAB = {"inclusion_prob": 0.3, "slab_scale": 1.5, "max_iter": 30}
SPARSE_FITS = {
    "known noise": (nt.sparse.fit_linear, Y, {"noise_scale": 0.5, "alpha": 0.5}),
    "estimated noise": (
        nt.sparse.fit_linear,
        Y,
        {"intercept_scale": 3.0, "num_restarts": 2},
    ),
    "gamma noise": (nt.sparse.fit_linear, Y, {"noise_prior": (1.5, 0.7)}),
    "logistic": (nt.sparse.fit_logistic, LABEL, {"alpha": 0.5}),
    "logistic, restarts": (
        nt.sparse.fit_logistic,
        LABEL,
        {"intercept_scale": None, "num_restarts": 2},
    ),
}
for name, (fit, outcomes, options) in SPARSE_FITS.items():

    @case(f"sparse {name}", fit, outcomes, options, ignore=WARNED)
    def fit_sparse(fit, outcomes, options):
        found = fit(KEY, X, outcomes, **SLAB, **options)
        out = {"trace": found.trace, "posterior": found.posterior, "fit": found}
        out |= {
            "selected": nt.sparse.selected(found),
            "draws": nt.sparse.sample_posterior(KEY, found, 5),
        }
        out |= {"predictor": nt.sparse.linear_predictor(found, X)}
        if fit is nt.sparse.fit_linear:
            return out | {"predictions": nt.sparse.predict(found, X)}
        return out | {"predictions": nt.sparse.predict_proba(KEY, found, X, 20)}


# Probabilistic PCA.

ROWS = np.round(np.outer(Y, [1.0, -1.0, 0.5]) + 0.3 * X, 2)
MISSING = np.where((3 * np.arange(40)[:, None] + np.arange(3)) % 10 == 0, np.nan, ROWS)
PCA_FITS = {
    "ard": (ROWS, {"alpha": 0.5}),
    "no ard": (ROWS, {"ard": False, "prior": nt.ppca.prior(scale=2.0)}),
    "missing entries": (MISSING, {"num_restarts": 2}),
}
for name, (rows, options) in PCA_FITS.items():

    @case(f"pca {name}", rows, options, ignore=WARNED)
    def fit_pca(rows, options):
        fit = nt.ppca.fit(KEY, rows, num_factors=2, max_iter=20, **options)
        return {
            "trace": fit.trace,
            "posterior": fit.posterior,
            "elbos": fit.restart_elbos,
            "axes": nt.ppca.principal_axes(fit),
            "occupied": fit.num_occupied,
            "scores": nt.ppca.transform(fit, rows),
            "imputed": nt.ppca.impute(fit, MISSING),
            "reconstructed": nt.ppca.reconstruct(fit, rows),
            "density": nt.ppca.log_predictive(KEY, fit, rows, 20),
            "draws": nt.ppca.sample_posterior(KEY, fit, 5),
            "rows": nt.ppca.sample(KEY, fit, 5),
        }


@case("pca number of factors", ignore=WARNED)
def select_factors():
    choice = nt.ppca.select_num_factors(
        KEY, ROWS, num_factors=[1, 2], log_prior=nt.dyadic, alpha=0.5, max_iter=20
    )
    return {
        "selected": choice.selected,
        "elbo": choice.elbo,
        "criterion": choice.criterion,
        "weight": choice.weight,
    }
