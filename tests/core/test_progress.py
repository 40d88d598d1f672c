"""Progress bars: off, on, and where a call takes some seconds."""

import contextlib
import functools

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import NUTS
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.core import bars
from numpyro_tempered.core.bars import progress, progress_bars, progress_within
from numpyro_tempered.mixtures import ascent

Y = np.random.default_rng(0).normal(size=20)


def normal(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 3.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


@pytest.mark.parametrize(
    ("choice", "is_seen"), [(True, True), (False, False), (None, False)]
)
def test_a_short_loop_shows_a_bar_only_if_asked(choice, is_seen, capsys):
    with progress(3, "steps", choice) as bar:
        for _ in range(3):
            bar.update()
    assert ("3/3" in capsys.readouterr().err) == is_seen


def test_a_loop_that_ends_early_is_done_and_one_that_fails_is_not(capsys):
    with progress(100, "steps", True) as bar:
        bar.update(18)
    assert "18/18" in capsys.readouterr().err
    with contextlib.suppress(KeyError), progress(100, "steps", True) as bar:
        bar.update(18)
        raise KeyError
    assert "18/100" in capsys.readouterr().err


def test_a_long_loop_shows_one_by_itself(capsys, monkeypatch):
    monkeypatch.setattr(bars, "DELAY", 1e-9)
    with progress(3, "steps", None) as bar:
        for _ in range(3):
            bar.update()
    assert "3/3" in capsys.readouterr().err


def test_loops_within_show_what_the_call_asks_for(capsys):
    def loop():
        with progress_within(2, "alphas") as bar:
            bar.update(2)
        return capsys.readouterr().err

    assert loop() == ""
    with progress_bars(True):
        assert "2/2" in loop()
        with progress_bars(False):
            assert loop() == ""
        assert "2/2" in loop()
    assert loop() == ""


X = np.concatenate([Y - 5.0, Y + 5.0]).reshape(20, 2)
COMPONENT = nt.mixtures.components.known_variance(2, prior_scale=10.0)
MIXTURE = {"num_components": 2, "num_restarts": 2}
SAMPLER = {"num_warmup": 10, "num_samples": 10}
CALLS = {
    "fit_svi": functools.partial(nt.fit_svi, jax.random.key(0), normal, AutoNormal, Y),
    "temper_path by a guide": functools.partial(
        nt.temper_path, jax.random.key(0), normal, AutoNormal, Y, alphas=[0.5, 1.0]
    ),
    "temper_path by NUTS": functools.partial(
        nt.temper_path, jax.random.key(0), normal, NUTS, Y, alphas=[0.5, 1.0], **SAMPLER
    ),
    "select_alpha by a guide": functools.partial(
        nt.select_alpha,
        jax.random.key(0),
        normal,
        AutoNormal,
        Y,
        alphas=[0.5, 1.0],
        criterion=nt.alpha.lyddon(),
    ),
    "mixtures.fit": functools.partial(
        nt.mixtures.fit, jax.random.key(0), X, COMPONENT, **MIXTURE
    ),
    "mixtures.fit, chunks": functools.partial(
        nt.mixtures.fit, jax.random.key(0), [X], COMPONENT, **MIXTURE
    ),
}
UNIT = {"mixtures.fit"}


@pytest.mark.parametrize(
    ("choice", "is_whole"), [(None, True), (False, True), (True, False)]
)
def test_a_fit_of_few_rows_is_one_call_unless_a_bar_is_asked_for(
    choice, is_whole, monkeypatch
):
    strides = []

    def ascend(advance, state, limits, stride):
        strides.append(stride)
        return ascend_before(advance, state, limits, stride)

    ascend_before = ascent.ascend
    monkeypatch.setattr(ascent, "ascend", ascend)
    CALLS["mixtures.fit"](progress_bar=choice, max_iter=100)
    assert {stride == 100 for stride in strides} == {is_whole}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in UNIT else pytest.mark.full)
        for name in CALLS
    ],
)
def test_calls_show_a_bar_and_are_silent_without(name, capsys):
    call = CALLS[name]
    call(progress_bar=False)
    assert capsys.readouterr().err == ""
    if name in UNIT:  # and compiled before
        call()
        assert capsys.readouterr().err == ""
    call(progress_bar=True)
    shown = capsys.readouterr().err
    assert any(unit in shown for unit in ("steps", "alphas", "passes"))
