"""Runs a group of functions, lowers every program that they compile for other platforms, and prints the outcome.

``python lowering_worker.py GROUP PLATFORM ...`` prints one JSON object: the names of the programs that were
lowered, and the errors of those that were not. ``jax.jit`` is wrapped before the package is imported, so that no
program is missed.
"""

import json
import sys
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.export

PLATFORMS: list[str] = []
LOWERED: set[str] = set()
ERRORS: dict[str, str] = {}
_jit = jax.jit


class Watched:
    """A compiled function that is lowered for the platforms when it is called on new shapes."""

    def __init__(self, function, **options):
        self.jitted, self.seen = _jit(function, **options), set()
        inner = function
        while isinstance(inner, partial):
            inner = inner.func
        self.name = f"{getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', repr(inner))}"
        self.__wrapped__ = function

    def __call__(self, *args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            shapes = [
                (leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf
                for leaf in leaves
            ]
            form = str((tree, shapes))
            if form not in self.seen:
                self.seen.add(form)
                lower(self.name, self.jitted, args, kwargs)
        return self.jitted(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.jitted, name)


def lower(name, jitted, args, kwargs):
    try:
        jax.export.export(jitted, platforms=PLATFORMS)(*args, **kwargs)
    except Exception as error:
        ERRORS[name] = f"{type(error).__name__}: {error}"[:600]
    else:
        LOWERED.add(name)


def watched_jit(function=None, **options):
    return (
        partial(watched_jit, **options)
        if function is None
        else Watched(function, **options)
    )


def stream():
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 4)).astype(np.float32)
    return x, np.where(x[:, 0] + rng.normal(size=6) > 0, 1.0, -1.0).astype(np.float32)


def regression(x, y=None):
    import numpyro
    import numpyro.distributions as dist

    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    eta = numpyro.deterministic("eta", x @ weights)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


def run_online(nt):
    """One rule of each kind."""
    loss, (x, y) = nt.expectations.hinge(), stream()
    prior = nt.gaussian.families.FullRank(jax.numpy.zeros(4), jax.numpy.eye(4))
    rule = nt.online.rvga()
    state, _ = nt.online.run(rule, loss, rule.init(prior), x, y)
    nt.online.update(rule, loss, state, x[0], y[0])


def run_rules(nt):
    """Every rule on every family that takes it."""
    from test_families import UNBOXED, WORKING, loss_of, make_prior

    x, y = stream()
    for name, family in [
        *WORKING,
        ("rvga", "MeanField"),
        ("rvga", "FullRank"),
        ("rvga", "LowRank"),
    ]:
        rule = nt.online.rvga() if name == "rvga" else UNBOXED[name]
        state = rule.init(make_prior(family))
        state, _ = nt.online.run(rule, loss_of(name), state, x, y)
        nt.online.update(rule, loss_of(name), state, x[0], y[0])


def run_streams(nt):
    """Experts, wrappers, chunks, expectations and the model's own loop."""
    x, y = stream()
    prior = nt.gaussian.families.MeanField(jax.numpy.zeros(4), jax.numpy.ones(4))
    logistic = nt.expectations.logistic()
    losses = [
        nt.expectations.squared(),
        nt.expectations.absolute(),
        nt.expectations.pinball(0.5),
        nt.expectations.probit(),
    ]
    rule = nt.online.rvga(0.5)
    for loss in (*losses, nt.expectations.poisson(), logistic):
        nt.online.run(rule, loss, rule.init(prior), x, abs(y))
    wrapped = [
        nt.online.standardise(rule),
        nt.online.clip(rule),
        nt.online.skip(rule, max_loss=100.0),
        nt.online.robust(rule, 3.0),
    ]
    for each in (*wrapped, nt.online.with_average(nt.online.sva(0.1))):
        nt.online.run_chunks(
            each, losses[0], each.init(prior), [(x, y)], progress_bar=False
        )
    grid = nt.online.grid(nt.online.ngvi, step_size=[0.1, 1.0])
    aggregate = nt.online.aggregate(grid)
    nt.online.run(aggregate, losses[0], aggregate.init(prior), x, y)
    for guide in (
        "AutoOnlineDiagonalNormal",
        "AutoOnlineMultivariateNormal",
        "AutoOnlineLowRankNormal",
    ):
        expectation = (
            nt.expectations.gauss_hermite(predictor="eta")
            if "LowRank" in guide
            else None
        )
        online = nt.OnlineVI(regression, getattr(nt.guides, guide), rule, expectation)
        state, _ = online.run(jax.random.key(0), x, y)
        online.update(state, x, y)
        online.get_posterior(state).sample(jax.random.key(1))


def run_svi(nt):
    """Batch fits of a NumPyro model, their ELBOs, comparison and ArviZ data."""
    from numpyro.infer.autoguide import (
        AutoLowRankMultivariateNormal,
        AutoMultivariateNormal,
        AutoNormal,
    )

    x, y = stream()
    fits = {}
    for guide in (AutoNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal):
        fits[guide.__name__] = nt.fit_svi(
            jax.random.key(0), regression, guide, x, y, alpha=0.5
        )
    nt.compare(fits)
    nt.loo(nt.to_inference_data(fits["AutoNormal"]))
    gauss_hermite = nt.expectations.gauss_hermite(predictor="eta")
    for guide, expectation in (
        (AutoMultivariateNormal, None),
        (AutoNormal, gauss_hermite),
    ):
        nt.fit_gaussian(
            jax.random.key(0), regression, guide, x, y, expectation=expectation
        )
    nt.linear_response(jax.random.key(2), fits["AutoNormal"])
    nt.sandwich(jax.random.key(3), fits["AutoNormal"])


