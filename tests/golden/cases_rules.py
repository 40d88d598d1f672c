"""Golden cases of online rules on bare losses: families, expectations, wrappers, masks."""

import jax
import jax.numpy as jnp
import numpy as np

import numpyro_tempered as nt
from golden.table import (
    CLASS,
    COUNT,
    KEY,
    PRIORS,
    SIGN,
    D,
    X,
    Y,
    case,
    full_rank,
    mean_field,
)

SQUARED, HINGE, LOGISTIC = (
    nt.expectations.squared(),
    nt.expectations.hinge(),
    nt.expectations.logistic(),
)
BOX, BALL = nt.online.Box(0.5, 0.8), nt.online.Ball(0.5, 0.8)


def of_run(state, losses):
    """What a run leaves: each loss, the posterior, and all of the state for what goes on from it."""
    return {"losses": losses, "posterior": state.posterior, "state": state}


def stream(rule, loss, prior, *data, **options):
    """A run and what it leaves."""
    return of_run(*nt.online.run(rule, loss, rule.init(prior), *data, **options))


# Rules and families.

ALL, GAUSSIAN, DENSE = (
    ("mean field", "full rank", "low rank"),
    ("mean field", "full rank"),
    ("full rank",),
)
RATE = nt.online.svb_rate(
    nt.online.svb_constant(lipschitz=2.0, diameter=nt.bounds.diameter(BOX, D))
)
RULES = {
    "oga": (GAUSSIAN, nt.online.oga(0.1)),
    "oga, ball": (
        ("mean field",),
        nt.online.oga(nt.online.oga_rate(lipschitz=2.0, diameter=1.0), BALL),
    ),
    "oga_el": (GAUSSIAN, nt.online.oga_el(0.1)),
    "oga_el, box": (("mean field",), nt.online.oga_el(0.1, BOX)),
    "sva": (
        GAUSSIAN,
        nt.online.sva(
            nt.online.sva_rate(40, kl=4.0, lipschitz=2.0, strong_convexity=1.0)
        ),
    ),
    "sva, ball": (("mean field",), nt.online.sva(0.1, BALL)),
    "svb": (GAUSSIAN, nt.online.svb(0.1)),
    "svb, rate": (("mean field",), nt.online.svb(RATE, BOX)),
    "svb, strongly convex": (
        ("mean field",),
        nt.online.svb(nt.online.svb_strongly_convex_rate(2.0), BOX),
    ),
    "svb, evidence": (("mean field",), nt.online.svb(0.1, evidence=5.0)),
    "ngvi": (ALL, nt.online.ngvi(0.7)),
    "ngvi, fisher": (ALL, nt.online.ngvi(0.7, curvature="fisher")),
    "ngvi, floor": (GAUSSIAN, nt.online.ngvi(0.7, negative="floor")),
    "ngvi, box": (("mean field",), nt.online.ngvi(0.7, box=BOX)),
    "ngvi, to prior": (GAUSSIAN, nt.online.ngvi(0.7, forget=nt.online.to_prior(9.0))),
    "ngvi, power": (ALL, nt.online.ngvi(0.7, forget=nt.online.power(0.9))),
    "ngvi, random walk": (
        GAUSSIAN,
        nt.online.ngvi(0.7, forget=nt.online.random_walk(0.1)),
    ),
    "rvga": (ALL, nt.online.rvga()),
    "rvga, box": (("mean field",), nt.online.rvga(0.5, box=BOX)),
    "rvga, power": (GAUSSIAN, nt.online.rvga(forget=nt.online.power(0.9))),
    "ewa": (DENSE, nt.online.ewa(0.5)),
}
for name, (families, rule) in RULES.items():
    for family in families:

        @case(f"rule {name}, {family}", rule, family)
        def run_rule(rule, family):
            loss, outcomes = (SQUARED, Y) if rule.quadratic else (HINGE, SIGN)
            return stream(rule, loss, PRIORS[family](), X, outcomes)


# Expectations: each by the same rule.


def cauchy(u, y):
    return jnp.log1p(jnp.square(y - u))


def softplus(theta, x, y):
    return jax.nn.softplus(-y * jnp.sum(x * theta))


def cross_entropy(u, y):
    return jax.nn.logsumexp(u) - jnp.sum(u * (jnp.arange(3) == y))


def small_network(theta, x):
    return jnp.sum(theta[:2] * jnp.tanh(theta[2:4] * x[0] + theta[4:]))


