"""Guides that keep their model: refused where it is not the tempered one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoDAIS,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoNormal,
    AutoSemiDAIS,
)
from oracles import tempered_normal_posterior

import numpyro_tempered as nt

DATA = np.linspace(-1.0, 3.0, 50)


def model(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 100.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def global_model():
    return numpyro.sample("theta", dist.Normal(0.0, 1.0))


def local_model(theta):
    with numpyro.plate("n", len(DATA), subsample_size=5):
        batch = numpyro.subsample(jnp.asarray(DATA), event_dim=0)
        z = numpyro.sample("z", dist.Normal(theta, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=batch)


def with_local():
    local_model(global_model())


@pytest.fixture(params=["abstract", pytest.param("computed", marks=pytest.mark.full)])
def start(request):
    """Abstractly by default: what is refused is not computed."""

    def of(target, guide, *args):
        svi = SVI(target, guide, numpyro.optim.Adam(0.1), Trace_ELBO())
        if request.param == "abstract":
            jax.eval_shape(lambda: svi.init(jax.random.key(0), *args) and None)
        else:
            svi.init(jax.random.key(0), *args)

    return of


KEEPERS = [AutoLaplaceApproximation, pytest.param(AutoDAIS, marks=pytest.mark.slow)]


@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_guide_on_the_untempered_model_is_refused(start, keeper):
    tempered = nt.temper(model, alpha=0.1)
    for target in (
        tempered,
        nt.temper(tempered, alpha=0.5),
        nt.temper(model, {"y": 0.1}),
    ):
        with pytest.raises(
            ValueError, match=rf"{keeper.__name__} keeps a model without alpha"
        ):
            start(target, keeper(model), DATA)
    with pytest.raises(
        ValueError, match=r"keeps a model without alpha = 0\.5.*that SVI is given"
    ):
        start(nt.temper(tempered, alpha=0.5), keeper(tempered), DATA)
    # Without a power nothing is lost.
    start(nt.temper(model, alpha=1.0), keeper(model), DATA)


@pytest.mark.slow
def test_a_guide_with_its_own_local_model_is_refused(start):
    def semi(target):
        return AutoSemiDAIS(target, local_model, AutoNormal(global_model))

    tempered = nt.temper(with_local, alpha=0.1)
    with pytest.raises(ValueError, match="AutoSemiDAIS keeps a model without alpha"):
        start(tempered, semi(with_local))
    start(tempered, semi(tempered))


@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_guide_on_the_tempered_model_is_not_refused(start, keeper):
    tempered = nt.temper(model, alpha=0.1)
    nested = nt.temper(tempered, alpha=0.5)
    scaled = handlers.scale(tempered, scale=2.0)
    guide = keeper(tempered)
    for target, built in (
        (tempered, guide),
        (nested, keeper(nested)),
        (scaled, keeper(scaled)),
        (tempered, tempered.guide(keeper(tempered))),
        (tempered, handlers.scale(keeper(tempered), scale=1.0)),
    ):
        start(target, built, DATA)


def part(theta, y):
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def model_of_parts(y):
    nt_part(numpyro.sample("theta", dist.Normal(0.0, 100.0)), y)


nt_part = nt.temper(part, alpha=0.1)


def model_with_context(y):
    with nt.temper(alpha=0.1):
        model(y)


def test_a_guide_on_a_model_that_tempers_inside_is_not_refused(start):
    tempered = nt.temper(model, alpha=0.1)
    for target in (
        model_of_parts,
        model_with_context,
        lambda y: tempered(y),
        functools.partial(tempered),
    ):
        start(target, AutoLaplaceApproximation(target), DATA)


@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal])
def test_guides_that_take_only_shapes_may_be_built_on_either(start, guide):
    start(nt.temper(model, alpha=0.1), guide(model), DATA)


def test_a_list_of_guides_is_looked_into(start):
    tempered = nt.temper(model, alpha=0.1)
    parts = AutoGuideList(tempered)
    parts.append(AutoLaplaceApproximation(model))
    with pytest.raises(
        ValueError, match=r"keeps a model without alpha.*that SVI is given"
    ):
        start(tempered, parts, DATA)


def test_laplace_has_the_tempered_width(x64):
    """Exact for a Gaussian: a guide on the untempered model would say 0.141 for 0.447."""
    mean, sd = tempered_normal_posterior(DATA, 0.1, 0.0, 100.0, 1.0)
    tempered = nt.temper(model, alpha=0.1)
    params = {"auto_loc": jnp.array([mean])}

    def scale(target):
        guide = AutoLaplaceApproximation(target)
        SVI(target, guide, numpyro.optim.Adam(0.1), Trace_ELBO()).init(
            jax.random.key(0), DATA
        )
        return guide.get_transform(params).scale_tril

    right, wrong = (
        np.asarray(jax.jit(scale, static_argnums=0)(target))
        for target in (tempered, model)
    )
    assert float(right[0, 0]) == pytest.approx(sd, rel=1e-10)
    assert (round(float(right[0, 0]), 3), round(float(wrong[0, 0]), 3)) == (
        0.447,
        0.141,
    )
