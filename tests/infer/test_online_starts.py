"""Fits as priors of online runs by their moments, and what a service fills in, without a run."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_tempered as nt
from numpyro_tempered.handlers.likelihood import Layout
from numpyro_tempered.infer import guide_laws
from numpyro_tempered.infer.online import _predictors_of
from numpyro_tempered.infer.online_prior import of_fit

LOC = np.array([0.5, -1.0, 2.0], np.float32)
ROOT = np.array([[1.0, 0.0, 0.0], [0.4, 2.0, 0.0], [-0.3, 0.1, 0.5]], np.float32)
SCALE = np.array([0.5, 1.0, 2.0], np.float32)


def model():
    numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=0.0)


@pytest.fixture
def guide(monkeypatch):
    """With the order of its coordinates given, so that nothing is compiled to set it up."""
    monkeypatch.setattr(
        guide_laws, "flat_layout", lambda guide: Layout((("s", ()), ("w", (2,))))
    )
    return AutoMultivariateNormal(model)


@pytest.mark.parametrize(
    ("fitted", "family", "second"),
    [
        (
            dist.MultivariateNormal(LOC, scale_tril=ROOT),
            nt.gaussian.families.FullRank,
            ROOT,
        ),
        # Of six degrees of freedom the variance is 6/4 of the scale's.
        (
            dist.MultivariateStudentT(6.0, LOC, ROOT),
            nt.gaussian.families.FullRank,
            np.sqrt(1.5) * ROOT,
        ),
        (
            dist.StudentT(6.0, LOC, SCALE).to_event(1),
            nt.gaussian.families.MeanField,
            np.sqrt(1.5) * SCALE,
        ),
    ],
)
def test_a_fit_is_the_gaussian_of_its_mean_and_covariance(
    fitted, family, second, guide, monkeypatch
):
    monkeypatch.setattr(guide, "get_posterior", lambda params: fitted)
    q, layout = of_fit(SimpleNamespace(guide=guide, params={}))
    assert isinstance(q, family)
    assert dict(layout.sites) == {"s": (), "w": (2,)}
    np.testing.assert_allclose(q[0], LOC, rtol=1e-6)
    np.testing.assert_allclose(q[1], second, rtol=1e-6)


def test_a_fit_without_a_variance_is_no_gaussian(guide, monkeypatch):
    monkeypatch.setattr(
        guide,
        "get_posterior",
        lambda params: dist.StudentT(2.0, LOC, SCALE).to_event(1),
    )
    with pytest.raises(
        TypeError, match="a posterior by AutoMultivariateNormal is not a Gaussian"
    ):
        of_fit(SimpleNamespace(guide=guide, params={}))


def predictors(theta, x, n, y):
    """The shape and the values of what the service fills in."""
    return theta, x, n, y


KINDS = ((1, 2), float), ((), float), ((1,), np.int32)
SHAPES = tuple(jax.ShapeDtypeStruct(*kind) for kind in KINDS)


def test_a_service_fills_in_the_outcomes_of_its_rows():
    at = _predictors_of(
        SimpleNamespace(bind=None, predictors=predictors), SHAPES, (0, 1)
    )
    (theta, x, n, y), is_one = at("theta", (jnp.ones(2), jnp.asarray(3.0)), None)
    assert (theta, x.shape, float(n), is_one) == ("theta", (1, 2), 3.0, True)
    np.testing.assert_array_equal(y, [0])
    assert y.dtype == np.int32
    (_, x, _, y), is_one = at(
        "theta", (jnp.ones((4, 2)), jnp.asarray(3.0)), jnp.asarray(2.0)
    )
    assert (x.shape, is_one) == ((4, 2), False)
    np.testing.assert_array_equal(y, [2, 2, 2, 2])
    assert y.dtype == np.int32


def test_a_service_of_no_outcome_has_no_labels():
    at = _predictors_of(
        SimpleNamespace(bind=None, predictors=predictors), SHAPES, (0, 1, 2)
    )
    with pytest.raises(
        TypeError,
        match="needs a model that observes one of its arguments as it is: obs=y",
    ):
        at("theta", (jnp.ones((4, 2)), jnp.asarray(3.0), jnp.ones(4)), jnp.asarray(1.0))
