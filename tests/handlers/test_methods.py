"""A model that is decorated in a class is a method of its instances, with its own signature."""

import copy
import inspect
import pickle
import subprocess
import sys

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import Adam
from tempered_models import Y, normal, trace_of

import numpyro_tempered as nt


class Models:
    """Models with a parameter of the instance."""

    def __init__(self, scale):
        self.scale = scale

    @nt.temper(alpha=0.5)
    def tempered(self, y):
        """Tempered."""
        self.draw(y)

    @nt.temper(alpha=0.5)
    @nt.temper(alpha=0.5)
    def twice(self, y):
        self.draw(y)

    @nt.temper(alpha=0.5)
    @handlers.scale(scale=0.5)
    def scaled(self, y):
        self.draw(y)

    @nt.robust(beta=0.3, unit=1.0)
    def guarded(self, y):
        self.draw(y)

    @nt.temper(alpha=0.5)
    @nt.marginalize
    def mixed(self, y):
        loc = numpyro.sample("theta", dist.Normal(0.0, self.scale))
        with numpyro.plate("n", len(y)):
            z = numpyro.sample("z", dist.Bernoulli(0.5))
            numpyro.sample("y", dist.Normal(jnp.where(z, loc, -loc), 1.0), obs=y)

    factory = nt.temper(alpha=0.5)

    def draw(self, y):
        theta = numpyro.sample("theta", dist.Normal(0.0, self.scale))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


MODELS = Models(2.0)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("tempered", 0.5), ("twice", 0.25), ("scaled", 0.25), ("guarded", None)],
)
def test_a_method_is_its_function_with_the_instance(name, scale):
    trace = trace_of(getattr(MODELS, name), jnp.asarray(Y))
    assert trace["theta"]["fn"].scale == 2.0
    assert trace["y"]["scale"] == scale
    of_class = trace_of(getattr(Models, name), MODELS, jnp.asarray(Y))
    assert of_class["y"]["scale"] == scale


def test_a_method_is_marginalised():
    trace = trace_of(MODELS.mixed, jnp.asarray(Y))
    assert set(trace) >= {"theta", "y"}
    assert "z" not in trace
    assert trace["y"]["scale"] == 0.5


def test_a_method_has_name_documentation_and_signature():
    method = MODELS.tempered
    assert (method.__name__, method.__doc__) == ("tempered", "Tempered.")
    assert list(inspect.signature(method).parameters) == ["y"]
    assert list(inspect.signature(Models.tempered).parameters) == ["self", "y"]


def test_methods_are_equal_as_those_of_python_are():
    assert MODELS.tempered == MODELS.tempered
    assert len({MODELS.tempered, MODELS.tempered, Models(2.0).tempered}) == 2
    assert MODELS.tempered != MODELS.twice
    assert Models.tempered is Models.tempered
    assert nt.temper(normal, alpha=0.5) != nt.temper(normal, alpha=0.5)


def test_a_factory_in_a_class_stays_one():
    assert MODELS.factory is Models.factory
    assert trace_of(MODELS.factory(normal), Y)["y"]["scale"] == 0.5


@pytest.mark.parametrize("name", ["tempered", "twice", "mixed", "guarded"])
@pytest.mark.parametrize(
    "travel",
    [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy, copy.copy],
    ids=["pickle", "deepcopy", "copy"],
)
def test_a_method_travels(name, travel):
    got = travel(getattr(MODELS, name))
    assert type(got) is type(getattr(Models, name))
    trace = trace_of(got, jnp.asarray(Y))
    there = trace_of(getattr(MODELS, name), jnp.asarray(Y))
    assert trace["y"]["scale"] == there["y"]["scale"]
    assert trace["theta"]["fn"].scale == 2.0


def test_svi_and_nuts_take_a_method(key):
    guide = AutoNormal(MODELS.tempered)
    svi = SVI(MODELS.tempered, guide, Adam(0.05), Trace_ELBO())
    _, loss = svi.update(svi.init(key, jnp.asarray(Y)), jnp.asarray(Y))
    assert jnp.isfinite(loss)
    mcmc = MCMC(NUTS(MODELS.tempered), num_warmup=3, num_samples=3, progress_bar=False)
    mcmc.run(key, jnp.asarray(Y))
    assert mcmc.get_samples()["theta"].shape == (3,)


def test_fit_svi_takes_a_method_and_a_guide_of_it(key):
    options = {"num_steps": 5, "optim": Adam(0.05), "num_particles": 2}
    fits = [
        nt.fit_svi(key, MODELS.tempered, guide, jnp.asarray(Y), **options)
        for guide in (AutoNormal, AutoNormal(MODELS.tempered))
    ]
    assert fits[0].alpha == 0.5
    assert jnp.array_equal(fits[0].losses, fits[1].losses)
    with pytest.raises(ValueError, match="another model"):
        nt.fit_svi(key, MODELS.tempered, AutoNormal(MODELS.twice), Y, **options)


def test_online_vi_takes_a_method_and_a_guide_of_it(key):
    guide = nt.guides.AutoOnlineDiagonalNormal(MODELS.tempered)
    assert nt.OnlineVI(MODELS.tempered, guide).guide is guide
    with pytest.raises(ValueError, match="another model"):
        nt.OnlineVI(Models(3.0).tempered, guide)


TYPED = """
import numpyro_tempered as nt

@nt.temper(alpha=0.5)
def model(y: float, n: int = 1) -> str:
    return ""

class M:
    @nt.temper(alpha=0.5)
    @nt.marginalize
    def model(self, y: float) -> str:
        return ""

@nt.robust(beta=0.1)
def other(y: float) -> str:
    return ""

reveal_type(model)
reveal_type(model(1.0))
reveal_type(nt.temper(model, 0.5))
reveal_type(M().model)
reveal_type(other)
model("word")
M().model(1.0, 2.0)
reveal_type(nt.sparse.fit_linear)
"""
REVEALED = [
    "temper[[y: float, n: int =], str]",
    "str",
    "temper[[y: float, n: int =], str]",
    "DecoratedModel[[y: float], str]",
    "robust[[y: float], str]",
]


@pytest.mark.full
def test_type_checkers_see_the_signature(tmp_path):
    pytest.importorskip("mypy")
    path = tmp_path / "typed.py"
    path.write_text(TYPED)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(path)], capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    notes = [line.split("Revealed type is ")[1] for line in lines if "Revealed" in line]
    for note, type_ in zip(notes[:-1], REVEALED, strict=True):
        assert note.strip('"').endswith(type_), done.stdout
    assert notes[-1].startswith('"def ('), (
        "a namespace that is imported lazily has no types"
    )
    assert [line.split("[")[-1] for line in lines if " error: " in line] == [
        "arg-type]",
        "call-arg]",
    ], done.stdout
