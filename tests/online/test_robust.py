"""Rules that survive bad data: robust, clip and skip."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered

import numpyro_tempered as nt
from numpyro_tempered.core.precision import CompensatedSum
from numpyro_tempered.gaussian.expectations.base import Options
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField
from numpyro_tempered.online import base
from numpyro_tempered.online.streams import robust as robust_module

D, NOISE = 3, 0.5
SQUARED = nt.expectations.squared(noise_scale=NOISE)
LEAST = float(np.log(NOISE * np.sqrt(2 * np.pi)))
NGVI = nt.online.ngvi()
ROBUST = nt.online.robust(NGVI, 2.0)
CLIP = nt.online.clip(NGVI, 2.0)
SKIP = nt.online.skip(NGVI, max_loss=50.0)
PRIORS = {
    "mean field": MeanField(np.zeros(D), np.ones(D)),
    "full rank": FullRank(np.zeros(D), np.eye(D)),
    "low rank": LowRank(np.zeros(D), np.ones(D), np.zeros((D, 1))),
}


def make_rows(n=40, seed=0):
    """A linear model whose every tenth outcome is far off."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, D))
    y = x @ [1.0, -1.0, 0.5] + NOISE * rng.normal(size=n)
    return x, y + 50.0 * (np.arange(n) % 10 == 5)


def wolf(x, y, threshold, hard):
    """DM24's filter on a linear model with a state that stands still, in NumPy."""
    mean, precision = np.zeros(D), np.eye(D)
    for row, outcome in zip(x, y, strict=True):
        residual = (outcome - row @ mean) / NOISE
        weight = (
            float(abs(residual) <= threshold)
            if hard
            else (1 + residual**2 / threshold**2) ** -0.5
        )
        precision = precision + weight**2 * np.outer(row, row) / NOISE**2
        mean = mean + np.linalg.solve(precision, weight**2 * row * residual / NOISE)
    return mean, np.linalg.inv(precision)


def run(rule, prior="full rank", loss=SQUARED, rows=None):
    return nt.online.run(
        rule, loss, rule.init(PRIORS[prior]), *(make_rows() if rows is None else rows)
    )


@pytest.mark.parametrize(
    ("hard", "least"),
    tiered(
        [(False, None), (False, LEAST), (True, None), (True, LEAST)],
        unit=[(False, None)],
    ),
)
def test_on_gaussian_noise_robust_is_the_filter_of_the_paper(x64, hard, least):
    x, y = make_rows()
    state, losses = run(nt.online.robust(NGVI, 2.0, hard=hard, least=least))
    mean, covariance = wolf(x, y, 2.0, hard)
    np.testing.assert_allclose(state.posterior.loc, mean, rtol=1e-9)
    factor = np.asarray(state.posterior.factor)
    np.testing.assert_allclose(factor @ factor.T, covariance, rtol=1e-9, atol=1e-12)
    # The losses are those of the data, not weighted.
    np.testing.assert_allclose(
        losses.at_mean[0], 0.5 * (y[0] / NOISE) ** 2 + LEAST, rtol=1e-12
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "inner",
    [nt.online.rvga(), nt.online.ewa(1.0), nt.online.svb(0.01), nt.online.oga(0.01)],
)
def test_outliers_do_not_move_robust_rules(x64, inner):
    x, y = make_rows(400)
    state, _ = run(nt.online.robust(inner, 2.0), rows=(x, y))
    np.testing.assert_allclose(state.posterior.loc, [1.0, -1.0, 0.5], atol=0.3)


def test_the_rows_of_a_batch_are_weighed_one_by_one(x64):
    x, y = make_rows(8)
    on = np.arange(8) != 2
    spoiled = np.where(on, y, np.nan)
    state, _ = nt.online.update(
        ROBUST, SQUARED, ROBUST.init(PRIORS["full rank"]), x, spoiled, mask=on
    )
    weights = 1 / (1 + (y / NOISE / 2.0) ** 2)
    precision = np.eye(D) + (x[on].T * weights[on]) @ x[on] / NOISE**2
    expected = np.linalg.solve(precision, x[on].T @ (weights * y)[on] / NOISE**2)
    np.testing.assert_allclose(state.posterior.loc, expected, rtol=1e-10)
    np.testing.assert_allclose(state.memory.total.value, weights[on].mean(), rtol=1e-12)


def test_the_residual_is_pearsons_whatever_the_covariance(x64):
    q = MeanField(jnp.array([0.3, -0.2, 0.1]), jnp.full(D, 1e-5))
    x, y = make_rows(5)[0], np.array([0.0, 1.0, 2.0, 5.0, 9.0])
    rate = np.exp(x @ np.asarray(q.loc))
    squares = robust_module.residuals(
        nt.expectations.poisson(), q, (x, y), Options(), None
    )
    np.testing.assert_allclose(squares, (y - rate) ** 2 / rate, rtol=1e-6)
    for wide in (q, FullRank(q.loc, jnp.diag(jnp.array([1e-5, 3e-5, 1e-4])))):
        one = robust_module.residual(
            nt.expectations.poisson(), wide, wide, (x[3], y[3]), Options(), None
        )
        np.testing.assert_allclose(one, squares[3], rtol=1e-6)


