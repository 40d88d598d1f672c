"""The package as a whole: layers, import, public names."""

import ast
import functools
import inspect
import re
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import pytest

import numpyro_tempered as nt

PACKAGE = Path(nt.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
# A room imports from its own line's left and from the lines above: there is no arrow upwards and no circle.
LAYERS = [
    ["core"],
    ["gaussian"],
    ["handlers", "online"],
    ["report"],
    ["infer", "theory"],
    ["select", "sparse"],
    ["mixtures", "ppca"],
    ["plots", "estimators"],
]
RANK = {
    name: rank for rank, name in enumerate(name for layer in LAYERS for name in layer)
}
# What needs no NumPyro; components of mixtures hand out its distributions as values.
PURE = ("core/", "gaussian/", "online/", "theory/bounds/", "ppca/")
# In these rooms the one module that speaks it.
BRIDGES = {"ppca/model.py"}
# Imported inside functions alone, and in these rooms.
LAZY = {
    "core": {"pyarrow"},
    "gaussian": {"scipy"},
    "handlers": {"funsor"},
    "infer": {"optax"},
    "report": {"arviz", "arviz_stats", "pandas", "xarray"},
    "theory": {"scipy"},
    "select": {"arviz", "arviz_stats", "scipy", "xarray"},
    "plots": {"matplotlib", "scipy"},
}
# Imported by modules that are themselves imported by name alone.
OPTIONAL = {"estimators": {"pandas", "river", "scipy", "sklearn"}}


def identify(path):
    return str(path.relative_to(PACKAGE))


def module_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(PACKAGE.rglob("*.py"))
# The names at top level, which import from every room.
FACE = ["__init__.py", "results.py", "warnings.py"]
BELOW_INIT = [path for path in MODULES if identify(path) not in FACE]


def is_pure(path):
    return identify(path).startswith(PURE) and identify(path) not in BRIDGES


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


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
        if inside_functions or not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ):
            nodes += ast.iter_child_nodes(node)
    return found


def outside(names):
    return (
        {name.split(".")[0] for name in names}
        - set(sys.stdlib_module_names)
        - {"numpyro_tempered"}
    )


def test_the_parser_finds_imports(tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        "import a\nif TYPE_CHECKING:\n    import b\nclass C:\n    from c import d\n"
        "def f():\n    import e\ntry:\n    import g.h\nexcept ImportError:\n    pass\n"
    )
    assert set(imports(source, inside_functions=False)) == {"a", "c.d", "g.h"}
    assert set(imports(source, inside_functions=True)) == {"a", "c.d", "g.h", "e"}


def rooms_of(names):
    return {
        name.split(".")[1] for name in names if name.startswith("numpyro_tempered.")
    }


@functools.cache
def arrows():
    """Pairs of rooms of which the first imports the second."""
    return {
        (module_of(path), room)
        for path in BELOW_INIT
        for room in rooms_of(imports(path, inside_functions=True))
        if room != module_of(path)
    }


@functools.cache
def floors():
    """Each room's floor: above all that it imports."""
    floor = {}
    for layer in LAYERS:
        for room in layer:
            floor[room] = 1 + max(
                (floor[below] for above, below in arrows() if above == room), default=0
            )
    return floor


def test_every_room_has_a_layer():
    assert {module_of(path) for path in BELOW_INIT} == set(RANK)


def test_the_house_is_small():
    assert (
        len([entry for entry in PACKAGE.iterdir() if entry.name != "__pycache__"]) <= 17
    )
    assert sorted(path.name for path in PACKAGE.glob("*.py")) == FACE
    # The face of the package stands on a floor of its own, with an arrow to every room.
    assert max(floors().values()) + 1 <= 10
    assert len(arrows()) + len(RANK) <= 60


def test_nothing_imports_upwards():
    upward = [
        (identify(path), name)
        for path in BELOW_INIT
        for name in imports(path, inside_functions=True)
        # A public name of the package itself has no rank: the rooms do not see it.
        if name.startswith("numpyro_tempered.")
        and RANK.get(name.split(".")[1], len(RANK)) > RANK[module_of(path)]
    ]
    assert not upward


def foreign_imports(path):
    """Packages that a module may not import, at its top or in a function."""
    allowed = {"jax", "numpy"} if is_pure(path) else {"jax", "numpy", "numpyro"}
    if path.name != "__init__.py":
        allowed = allowed | OPTIONAL.get(module_of(path), set())
    # The progress bar of a long stream is NumPyro's own dependency.
    lazy = LAZY.get(module_of(path), set()) | {"tqdm"}
    at_the_top = outside(imports(path, inside_functions=False)) - allowed
    return at_the_top | (outside(imports(path, inside_functions=True)) - allowed - lazy)


