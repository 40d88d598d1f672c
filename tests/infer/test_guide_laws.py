"""The row of each class of guide, against draws, densities and parameters of the guide itself."""

import ast
import inspect
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.infer import autoguide, init_to_value
from numpyro.infer.autoguide import AutoGuide, AutoGuideList
from numpyro.infer.util import log_density
from test_package import MODULES, identify, parse

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField
from numpyro_tempered.infer.guide_laws import (
    flat_layout,
    gaussian_of,
    has_gates,
    is_auto,
    law_of,
    location_scale_of,
    mixture_of,
    order_of,
    posterior_of,
)
from numpyro_tempered.infer.guides.online import StartsAtPrior
from numpyro_tempered.infer.guides.student_t import StudentTGuide
from numpyro_tempered.infer.moments import LocationScale

KEY = jax.random.key(3)
NUM_DRAWS = 4000
Y = np.array([0.5, -0.2, 1.0], np.float32)
SITES = {"b": (2,), "a": ()}


def model(y):
    """Sites whose order is not that of their names, one of them positive."""
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    a = numpyro.sample("a", dist.LogNormal(0.0, 0.5))
    numpyro.sample("y", dist.Normal(b.sum(), a).expand([3]).to_event(1), obs=y)


def sparse_model(y):
    numpyro.sample("b", nt.sparse.SpikeAndSlab(0.5, 0.0, 1.0).expand([2]))
    a = numpyro.sample("a", dist.LogNormal(0.0, 0.5))
    numpyro.sample("y", dist.Normal(0.0, a).expand([3]).to_event(1), obs=y)


def hand_written(y):
    numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("a", dist.LogNormal(0.0, 0.5))


class OtherNormal(autoguide.AutoNormal):
    """A user's, whose factors may be others."""


class OtherDiagonal(autoguide.AutoDiagonalNormal):
    """A user's."""


class AnyDiagonal(nt.guides.AutoOnlineGuide):
    """A user's, of a family with independent coordinates."""

    def start_at(self, loc, scale, moments):
        return MeanField(loc, scale)


class Case(NamedTuple):
    """What the rows say of a guide.

    Attributes:
        make: From the model to the guide.
        form: Where its latents are.
        has_covariance: Whether its coordinates depend on each other.
        read: The family of what is read of it; None of nothing.
        flags: The other fields that are true.
        known: The family of the Gaussian of its moments, for priors; None of nothing.
        has_law: Whether its distribution is known exactly.
    """

    make: object
    form: str | None = None
    has_covariance: bool | None = None
    read: type | None = None
    flags: tuple[str, ...] = ()
    known: type | None = None
    has_law: bool = False


def a_list(model):
    guide = AutoGuideList(model)
    guide.append(autoguide.AutoNormal(handlers.block(model, hide=["a"])))
    guide.append(autoguide.AutoDelta(handlers.block(model, hide=["b"])))
    return guide


