"""fit_svi from the mode, in coordinates of the curvature there, until its ELBO has settled."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import TraceEnum_ELBO
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.initialization import init_to_value
from scipy import optimize

import numpyro_tempered as nt
from numpyro_tempered.infer import settle
from numpyro_tempered.infer.antithetic import Antithetic, mirror
from numpyro_tempered.infer.averaged_adam import Settled
from numpyro_tempered.infer.coordinates import Coordinates, at_the_mode, frame_of
from numpyro_tempered.infer.mode import Mode, find_mode
from numpyro_tempered.infer.settle import Convergence, warn_unless_settled

KEY = jax.random.key(3)
ALPHA, NOISE = 0.5, 20.0
rng = np.random.default_rng(0)
# A covariate as it comes: mean 500, scale 100.
MONEY = rng.normal(500.0, 100.0, 200)
X = np.column_stack([np.ones(200), MONEY])
Y = 27.1 + 0.3 * MONEY + rng.normal(0.0, NOISE, 200)
PRIOR_SD = 1000.0


def raw_units(x, y):
    beta = numpyro.sample("beta", dist.Normal(0.0, PRIOR_SD).expand([2]).to_event(1))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(x @ beta, NOISE), obs=y)


# The tempered posterior is Gaussian: its evidence and the best mean field by hand.
PRECISION = np.eye(2) / PRIOR_SD**2 + ALPHA * X.T @ X / NOISE**2
MEAN = np.linalg.solve(PRECISION, ALPHA * X.T @ Y / NOISE**2)


def log_joint(beta):
    log_lik = -0.5 * np.sum((Y - X @ beta) ** 2) / NOISE**2 - 200 * np.log(
        NOISE * np.sqrt(2 * np.pi)
    )
    return (
        ALPHA * log_lik
        - 0.5 * np.sum(beta**2) / PRIOR_SD**2
        - 2 * np.log(PRIOR_SD * np.sqrt(2 * np.pi))
    )


EVIDENCE = log_joint(MEAN) + np.log(2 * np.pi) - 0.5 * np.linalg.slogdet(PRECISION)[1]
MEAN_FIELD = EVIDENCE - 0.5 * (
    np.sum(np.log(np.diag(PRECISION))) - np.linalg.slogdet(PRECISION)[1]
)


@pytest.mark.parametrize(
    ("guide", "best"),
    [
        (AutoNormal, MEAN_FIELD),
        pytest.param(AutoDiagonalNormal, MEAN_FIELD, marks=pytest.mark.full),
        pytest.param(AutoMultivariateNormal, EVIDENCE, marks=pytest.mark.full),
        pytest.param(AutoLaplaceApproximation, EVIDENCE, marks=pytest.mark.full),
    ],
)
def test_raw_units_end_at_the_optimum(guide, best):
    """Eight nats were missing, and 26 of 27 of the intercept, from a fixed start and number of steps."""
    fit = nt.fit_svi(
        KEY,
        raw_units,
        guide,
        jnp.asarray(X),
        jnp.asarray(Y),
        alpha=ALPHA,
        num_restarts=2,
    )
    assert fit.converged is True
    assert fit.convergence.starts_at_mode
    assert fit.convergence.gap <= 0.05
    assert abs(fit.elbo.value - best) < 0.1 + 4.0 * fit.elbo.se + 1e-5 * abs(best)
    location = np.ravel(
        fit.params["beta_auto_loc" if guide is AutoNormal else "auto_loc"]
    )
    sd = np.sqrt(np.diag(np.linalg.inv(PRECISION)))
    np.testing.assert_array_less(np.abs(location - MEAN) / sd, 0.3)
    assert len(fit.losses) == fit.convergence.num_steps
    assert fit.convergence.rejected == 0
    # Both restarts end there, and not at one and the same number.
    if (
        guide is not AutoLaplaceApproximation
    ):  # whose values are those of a density, at its mode
        assert fit.convergence.optima == pytest.approx([best], abs=0.2)


def test_too_few_steps_are_said():
    with pytest.warns(
        nt.warnings.ConvergenceWarning,
        match=r"^the fit.*not converged: it took 1 steps, which are too few.*its ELBO",
    ):
        fit = nt.fit_svi(
            KEY, raw_units, AutoNormal, X, Y, alpha=ALPHA, num_steps=1, num_particles=2
        )
    assert fit.converged is False
    with pytest.raises(ValueError, match=r"has not converged.*it take part by"):
        nt.compare({"few": fit})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"bias": 0.3, "gap": 0.4},
            r"misses its optimum by 0\.4 nats, above the tolerance 0\.05.*its ELBO",
        ),
        (
            {"fall": 7.0},
            r"^the fit has not.*last stage still fell by 7 nats.*before comparing its ELBO",
        ),
        (
            {"rejected": 3, "fall": 1.0},
            r"^the fit has.*not finite in 3 of them.*before comparing its ELBO",
        ),
        (
            {"step_size": np.nan, "fall": 2.0},
            r"over the last tenth at full step size.*comparing its ELBO",
        ),
    ],
)
def test_a_warning_says_why(change, match):
    evidence = Convergence(False, np.inf, 0.1, np.inf, 0.0, 0.05, 100)._replace(
        **change
    )
    with pytest.warns(nt.warnings.ConvergenceWarning, match=match):
        warn_unless_settled(evidence, 0.05)


@pytest.mark.full
@pytest.mark.parametrize(
    "key", [jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")], ids=["raw", "rbg"]
)
def test_keys_of_any_kind(key):
    fit = nt.fit_svi(key, two_modes, AutoNormal, jnp.asarray(9.0), num_particles=2)
    assert fit.converged is True


@pytest.mark.full
def test_latents_that_the_guide_does_not_have_are_no_part_of_the_mode():
    def hidden(y):
        numpyro.sample("gate", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        two_modes(y)

    guide = AutoNormal(handlers.block(hidden, hide=["gate"]))
    assert at_the_mode(KEY, nt.temper(hidden), guide, (jnp.asarray(9.0),), {}) is None


def two_modes(y, centre=0.5):
    theta = numpyro.sample("theta", dist.Normal(centre, 2.0))
    numpyro.sample("y", dist.Normal(theta**2, 1.0), obs=y)


def test_optima_that_are_far_enough_apart_are_told_the_best_first():
    assert settle.distinct([1.0, 5.0, np.nan, 4.9, -np.inf, 5.0], 0.5) == (5.0, 1.0)


@pytest.mark.full
def test_restarts_find_the_optima_and_return_the_best():
    fit = nt.fit_svi(KEY, two_modes, AutoNormal, jnp.asarray(9.0), num_restarts=6)
    assert float(fit.params["theta_auto_loc"]) == pytest.approx(3.0, abs=0.1)
    better, worse = fit.convergence.optima
    # Their priors differ by the ratio at 3 and -3, nearly.
    assert better - worse == pytest.approx((3.5**2 - 2.5**2) / 8.0, abs=0.1)


@pytest.mark.full
@pytest.mark.parametrize(("tolerance", "num_optima"), [(0.05, 1), (0.025, 2)])
def test_optima_within_four_tolerances_are_one(tolerance, num_optima):
    options = {"centre": jnp.asarray(0.1), "num_restarts": 6, "tolerance": tolerance}
    optima = nt.fit_svi(
        KEY, two_modes, AutoNormal, jnp.asarray(9.0), **options
    ).convergence.optima
    # Six restarts find both, whose priors differ by the ratio at 3 and -3: by 0.15 nats.
    assert len(optima) == num_optima
    assert num_optima == 1 or optima[0] - optima[1] == pytest.approx(
        (3.1**2 - 2.9**2) / 8.0, abs=0.02
    )


@pytest.mark.parametrize(
    ("guide", "options", "match"),
    [
        (
            AutoNormal,
            {"num_restarts": 2, "optim": numpyro.optim.Adam(0.1)},
            r"leave optim out.*once a key",
        ),
        (
            AutoNormal(two_modes),
            {"num_restarts": 2},
            r"is built already: pass its class.*model to guide",
        ),
        (
            AutoNormal,
            {"loss": TraceEnum_ELBO()},
            "sum them out by nt.marginalize, and leave loss out",
        ),
        (AutoNormal, {"num_restarts": 0}, r"num_restarts must be.*integer of at least"),
        (AutoNormal, {"num_steps": 0}, r"num_steps must be.*integer of at least"),
        (
            AutoNormal,
            {"tolerance": 0.0},
            r"tolerance must be.*positive and finite, got",
        ),
    ],
)
def test_options_out_of_range(guide, options, match):
    with pytest.raises(ValueError, match=match):
        nt.fit_svi(KEY, two_modes, guide, jnp.asarray(9.0), **options)


@pytest.mark.full
@pytest.mark.parametrize("side", [-3.0, 3.0])
def test_the_start_of_a_user_decides_the_mode(side):
    start = init_to_value(values={"theta": jnp.asarray(side)})
    fit = nt.fit_svi(
        KEY, two_modes, lambda m: AutoNormal(m, init_loc_fn=start), jnp.asarray(9.0)
    )
    assert float(fit.params["theta_auto_loc"]) == pytest.approx(side, abs=0.1)


# The mode.


def test_the_mode_is_that_of_scipy_and_its_curvature_is_exact():
    x = rng.normal(size=(50, 3)) * np.array([1.0, 10.0, 0.1])
    y = (rng.uniform(size=50) < 0.5).astype(float)

    def potential(beta, np=jnp):
        logits = x @ beta
        return np.sum(np.logaddexp(0.0, logits) - y * logits) + 0.5 * np.sum(beta**2)

    mode = jax.jit(lambda start: find_mode(potential, start))(jnp.full(3, 2.0))
    want = optimize.minimize(lambda beta: potential(beta, np), np.zeros(3), tol=1e-10).x
    chance = 1.0 / (1.0 + np.exp(-x @ want))
    hessian = x.T @ (x * (chance * (1 - chance))[:, None]) + np.eye(3)
    assert bool(mode.is_mode)
    sd = np.sqrt(np.diag(np.linalg.inv(hessian)))
    np.testing.assert_array_less(np.abs(np.asarray(mode.loc) - want) / sd, 0.05)
    covariance = np.asarray(mode.root) @ np.asarray(mode.root).T
    np.testing.assert_allclose(
        covariance, np.linalg.inv(hessian), atol=0.02 * np.outer(sd, sd).max()
    )
    np.testing.assert_allclose(mode.scale, 1.0 / np.sqrt(np.diag(hessian)), rtol=0.02)


def test_one_step_ends_at_the_mode_of_a_quadratic():
    root = np.array([[1.0, 0.0], [30.0, 10.0]], np.float32)
    mode = jax.jit(
        lambda start: find_mode(lambda z: 0.5 * jnp.sum((root @ (z - 1.0)) ** 2), start)
    )(jnp.zeros(2))
    np.testing.assert_allclose(mode.loc, 1.0, atol=1e-4)
    assert bool(mode.is_mode)
    # A second one may take out what the first has rounded.
    assert int(mode.num_iterations) <= 2


@pytest.mark.parametrize(
    "guide", ["mean field", "diagonal", "full", "diagonal t", "full t"]
)
def test_coordinates_of_a_guide_are_round_at_the_mode(guide):
    """Means m + R u, scales s exp(v), or a root L B with L Lᵀ = R Rᵀ and B triangular with diagonal exp(v)."""

    def of_three(y):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(z.sum(), 1.0), obs=y)

    make = {
        "mean field": AutoNormal,
        "diagonal": AutoDiagonalNormal,
        "full": AutoMultivariateNormal,
        "diagonal t": partial(nt.guides.AutoDiagonalStudentT, df=None),
        "full t": partial(nt.guides.AutoMultivariateStudentT, df=None),
    }[guide]
    frame = frame_of(KEY, of_three, make(of_three), (0.5,), {})
    loc, scale = np.array([1.0, -2.0, 0.5]), np.array([0.2, 3.0, 1.0])
    root = np.array([[0.1, 2.0, 0.3], [-1.0, 0.5, 0.7], [0.2, -0.3, 1.5]])
    axes = frame.axes(
        Mode(
            *(jnp.asarray(a, jnp.float32) for a in (loc, root, scale)),
            jnp.array(True),
            3,
        )
    )
    z = jax.tree.map(jnp.zeros_like, frame.start) | {
        key: frame.start[key] for key in ("df",) if key in frame.start
    }
    u, v, lower = (
        np.array([0.3, -1.0, 2.0]),
        np.array([0.1, -0.2, 0.3]),
        np.array([[9, 9, 9], [0.5, 9, 9], [-1, 2, 9]]),
    )
    at_mode = frame.to_params(axes, z)
    moved = {"loc": u, "log_scale": v, "lower": lower}
    there = frame.to_params(
        axes,
        z | {key: jnp.asarray(moved[key], jnp.float32) for key in moved if key in z},
    )
    names = {
        "mean field": ("z_auto_loc", "z_auto_scale"),
        "full": ("auto_loc", "auto_scale_tril"),
    }
    names |= {
        "diagonal": ("auto_loc", "auto_scale"),
        "diagonal t": ("auto_loc", "auto_scale"),
    }
    of_loc, of_root = names.get(guide, names["full"])
    np.testing.assert_allclose(at_mode[of_loc], loc, rtol=1e-6)
    np.testing.assert_allclose(there[of_loc], loc + root @ u, rtol=1e-5)
    if "full" in guide:
        factor = np.linalg.cholesky(root @ root.T)
        np.testing.assert_allclose(at_mode[of_root], factor, rtol=1e-4, atol=1e-5)
        inner = np.tril(lower, -1) + np.diag(np.exp(v))
        np.testing.assert_allclose(there[of_root], factor @ inner, rtol=1e-4, atol=1e-4)
    else:
        np.testing.assert_allclose(at_mode[of_root], scale, rtol=1e-6)
        np.testing.assert_allclose(there[of_root], scale * np.exp(v), rtol=1e-6)
    assert ("auto_df" in at_mode) == guide.endswith("t")
    if guide.endswith("t"):
        np.testing.assert_allclose(
            at_mode["auto_df"], np.full(np.shape(at_mode["auto_df"]), 7.0), rtol=1e-5
        )
        # However far down they are learned, there is a variance.
        least = frame.to_params(axes, z | {"df": jnp.full_like(z["df"], -50.0)})[
            "auto_df"
        ]
        np.testing.assert_allclose(least, np.full(np.shape(least), 2.1), rtol=1e-3)


def test_the_best_run_is_the_lowest_of_those_that_ended():
    def run(value):
        start = SimpleNamespace(
            guide=value,
            at_mode=False,
            coordinates=SimpleNamespace(to_params=lambda z: {"z": z}),
        )
        return start, Settled(
            jnp.array(value), np.array(value), np.ones(9), True, *[np.array(0.1)] * 4
        )

    guide, params, _, evidence = settle._best_of(
        [run(value) for value in (np.nan, 7.0, 5.0, 5.001)], 0.05
    )
    assert guide == params["z"] == 5.0
    assert evidence.optima == (-5.0, -7.0)


def test_steps_end_where_they_move_by_rounding():
    """In float32, far from 0: the gradient does not fall further, and the value is as low as it can be."""
    y = jnp.asarray(2000.0 + np.random.default_rng(0).normal(size=50), jnp.float32)
    mode = jax.jit(
        lambda start: find_mode(lambda z: 0.5e4 * jnp.sum((y - z) ** 2), start)
    )(jnp.zeros(1))
    np.testing.assert_allclose(mode.loc, np.mean(np.asarray(y), dtype=float), atol=1e-3)
    assert bool(mode.is_mode)
    assert int(mode.num_iterations) < 10


@pytest.mark.parametrize(
    "potential",
    [
        lambda z: z[0] ** 2 - z[1] ** 2,
        lambda z: jnp.sum(jnp.log(jnp.where(z > 0, z, jnp.nan))),
    ],
    ids=["unbounded", "NaN"],
)
def test_what_has_no_mode_is_no_mode(potential):
    assert not bool(find_mode(potential, jnp.array([0.3, 1.0])).is_mode)


@pytest.mark.full
def test_a_hierarchy_without_a_mode_starts_where_its_guide_does():
    def centred(y):
        tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
        with numpyro.plate("n", 3):
            theta = numpyro.sample("theta", dist.Normal(0.0, tau))
            numpyro.sample("y", dist.Normal(theta, 10.0), obs=y)

    with pytest.warns(nt.warnings.ConvergenceWarning):
        fit = nt.fit_svi(
            KEY, centred, AutoNormal, jnp.ones(3), num_steps=5, num_particles=2
        )
    assert not fit.convergence.starts_at_mode


# Antithetic draws.


def sites(guide):
    return {
        k: site["value"]
        for k, site in handlers.trace(guide).get_trace().items()
        if site["type"] == "sample"
    }


def several_sites():
    with numpyro.plate("n", 3):
        numpyro.sample("plain", dist.Normal(1.0, 2.0))
    numpyro.sample("event", dist.MultivariateNormal(jnp.ones(2), jnp.eye(2)))
    numpyro.sample("positive", dist.LogNormal(0.5, 1.0))
    numpyro.sample("gamma", dist.Gamma(2.0, 1.0))


def test_the_mirror_reflects_gaussians_and_redraws_what_is_none():
    one = sites(handlers.seed(several_sites, KEY))
    other = sites(mirror(handlers.seed(several_sites, KEY), -1))
    for name, centre in {"plain": 1.0, "event": 1.0}.items():
        np.testing.assert_allclose(one[name] + other[name], 2.0 * centre, rtol=1e-5)
    assert float(
        jnp.log(one["positive"]) + jnp.log(other["positive"])
    ) == pytest.approx(1.0, rel=1e-5)
    assert float(one["gamma"]) != float(other["gamma"])


def test_the_mirror_redraws_what_has_a_shape_of_its_own():
    def guide():
        numpyro.sample("z", dist.Normal(0.0, 1.0), sample_shape=(3,))

    assert sites(mirror(handlers.seed(guide, KEY), -1))["z"].shape == (3,)


@pytest.mark.full
def test_antithetic_gradients_of_the_mean_are_exact_for_a_quadratic():
    guide = AutoNormal(raw_units)
    handlers.seed(guide, KEY)(X, Y)
    params = {"beta_auto_loc": jnp.zeros(2), "beta_auto_scale": jnp.full(2, 0.1)}

    def gradient(key):
        loss = jax.grad(
            lambda loc: Antithetic().loss(
                key, params | {"beta_auto_loc": loc}, raw_units, guide, X, Y
            )
        )
        return loss(params["beta_auto_loc"])

    one, two = jax.jit(jax.vmap(gradient))(jax.random.split(KEY))
    np.testing.assert_allclose(one, two, rtol=1e-5)
    np.testing.assert_allclose(one, -X.T @ Y / NOISE**2, rtol=1e-4)
    # Keys of either kind.
    shapes = [
        jax.eval_shape(gradient, key).shape for key in (KEY, jax.random.PRNGKey(0))
    ]
    assert shapes == [(2,), (2,)]


# Other guides and models.


@pytest.mark.full
@pytest.mark.parametrize(
    "factory",
    [
        lambda m: AutoIAFNormal(m, hidden_dims=[4]),
        lambda m: listed(m),
        lambda m: nt.guides.AutoOnlineDiagonalNormal(m),
        lambda m: by_hand,
    ],
    ids=["flow", "list", "online", "by hand"],
)
def test_other_guides_settle_too(factory):
    def small(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(theta, 1.0).to_event(1), obs=y)

    y = jnp.array([1.0, -0.5])
    fit = nt.fit_svi(KEY, small, factory, y, alpha=ALPHA)
    best = (
        -0.5 * np.sum(ALPHA / (1 + ALPHA) * np.array(y) ** 2)
        - np.log(1 + ALPHA)
        - ALPHA * np.log(2 * np.pi)
    )
    assert fit.converged is True
    assert fit.convergence.starts_at_mode is isinstance(fit.guide, AutoDiagonalNormal)
    assert abs(fit.elbo.value - best) < 0.1 + 4.0 * fit.elbo.se


def listed(model):
    guide = AutoGuideList(model)
    guide.append(AutoNormal(handlers.block(model, expose=["theta"])))
    return guide


def by_hand(y):
    loc = numpyro.param("loc", jnp.zeros(2))
    scale = numpyro.param("scale", jnp.ones(2), constraint=dist.constraints.positive)
    numpyro.sample("theta", dist.Normal(loc, scale).to_event(1))


@pytest.mark.full
def test_a_model_with_params_and_a_subsample_is_fitted_as_it_is():
    y = jnp.asarray(rng.normal(3.0, 1.0, 60), float)

    def subsampled(y):
        bias = numpyro.param("bias", jnp.asarray(0.5))
        theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        with numpyro.plate("n", 60, subsample_size=20) as index:
            numpyro.sample("y", dist.Normal(theta + 0.0 * bias, 1.0), obs=y[index])

    fit = nt.fit_svi(KEY, subsampled, AutoNormal, y, tolerance=0.2)
    assert not fit.convergence.starts_at_mode
    assert float(fit.params["theta_auto_loc"]) == pytest.approx(
        float(y.mean()), abs=0.1
    )


@pytest.mark.full
def test_a_model_may_take_objects():
    def levels(y, group, options):
        means = numpyro.sample("means", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(means[group], options["sd"]), obs=y)

    group = jnp.repeat(jnp.arange(3), 10)
    y = jnp.asarray(rng.normal(np.repeat([0.0, 5.0, 9.0], 10), 1.0), float)
    fit = nt.fit_svi(KEY, levels, AutoNormal, y, group, {"sd": 1.0, "what": object()})
    np.testing.assert_allclose(
        fit.params["means_auto_loc"], np.array(y).reshape(3, 10).mean(1), atol=0.2
    )


def test_the_second_start_too_has_the_loss_that_was_asked_for(monkeypatch):
    """Where the mode is not worth its steps."""
    losses = []

    def descent_of(*_, loss, num_steps):
        losses.append(loss)
        if len(losses) == 4:
            raise StopIteration
        return None, None

    def start_of(key, model, guide, args, kwargs, *, loss, at_mode=True):
        losses.append(loss)
        return settle.Start(guide, None, at_mode=at_mode)

    monkeypatch.setattr(settle, "start_of", start_of)
    monkeypatch.setattr(settle, "_descent", descent_of)
    monkeypatch.setattr(settle, "is_worth_its_steps", lambda *_: [False])
    for of_fit in (None, Antithetic(3)):
        losses.clear()
        with pytest.raises(StopIteration):
            settle.settle(
                KEY,
                None,
                lambda: None,
                (),
                {},
                loss=of_fit,
                num_steps=9,
                num_restarts=1,
                tolerance=0.05,
                progress_bar=False,
            )
        assert losses == [of_fit] * 4


@pytest.mark.full
def test_a_plateau_is_no_mode(monkeypatch):
    """One datum of a scale of its own: as the scale falls, the density does, and Newton's method ends far out."""
    y, group = jnp.array([0.3, -1.2, 0.8, 0.4, 1.9, 0.1]), np.array([0, 0, 0, 1, 1, 2])

    def model(y):
        with numpyro.plate("groups", 3):
            m = numpyro.sample("m", dist.Normal(0.0, 1.0))
            s = numpyro.sample("s", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(m[group], s[group]), obs=y)

    def on_the_plateau(key, model, guide, args, kwargs):
        frame = frame_of(key, model, guide, args, kwargs)
        far = Mode(
            jnp.full(6, -40.0), jnp.eye(6), jnp.ones(6), jnp.array(True), jnp.array(9)
        )
        return Coordinates(frame.start, partial(frame.to_params, frame.axes(far)))

    monkeypatch.setattr(settle, "at_the_mode", on_the_plateau)
    fit = nt.fit_svi(jax.random.key(3), model, AutoNormal, y)
    assert fit.converged
    assert not fit.convergence.starts_at_mode
    assert fit.elbo.value == pytest.approx(-11.12, abs=0.2)