def test_the_residual_of_classes_is_pearsons_over_all_of_them(x64):
    x, classes = make_rows(5)[0], np.array([0, 2, 1, 1, 0])
    theta = 0.3 * np.arange(3.0 * D) - 1.0
    q = MeanField(jnp.asarray(theta), jnp.full(3 * D, 1e-5))
    p = np.exp(x @ theta.reshape(3, D).T)
    p /= p.sum(axis=1, keepdims=True)
    expected = np.sum((p - np.eye(3)[classes]) ** 2, axis=1) / np.sum(
        p * (1 - p), axis=1
    )
    of_rows = lambda q: robust_module.residuals(  # noqa: E731
        nt.expectations.softmax(3), q, (x, classes), Options(), None
    )
    squares = jax.jit(of_rows)(q)
    np.testing.assert_allclose(squares, expected, rtol=1e-6)


def test_losses_without_curvature_need_their_least_value():
    hinge, labels = nt.expectations.hinge(), np.sign(make_rows()[1])
    with pytest.raises(
        ValueError,
        match=r"^the loss.*piecewise linear.*least=0\.0.*hinge and pinball losses",
    ):
        run(ROBUST, loss=hinge, rows=(make_rows()[0], labels))
    # Twice the loss is the deviance.
    q = MeanField(jnp.zeros(D), jnp.ones(D))
    squares = robust_module.residuals(
        hinge, q, (make_rows()[0], labels), Options(), 0.0
    )
    np.testing.assert_allclose(squares, 2.0)


def test_a_prior_far_from_the_data_is_told():
    x, y = make_rows(60)
    rule = nt.online.robust(NGVI, 1.0)
    with pytest.warns(
        nt.online.StreamWarning,
        match=r"robust gave 60 rounds a mean weight of 2\.\de-09",
    ):
        run(rule, rows=(x, y + 1e4))


# Clip


def test_a_clipped_round_is_that_of_a_datum_of_less_weight(x64):
    x, y = make_rows()
    state, _ = run(CLIP, "mean field", rows=(x, y))
    assert state.max_move <= 2.0
    assert 3 <= int(state.memory.shortened) < 20
    assert (int(state.count), int(state.rejected)) == (40, 0)
    start = CLIP.init(PRIORS["mean field"])
    after, _ = nt.online.update(CLIP, SQUARED, start, x[0], 1e3)
    # The precision tells the weight, and the mean must be that of the weighed datum.
    added = np.asarray(after.posterior.scale) ** -2 - 1
    weight = added[0] * NOISE**2 / x[0, 0] ** 2
    assert 0 < weight < 1
    np.testing.assert_allclose(added, weight * x[0] ** 2 / NOISE**2, rtol=1e-9)
    np.testing.assert_allclose(
        after.posterior.loc, weight * x[0] * 1e3 / NOISE**2 / (1 + added), rtol=1e-9
    )
    assert 0.5 < np.max(np.abs(after.posterior.loc)) <= 2.0


def test_short_rounds_are_not_clipped(x64):
    x, y = make_rows()
    y -= 50.0 * (np.arange(40) % 10 == 5)
    loose = nt.online.clip(NGVI, 1e6)
    ours, theirs = run(loose, rows=(x, y))[0], run(NGVI, rows=(x, y))[0]
    np.testing.assert_allclose(ours.posterior.loc, theirs.posterior.loc, rtol=1e-12)
    assert int(ours.memory.shortened) == 0


def test_a_step_that_no_weight_shortens_is_rejected(x64):
    # The pull to the prior moves the mean by more than the bound, without data.
    rule = nt.online.clip(nt.online.ngvi(forget=nt.online.to_prior(0.1)), 0.5)
    state = rule.init(PRIORS["mean field"])
    far = state._replace(posterior=MeanField(jnp.full(D, 50.0), jnp.ones(D)))
    after, _ = nt.online.update(rule, SQUARED, far, make_rows()[0][0], 1.0)
    assert (int(after.count), int(after.rejected)) == (0, 1)
    np.testing.assert_array_equal(after.posterior.loc, far.posterior.loc)


def test_a_datum_at_the_threshold_counts():
    rule = nt.online.robust(NGVI, 1.0, hard=True)
    state = rule.init(MeanField(jnp.zeros(1), jnp.ones(1)))
    # A residual of one noise scale, without rounding.
    state, _ = nt.online.run(
        rule,
        nt.expectations.squared(noise_scale=1.0),
        state,
        np.ones((1, 1)),
        np.ones(1),
    )
    np.testing.assert_allclose(state.posterior.loc, [0.5])