THREE = {"num_outputs": 3}
EXPECTATIONS = {
    "hinge": (HINGE, D, SIGN),
    "squared": (SQUARED, D, Y),
    "squared, noise": (nt.expectations.squared(noise_scale=0.5), D, Y),
    "absolute": (nt.expectations.absolute(), D, Y),
    "pinball": (nt.expectations.pinball(0.9), D, Y),
    "poisson": (nt.expectations.poisson(), D, COUNT),
    "logistic": (LOGISTIC, D, SIGN),
    "probit": (nt.expectations.probit(), D, SIGN),
    "softmax": (nt.expectations.softmax(3), 3 * D, CLASS),
    "softmax, draws": (nt.expectations.softmax(3, num_draws=16), 3 * D, CLASS),
    "gauss_hermite": (nt.expectations.gauss_hermite(cauchy), D, Y),
    "gauss_hermite, outputs": (
        nt.expectations.gauss_hermite(cross_entropy, num_nodes=5, **THREE),
        3 * D,
        CLASS,
    ),
    "predictor_monte_carlo": (
        nt.expectations.predictor_monte_carlo(cross_entropy, **THREE),
        3 * D,
        CLASS,
    ),
    "linearised": (nt.expectations.linearised(small_network, SQUARED), 6, Y),
    "location_scale": (
        nt.expectations.location_scale(HINGE, "student_t", df=4.0),
        D,
        SIGN,
    ),
    "monte_carlo": (
        nt.expectations.monte_carlo(softplus, num_particles=4, antithetic=True),
        D,
        SIGN,
    ),
}
STEP = nt.online.ngvi(0.3)
for name, (loss, d, outcomes) in EXPECTATIONS.items():
    for family in (
        GAUSSIAN if name in ("logistic", "softmax", "monte_carlo") else ("mean field",)
    ):

        @case(f"expectation {name}, {family}", loss, d, outcomes, family)
        def run_expectation(loss, d, outcomes, family):
            return stream(STEP, loss, PRIORS[family](d), X, outcomes, rng_key=KEY)


# Wrappers, masks and batches.


@case("batches of rows")
def run_batches():
    return stream(STEP, LOGISTIC, full_rank(), X.reshape(10, 4, D), SIGN.reshape(10, 4))


@case("masked rounds")
def run_masked():
    return stream(
        STEP, LOGISTIC, mean_field(), X, SIGN, mask=np.arange(len(X)) % 7 != 3
    )


@case("one round at a time")
def update_rounds():
    (x, y), mask = nt.online.pad_batch(X[:3], SIGN[:3], size=4)
    state = STEP.init(mean_field())
    state, first = nt.online.update(STEP, LOGISTIC, state, x, y, mask=mask)
    return of_run(*nt.online.update(STEP, LOGISTIC, state, X[4:8], SIGN[4:8])) | {
        "first": first
    }


@case("rows that are not finite", ignore=[nt.online.StreamWarning])
def run_broken():
    x = X.copy()
    x[5, 1] = np.nan
    return stream(STEP, LOGISTIC, mean_field(), x, SIGN)


WRAPPERS = {
    "average": nt.online.with_average(nt.online.svb(0.1)),
    "clip": nt.online.clip(nt.online.ngvi(), max_move=1.0),
    "doubling": nt.online.doubling(
        nt.online.sva,
        nt.online.ewa_rate(10, kl=nt.online.point_kl(10, D), loss_range=4.0),
    ),
    "robust": nt.online.robust(nt.online.ngvi(), threshold=1.0),
    "robust, hard": nt.online.robust(nt.online.ngvi(), threshold=1.0, hard=True),
    "skip": nt.online.skip(
        nt.online.ngvi(), max_loss=3.0, max_deviations=2.0, warm_up=5
    ),
    "standardise": nt.online.standardise(nt.online.ngvi(), intercept=0),
}
for name, rule in WRAPPERS.items():

    @case(f"wrapper {name}", name, rule, ignore=[nt.online.StreamWarning])
    def run_wrapped(name, rule):
        x = (
            np.column_stack([np.ones(len(X)), 3.0 * X[:, 1:] + 5.0])
            if name == "standardise"
            else X
        )
        loss = nt.expectations.squared(noise_scale=0.5)
        state, losses = nt.online.run(rule, loss, rule.init(full_rank()), x, Y)
        more = {"average": nt.online.average(state)} if name == "average" else {}
        if name == "standardise":
            more = {"original": nt.online.original_scale(state)}
        return of_run(state, losses) | more
