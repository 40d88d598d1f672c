"""Golden cases of mixtures: every family, the ways to fit one, the number of components, NumPyro beside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import Trace_ELBO
from numpyro.infer.util import log_density
from sklearn.mixture import BayesianGaussianMixture

import numpyro_tempered as nt
from golden.table import GROUP, KEY, POINTS, case, holes

WARNED = [UserWarning]
CODES = np.stack([POINTS[:, 0] > 0, np.floor(np.abs(POINTS[:, 1])) % 3], axis=1).astype(
    float
)
COUNTS, MIXED = np.floor(np.abs(POINTS)), np.column_stack([POINTS, CODES[:, 1]])
GAUSSIANS = {"loc": 0.5, "mean_precision": 0.25}
PARTS = {
    "place": nt.mixtures.components.known_variance(2, prior_scale=3.0),
    "kind": nt.mixtures.components.categorical([3]),
}
FAMILIES = {
    "known variance": (
        nt.mixtures.components.known_variance(2, prior_scale=3.0, scale=0.75),
        POINTS,
    ),
    "diagonal gaussian": (
        nt.mixtures.components.diagonal_gaussian(2, **GAUSSIANS),
        POINTS,
    ),
    "spherical gaussian": (
        nt.mixtures.components.spherical_gaussian(2, **GAUSSIANS),
        POINTS,
    ),
    "gaussian": (
        nt.mixtures.components.gaussian(2, **nt.mixtures.components.scaled_to(POINTS)),
        POINTS,
    ),
    "tied gaussian": (nt.mixtures.components.tied_gaussian(2, **GAUSSIANS), POINTS),
    "bernoulli": (
        nt.mixtures.components.bernoulli(2, ones=0.5, zeros=2.0),
        (POINTS > 0.5).astype(float),
    ),
    "poisson": (nt.mixtures.components.poisson(2, rate=0.25), COUNTS),
    "exponential": (
        nt.mixtures.components.exponential(2, rate=0.25),
        np.exp(0.5 * POINTS),
    ),
    "categorical": (
        nt.mixtures.components.categorical([2, 3], concentration=0.75),
        CODES,
    ),
    "multinomial": (nt.mixtures.components.multinomial(2, concentration=0.75), COUNTS),
    "product": (
        nt.mixtures.components.product(PARTS, {"place": [0, 1], "kind": [2]}),
        MIXED,
    ),
}
BRIEF = {"num_restarts": 2, "max_iter": 15, "num_draws": 20, "progress_bar": False}
KNOWN = FAMILIES["known variance"][0]


def of_mixture(fit):
    """What a fit leaves."""
    return {
        "trace": fit.trace,
        "objectives": fit.restart_objectives,
        "factors": fit.factors,
        "bound": [fit.bound, fit.objective, fit.kl, fit.spread, fit.num_iter],
    }


@functools.cache
def fitted(name, **options):
    component, x = FAMILIES[name]
    return nt.mixtures.fit(
        KEY, x, component, num_components=2, alpha=0.5, **BRIEF, **options
    )


for name in FAMILIES:

    @case(f"mixture {name}", name, ignore=WARNED)
    def fit_family(name):
        fit = fitted(name)
        return of_mixture(fit) | {"draws": nt.mixtures.sample_posterior(KEY, fit, 3)}

    @case(f"em {name}", name, ignore=WARNED)
    def fit_em(name):
        component, x = FAMILIES[name]
        options = {"num_restarts": 2, "max_iter": 15}
        fit = nt.mixtures.em(
            KEY, x, component, num_components=2, pseudo_data=1.0, **options
        )
        of_data = {"parameters": fit.parameters, "weights": fit.weights}
        return {
            "trace": fit.trace,
            "objectives": fit.restart_objectives,
            "entropy": fit.entropy,
        } | of_data


@case("em, three passes", ignore=WARNED)
def fit_em_briefly():
    fit = nt.mixtures.em(
        KEY, POINTS, KNOWN, num_components=4, num_restarts=2, max_iter=3
    )
    return {
        "trace": fit.trace,
        "objectives": fit.restart_objectives,
        "parameters": fit.parameters,
    }


WAYS = {
    "sticks": {"concentration": nt.mixtures.stick_breaking(0.5), "num_components": 4},
    "moves": {"num_moves": 2, "num_components": 4},
    "weighted rows": {"sample_weight": 0.5 + np.arange(40) % 3},
    "random start": {"init": nt.mixtures.starts.random_responsibilities(0.5)},
    "k-means start": {"init": nt.mixtures.starts.kmeans_plus_plus(num_lloyd=2)},
    # The others may settle before they reach the limit.
    "three passes": {"max_iter": 3, "num_components": 4},
    "given start": {"init": nt.mixtures.starts.given_responsibilities(GROUP)},
}
for name, options in WAYS.items():

    @case(f"mixture, {name}", options, ignore=WARNED)
    def fit_otherwise(options):
        fit = nt.mixtures.fit(
            KEY, POINTS, KNOWN, **({"num_components": 2} | BRIEF | options)
        )
        return of_mixture(fit) | {"relabelled": nt.mixtures.relabel(fit).counts}


for name in ("gaussian", "known variance", "diagonal gaussian"):

    @case(f"mixture with missing entries, {name}", name, ignore=WARNED)
    def fit_missing(name):
        return of_mixture(
            nt.mixtures.fit(
                KEY, holes(POINTS), FAMILIES[name][0], num_components=2, **BRIEF
            )
        )


@case("mixture, warm start", ignore=WARNED)
def warm():
    fit = nt.mixtures.fit(
        KEY, POINTS, KNOWN, num_components=2, init=fitted("known variance"), **BRIEF
    )
    return of_mixture(fit)


CHUNKS = [POINTS[:25], POINTS[25:]]


@case("mixture of chunks", ignore=WARNED)
def fit_in_chunks():
    options = {"num_components": 2, "alpha": 0.5, "size": 16} | BRIEF
    return of_mixture(nt.mixtures.fit(KEY, lambda: iter(CHUNKS), KNOWN, **options))


@case("mixture by stochastic steps", ignore=WARNED)
def fit_stochastic():
    options = {"num_components": 2, "alpha": 0.5, "num_restarts": 2, "num_draws": 20}
    steps = {
        "batch_size": 10,
        "num_passes": 2,
        "step_size": nt.mixtures.robbins_monro(0.6, 2.0),
    }
    return of_mixture(
        nt.mixtures.fit_stochastic(KEY, CHUNKS, KNOWN, **options, **steps)
    )


for name in ("known variance", "gaussian"):

    @case(f"mixture of a stream, {name}", name)
    def follow(name):
        rule = nt.mixtures.stochastic(FAMILIES[name][0], num_components=2, alpha=0.5)
        batches = jnp.asarray(POINTS.reshape(5, 8, 2))
        start = jax.jit(rule.init)(KEY, batches[0])
        state, densities = jax.lax.scan(rule.update, start, batches)
        return {
            "densities": densities,
            "state": state,
            "factors": jax.jit(rule.factors)(state),
        }


@case("mixture on a mesh", ignore=WARNED)
def fit_sharded():
    rows, weight = nt.mixtures.shard_rows(POINTS, jax.make_mesh((1,), ("rows",)))
    return of_mixture(
        nt.mixtures.fit(
            KEY, rows, KNOWN, num_components=2, sample_weight=weight, **BRIEF
        )
    )


@case("mixture, predictions", ignore=WARNED)
def predict():
    fit = fitted("gaussian")
    return {
        "responsibilities": nt.mixtures.responsibilities(fit, POINTS),
        "labels": nt.mixtures.predict(fit, POINTS),
        "density": nt.mixtures.log_predictive(fit, POINTS),
        "rows": nt.mixtures.sample(KEY, fit, 5),
        "parameters": nt.mixtures.sample_posterior(KEY, fit, 3),
    }


# The number of components.

ORDERS = {
    "num_components": [1, 2, 3],
    "num_restarts": 2,
    "max_iter": 15,
    "num_draws": 20,
}


@case("number of components", ignore=WARNED)
def select():
    choice = nt.mixtures.select_num_components(
        KEY, POINTS, KNOWN, alpha=0.5, num_samples=20, **ORDERS
    )
    fits = {k: [fit.objective, fit.counts] for k, fit in choice.fits.items()}
    return {"selected": choice.selected, "table": table_of(choice), "fits": fits}


@case("number of components, growing", ignore=WARNED)
def grow():
    families = {
        "narrow": KNOWN,
        "wide": nt.mixtures.components.known_variance(2, prior_scale=3.0, scale=2.0),
    }
    options = ORDERS | {"num_components": None, "baselines": False}
    choice = nt.mixtures.select_num_components(KEY, POINTS[:12], families, **options)
    return {"selected": [*choice.selected, choice.stopped], "table": table_of(choice)}


@case("number of components, path", ignore=WARNED)
def follow_path():
    path = nt.mixtures.num_components_path(
        KEY, POINTS, KNOWN, alphas=[0.5, 1.0], **ORDERS
    )
    data = path["num_components_path"]
    return {"path": {name: np.asarray(data[name]) for name in sorted(data.data_vars)}}


def table_of(choice):
    table = nt.table(choice)
    return {name: table[name].tolist() for name in sorted(table)}


# In NumPyro.


@case("mixture as a tempered fit", ignore=WARNED)
def as_tempered():
    fit = fitted("known variance").on(POINTS, rng_key=KEY)
    return {"elbo": fit.elbo, "losses": fit.losses}


@case("mixture, polished", ignore=WARNED)
def polish():
    fit = nt.mixtures.polish(
        KEY, fitted("known variance"), POINTS, num_steps=20, num_draws=20
    )
    return {"losses": fit.losses, "params": fit.params, "elbo": fit.elbo}


@case("mixture as a model", ignore=WARNED)
def as_model():
    fit = fitted("known variance")
    model, guide = (
        nt.temper(nt.mixtures.numpyro_model(fit), fit.alpha),
        nt.mixtures.numpyro_guide(fit),
    )
    loss = jax.jit(
        lambda key: Trace_ELBO(num_particles=5).loss(key, {}, model, guide, POINTS)
    )
    point = {
        "weights": np.array([0.5, 0.5]),
        "loc": np.array([[-2.0, 0.0], [2.0, 1.0]]),
    }
    density = jax.jit(lambda theta: log_density(model, (POINTS,), {}, theta)[0])
    return {"loss": loss(KEY), "density": density(point)}


@case("mixture from scikit-learn", ignore=WARNED)
def from_sklearn():
    model = BayesianGaussianMixture(n_components=2, random_state=0, max_iter=15).fit(
        POINTS
    )
    return of_mixture(nt.mixtures.from_sklearn(KEY, model, POINTS, num_draws=20))