# Skip


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
@pytest.mark.parametrize(
    "threshold", tiered(["max_loss", "max_move"], unit=["max_loss"])
)
def test_skipped_rounds_leave_no_trace(x64, threshold):
    x, y = make_rows()
    rule = SKIP if threshold == "max_loss" else nt.online.skip(NGVI, max_move=5.0)
    state, losses = run(rule, rows=(x, y))
    bad = np.arange(40) % 10 == 5
    assert (int(state.count), int(state.rejected), int(state.memory.skipped)) == (
        36,
        4,
        4,
    )
    expected, others = run(NGVI, rows=(x[~bad], y[~bad]))
    np.testing.assert_allclose(state.posterior.loc, expected.posterior.loc, rtol=1e-12)
    np.testing.assert_allclose(
        np.asarray(losses.expected)[~bad], others.expected, rtol=1e-12
    )
    np.testing.assert_allclose(
        state.cumulative.expected.value, np.sum(others.expected), rtol=1e-10
    )
    taken = np.asarray(others.expected)
    np.testing.assert_allclose(state.memory.mean.value, taken.mean(), rtol=1e-10)
    np.testing.assert_allclose(
        state.memory.squares.value, len(taken) * taken.var(), rtol=1e-9
    )


@pytest.mark.parametrize(
    ("count", "excess", "is_skipped"),
    [(20, 5.9, False), (20, 6.1, True), (9, 6.1, False)],
)
def test_a_round_is_skipped_beyond_three_deviations_of_the_losses_so_far(
    x64, count, excess, is_skipped
):
    """Of 20 losses with mean 3 and variance 4, in units of nats; of 9 nothing is known."""
    rule = nt.online.skip(NGVI, max_deviations=3.0, warm_up=10)
    state = rule.init(PRIORS["mean field"])
    mean, squares = (
        CompensatedSum.start(jnp.asarray(value)) for value in (3.0, 4.0 * count)
    )
    memory = state.memory._replace(mean=mean, squares=squares)
    y = np.sqrt(2.0 * NOISE**2 * (3.0 + excess - LEAST))
    state = state._replace(count=jnp.asarray(count, state.count.dtype), memory=memory)
    after, losses = nt.online.update(rule, SQUARED, state, np.zeros(D), y)
    assert float(losses.expected) == pytest.approx(3.0 + excess)
    assert (int(after.count) - count, int(after.memory.skipped)) == (
        (0, 1) if is_skipped else (1, 0)
    )


@pytest.mark.full
def test_rounds_beyond_the_running_losses_are_skipped_and_told(x64):
    x, y = make_rows()
    y[5] = 0.0
    rule = nt.online.skip(NGVI, max_deviations=6.0, warm_up=10)
    with pytest.warns(
        nt.online.StreamWarning,
        match=r"3 of 40 rounds were rejected \(3 skipped by the rule",
    ):
        state, _ = run(rule, rows=(x, y))
    assert (int(state.rejected), int(state.memory.skipped)) == (3, 3)


# Composition

NESTED = {
    "average of robust": nt.online.with_average(ROBUST),
    "robust average": nt.online.robust(nt.online.with_average(NGVI), 2.0),
    "standardised robust": nt.online.standardise(ROBUST),
    "clipped standardised": nt.online.clip(nt.online.standardise(NGVI), 2.0),
    "standardised clipped": nt.online.standardise(CLIP),
    "skipping standardised": nt.online.skip(nt.online.standardise(NGVI), max_loss=50.0),
    "standardised skipping": nt.online.standardise(SKIP),
    "robust clipped skipping": nt.online.robust(nt.online.clip(SKIP, 2.0), 2.0),
    "skipping clipped robust": nt.online.skip(
        nt.online.clip(ROBUST, 2.0), max_loss=1e5
    ),
    "average of clipped": nt.online.with_average(CLIP),
    "clipped average": nt.online.clip(nt.online.with_average(NGVI), 2.0),
    "experts": nt.online.aggregate(
        nt.online.grid(
            lambda threshold: nt.online.robust(nt.online.ngvi(), threshold),
            threshold=[1.0, 2.0],
        )
    ),
}


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
@pytest.mark.parametrize(
    "name",
    tiered(
        NESTED,
        unit=[
            "robust clipped skipping",
            "skipping clipped robust",
            "standardised robust",
        ],
    ),
)
def test_wrappers_compose(name, x64):
    x, y = make_rows(200)
    state, losses = run(NESTED[name], "mean field", rows=(x, y))
    assert all(
        np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((state.posterior, losses))
    )
    scale = np.sqrt(np.mean(x**2, axis=0)) if "standardised" in name else 1.0
    np.testing.assert_allclose(state.posterior.loc / scale, [1.0, -1.0, 0.5], atol=0.5)
    if "standardised" in name:
        assert nt.online.original_scale(state).loc.shape == (D,)
    if "average" in name:
        assert nt.online.average(state).shape == (D,)