CASES = {
    "AutoNormal": Case(
        autoguide.AutoNormal, "sites", False, MeanField, (), MeanField, True
    ),
    "a subclass of AutoNormal": Case(OtherNormal, "sites", False, known=MeanField),
    "AutoNetworkNormal": Case(
        nt.guides.AutoNetworkNormal, "sites", False, known=MeanField
    ),
    "AutoSpikeAndSlab": Case(
        lambda _: nt.guides.AutoSpikeAndSlab(sparse_model),
        "sites",
        False,
        flags=("has_gates",),
    ),
    "AutoDiagonalNormal": Case(
        autoguide.AutoDiagonalNormal, "flat", False, MeanField, (), MeanField, True
    ),
    "a subclass of AutoDiagonalNormal": Case(
        OtherDiagonal, "flat", False, MeanField, (), MeanField, True
    ),
    "AutoMultivariateNormal": Case(
        autoguide.AutoMultivariateNormal, "flat", True, FullRank, (), FullRank, True
    ),
    "AutoLowRankMultivariateNormal": Case(
        lambda model: autoguide.AutoLowRankMultivariateNormal(model, rank=1),
        "flat",
        True,
        known=MeanField,
        has_law=True,
    ),
    "AutoLaplaceApproximation": Case(
        # At a point where its Hessian is definite.
        lambda model: autoguide.AutoLaplaceApproximation(
            model, init_loc_fn=init_to_value(values={"b": jnp.zeros(2), "a": 1.0})
        ),
        "flat",
        True,
        flags=("is_laplace",),
        known=FullRank,
        has_law=True,
    ),
    "AutoOnlineDiagonalNormal": Case(
        nt.guides.AutoOnlineDiagonalNormal,
        "flat",
        False,
        MeanField,
        (),
        MeanField,
        True,
    ),
    "AutoOnlineMultivariateNormal": Case(
        nt.guides.AutoOnlineMultivariateNormal,
        "flat",
        True,
        FullRank,
        (),
        FullRank,
        True,
    ),
    "AutoOnlineLowRankNormal": Case(
        nt.guides.AutoOnlineLowRankNormal, "flat", None, LowRank, (), MeanField
    ),
    "a subclass of AutoOnlineGuide": Case(
        AnyDiagonal, "flat", None, MeanField, (), FullRank, True
    ),
    "AutoDiagonalStudentT": Case(
        nt.guides.AutoDiagonalStudentT,
        "flat",
        False,
        MeanField,
        ("is_heavy",),
        MeanField,
        True,
    ),
    "AutoMultivariateStudentT": Case(
        nt.guides.AutoMultivariateStudentT,
        "flat",
        True,
        FullRank,
        ("is_heavy",),
        FullRank,
        True,
    ),
    "AutoGaussianMixture": Case(
        nt.guides.AutoGaussianMixture,
        "flat",
        None,
        nt.gaussian.families.GaussianMixture,
        ("is_mixture",),
        MeanField,
    ),
    "AutoIAFNormal": Case(
        lambda model: autoguide.AutoIAFNormal(model, hidden_dims=[3]), "flat"
    ),
    "AutoBNAFNormal": Case(autoguide.AutoBNAFNormal, "flat"),
    "AutoBatchedMultivariateNormal": Case(
        lambda model: autoguide.AutoBatchedMultivariateNormal(model, batch_ndim=0),
        "flat",
    ),
    "AutoBatchedLowRankMultivariateNormal": Case(
        lambda model: autoguide.AutoBatchedLowRankMultivariateNormal(
            model, batch_ndim=0
        ),
        "flat",
    ),
    "AutoDAIS": Case(autoguide.AutoDAIS, "flat"),
    "AutoSurrogateLikelihoodDAIS": Case(
        lambda model: autoguide.AutoSurrogateLikelihoodDAIS(model, lambda: model(Y)),
        "flat",
    ),
    "AutoSemiDAIS": Case(lambda model: autoguide.AutoSemiDAIS(model, model)),
    "AutoDelta": Case(autoguide.AutoDelta),
    "AutoGuideList": Case(a_list),
    "a function": Case(lambda _: hand_written),
}
FLAGS = {"is_heavy", "is_laplace", "is_mixture", "has_gates"}
# Those that nobody makes a guide of.
BASES = {"AutoContinuous", "AutoGuide", "AutoOnlineGuide"}


@pytest.mark.parametrize("name", CASES)
def test_the_row_of_a_class(name):
    case = CASES[name]
    guide = case.make(model)
    law = law_of(guide)
    assert (law.form, law.has_covariance) == (case.form, case.has_covariance)
    assert {flag for flag in FLAGS if getattr(law, flag)} == set(case.flags)
    assert (law.read is None) == (case.read is None)
    assert law.is_gaussian == (
        case.read is not None and not {"is_heavy", "is_mixture"} & set(case.flags)
    )
    assert has_gates(guide) == ("has_gates" in case.flags)
    assert is_auto(guide) == isinstance(guide, AutoGuide) == (name != "a function")


