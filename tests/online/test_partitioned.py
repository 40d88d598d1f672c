"""Partitioned variational inference: one posterior from the rows of several machines."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from scipy.special import expit

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField
from numpyro_tempered.online.parts.partitioned import _record

SQUARED = nt.expectations.squared()
LOGISTIC = nt.expectations.logistic()
D, ALPHA = 2, 0.7
SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def prior_of(family, dtype=None):
    loc, scale = jnp.asarray([0.2, -0.5], dtype), jnp.asarray([0.7, 1.5], dtype)
    return (
        FullRank(loc, jnp.diag(scale))
        if family == "full rank"
        else MeanField(loc, scale)
    )


def logistic_rows(n=36, seed=3):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, D)) @ np.array([[1.0, 0.6], [0.0, 0.8]])
    return x, np.where(
        rng.uniform(size=n) < expit(x @ np.array([1.0, -0.5])), 1.0, -1.0
    )


def split(x, y, sizes):
    ends = np.cumsum(sizes)
    assert ends[-1] == len(y)
    return [
        (x[end - size : end], y[end - size : end])
        for end, size in zip(ends, sizes, strict=True)
    ]


def variational_optimum(x, y, alpha, loc, scale, *, diagonal):
    """Mean and covariance of the best Gaussian, by natural gradients on Gauss-Hermite expectations."""
    z, w = np.polynomial.hermite_e.hermegauss(80)
    w = w / w.sum()
    p0, m = np.diag(np.asarray(scale, float) ** -2), np.array(loc, float)
    p = p0.copy()
    for _ in range(400):
        cov = np.linalg.inv(p)
        sd = np.sqrt(np.einsum("ij,jk,ik->i", x, cov, x))
        u = (x @ m)[:, None] + sd[:, None] * z
        s = expit(-y[:, None] * u)
        grad = p0 @ (m - loc) - alpha * x.T @ (y * (s @ w))
        hessian = p0 + alpha * (x.T * ((s * (1 - s)) @ w)) @ x
        p = 0.7 * p + 0.3 * (np.diag(np.diag(hessian)) if diagonal else hessian)
        m = m - 0.3 * np.linalg.solve(hessian, grad)
    return m, np.linalg.inv(p)


def moments(q):
    root = nt.gaussian.families.family_of(q).root(q)
    return np.asarray(q.loc), np.asarray(
        jnp.diag(root**2) if root.ndim == 1 else root @ root.T
    )


def assert_optimal(q, x, y, rtol=1e-6):
    expected = variational_optimum(
        x, y, ALPHA, [0.2, -0.5], [0.7, 1.5], diagonal=isinstance(q, MeanField)
    )
    for ours, theirs in zip(moments(q), expected, strict=True):
        np.testing.assert_allclose(
            ours, theirs, rtol=rtol, atol=rtol * np.max(np.abs(theirs))
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "num_parts"),
    [("full rank", 1), ("full rank", 3), ("full rank", 6), ("mean field", 3)],
)
def test_one_undamped_round_is_exact_on_a_conjugate_model(x64, family, num_parts):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, D)), rng.normal(size=12) * 3
    if family == "mean field":
        # Rows along the axes keep the exact posterior within the family.
        x = np.eye(D)[rng.integers(D, size=12)] * x
    pvi = nt.online.partitioned(SQUARED, alpha=ALPHA / 2, damping=1.0)
    server = pvi.init(prior_of(family), num_parts)
    shards = split(x, y, [12 // num_parts] * num_parts)
    factors = [
        pvi.refit(pvi.factor(server, k), server, *shard)
        for k, shard in enumerate(shards)
    ]
    server = pvi.combine(server, [factor.change for factor in factors])
    mean, covariance = oracles.linear_posterior(
        x, y, 1.0 / ALPHA, [0.2, -0.5], [0.7, 1.5]
    )
    for ours, theirs in zip(moments(server.posterior), (mean, covariance), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


FIXED_POINTS = {
    "three machines": ("full rank", [12, 12, 12], {}),
    "one machine": ("full rank", [36], {}),
    "sequential": ("full rank", [12, 12, 12], {"sequential": True}),
    "unequal and empty": ("full rank", [1, 0, 30, 5], {}),
    "mean field": ("mean field", [12, 12, 12], {}),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "sizes", "options"), FIXED_POINTS.values(), ids=FIXED_POINTS
)
def test_rounds_lead_to_the_optimum_of_all_rows(x64, family, sizes, options):
    x, y = logistic_rows()
    pvi = nt.online.partitioned(LOGISTIC, alpha=ALPHA, tolerance=1e-12)
    run = nt.online.run_partitioned(
        pvi,
        prior_of(family),
        split(x, y, sizes),
        num_rounds=100,
        tolerance=1e-15,
        **options,
    )
    assert run.converged
    assert_optimal(run.posterior, x, y)


@pytest.mark.full
def test_machines_with_one_class_each_converge(x64):
    x, y = logistic_rows()
    order = np.argsort(y, kind="stable")
    x, y = x[order], y[order]
    negative = int(np.sum(y < 0))
    pvi = nt.online.partitioned(LOGISTIC, alpha=ALPHA, tolerance=1e-12)
    shards = split(x, y, [negative, 36 - negative])
    run = nt.online.run_partitioned(
        pvi, prior_of("full rank"), shards, num_rounds=200, tolerance=1e-15
    )
    assert run.converged
    assert_optimal(run.posterior, x, y)


def test_changes_in_any_order_late_and_twice_lead_there_too(x64):
    rng = np.random.default_rng(1)
    x, y = logistic_rows()
    shards = split(x, y, [12, 12, 12])
    pvi = nt.online.partitioned(LOGISTIC, alpha=ALPHA, tolerance=1e-12)
    server = pvi.init(prior_of("full rank"), 3)
    factors = [pvi.factor(server, k) for k in range(3)]
    on_the_way, sent, num_duplicates = [], [], 0
    for _ in range(300):
        k = int(rng.integers(3))
        if int(server.rounds[k]) == int(factors[k].change.round):
            # From the posterior of now; it arrives when others have changed it.
            factors[k] = pvi.refit(factors[k], server, *shards[k])
            on_the_way.append(factors[k].change)
        if sent and rng.uniform() < 0.2:
            on_the_way.append(sent[int(rng.integers(len(sent)))])
            num_duplicates += 1
        if len(on_the_way) > 2 or rng.uniform() < 0.3:
            change = on_the_way.pop(int(rng.integers(len(on_the_way))))
            server = pvi.combine(server, change)
            sent.append(change)
    assert int(server.duplicates) >= num_duplicates - len(on_the_way) > 5
    assert (int(server.rejected), int(server.halved)) == (0, 0)
    assert_optimal(server.posterior, x, y)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_both_precisions_and_units(x64, dtype):
    x, y = logistic_rows()
    units = np.array([1e3, 1e-2])
    prior = prior_of("full rank", dtype)
    prior = FullRank(
        prior.loc / units.astype(dtype), prior.factor / units.astype(dtype)[:, None]
    )
    shards = split((x * units).astype(dtype), y.astype(dtype), [12, 12, 12])
    pvi = nt.online.partitioned(LOGISTIC, alpha=ALPHA)
    run = nt.online.run_partitioned(pvi, prior, shards, num_rounds=40, tolerance=1e-9)
    assert run.converged
    assert run.posterior.loc.dtype == dtype
    scaled = FullRank(run.posterior.loc * units, run.posterior.factor * units[:, None])
    assert_optimal(scaled, x, y, rtol=1e-4)


def test_a_factor_keeps_the_types_that_a_round_was_compiled_for(x64):
    x, y = logistic_rows()
    pvi = nt.online.partitioned(LOGISTIC, alpha=ALPHA)
    server = pvi.init(prior_of("full rank"), 3)
    factor = pvi.factor(server, 0)
    after = pvi.refit(factor, server, x[:12], y[:12])
    # jax.typeof tells weak types, for each of which JAX compiles anew.
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, factor)
    combined = pvi.combine(server, after.change)
    assert jax.tree.map(jax.typeof, combined) == jax.tree.map(jax.typeof, server)


def test_rows_that_are_not_finite_are_left_out(x64):
    x, y = logistic_rows()
    pvi = nt.online.partitioned(LOGISTIC, alpha=ALPHA)
    server = pvi.init(prior_of("full rank"), 3)
    bad = x[:12].copy()
    bad[3, 1] = np.nan
    change = pvi.refit(pvi.factor(server, 0), server, bad, y[:12]).change
    assert int(change.skipped) == 1
    off = np.arange(12) != 3
    masked = pvi.refit(pvi.factor(server, 0), server, x[:12], y[:12], mask=off).change
    np.testing.assert_allclose(change.linear, masked.linear, rtol=1e-12)
    none = pvi.refit(
        pvi.factor(server, 0), server, np.full((12, D), np.nan), y[:12]
    ).change
    assert int(none.skipped) == 12
    assert not np.any(none.linear)
    assert not np.any(none.precision)


@pytest.mark.full
def test_a_machine_that_leaves_takes_its_rows_out(x64):
    x, y = logistic_rows()
    pvi = nt.online.partitioned(LOGISTIC, alpha=ALPHA)
    server = pvi.init(prior_of("full rank"), 3)
    factors = [
        pvi.refit(pvi.factor(server, k), server, x[:12], y[:12]) for k in range(2)
    ]
    server = pvi.combine(server, [factor.change for factor in factors])
    leave = nt.online.partitioned(LOGISTIC, alpha=ALPHA, damping=1.0)
    for factor in factors:
        server = leave.combine(server, leave.refit(factor, server, x[:0], y[:0]).change)
    np.testing.assert_allclose(server.posterior.loc, server.prior.loc, rtol=1e-9)
    np.testing.assert_allclose(
        server.posterior.factor, server.prior.factor, rtol=1e-9, atol=1e-12
    )


@pytest.mark.full
def test_a_run_says_what_it_left_out_and_where_it_did_not_converge(x64):
    x, y = logistic_rows()
    y[0] = np.nan
    pvi = nt.online.partitioned(LOGISTIC, alpha=ALPHA)
    with pytest.warns(
        nt.online.StreamWarning,
        match=r"2 rounds did not converge.*1 rows are not finite",
    ):
        nt.online.run_partitioned(
            pvi, prior_of("full rank"), split(x, y, [12, 12, 12]), num_rounds=2
        )
    # Correlated coordinates that are fitted as independent, by undamped rounds of many machines.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 1)) + 0.1 * rng.normal(size=(40, 5))
    y = x.sum(axis=1)
    pvi, prior = (
        nt.online.partitioned(SQUARED, damping=1.0),
        MeanField(jnp.zeros(5), jnp.ones(5)),
    )
    with pytest.warns(
        nt.online.StreamWarning,
        match=r"did not converge, and the ELBO fell.*smaller damping",
    ):
        nt.online.run_partitioned(pvi, prior, split(x, y, [1] * 40), num_rounds=6)


@pytest.mark.full
def test_devices_of_an_axis_combine_by_collectives(x64):
    x, y = logistic_rows()
    pvi = nt.online.partitioned(LOGISTIC, alpha=ALPHA)
    server = pvi.init(prior_of("full rank"), 3)
    factors = [pvi.factor(server, k) for k in range(3)]
    stack = partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))

    @jax.jit
    @partial(jax.vmap, in_axes=(None, 0, 0), axis_name="machines")
    def one_round(state, factor, data):
        factor = pvi.refit(factor, state, *data)
        return pvi.combine_over(state, factor.change, "machines"), factor

    after, moved = one_round(
        server, stack(*factors), stack(*split(jnp.asarray(x), jnp.asarray(y), [12] * 3))
    )
    together = pvi.combine(server, moved.change)
    for k in range(3):
        np.testing.assert_allclose(
            after.posterior.loc[k], together.posterior.loc, rtol=1e-12
        )
        np.testing.assert_array_equal(after.rounds[k], [1, 1, 1])
    np.testing.assert_array_equal(together.shares, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("each", [1, 2], ids=["one machine a device", "two"])
def test_a_sum_over_devices_is_that_of_the_changes_that_count(each):
    """Of six changes one is not finite, one came before, and one is of another prior."""
    pvi = nt.online.partitioned(LOGISTIC, alpha=ALPHA)
    server = pvi.init(prior_of("full rank"), 6)
    rng = np.random.default_rng(0)
    roots = rng.normal(size=(6, D, D)).astype(np.float32)
    one = pvi.factor(server, 0).change
    changes = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (6, *leaf.shape)), one
    )._replace(
        linear=jnp.asarray(rng.normal(size=(6, D)), jnp.float32).at[1, 0].set(jnp.nan),
        precision=roots @ np.swapaxes(roots, 1, 2),
        part=jnp.arange(6),
        round=jnp.array([1, 1, 1, 0, 1, 1]),
        prior=jnp.where(jnp.arange(6) == 4, one.prior + 1, one.prior),
    )
    groups = jax.tree.map(
        lambda leaf: jnp.reshape(leaf, (6 // each, each, *leaf.shape[1:])), changes
    )
    if each == 1:
        groups = jax.tree.map(lambda leaf: leaf[:, 0], groups)
    over = jax.vmap(
        partial(pvi.combine_over, axis_name="machines"),
        in_axes=(None, 0),
        axis_name="machines",
    )
    after = jax.jit(over)(server, groups)
    counted = [0, 2, 5]
    linear = np.asarray(changes.linear)[counted].sum(axis=0)
    precision = np.asarray(changes.precision)[counted].sum(axis=0)
    for device in range(6 // each):
        np.testing.assert_allclose(
            after.linear[device] - server.linear, linear, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            after.precision[device] - server.precision, precision, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_array_equal(after.rounds[device], [1, 1, 1, 0, 0, 1])
        np.testing.assert_array_equal(after.shares[device], [1, 0, 1, 0, 0, 1])
        assert (int(after.duplicates[device]), int(after.rejected[device])) == (1, 2)


@pytest.mark.parametrize("family", ["full rank", "mean field"])
def test_the_record_of_a_round_is_its_elbo_and_how_far_it_moved(family, x64):
    """One undamped change from the prior, to a posterior that is known."""
    pvi = nt.online.partitioned(LOGISTIC, alpha=ALPHA)
    server = pvi.init(prior_of(family), 1)
    sd = np.array([0.7, 1.5])
    precision = (
        np.array([[2.0, 0.5], [0.5, 1.0]])
        if family == "full rank"
        else np.array([2.0, 1.0])
    )
    change = pvi.factor(server, 0).change._replace(
        linear=jnp.array([0.3, -0.4]),
        precision=jnp.asarray(precision),
        round=jnp.array(1),
        expected_loss=jnp.array(9.0),
    )
    after = pvi.combine(server, change)
    first = _record(server, after, jax.tree.map(lambda leaf: leaf[None], change))
    matrix = precision if family == "full rank" else np.diag(precision)
    linear = np.array([0.3, -0.4])
    # At the prior's mean the slope is the change's, and the curvature that of prior and change.
    spread = np.diag(sd) @ (matrix + np.diag(sd**-2)) @ np.diag(sd) - np.eye(2)
    expected = 0.5 * np.sum((sd * linear) ** 2) + 0.25 * np.sum(spread**2)
    assert float(first.move) == pytest.approx(expected, rel=1e-9)
    assert float(first.elbo) == pytest.approx(-9.0)
    # From the posterior on, nothing moves, and its divergence from the prior counts.
    second = _record(after, after, jax.tree.map(lambda leaf: leaf[None], change))
    assert float(second.move) < 1e-20
    kl = nt.gaussian.families.family_of(after.posterior).kl(
        after.posterior, server.prior
    )
    assert float(second.elbo) == pytest.approx(-9.0 - float(kl))


def test_no_change_leaves_an_improper_posterior(x64):
    pvi = nt.online.partitioned(LOGISTIC)
    server = pvi.init(prior_of("full rank"), 3)
    blank = pvi.factor(server, 0).change._replace(round=jnp.int32(1))
    before = np.asarray(server.precision)
    # Half of this leaves a Gaussian, all of it none.
    halved = pvi.combine(server, blank._replace(precision=-1.5 * before))
    assert (float(halved.shares[0]), int(halved.halved), int(halved.rejected)) == (
        0.5,
        1,
        0,
    )
    np.testing.assert_allclose(halved.precision, 0.25 * before)
    # The machine goes on from what entered.
    x, y = logistic_rows()
    factor = pvi.factor(server, 0)._replace(
        change=blank._replace(precision=-1.5 * before)
    )
    again = pvi.refit(factor, halved, x[:12], y[:12])
    np.testing.assert_allclose(again.precision, -0.75 * before)
    for change in (-1e6 * before, np.full_like(before, np.nan)):
        rejected = pvi.combine(server, blank._replace(precision=jnp.asarray(change)))
        assert (
            float(rejected.shares[0]),
            int(rejected.rejected),
            int(rejected.rounds[0]),
        ) == (0.0, 1, 1)
        np.testing.assert_array_equal(
            rejected.posterior.factor, server.posterior.factor
        )
        np.testing.assert_array_equal(rejected.precision, before)


@pytest.mark.full
def test_losses_that_are_not_convex_keep_a_gaussian(x64):
    # A Cauchy loss with outliers on one machine, whose factor has negative precision.
    cauchy = nt.expectations.gauss_hermite(lambda u, y: jnp.log1p(jnp.square(y - u)))
    x = np.ones((30, 1))
    y = np.concatenate([np.random.default_rng(0).normal(size=20), np.full(10, 4.0)])
    pvi = nt.online.partitioned(cauchy, damping=0.3)
    prior = FullRank(jnp.zeros(1), 10.0 * jnp.eye(1))
    run = nt.online.run_partitioned(
        pvi, prior, split(x, y, [20, 10]), num_rounds=100, tolerance=1e-10
    )
    assert run.converged
    f = nt.gaussian.descent.objective(cauchy, prior, x, y)
    batch = nt.gaussian.descent.minimise(f, run.posterior, tolerance=1e-12)
    np.testing.assert_allclose(run.posterior.loc, batch.posterior.loc, rtol=1e-4)
    np.testing.assert_allclose(run.posterior.factor, batch.posterior.factor, rtol=1e-4)


@pytest.mark.full
def test_wide_priors_of_counts_start_narrow():
    x = np.random.default_rng(0).normal(size=(40, D)).astype(np.float32)
    y = np.random.default_rng(1).poisson(np.exp(x @ [0.5, -0.2])).astype(np.float32)
    pvi, prior = (
        nt.online.partitioned(nt.expectations.poisson()),
        FullRank(jnp.zeros(D), 30.0 * jnp.eye(D)),
    )
    run = nt.online.run_partitioned(
        pvi, prior, split(x, y, [20, 20]), num_rounds=40, tolerance=1e-7
    )
    batch = nt.gaussian.descent.minimise(
        nt.gaussian.descent.objective(nt.expectations.poisson(), prior, x, y),
        run.posterior,
    )
    np.testing.assert_allclose(run.posterior.loc, batch.posterior.loc, atol=1e-3)


@pytest.mark.full
def test_draws_are_the_same_in_each_round(x64):
    drawn = nt.expectations.monte_carlo(
        lambda theta, x, y: jax.nn.softplus(-y * (x @ theta)),
        num_particles=200,
        antithetic=True,
    )
    x, y = logistic_rows()
    pvi = nt.online.partitioned(drawn, alpha=ALPHA)
    key = jax.random.key(0)
    run = nt.online.run_partitioned(
        pvi,
        prior_of("full rank"),
        split(x, y, [12] * 3),
        num_rounds=60,
        tolerance=1e-8,
        rng_key=key,
    )
    assert run.converged
    assert_optimal(run.posterior, x, y, rtol=0.1)
    server = pvi.init(prior_of("full rank"), 1)
    with pytest.raises(ValueError, match="pass rng_key=, the same one in each round"):
        pvi.refit(pvi.factor(server, 0), server, x, y)


def test_changes_and_states_travel_as_bytes():
    pvi = nt.online.partitioned(LOGISTIC)
    server = pvi.init(prior_of("mean field"), 2)
    blank = pvi.factor(server, 1).change
    change = blank._replace(linear=jnp.asarray([1.0, jnp.pi]), round=jnp.int32(1))
    data = nt.online.to_bytes(change)
    again = nt.online.from_bytes(data, like=blank)
    for ours, theirs in zip(again, change, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(
        nt.online.from_bytes(nt.online.to_bytes(server), like=server).rounds, [0, 0]
    )
    with pytest.raises(
        ValueError,
        match=r"the message is truncated, or not a state that to_bytes made.*not a zip",
    ):
        nt.online.from_bytes(data[:-20], like=blank)
    with pytest.raises(
        ValueError,
        match=r"the message holds a state of another structure than like: .*Change",
    ):
        nt.online.from_bytes(data, like=server)
    with pytest.raises(TypeError, match=r"is traced.*it outside of jit, vmap"):
        jax.jit(lambda c: nt.online.to_bytes(c))(change)


def test_what_does_not_fit_is_refused():
    x, y = logistic_rows()
    pvi = nt.online.partitioned(LOGISTIC)
    for bad in (LowRank(jnp.zeros(D), jnp.ones(D), jnp.zeros((D, 1))), jnp.zeros(D)):
        with pytest.raises(
            TypeError,
            match=f"works on a MeanField or FullRank prior.*{type(bad).__name__}",
        ):
            pvi.init(bad, 2)
    with pytest.raises(
        ValueError, match="num_parts must be an integer of at least 1, got 0"
    ):
        pvi.init(prior_of("full rank"), 0)
    server = pvi.init(prior_of("full rank"), 2)
    with pytest.raises(ValueError, match="part must be an integer from 0 to 1, got 2"):
        pvi.factor(server, 2)
    change = pvi.factor(server, 0).change._replace(round=jnp.int32(1))
    other = pvi.init(prior_of("full rank")._replace(loc=jnp.ones(D)), 2)
    small = pvi.init(MeanField(jnp.zeros(1), jnp.ones(1)), 2)
    with pytest.raises(
        ValueError,
        match=r"the change of machine 0 is of another prior than the posterior",
    ):
        pvi.combine(other, change)
    with pytest.raises(
        ValueError,
        match=r"parameters of shapes .*\(2, 2\).* and the posterior .*\(1,\), \(1,\)",
    ):
        pvi.combine(small, change)
    with pytest.raises(
        ValueError,
        match=r"change 3 of machine 0 came, and 1 was expected.*of different runs",
    ):
        pvi.combine(server, change._replace(round=jnp.int32(3)))
    with pytest.raises(
        ValueError, match=r"^a change.*came from machine \[5\], and there are 2"
    ):
        pvi.combine(server, change._replace(part=jnp.int32(5)))
    with pytest.raises(
        TypeError, match=r"combine takes changes, got .*Factor.*; send factor.change"
    ):
        pvi.combine(server, [pvi.factor(server, 0)])
    ahead = pvi.factor(server, 0)._replace(change=change)
    with pytest.raises(
        ValueError, match="has made 1 changes, and 0 have entered this posterior: wait"
    ):
        pvi.refit(ahead, server, x, y)
    with pytest.raises(
        TypeError,
        match=r"state must be .*PartitionedState.*pvi.init\(prior, num_parts\)",
    ):
        pvi.refit(pvi.factor(server, 0), server.prior, x, y)
    with pytest.raises(
        ValueError,
        match=r"refit needs arrays with one common.* Constants belong inside the model.*the loss",
    ):
        pvi.refit(pvi.factor(server, 0), server, x, y[:3])
    with pytest.raises(
        ValueError,
        match=r"the factor of machine 0 is of another prior.*the same everywhere",
    ):
        pvi.refit(pvi.factor(other, 0), server, x, y)
    with pytest.raises(
        ValueError,
        match=r"has sent 1 changes: go on from the factor that it keeps.*the posterior",
    ):
        pvi.factor(server._replace(rounds=jnp.asarray([1, 0])), 0)
    with pytest.raises(ValueError, match=r"damping must be in \(0, 1\], got 2"):
        nt.online.partitioned(LOGISTIC, damping=2.0)
    with pytest.raises(
        TypeError,
        match=r"^partitioned takes.*online.bare_loss\(rng_key, \*args\) makes one of it",
    ):
        nt.online.partitioned(nt.expectations.gauss_hermite(predictor="eta"))
    with pytest.raises(
        ValueError, match="shards must hold the data of at least one machine"
    ):
        nt.online.run_partitioned(pvi, prior_of("full rank"), [])


def cover_type(num_rows):
    with np.load(SHARED / "covtype.npz") as file:
        at = np.random.default_rng(0).permutation(file["y"].size)[:num_rows]
        areas, soils = (
            np.eye(4)[file["wilderness"][at] - 1],
            np.eye(40)[file["soil"][at] - 1],
        )
        x = np.concatenate([file["numeric"][at].astype(float), areas, soils], axis=1)
        y = np.where(file["y"][at] == 2, 1.0, -1.0)
    scale = x.std(axis=0)
    x = (x - x.mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    return np.concatenate([x, np.ones((num_rows, 1))], axis=1), y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_cover_type_on_32_machines_is_within_a_standard_deviation_in_five_rounds(x64):
    if not (SHARED / "covtype.npz").exists():
        pytest.skip("no file covtype.npz in a folder shared/data beside the checkout")
    x, y = cover_type(60_000)
    d = x.shape[1]
    prior = FullRank(jnp.zeros(d), jnp.eye(d))
    batch = nt.gaussian.descent.minimise(
        nt.gaussian.descent.objective(LOGISTIC, prior, x, y), prior, tolerance=1e-2
    ).posterior
    root = np.asarray(batch.factor)

    def distance(q):
        return (
            float(np.sum(np.linalg.solve(root, np.asarray(q.loc - batch.loc)) ** 2)) / d
        )

    shards = list(zip(np.array_split(x, 32), np.array_split(y, 32), strict=True))
    rule = nt.online.ngvi(curvature="fisher")
    streams = [
        nt.online.run(rule, LOGISTIC, rule.init(prior), *shard)[0] for shard in shards
    ]
    once = streams[0]
    for state in streams[1:]:
        once = nt.online.merge(rule, once, state)
    assert distance(once.posterior) > 10.0
    run = nt.online.run_partitioned(
        nt.online.partitioned(LOGISTIC), prior, shards, num_rounds=5
    )
    assert distance(run.posterior) < 0.1