def test_modules_import_jax_numpy_and_numpyro_alone():
    assert not {
        identify(path): names for path in BELOW_INIT if (names := foreign_imports(path))
    }


FAMILIES = {"MeanField", "FullRank", "LowRank", "SpikeSlab", "GaussianMixture"}
# Guides that stand for a family, and the fields that tell one from another.
GUIDES = {
    "AutoOnlineDiagonalNormal",
    "AutoOnlineMultivariateNormal",
    "AutoOnlineLowRankNormal",
}
FIELDS = {
    "scale",
    "factor",
    "scale_tril",
    "precision_diag",
    "precision_factor",
    "probs",
}


def family_questions(tree):
    """Lines that ask of which family a value is: by its type, by a field, or by its guide."""

    def names(node):
        return {
            getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node)
        }

    def strings(node):
        return {getattr(part, "value", "") for part in ast.walk(node)}

    for node in ast.walk(tree):
        called = getattr(getattr(node, "func", None), "id", "")
        if called in ("isinstance", "issubclass") or isinstance(
            node, ast.Compare | ast.MatchClass
        ):
            asks = names(node) & (FAMILIES | GUIDES)
            asks |= strings(node) & FIELDS if "_fields" in names(node) else set()
        else:
            asks = strings(node) & FIELDS if called in ("hasattr", "getattr") else set()
        if asks:
            yield getattr(node, "lineno", None)


def test_only_the_families_know_which_family_it_is():
    others = [
        path
        for path in BELOW_INIT
        if not identify(path).startswith("gaussian/families/")
    ]
    assert not {
        identify(path): lines
        for path in others
        if (lines := list(family_questions(parse(path))))
    }


def test_questions_about_the_family_are_found():
    questions = (
        "isinstance(q, MeanField | FullRank)",
        "isinstance(q, families.LowRank)",
        "type(q) is FullRank",
        "type(q) in (MeanField, SpikeSlab)",
        "hasattr(q, 'factor')",
        "q._fields[-1] == 'factor'",
        "isinstance(guide, AutoOnlineLowRankNormal)",
        "match q:\n    case MeanField(loc, scale):\n        pass",
    )
    for question in questions:
        assert list(family_questions(ast.parse(question))), question
    assert not list(
        family_questions(
            ast.parse("isinstance(x, Rows), hasattr(q, 'loc'), MeanField(loc, scale)")
        )
    )


IMPORT_PROBE = """
import sys
import jax
import numpyro_tempered
loaded = {"arviz", "pandas", "xarray", "matplotlib", "funsor", "optax", "sklearn"} & set(sys.modules)
assert not loaded, loaded
lazy = {f"numpyro_tempered.{name}" for name in ("estimators", "plots", "sparse")}
assert not lazy & set(sys.modules), lazy & set(sys.modules)
assert not jax._src.xla_bridge._backends, "a backend was initialised"
# The check above sees what it should.
jax.numpy.zeros(1)
assert jax._src.xla_bridge._backends
"""


def test_import_is_light_and_touches_no_device():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def namespaces(module=nt, prefix=""):
    """Public modules by dotted name, those that repeat names of others last."""
    yield prefix, module
    for name in sorted(module.__all__, key=["warnings", "results"].count):
        if inspect.ismodule(value := getattr(module, name)):
            yield from namespaces(value, f"{prefix}{name}.")


NAMESPACES = dict(namespaces())


def public():
    """Public functions, classes and constants by the dotted name under which they are documented."""
    objects, places = {}, set()
    for prefix, module in NAMESPACES.items():
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value) and id(value) not in places:
                objects[prefix + name] = value
                places.add(id(value))
    return objects


PUBLIC = public()


def is_record(value):
    """NamedTuples are what functions return: their fields are documented, not exemplified."""
    return inspect.isclass(value) and issubclass(value, tuple)


@pytest.mark.parametrize("module", NAMESPACES.values(), ids=lambda m: m.__name__)
def test_dir_shows_the_public_names_and_nothing_else(module):
    assert dir(module) == sorted(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name)), name


def test_the_names_at_top_level():
    verbs = """
    temper marginalize robust fit_svi fit_gaussian OnlineVI select_alpha compare check_fit check_calibration
    certify_risk sandwich linear_response loo temper_path to_inference_data table dyadic
    """
    modules = """
    alpha bounds estimators expectations gaussian guides mixtures online optim plots ppca results sparse warnings
    """
    assert dir(nt) == sorted((verbs + modules).split())


def test_namespaces_are_found():
    assert len(NAMESPACES) >= 20
    assert {"", "bounds.hindsight.", "gaussian.families.", "mixtures.starts."} <= set(
        NAMESPACES
    )