def test_each_guide_of_numpyro_and_of_ours_has_a_case():
    classes = {
        name
        for module in (autoguide, nt.guides)
        for name in module.__all__
        if inspect.isclass(kind := getattr(module, name))
        and issubclass(kind, AutoGuide)
    }
    assert classes - BASES <= set(CASES)


def at_some_params(name):
    """A guide that is set up, and parameters of it that are not those of its start."""
    guide = CASES[name].make(model)
    with pytest.warns() if isinstance(guide, StartsAtPrior) else handlers.block():
        run = handlers.trace(handlers.seed(guide, KEY)).get_trace
        trace = handlers.block(lambda: run(Y))()
    rng, params = np.random.default_rng(5), {}
    for site in trace.values():
        if site["type"] == "param":
            params[site["name"]] = site["value"]
    if CASES[name].known is None and CASES[name].read is None:
        return guide, params
    for site, value in params.items():
        noise = rng.normal(size=np.shape(value)).astype(np.float32)
        if site.endswith("_loc") and not law_of(guide).is_laplace:
            value = value + 0.3 * noise
        elif site.endswith(("_scale", "_precision_diag")):
            value = value * np.exp(0.3 * noise)
        elif site.endswith("_scale_tril"):
            value = value + 0.1 * np.tril(noise, -1)
        elif site.endswith("_factor"):
            value = value + 0.1 * noise
        params[site] = jnp.asarray(value)
    return guide, params


UNIT = ("AutoNormal", "AutoMultivariateNormal")
READ = [name for name, case in CASES.items() if case.read is not None]


@pytest.mark.parametrize("name", tiered(READ, unit=UNIT))
def test_params_go_to_the_gaussian_and_back(name):
    guide, params = at_some_params(name)
    q, layout, unpack, to_params = law_of(guide).read(guide, params)
    assert type(q) is CASES[name].read
    assert layout.sites == tuple(SITES.items())
    flat = jnp.arange(3.0)
    for site, value in unpack(flat).items():
        np.testing.assert_array_equal(value, layout.split(flat)[site])
    found = to_params(q)
    assert set(found) == set(params)
    for param, value in found.items():
        # The root of a covariance is made triangular, which rounds.
        rtol = 1e-5 if param.endswith("scale_tril") else 0.0
        np.testing.assert_allclose(value, params[param], rtol=rtol, atol=rtol)


def flat_of(values):
    """Values on the scale of the model as unconstrained coordinates, in the order of the names."""
    values = {name: np.asarray(value, np.float64) for name, value in values.items()}
    return np.concatenate([np.log(values["a"])[:, None], values["b"]], axis=1)


def assert_moments(draws, mean, cov):
    """The mean of independent draws, and that of their squares, within five standard errors."""
    off = draws - mean
    assert np.all(np.abs(off.mean(0)) < 5 * off.std(0) / np.sqrt(len(off)))
    products = off[:, :, None] * off[:, None, :] - cov
    bound = 5 * products.std(0) / np.sqrt(len(off))
    assert np.all(np.abs(products.mean(0)) < bound)


KNOWN = [name for name, case in CASES.items() if case.known is not None]


