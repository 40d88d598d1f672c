"""Warnings name the line of the user's call."""

import ast
import contextlib
import functools
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.autoguide import AutoNormal
from sklearn.preprocessing import FunctionTransformer

import numpyro_tempered as nt
from numpyro_tempered.core.warn import warn_caller

# As if this were a line of the package.
WITHIN = "def speak(*args):\n    from numpyro_tempered.core.warn import warn_caller\n    warn_caller('look')\n"
PACKAGE = {"__name__": "numpyro_tempered.somewhere"}
exec(compile(WITHIN, "somewhere.py", "exec"), PACKAGE)


@contextlib.contextmanager
def in_context():
    yield


def model():
    numpyro.sample("x", dist.Normal(0.0, 1.0))
    PACKAGE["speak"]()


CALLS = {
    "of the package": PACKAGE["speak"],
    "of what the package calls back": lambda: [PACKAGE["speak"]() for _ in range(1)],
    "by jax": lambda: jax.jit(PACKAGE["speak"])(np.ones(2)),
    "by numpyro": lambda: handlers.seed(PACKAGE["speak"], 0)(),
    "by scikit-learn": lambda: FunctionTransformer(PACKAGE["speak"]).transform(
        np.ones((2, 1))
    ),
    "within a context": lambda: in_context()(PACKAGE["speak"])(),
    "by dispatch": lambda: functools.singledispatch(PACKAGE["speak"])(0),
    "through a model": lambda: AutoNormal(model)._setup_prototype(),
    "through a tempered model": lambda: handlers.seed(nt.temper(model, alpha=0.5), 0)(),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_line_is_the_nearest_of_the_user(name):
    with handlers.seed(rng_seed=0), pytest.warns(UserWarning, match="^look$") as caught:
        CALLS[name]()
    assert {each.filename for each in caught} == {__file__}


def test_without_a_user_it_warns_still():
    code = "warn_caller('look', DeprecationWarning)"
    with pytest.warns(DeprecationWarning, match="^look$"):
        eval(code, {"warn_caller": warn_caller, "__name__": "jax"})


def test_no_other_line_of_the_package_warns():
    modules = [
        path
        for path in Path(nt.__file__).parent.rglob("*.py")
        if path.name != "warn.py"
    ]
    found = [
        f"{path.name}:{node.lineno}"
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "warnings.warn"
    ]
    assert not found