@pytest.mark.full
def test_the_order_of_averages_does_not_matter(x64):
    ends = [run(NESTED[name])[0] for name in ("average of robust", "robust average")]
    np.testing.assert_allclose(ends[0].posterior.loc, ends[1].posterior.loc, rtol=1e-10)
    np.testing.assert_allclose(
        nt.online.average(ends[0]), nt.online.average(ends[1]), rtol=1e-10
    )


def test_orders_that_have_no_meaning_are_refused():
    prior, experts = (
        PRIORS["mean field"],
        nt.online.aggregate(nt.online.grid(nt.online.ngvi, step_size=[0.5, 1.0])),
    )
    with pytest.raises(
        TypeError,
        match=r"^robust predicts from the.*write standardise\(robust\(rule\)\)",
    ):
        nt.online.robust(nt.online.standardise(NGVI)).init(prior)
    with pytest.raises(
        TypeError, match=r"^each expert of an.*make the rules of its grids robust"
    ):
        nt.online.robust(experts).init(prior)
    with pytest.raises(
        TypeError, match=r"^an aggregate moves as.*clip the rules of its grids"
    ):
        nt.online.clip(experts).init(prior)
    for rule in (ROBUST, CLIP, SKIP):
        with pytest.raises(TypeError, match="use run or update"):
            rule.update(None, rule.init(prior))
        start = rule.init(PRIORS["mean field"])
        with pytest.raises(
            TypeError, match=r"merge|holds no evidence|holds more than the posterior"
        ):
            nt.online.merge(rule, start, start)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nt.online.robust(NGVI, 0.0),
            r"threshold must be.*positive and finite, got",
        ),
        (lambda: nt.online.robust(NGVI, least=np.nan), r"least must be.*finite, got"),
        (
            lambda: nt.online.clip(NGVI, -1.0),
            r"max_move must be.*positive and finite, got",
        ),
        (lambda: nt.online.skip(NGVI), "skip needs a threshold"),
        (
            lambda: nt.online.skip(NGVI, max_loss=np.inf),
            r"max_loss must be.*finite, got",
        ),
        (
            lambda: nt.online.skip(NGVI, max_deviations=0.0),
            r"max_deviations must be.*and finite, got",
        ),
        (
            lambda: nt.online.skip(NGVI, max_move=np.nan),
            r"max_move must be.*positive and finite, got",
        ),
        (
            lambda: nt.online.skip(NGVI, max_move=1.0, warm_up=1),
            r"warm_up must be.*integer of at least",
        ),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.full
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", ["robust", "clip", "skip"])
def test_updates_runs_and_vmapped_runs_agree(name, prior):
    rule = {"robust": ROBUST, "clip": CLIP, "skip": SKIP}[name]
    x, y = (np.asarray(leaf, np.float32) for leaf in make_rows(12))
    start = rule.init(
        jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), PRIORS[prior])
    )
    one = start
    for t in range(12):
        one, _ = nt.online.update(rule, SQUARED, one, x[t], y[t])
    many, _ = jax.jit(jax.vmap(lambda y: nt.online.run(rule, SQUARED, start, x, y)))(
        np.stack([y, -y])
    )
    np.testing.assert_allclose(
        many.posterior.loc[0], one.posterior.loc, rtol=2e-4, atol=1e-5
    )
    assert int(many.rejected[0]) == int(one.rejected)
    for a, b in zip(
        jax.tree.leaves(base.unit_of(rule, one)),
        jax.tree.leaves(one.posterior),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full
@pytest.mark.parametrize("expectation", ["gauss_hermite", "monte_carlo"])
def test_a_model_with_outliers(key, expectation):
    def model(x, y=None):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
        eta = numpyro.deterministic("eta", x @ theta)
        with numpyro.plate("n", x.shape[0]):
            numpyro.sample("y", dist.Normal(eta, NOISE), obs=y)

    x, y = make_rows(150)
    expectation = getattr(nt.expectations, expectation)(predictor="eta")
    guide = nt.guides.AutoOnlineMultivariateNormal(model)
    online = nt.OnlineVI(model, guide, nt.online.robust(NGVI, 2.0), expectation)
    state, _ = online.run(key, x, y)
    np.testing.assert_allclose(state.posterior.loc, [1.0, -1.0, 0.5], atol=0.3)
    batch, _ = online.update(online.init(key, x, y), x, y)
    assert int(batch.count) == 1