@pytest.mark.full
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_of_a_guide_is_so_of_its_draws_and_its_density(name):
    guide, params = at_some_params(name)
    case = CASES[name]
    draws = flat_of(guide.sample_posterior(KEY, params, Y, sample_shape=(NUM_DRAWS,)))
    q, layout = gaussian_of(guide, params)
    assert type(q) is case.known
    order = order_of(layout, ["a", "b"])
    root = np.asarray(q.scale_tril if case.known is FullRank else np.diag(q.scale))
    cov = (root @ root.T)[np.ix_(order, order)]
    if case.known is MeanField:
        # The moments have no covariance, where the guide may have one.
        cov += np.cov(draws.T) * (1 - np.eye(3))
    assert_moments(draws, np.asarray(q.loc)[order], cov)
    law = location_scale_of(guide, params)
    assert isinstance(law, LocationScale) == case.has_law
    if case.has_law:
        assert_moments(draws, law.loc, law.cov)
        assert law.is_heavy == ("is_heavy" in case.flags)
    mixture = mixture_of(guide, params)
    assert (mixture is not None) == ("is_mixture" in case.flags)
    if mixture is not None:
        assert_moments(draws, mixture.mean, mixture.covariance)
    if case.form == "flat" and "is_laplace" not in case.flags:
        at = handlers.substitute(handlers.seed(guide, KEY), params)
        value, trace = log_density(at, (Y,), {}, {})
        flat = np.zeros(3)
        for site, part in (("a", 0), ("b", slice(1, None))):
            drawn = np.asarray(trace[site]["value"])
            flat[order_of(layout, ["a", "b"])[part]] = (
                np.log(drawn) if site == "a" else drawn
            )
        # The density of a is that of its logarithm over a.
        log_prob = jnp.sum(
            posterior_of(guide, params).log_prob(jnp.asarray(flat, jnp.float32))
        )
        np.testing.assert_allclose(
            log_prob - np.log(trace["a"]["value"]), value, rtol=1e-4, atol=1e-4
        )


@pytest.mark.full
def test_the_density_of_factors_by_site():
    guide, params = at_some_params("AutoNormal")
    at = handlers.substitute(handlers.seed(guide, KEY), params)
    value, trace = log_density(at, (Y,), {}, {})
    flat = jnp.append(trace["b"]["value"], jnp.log(trace["a"]["value"]))
    found = posterior_of(guide, params).log_prob(flat) - flat[2]
    np.testing.assert_allclose(found, value, rtol=1e-5)


# The one is set up on plates alone, the other takes seconds, and is as AutoIAFNormal.
UNKNOWN = [
    name for name in CASES if name not in (*KNOWN, "AutoSemiDAIS", "AutoBNAFNormal")
]


@pytest.mark.parametrize("name", tiered(UNKNOWN, unit=["AutoDelta", "a function"]))
def test_of_other_guides_nothing_is_known(name):
    guide, params = at_some_params(name)
    assert gaussian_of(guide, params) is None
    assert location_scale_of(guide, params) is None
    assert mixture_of(guide, params) is None
    if CASES[name].form == "flat":
        assert flat_layout(guide).sites == tuple(SITES.items())


# Modules that ask for classes of guides themselves, with the reason.
ALLOWED = {
    "infer/guide_laws.py": "the registry",
    "handlers/powers.py": "below the registry: guides that keep a model would lose its powers",
    "select/alpha/model_data.py": "any method that is built already is refused, kernels as well as guides",
    "infer/guides/online.py": "the check that an online rule has an online guide",
    "infer/online.py": "the same",
}
KINDS = {StartsAtPrior.__name__, StudentTGuide.__name__}


def classes_asked_for(tree):
    """Names of guide classes that are used but to annotate, to inherit from and to call."""
    harmless = set()
    for node in ast.walk(tree):
        parts = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = [node.returns]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.ClassDef):
            parts = node.bases
        elif isinstance(node, ast.Call):
            parts = [node.func]
        for part in parts:
            harmless.update(map(id, ast.walk(part) if part else ()))
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name)
        and (node.id.startswith("Auto") or node.id in KINDS)
        and id(node) not in harmless
    }


def test_classes_that_are_asked_for_are_found():
    source = (
        "_FULL = AutoA | AutoB\n"
        "class C(AutoC):\n    x: AutoD\n"
        "def f(g: AutoE) -> AutoF:\n"
        "    return AutoG(g) if isinstance(g, AutoH) or type(g) is AutoI else StartsAtPrior\n"
    )
    assert classes_asked_for(ast.parse(source)) == {
        "AutoA",
        "AutoB",
        "AutoH",
        "AutoI",
        "StartsAtPrior",
    }


def test_no_other_module_asks_which_class_a_guide_is_of():
    named = [
        path
        for path in MODULES
        if re.search(r"\bAuto[A-Z]|StartsAt|StudentTG", path.read_text())
    ]
    asking = {identify(path) for path in named if classes_asked_for(parse(path))}
    assert asking == set(ALLOWED)