def run_nuts(nt):
    """The potential of a tempered model and its chains, and the path along alpha."""
    from numpyro.infer import MCMC, NUTS
    from numpyro.infer.util import initialize_model

    x, y = stream()
    tempered = nt.temper(regression, alpha=0.5)
    info = initialize_model(jax.random.key(0), tempered, model_args=(x, y))
    watched_jit(jax.value_and_grad(info.potential_fn))(info.param_info.z)
    options = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(NUTS(tempered), num_warmup=5, num_samples=5, **options)
    mcmc.run(jax.random.key(1), x, y)
    nt.to_inference_data(mcmc)


def run_alpha(nt):
    """The criteria for alpha."""
    import numpy as np
    from numpyro.infer.autoguide import AutoMultivariateNormal

    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4)).astype(np.float32)
    y = (x[:, 0] + 2.0 * rng.normal(size=200)).astype(np.float32)
    criteria = [
        nt.alpha.magnitude(),
        nt.alpha.lyddon(),
        nt.alpha.bootstrap_fisher(),
        nt.alpha.safe_bayes(blocks=4),
    ]
    for criterion in criteria:
        nt.select_alpha(
            jax.random.key(0),
            regression,
            AutoMultivariateNormal,
            x,
            y,
            alphas=[0.25, 0.5],
            criterion=criterion,
        )
    nt.alpha.calibrated_powers(jax.random.key(0), regression, x, y)
    nt.alpha.check_coverage(
        jax.random.key(0), regression, AutoMultivariateNormal, x, y, num_bootstrap=20
    )


OPTIONS = {"num_components": 2, "num_restarts": 2, "max_iter": 5, "tolerance": 1e6}


def run_families(nt):
    """The fit of every family of mixtures."""
    from mixture_families import ALL, component_of, some_data

    for name in sorted(set(ALL) - {"product"}):
        nt.mixtures.fit(
            jax.random.key(0), some_data(name), component_of(name), **OPTIONS
        )


def run_missing(nt):
    """The same with missing entries."""
    import numpy as np
    from mixture_families import ALL, component_of, some_data

    for name in sorted(name for name in set(ALL) - {"product"} if ALL[name].missing):
        x = np.array(some_data(name), float)
        x[0, 0] = np.nan
        nt.mixtures.fit(jax.random.key(0), x, component_of(name), **OPTIONS)


def run_mixtures(nt):
    """Every function of mixtures, on one family."""
    from mixture_families import component_of, some_data

    component, x, key = (
        component_of("gaussian"),
        some_data("gaussian"),
        jax.random.key(0),
    )
    fit = nt.mixtures.fit(key, x, component, **OPTIONS)
    nt.mixtures.predict(fit, x)
    nt.mixtures.log_predictive(fit, x)
    nt.mixtures.sample(key, fit, 3)
    nt.mixtures.relabel(fit)
    nt.mixtures.fit(key, [x], component, **OPTIONS)
    nt.mixtures.em(key, x, component, num_components=2, num_restarts=2)
    nt.mixtures.select_num_components(
        key, x, component, num_components=[1, 2], num_restarts=2, baselines=False
    )
    nt.mixtures.fit_stochastic(
        key,
        [x],
        component,
        num_components=2,
        num_restarts=2,
        num_passes=1,
        batch_size=4,
    )
    nt.mixtures.fit(
        key, x, component, concentration=nt.mixtures.stick_breaking(1.0), **OPTIONS
    )


def run_matrices(nt):
    """Probabilistic PCA and sparse regression."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 5)).astype(np.float32)
    key = jax.random.key(0)
    fit = nt.ppca.fit(key, x, num_factors=2)
    nt.ppca.transform(fit, x)
    nt.ppca.log_predictive(key, fit, x)
    holes = x.copy()
    holes[0, 0] = np.nan
    nt.ppca.fit(key, holes, num_factors=2, ard=False)
    nt.ppca.select_num_factors(key, x, num_factors=[0, 1, 2])
    linear = nt.sparse.fit_linear(
        key, x, x[:, 0] + rng.normal(size=30), inclusion_prob=0.2, slab_scale=1.0
    )
    nt.sparse.predict(linear, x)
    logistic = nt.sparse.fit_logistic(
        key, x, (x[:, 0] > 0).astype(float), inclusion_prob=0.2, slab_scale=1.0
    )
    nt.sparse.predict_proba(key, logistic, x)


def run_cpu_alone(nt):
    """A program that no other platform can run, for the test of this worker."""

    def only_on_cpu(x):
        return jax.scipy.linalg.schur(x)

    watched_jit(only_on_cpu)(jax.numpy.eye(2))


def main(group, platforms):
    jax.jit = watched_jit
    PLATFORMS.extend(platforms)
    warnings.simplefilter("ignore")
    here = Path(__file__).parent
    sys.path[:0] = map(str, (here, here / "online", here / "mixtures"))
    import numpyro_tempered as nt

    globals()[f"run_{group}"](nt)
    print(json.dumps({"lowered": sorted(LOWERED), "errors": ERRORS}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