def returned(function):
    """Records that the annotation of a function names."""
    kinds, records = [function.__annotations__.get("return")], set()
    while kinds:
        kind = kinds.pop()
        kinds += typing.get_args(kind)
        if is_record(kind) and hasattr(kind, "_fields"):
            records.add(kind)
    return records


def test_results_have_the_records_that_functions_return():
    """All but algorithms and values to compute with, and records whose names tell only within their namespace."""
    verbs = {name: getattr(nt, name) for name in nt.__all__}
    fits = re.compile(r"(\w+\.)?(fit|run|predict|check|select|polish|compare)(_\w+)?")
    functions = {
        name: value
        for name, value in (PUBLIC | verbs).items()
        if inspect.isfunction(value) and (name in verbs or fits.fullmatch(name))
    }
    records = set().union(*map(returned, functions.values()))
    assert len(records) > 15
    missing = {record.__name__ for record in records} - set(nt.results.__all__)
    assert missing == {"Moments"}
    assert {
        record.__name__ for record in map(nt.results.__dict__.get, dir(nt.results))
    } == set(dir(nt.results))


def test_warnings_have_every_warning():
    found = {
        name
        for path in BELOW_INIT
        for node in parse(path).body
        if isinstance(node, ast.ClassDef) and (name := node.name).endswith("Warning")
    }
    assert found == set(dir(nt.warnings))


CHANGELOG = ROOT / "docs" / "reference" / "changelog.md"


def test_the_changelog_says_where_names_are():
    rows = re.findall(
        r"^\| `nt\.(\w+)` \| `nt\.([\w.]+)` \|$", CHANGELOG.read_text(), re.M
    )
    assert len(rows) > 20
    for before, place in rows:
        assert not hasattr(nt, before), before
        assert functools.reduce(getattr, place.split("."), nt) is not None


def test_a_name_that_never_was_is_refused():
    with pytest.raises(AttributeError, match=r"^numpyro_tempered has no 'no_such'\.$"):
        nt.no_such  # noqa: B018


def test_public_names_are_found():
    assert {
        "temper",
        "compare",
        "online.ngvi",
        "optim.SVB",
        "guides.AutoOnlineDiagonalNormal",
    } <= set(PUBLIC)
    assert {"plots.plot_regret", "gaussian.families.MeanField"} <= set(PUBLIC)
    assert {"results.TemperedFit", "mixtures.MixtureFit"} <= set(PUBLIC)
    assert "results.MixtureFit" not in PUBLIC
    assert not {"guides.prior_moments", "optim.AutoOnlineDiagonalNormal"} & set(PUBLIC)


def test_public_callables_have_an_example():
    callables = {
        name: value
        for name, value in PUBLIC.items()
        if callable(value) and not is_record(value)
    }
    assert len(callables) > 200
    assert not [
        name for name, value in callables.items() if ">>>" not in inspect.getdoc(value)
    ]


def test_records_document_every_field():
    records = {name: value for name, value in PUBLIC.items() if is_record(value)}
    assert len(records) > 70
    assert not [
        (name, field)
        for name, record in records.items()
        for field in record._fields
        if f"{field}:" not in inspect.getdoc(record)
    ]


SIGNATURES = Path(__file__).with_name("signatures.txt")


def signature(value):
    """Names and defaults of the parameters, without types and without places in memory."""
    parameters = [
        p.replace(annotation=p.empty)
        for p in inspect.signature(value).parameters.values()
    ]
    bare = inspect.Signature(parameters)
    text = re.sub(r"<function (\S+) at 0x\w+>", r"<\1>", str(bare))
    # A record as a default is shown in lines.
    return re.sub(r"\s+", " ", text)


def signatures():
    """The call of every public function and class, and of every public method of our own, a line each."""
    lines = []
    for name, value in PUBLIC.items():
        if inspect.isclass(value) and issubclass(value, Warning):
            continue
        if callable(value):
            lines.append(name + signature(value))
        for method, function in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(function) and not method.startswith("_"):
                lines.append(f"{name}.{method}{signature(function)}")
    return sorted(lines)


def test_calls_and_their_defaults_are_those_that_are_written_down():
    """A changed default changes users' results without a word. `python tests/test_package.py` writes the list."""
    written = SIGNATURES.read_text().splitlines()
    assert len(written) > 300
    assert signatures() == written


def test_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_version_is_that_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert nt.__version__ == project["version"]


def test_no_two_test_modules_share_a_name():
    """Their folders are no packages, and one process imports one module of a name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


if __name__ == "__main__":
    SIGNATURES.write_text("\n".join(signatures()) + "\n")
