"""Golden cases of streams: aggregates, chunks, several machines, services, and NumPyro models."""

import jax.numpy as jnp
import numpy as np

import numpyro_tempered as nt
from golden.cases_rules import LOGISTIC, SQUARED, STEP, of_run, softplus
from golden.table import (
    COUNT,
    KEY,
    LABEL,
    PRIORS,
    SIGN,
    D,
    X,
    Y,
    case,
    counts,
    full_rank,
    linear,
    location,
    logistic,
    mean_field,
)

# That the guide starts at moments of the prior, and of rejected rounds.
WARNED = [UserWarning]

# Aggregates and grids.

STEPS = nt.online.grid(nt.online.ngvi, step_size=[0.1, 1.0], prior_scale=[0.5, 2.0])
SIZES = nt.online.grid(nt.online.svb, step_size=[0.01, 0.1, 1.0])
WINDOWS = (4, 16, np.inf)
AGGREGATES = {
    "two grids": nt.online.aggregate(STEPS, SIZES),
    "shares": nt.online.aggregate(STEPS, learning_rate=0.5, share=0.01),
    "windows": nt.online.aggregate_windows(WINDOWS),
    "points": nt.online.ewa_grid([[-1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, -0.5, 0.0]]),
}
for name, rule in AGGREGATES.items():

    @case(f"aggregate {name}", rule)
    def run_aggregate(rule):
        state, losses = nt.online.run(rule, LOGISTIC, rule.init(mean_field()), X, SIGN)
        return of_run(state, losses) | {
            "weights": nt.online.weights(state),
            "regret": [nt.online.regret(state), nt.online.regret_bound(state)],
            "experts": [
                nt.online.weighted_posteriors(state),
                nt.online.expert_states(state),
            ],
        }


@case("grid side by side")
def run_grid():
    states, losses = nt.online.run_grid(STEPS, LOGISTIC, full_rank(), X, SIGN)
    return of_run(states, losses)


@case("changes")
def detect():
    history = np.zeros((600, 3))
    history[:400, 2] = history[400:, 0] = 1.0
    return {"rows": nt.online.detect_changes(history, WINDOWS, warm_up=64)}


# Chunks, several machines, late outcomes.

CHUNKS = [(X[:15], SIGN[:15]), (X[15:21], SIGN[15:21]), (X[21:], SIGN[21:])]
DRAWN = nt.expectations.monte_carlo(softplus, num_particles=4, antithetic=True)


@case("chunks")
def run_chunks():
    state = STEP.init(mean_field())
    return of_run(
        *nt.online.run_chunks(STEP, DRAWN, state, CHUNKS, rng_key=KEY, size=16)
    )


@case("chunks, one by one")
def iterate_chunks():
    blocks = list(
        nt.online.iterate_chunks(
            STEP, DRAWN, STEP.init(mean_field()), CHUNKS, rng_key=KEY, size=16
        )
    )
    return of_run(blocks[-1][0], [losses for _, losses in blocks])


@case("batches of chunks")
def run_global_batches():
    state, each = STEP.init(mean_field()), []
    for (x, y), mask in nt.online.global_batches(CHUNKS, size=16):
        state, losses = nt.online.update(STEP, LOGISTIC, state, x, y, mask=mask)
        each.append(losses)
    return of_run(state, each)


for name, family, options in (
    ("at once", "full rank", {}),
    ("sequential", "full rank", {"sequential": True}),
    ("at once", "mean field", {}),
):

    @case(
        f"machines {name}, {family}", family, options, ignore=[nt.online.StreamWarning]
    )
    def run_partitioned(family, options):
        pvi = nt.online.partitioned(LOGISTIC, alpha=0.7)
        shards = [(X[:10], SIGN[:10]), (X[10:], SIGN[10:])]
        run = nt.online.run_partitioned(
            pvi, PRIORS[family](), shards, num_rounds=4, **options
        )
        return {
            "elbo": run.elbo,
            "move": run.move,
            "posterior": run.state.posterior,
            "state": run.state,
        }


@case("merge")
def merge():
    rule = nt.online.ewa(0.5)
    start = rule.init(full_rank())
    halves = [
        nt.online.run(rule, SQUARED, start, X[rows], Y[rows])[0]
        for rows in (slice(20), slice(20, 40))
    ]
    state = nt.online.merge(rule, *halves)
    return {"posterior": state.posterior, "state": state}


