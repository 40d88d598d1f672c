"""The package as a whole: layers, import, public names."""

import ast
import functools
import importlib.metadata
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import numpyro_tempered as nt

PACKAGE = Path(nt.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
# Each module imports from its own line's left and from the lines above.
ORDER = [
    ["_typing", "batching"],
    ["families"],
    ["expectations"],
    ["gaussian_vi"],
    ["online"],
    ["bounds"],
    ["components", "cavi", "ppca", "sparse"],
    [
        "messages",
        "powers",
        "local_latents",
        "kept_models",
        "handlers",
        "dependence",
        "elimination",
        "marginalize",
    ],
    [
        "distributions",
        "arguments",
        "likelihood",
        "admissible",
        "predictive",
        "guides",
        "elbo",
        "optim",
        "guide_factory",
        "fit",
        "model_objective",
        "fit_gaussian",
        "round_and_refit",
        "sparse_bridge",
        "priors",
        "online_state",
        "infer",
        "runs",
        "mixture_bridges",
    ],
    [
        "arviz_data",
        "inference_data",
        "loo",
        "selection",
        "path",
        "alpha",
        "tables",
        "hindsight",
        "ledger",
        "plots",
        "mixtures",
    ],
]
PURE = {
    "_typing",
    "batching",
    "families",
    "expectations",
    "gaussian_vi",
    "online",
    "bounds",
    "components",
    "cavi",
    "ppca",
    "sparse",
}
REPORTING = set(ORDER[-1])
RANK = {name: rank for rank, name in enumerate(name for line in ORDER for name in line)}
LAZY = {"arviz", "pandas", "matplotlib", "xarray", "scipy", "pyarrow"}


def module_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(PACKAGE.rglob("*.py"))
BELOW_INIT = [path for path in MODULES if path != PACKAGE / "__init__.py"]


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@functools.cache
def parse(path):
    return ast.parse(path.read_text())


@functools.cache
def imports(path, *, inside_functions):
    """Dotted names that a module imports; those inside functions only if asked for."""
    found, nodes = [], list(parse(path).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from package import a, b` may import modules of the package.
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        if is_type_checking(node):
            continue
        if inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)
    return found


def outside(names):
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"numpyro_tempered"}


def identify(path):
    return str(path.relative_to(PACKAGE))


def test_the_parser_finds_imports(tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        "import a\nif TYPE_CHECKING:\n    import b\nclass C:\n    from c import d\n"
        "def f():\n    import e\ntry:\n    import g.h\nexcept ImportError:\n    pass\n"
    )
    assert set(imports(source, inside_functions=False)) == {"a", "c.d", "g.h"}
    assert set(imports(source, inside_functions=True)) == {"a", "c.d", "g.h", "e"}


def test_every_module_has_a_layer():
    assert {module_of(path) for path in BELOW_INIT} == set(RANK)


@pytest.mark.parametrize("path", BELOW_INIT, ids=identify)
def test_nothing_imports_upwards(path):
    own = module_of(path)
    for name in imports(path, inside_functions=True):
        if name.split(".")[0] == "numpyro_tempered":
            target = name.split(".")[1]
            assert target in RANK, f"{own} imports the public name {name}"
            assert RANK[target] <= RANK[own], f"{own} imports {name}"


@pytest.mark.parametrize("path", [p for p in BELOW_INIT if module_of(p) in PURE], ids=identify)
def test_pure_modules_import_jax_and_numpy_alone(path):
    # A component hands out distributions as values.
    values = {"numpyro"} if module_of(path) == "components" else set()
    assert outside(imports(path, inside_functions=False)) <= {"jax", "numpy"} | values
    # The progress bar of a long stream is NumPyro's own dependency.
    assert outside(imports(path, inside_functions=True)) <= {"jax", "numpy", "tqdm"} | values


@pytest.mark.parametrize("path", [p for p in BELOW_INIT if module_of(p) not in PURE], ids=identify)
def test_other_modules_import_numpyro_besides(path):
    allowed = {"jax", "numpy", "numpyro"}
    assert outside(imports(path, inside_functions=False)) <= allowed
    lazy = LAZY if module_of(path) in REPORTING else {"funsor"} if module_of(path) == "elimination" else set()
    assert outside(imports(path, inside_functions=True)) <= allowed | lazy


IMPORT_PROBE = """
import sys
import jax
import numpyro_tempered
loaded = {"arviz", "pandas", "xarray", "matplotlib", "funsor", "optax", "sklearn"} & set(sys.modules)
assert not loaded, loaded
assert not jax._src.xla_bridge._backends, "a backend was initialised"
# The check above sees what it should.
jax.numpy.zeros(1)
assert jax._src.xla_bridge._backends
"""


def test_import_is_light_and_touches_no_device():
    done = subprocess.run([sys.executable, "-c", IMPORT_PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def members(module):
    """Public names of a module: its ``__all__``, else its own classes, or functions for the plots."""
    if hasattr(module, "__all__"):
        return module.__all__
    kind = inspect.isfunction if module is nt.plots else inspect.isclass
    return [
        name
        for name, value in vars(module).items()
        if kind(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def public():
    """Public functions and classes by dotted name."""
    objects = {}
    for name in nt.__all__:
        value = getattr(nt, name)
        if inspect.ismodule(value):
            objects |= {f"{name}.{inner}": getattr(value, inner) for inner in members(value)}
        else:
            objects[name] = value
    return objects


PUBLIC = public()


def is_record(value):
    """NamedTuples are what functions return: their fields are documented, not exemplified."""
    return inspect.isclass(value) and issubclass(value, tuple)


@pytest.mark.parametrize("module", [nt, nt.expectations, nt.families, nt.online], ids=lambda m: m.__name__)
def test_all_is_sorted_and_exists(module):
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name)), name


def test_public_names_are_found():
    assert {"temper", "compare", "online.ngvi", "optim.SVB", "guides.AutoOnlineDiagonalNormal"} <= set(PUBLIC)
    assert {"plots.plot_regret", "families.MeanField"} <= set(PUBLIC)
    assert not {"guides.prior_moments", "optim.AutoOnlineDiagonalNormal"} & set(PUBLIC)


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if not is_record(value)])
def test_public_callables_have_an_example(name):
    assert ">>>" in inspect.getdoc(PUBLIC[name])


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if is_record(value)])
def test_records_document_every_field(name):
    documented = inspect.getdoc(PUBLIC[name])
    for field in PUBLIC[name]._fields:
        assert f"{field}:" in documented, field


def test_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_version_is_that_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert importlib.metadata.version("numpyro_tempered") == project["version"]


def test_no_two_test_modules_share_a_name():
    """Their folders are no packages, and one process imports one module of a name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
