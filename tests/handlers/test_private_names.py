"""Private names of NumPyro, JAX and funsor: each in one module, and there in this version."""

import ast
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC
from numpyro.infer import autoguide as autoguides
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import potential_energy

import numpyro_tempered as nt
from numpyro_tempered.core import jax_private
from numpyro_tempered.handlers import numpyro_private

PACKAGE = Path(nt.__file__).parent
NUMPYRO, JAX = "handlers/numpyro_private.py", "core/jax_private.py"
HOME = {"numpyro": NUMPYRO, "funsor": NUMPYRO, "jax": JAX}
# Not underscored, and yet not documented.
UNDOCUMENTED = {"dce_jaxpr", "estimate_likelihood", "COERCIONS"}
# Attributes of NumPyro's objects. Its guides are made to be subclassed by overriding such, on self and super().
ATTRIBUTES = {
    "AutoContinuous": [
        "_forward_mode_differentiation",
        "_get_posterior",
        "_init_latent",
        "_init_locs",
        "_potential_fn",
        "_sample_latent",
        "_setup_prototype",
        "_unpack_and_constrain",
        "_unpack_latent",
    ],
    "MCMC": ["_args", "_kwargs"],
    "MaskedDistribution": ["_mask"],
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def model(y=0.5):
    numpyro.sample("y", dist.Normal(numpyro.sample("theta", dist.Normal()), 1.0), obs=y)


def guide():
    result = autoguides.AutoDiagonalNormal(model)
    handlers.seed(result, 0)()
    return result


class Stops(MCMCKernel):
    """A kernel that does not start."""

    sample_field = "theta"

    def init(self, *args, **kwargs):
        raise StopAsyncIteration

    def sample(self, *args):
        raise NotImplementedError


def mcmc():
    result = MCMC(Stops(), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(StopAsyncIteration):
        result.run(jax.random.key(0), 0.5)
    return result


MASK = jnp.array([True])
OBJECTS = {
    "AutoContinuous": guide,
    "MCMC": mcmc,
    "MaskedDistribution": lambda: dist.Normal().mask(MASK),
}


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_objects_have_the_attributes(kind):
    thing = OBJECTS[kind]()
    missing = [name for name in ATTRIBUTES[kind] if not hasattr(thing, name)]
    assert not missing, f"numpyro {numpyro.__version__} has no {kind}.{missing}"


def imports(path):
    """Pairs of a module and a name that are imported from it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def is_private(module, name):
    library, *rest = module.split(".")
    return library in HOME and (
        name in UNDOCUMENTED or any(part.startswith("_") for part in [*rest, name])
    )


@pytest.mark.parametrize("home", sorted(set(HOME.values())))
def test_names_are_there(home):
    for module, name in imports(PACKAGE / home):
        if is_private(module, name):
            library = importlib.import_module(module)
            assert hasattr(library, name), f"{module} of this version has no {name}"


def private_uses(path):
    """Private names of another library in a module that is not their home."""
    name, tree = str(path.relative_to(PACKAGE)), ast.parse(path.read_text())
    for module, private in imports(path):
        if is_private(module, private) and HOME[module.split(".")[0]] != name:
            yield f"{module}.{private}"
    attributes = {attribute for names in ATTRIBUTES.values() for attribute in names}
    for node in ast.walk(tree) if name != NUMPYRO else ():
        is_foreign = isinstance(node, ast.Attribute) and not is_own(node)
        if is_foreign and (node.attr in attributes or reaches_into_library(node)):
            yield ast.unparse(node)


@pytest.mark.full
def test_no_other_module_uses_one():
    assert not {
        str(path): uses for path in MODULES if (uses := list(private_uses(path)))
    }


def is_own(node):
    return ast.unparse(node.value) in ("self", "cls", "super()")


def reaches_into_library(node):
    """An access such as ``numpyro.infer.util._private`` or ``jax._src``."""
    dotted = ast.unparse(node).split(".")
    roots = {
        "numpyro",
        "jax",
        "jnp",
        "lax",
        "dist",
        "handlers",
        "constraints",
        "primitives",
        "funsor",
    }
    private = node.attr.startswith("_") and not node.attr.startswith("__")
    return dotted[0] in roots and private


def test_the_parser_finds_private_names(tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        "def f():\n    from numpyro.infer.util import _a\nfrom jax._src import b\nimport jax._src.c\n"
    )
    assert [is_private(*pair) for pair in imports(source)] == [True, True, True]
    assert not is_private("numpyro.infer", "SVI")
    texts = ["jax._src", "constraints._Real", "jax.numpy", "mine._x"]
    private = [
        reaches_into_library(ast.parse(text, mode="eval").body) for text in texts
    ]
    assert private == [True, True, False, False]


def test_each_name_has_its_meaning():
    """What the package relies on, beyond that a name is there."""
    program = jax.make_jaxpr(lambda x, y: (x, y))(1.0, 2.0)
    assert jax_private.dce_jaxpr(program.jaxpr, [False, True])[1] == [False, True]
    with handlers.block() as _, handlers.mask(mask=True) as _:
        assert [type(handler) for handler in numpyro_private.STACK] == [
            handlers.block,
            handlers.mask,
        ]
    independent = dist.Normal(jnp.zeros(2), 1.0).to_event(1).support
    assert isinstance(independent, numpyro_private.IndependentConstraint)
    assert numpyro_private.mask_of(dist.Normal().mask(MASK)) is MASK
    fitted = guide()
    assert set(numpyro_private.unpacker(fitted)(jnp.zeros(1))) == {"theta"}
    assert numpyro_private.unpack_and_constrain(fitted, jnp.ones(1), {})["theta"] == 1.0
    start, potential = numpyro_private.start_and_potential(fitted)
    assert set(start) == {"theta"}
    np.testing.assert_allclose(
        potential({"theta": 0.5}), np.log(2.0 * np.pi) + 0.125, rtol=1e-6
    )
    assert numpyro_private.is_reverse(fitted)


def test_a_potential_is_known_from_inside_the_model():
    seen = []

    def watched():
        seen.append(numpyro_private.is_potential())
        numpyro.sample("theta", dist.Normal())

    handlers.seed(watched, 0)()
    potential_energy(watched, (), {}, {"theta": 0.5})
    assert seen == [False, True]


def test_the_names_of_funsors_dimensions():
    pytest.importorskip("funsor")
    frame = numpyro_private.dim_stack().global_frame
    frame.write("rows", -1)
    assert frame.name_to_dim["rows"] == -1
    frame.free("rows", -1)
    assert "rows" not in frame.name_to_dim