@case("late outcomes")
def run_late():
    rule = nt.online.rvga()
    state, store, each = rule.init(full_rank()), nt.online.pending(16, jnp.zeros(D)), []
    late = np.random.default_rng(0).permutation(N_LATE)
    for start in range(0, N_LATE, 8):
        store = nt.online.remember(
            store, np.arange(start, start + 8), X[start : start + 8]
        )
        ids = late[(late >= start) & (late < start + 8)][:6]
        (x,), present, store = nt.online.recall(store, ids)
        state, losses = nt.online.update(
            rule, LOGISTIC, state, x, SIGN[ids], mask=present
        )
        each.append(losses)
    return of_run(state, each) | {"store": [store, nt.online.id_words(ids)]}


N_LATE = 24


@case("predictions")
def predict():
    q = full_rank()
    return {
        "moments": nt.online.predict(LOGISTIC, q, X),
        "probabilities": nt.online.class_probabilities(LOGISTIC, q, X),
        "draws": nt.online.sample_predictor(KEY, LOGISTIC, q, X),
        "draws of each": nt.online.sample_predictor(KEY, LOGISTIC, q, X, num_samples=3),
    }


@case("service")
def serve():
    rule = nt.online.rvga()
    service = nt.online.Service(
        rule, LOGISTIC, rule.init(full_rank()), X[0], 1.0, rng_key=KEY
    )
    losses, answers = [], []
    for x, y in zip(X, SIGN, strict=True):
        answers.append(service.class_probabilities(x))
        losses.append(service.learn(x, y))
    return of_run(service.state, losses) | {"answers": answers}


# Streams of NumPyro models.

AT_ETA = nt.expectations.gauss_hermite(predictor="eta")
DIAGONAL, MATRIX = (
    nt.guides.AutoOnlineDiagonalNormal,
    nt.guides.AutoOnlineMultivariateNormal,
)
FISHER = nt.online.ngvi(curvature="fisher")
MODELS = {
    "logistic, predictor": (logistic, DIAGONAL, None, AT_ETA, (X, LABEL)),
    "logistic, predictor, matrix": (
        logistic,
        MATRIX,
        nt.online.rvga(),
        AT_ETA,
        (X, LABEL),
    ),
    "logistic, draws of the predictor": (
        logistic,
        DIAGONAL,
        None,
        nt.expectations.monte_carlo(predictor="eta", num_particles=4),
        (X, LABEL),
    ),
    "tempered": (nt.temper(linear, alpha=0.5), MATRIX, None, None, (X, Y)),
    "location and scale": (location, DIAGONAL, nt.online.sva(0.05), None, (Y,)),
    "location and scale, matrix": (location, MATRIX, nt.online.svb(0.05), None, (Y,)),
    "counts, low rank": (
        counts,
        nt.guides.AutoOnlineLowRankNormal,
        FISHER,
        None,
        (X, COUNT),
    ),
}


def online_of(name):
    model, guide, rule, expectation, data = MODELS[name]
    return nt.OnlineVI(model, guide, rule, expectation), data


for name in MODELS:

    @case(f"model {name}", name, ignore=WARNED)
    def run_model(name):
        online, data = online_of(name)
        state, losses = online.run(KEY, *data)
        return of_run(state, losses) | {"draws": online.sample_posterior(KEY, state, 5)}


@case("model, batches", ignore=WARNED)
def update_model():
    online, (x, y) = online_of("location and scale")[0], (Y[:8], Y[8:14])
    state = online.init(KEY, x)
    state, first = online.update(state, x)
    (y,), mask = nt.online.pad_batch(y, size=8)
    state, second = online.update_masked(state, mask, y)
    return of_run(state, [first, second])


@case("model, chunks and its own prior", ignore=WARNED)
def with_prior():
    online = nt.OnlineVI(location, MATRIX)
    state, losses = online.run_chunks(KEY, [(Y[:25],), (Y[25:],)], size=20)
    exact = online.with_prior(state, Y[:1], num_particles=50, num_iter=5)
    return of_run(state, losses) | {"with prior": exact.posterior}


@case("model, from another posterior")
def from_posterior():
    online, (x, y) = online_of("logistic, predictor")
    state = online.init(KEY, x[:1], y[:1], prior=full_rank())
    return of_run(*online.run(state, x, y))


@case("model as a bare loss")
def bare():
    online, (x, y) = online_of("logistic, predictor, matrix")
    loss, prior = online.bare_loss(KEY, x, y)
    pvi = nt.online.partitioned(loss)
    run = nt.online.run_partitioned(
        pvi, prior, [(x[:20], y[:20]), (x[20:], y[20:])], num_rounds=20
    )
    return {"elbo": run.elbo, "posterior": run.state.posterior}
