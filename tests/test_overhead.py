"""What tempering costs: nothing at alpha = 1, one multiplication a datum otherwise, no time to trace."""

import time

import jax
import numpy as np
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import Adam
from workloads import (
    WORKLOADS,
    energy_and_gradient,
    flops,
    gradient,
    hierarchical,
    labels,
    location,
    logistic,
    mixture,
    numpyro_scale,
    poisson,
    simulate,
    svi_update,
    unconstrained_point,
)

import numpyro_tempered as nt

pytestmark = pytest.mark.full

ALPHA = 0.5
NUM_DATA = 1000
# XLA's count differs by a few operations outside of the loop over data.
SLACK = 50


@pytest.fixture(scope="module")
def data():
    return simulate(NUM_DATA)


def nuts(model, key, data):
    mcmc = MCMC(NUTS(model), num_warmup=20, num_samples=20, progress_bar=False)
    mcmc.run(key, data)
    return mcmc.get_samples()


def svi(model, key, data):
    result = SVI(model, AutoNormal(model), Adam(0.05), Trace_ELBO()).run(
        key, 20, data, progress_bar=False
    )
    return {**result.params, "losses": result.losses}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


RUNS = [(location, nuts), (location, svi)]
SLOW_RUNS = [
    (model, run) for model in (logistic, hierarchical, mixture) for run in (nuts, svi)
]


@pytest.mark.parametrize(
    ("model", "run"),
    [*RUNS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_RUNS)],
    ids=lambda f: f.__name__,
)
def test_runs_at_alpha_one_are_bitwise_those_of_the_undecorated_model(
    model, run, key, data
):
    small = {name: value[:50] for name, value in data.items()}
    plain = run(model, key, small)
    assert_same(run(nt.temper(model, alpha=1.0), key, small), plain)
    tempered = run(nt.temper(model, alpha=ALPHA), key, small)
    assert all(not np.array_equal(tempered[name], plain[name]) for name in plain)


def lowered(model, data):
    return (
        jax.jit(energy_and_gradient(model))
        .lower(unconstrained_point(model, data), data)
        .as_text()
    )


@pytest.mark.parametrize("model", WORKLOADS.values(), ids=WORKLOADS)
def test_program_at_alpha_one_is_that_of_the_undecorated_model(model, data):
    plain = lowered(model, data)
    assert lowered(nt.temper(model, alpha=1.0), data) == plain
    assert lowered(nt.temper(model, alpha=ALPHA), data) != plain


@pytest.mark.parametrize("model", WORKLOADS.values(), ids=WORKLOADS)
def test_gradient_takes_no_more_operations(model, data):
    point = unconstrained_point(model, data)
    plain = flops(gradient(model), point, data)
    assert plain > NUM_DATA
    tempered = flops(gradient(nt.temper(model, ALPHA)), point, data)
    # XLA of older jax leaves the constant factor of one gradient a multiplication of its own.
    assert tempered <= (
        1.01 * plain if jax.__version_info__ >= (0, 10) else plain + NUM_DATA + SLACK
    )


@pytest.mark.parametrize("model", [location, poisson], ids=lambda f: f.__name__)
def test_energy_takes_one_multiplication_more_a_datum_as_numpyro_scale_does(
    model, data
):
    point = unconstrained_point(model, data)
    plain, tempered, scaled = (
        flops(energy_and_gradient(m), point, data)
        for m in (model, nt.temper(model, ALPHA), numpyro_scale(model, ALPHA))
    )
    assert tempered == scaled
    assert tempered - plain <= NUM_DATA + SLACK
    if model is poisson:
        assert tempered <= 1.01 * plain


@pytest.mark.parametrize(
    "model",
    [location, pytest.param(poisson, marks=pytest.mark.slow)],
    ids=lambda f: f.__name__,
)
def test_svi_update_takes_one_multiplication_more_a_datum(model, data):
    counts = []
    for each in (model, nt.temper(model, ALPHA)):
        update, state = svi_update(each, data)
        counts.append(flops(update, state, data))
    assert counts[1] - counts[0] <= NUM_DATA + SLACK
    if model is poisson:
        assert counts[1] <= 1.01 * counts[0]


def lowering_seconds(models, data, repeats):
    """Median CPU seconds to trace and lower the energy and its gradient, the models taking turns."""
    points = [unconstrained_point(model, data) for model in models]
    times = np.empty((repeats + 1, len(models)))
    for i in range(repeats + 1):
        for j, (model, point) in enumerate(zip(models, points, strict=True)):
            begin = time.process_time()
            jax.jit(energy_and_gradient(model)).lower(point, data)
            times[i, j] = time.process_time() - begin
    return np.median(times[1:], axis=0)


@pytest.mark.parametrize("model", [location, hierarchical], ids=lambda f: f.__name__)
def test_tracing_takes_at_most_half_as_long_again(model, data):
    plain, tempered = lowering_seconds(
        [model, nt.temper(model, ALPHA)], data, repeats=9
    )
    assert tempered <= 1.5 * plain


def test_the_measurement_of_tracing_sees_more_traces(data):
    def traced_again(data):
        with handlers.block():
            for _ in range(3):
                jax.eval_shape(gradient(location), {"loc": 0.1}, data)
        location(data)

    plain, slower = lowering_seconds([location, traced_again], data, repeats=9)
    assert slower > 1.5 * plain


def test_marginalize_counts_few_operations_more_than_the_mixture(data):
    """A sum by funsor is the arithmetic of MixtureSameFamily's, and a look for NaN, which it would hide."""
    point = unconstrained_point(mixture, data)
    by_hand, summed = (
        flops(energy_and_gradient(m), point, data)
        for m in (nt.temper(mixture, ALPHA), nt.temper(nt.marginalize(labels), ALPHA))
    )
    assert summed <= 1.5 * by_hand
