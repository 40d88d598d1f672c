"""What a stream is warned of."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiered

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField
from numpyro_tempered.online import Box

SQUARED = nt.expectations.squared()
NGVI = nt.online.ngvi()
PRIORS = {
    "mean field": MeanField(np.zeros(3), np.ones(3)),
    "full rank": FullRank(np.zeros(3), np.eye(3)),
    "low rank": LowRank(np.zeros(3), np.ones(3), np.zeros((3, 1))),
}


def make_rows(n=60, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)), rng.normal(size=n)


def kinds(*args, **options):
    return [
        finding.kind for finding in nt.online.diagnose(*args, warn=False, **options)
    ]


@pytest.mark.parametrize("name", tiered(PRIORS, unit=["mean field", "low rank"]))
def test_a_stream_in_order_is_not_warned_of(name):
    state, (x, y) = NGVI.init(PRIORS[name]), make_rows()
    assert nt.online.diagnose(NGVI, state, x) == ()
    if name == "mean field":
        state, _ = nt.online.run_chunks(NGVI, SQUARED, state, [(x, y)], size=16)
        assert nt.online.diagnose(NGVI, state, x, box=Box(loc=20.0, scale=1.0)) == ()


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_collapse(prior):
    rule = nt.online.ngvi()
    zeros, scales = np.zeros(3, np.float32), np.float32([1e-7, 2e-6, 1.0])
    narrow = {
        MeanField: MeanField(zeros, scales),
        FullRank: FullRank(zeros, np.diag(scales)),
        LowRank: LowRank(zeros, scales**-2, zeros[:, None]),
    }
    state = rule.init(prior)._replace(posterior=narrow[type(prior)])
    (finding,) = nt.online.diagnose(rule, state, warn=False)
    assert (finding.kind, finding.coordinates.tolist()) == ("collapse", [0])
    point = nt.online.oga(0.1)
    if not isinstance(prior, LowRank):
        assert kinds(point, point.init(prior)) == []


def test_the_box():
    box = Box(loc=0.5, scale=2.0)
    rule = nt.online.svb(1.0, box=box)
    start = rule.init(PRIORS["mean field"])
    # At the bound of the first mean.
    state = start._replace(
        posterior=MeanField(np.float32([0.5, 0.0, 0.0]), np.ones(3, np.float32))
    )
    (finding,) = nt.online.diagnose(rule, state, box=box, warn=False)
    assert (finding.kind, finding.coordinates.tolist()) == ("box", [0])
    # A start on the bound does not bind.
    tight = Box(loc=10.0, scale=1.0)
    rule = nt.online.svb(0.1, box=tight)
    assert kinds(rule, start, box=tight) == []
    grown = start._replace(prior=MeanField(np.zeros(3), np.full(3, 0.5)))
    assert kinds(rule, grown, box=tight) == ["box"]


@pytest.mark.full
def test_the_box_after_a_round():
    x, y = np.array([[1.0, 0.0, 0.0]]), np.array([5.0])
    for box, rate, found in (
        (Box(loc=0.5, scale=2.0), 1.0, [[0]]),
        (Box(loc=10.0, scale=1.0), 0.1, []),
    ):
        rule = nt.online.svb(rate, box=box)
        state, _ = nt.online.run(rule, SQUARED, rule.init(PRIORS["mean field"]), x, y)
        findings = nt.online.diagnose(rule, state, box=box, warn=False)
        assert all(finding.kind == "box" for finding in findings)
        assert [finding.coordinates.tolist() for finding in findings] == found


def test_features_of_different_sizes():
    rule = nt.online.ngvi()
    state = rule.init(PRIORS["mean field"])
    x, _ = make_rows(200)
    x[:, 1] *= 2e3
    (finding,) = nt.online.diagnose(rule, state, x, warn=False)
    assert (finding.kind, finding.coordinates[1]) == ("features", 1)
    x[:, 1] /= 2e3
    # An indicator that is rarely on, a missing value and a column of zeros are no difference of scale.
    x[:, 2] = np.arange(200) == 7
    x[3, 0] = np.nan
    assert kinds(rule, state, x) == []
    x[:, 2] = 0.0
    assert kinds(rule, state, x) == []
    assert kinds(rule, state, np.zeros((2, 3))) == []
    x[:, 1] *= 2e3
    assert (
        kinds(
            nt.online.standardise(rule),
            nt.online.standardise(rule).init(PRIORS["mean field"]),
            x,
        )
        == []
    )


def test_refused_rounds():
    state = NGVI.init(PRIORS["mean field"])._replace(count=jnp.int32(57))
    assert kinds(NGVI, state) == []
    assert kinds(NGVI, state._replace(rejected=jnp.int32(1))) == ["rejected"]
    assert kinds(NGVI, state._replace(jumps=jnp.int32(1))) == ["jump"]


def test_a_run_over_chunks_warns_once_a_kind():
    x, y = make_rows(60)
    x[:, 1] *= 1e4
    y[:10] = np.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nt.online.run_chunks(
            NGVI, SQUARED, NGVI.init(PRIORS["mean field"]), [(x, y)] * 3, size=16
        )
    messages = [
        str(w.message)
        for w in caught
        if issubclass(w.category, nt.online.StreamWarning)
    ]
    assert len(messages) == len(caught) == 2
    assert "rounds were rejected" in messages[0]
    assert "feature 1 is" in messages[1]


def test_what_learning_costs_on_noise_is_not_told():
    prior = FullRank(np.zeros(3), 2.0 * np.eye(3))
    for seed in (0, 2, 4):
        x, y = make_rows(seed=seed)
        _, losses = nt.online.run(NGVI, SQUARED, NGVI.init(prior), x, y)
        # More than 5 per cent, and less than three coefficients may cost in 60 rounds.
        assert 1.1 < np.mean(losses.at_mean) / np.mean(np.square(y)) < 1.3
    y[:20] += 10.0
    with pytest.warns(
        nt.online.StreamWarning,
        match=r"the mean loss, .*, is above .* for the same rows",
    ):
        nt.online.run(NGVI, SQUARED, NGVI.init(prior), x, y)


def test_diagnose_looks_at_one_stream():
    rule = nt.online.ngvi()
    states = jax.tree.map(
        lambda leaf: np.stack([leaf, leaf]), rule.init(PRIORS["mean field"])
    )
    with pytest.raises(
        ValueError, match=r"diagnose looks at one stream.*them: take one by"
    ):
        nt.online.diagnose(rule, states)
