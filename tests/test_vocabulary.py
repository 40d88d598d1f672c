"""One name for one thing: public signatures, names in the sources, and the language of texts."""

import ast
import functools
import inspect
import json
import re
from collections import defaultdict

import pytest
from test_package import MODULES, PUBLIC, ROOT, identify, is_record, module_of, parse

ROOMS = sorted({module_of(path) for path in MODULES})
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
# The right word, and what it is called elsewhere.
SYNONYMS = {
    "tolerance": {"tol", "eps", "epsilon", "rtol", "atol", "ftol", "gtol", "xtol"},
    "max_iter": {
        "max_iters",
        "maxiter",
        "max_iterations",
        "max_steps",
        "max_sweeps",
        "max_evaluations",
    },
    "num_iter": {
        "n_iter",
        "niter",
        "num_iters",
        "num_iterations",
        "num_sweeps",
        "iterations",
    },
    "num_samples": {"n_samples", "nsamples", "num_sample", "sample_size"},
    "num_draws": {"n_draws", "ndraws", "draws"},
    "num_particles": {"n_particles"},
    "num_restarts": {"n_init", "n_restarts", "restarts"},
    "num_components": {"n_components", "k"},
    "num_nodes": {"n_nodes", "nodes"},
    "rng_key": {"key", "seed", "rng", "prng_key", "random_state"},
    "init": {"init_params", "initial", "start", "warm_start", "x0", "init_state"},
    "step_size": {"lr", "stepsize", "learning_rate"},
    "progress_bar": {"progbar", "progress", "verbose"},
    "sample_weight": {"sample_weights", "row_weight"},
    "rule": {"algorithm"},
    "elbo": {"evidence_lower_bound", "elbo_value"},
    "restart_elbos": {"elbos_of_restarts", "restart_elbo"},
    "restart_objectives": {"objectives", "objectives_of_restarts"},
    "converged": {"has_converged", "success"},
    "log_prior": {"log_priors", "log_weights", "prior_weights"},
    "x": {"X", "features_array"},
    "y": {"Y", "target", "targets"},
}
# Public names whose arguments and fields are fixed, with the reason; a name stands for all that begin with it.
EXCEPTIONS = {
    (
        "learning_rate",
        "online.aggregate",
    ): "the rate of the weights, not a step of the parameters",
    (
        "max_evaluations",
        "fit_gaussian",
    ): "evaluations are what costs, and a step may take several",
    ("max_evaluations", "gaussian.descent.minimise"): "as fit_gaussian",
    ("max_evaluations", "online.partitioned"): "as fit_gaussian, of each local fit",
    ("target", "results.SampledPosterior"): "a Target, what is sampled",
    ("key", "sparse.SpikeAndSlab.sample"): "NumPyro's signature",
    ("key", "guides.LowRankPrecisionNormal.sample"): "NumPyro's signature",
    ("n_components", "estimators."): "scikit-learn's name",
    ("n_init", "estimators."): "scikit-learn's name",
    ("n_samples", "estimators."): "scikit-learn's name",
    ("random_state", "estimators."): "scikit-learn's name",
    ("tol", "estimators."): "scikit-learn's name",
    ("verbose", "estimators."): "scikit-learn's name",
    ("warm_start", "estimators."): "scikit-learn's name",
    ("X", "estimators."): "scikit-learn's name",
}
# Those of Python and of NumPyro's handlers.
COMMON = {"self", "args", "kwargs", "options", "msg"}
# No noun for a thing and no verb for an act.
BANNED = {
    "again",
    "apart",
    "asked",
    "away",
    "beside",
    "built",
    "chosen",
    "drawn",
    "else",
    "every",
    "forth",
    "found",
    "further",
    "given",
    "gone",
    "held",
    "here",
    "kept",
    "known",
    "longest",
    "made",
    "moved",
    "own",
    "refused",
    "relook",
    "seen",
    "shown",
    "swept",
    "taken",
    "there",
    "these",
    "told",
    "wanted",
    "widest",
}
# Words of no field.
INVENTED = {
    "Beginning",
    "Climb",
    "Growth",
    "Query",
    "Rest",
    "Settler",
    "Verdict",
    "Visit",
    "alike",
    "automatic",
    "beginning",
    "climb",
    "visit",
    "whole",
}
# Documents that no reader has, and sentences that read as translated.
PRIVATE = re.compile(
    r"\b(?:MATH|DESIGN|HOUSE|STYLE|NUMPYRO|BUILD)\.md\b|\b(?:MATH|DESIGN|HOUSE|STYLE),? section\b"
)
ODD = re.compile(
    r"\bone an? (?:column|row|datum|site|coefficient|key|restart|component|sweep|round)\b"
    r"|\bare else\b|\bthe look for\b|\bthe dearest\b|\balpha, drawn\b|\b[Uu]p to so many\b|\bof so many\b"
)


@functools.cache
def signatures():
    """Parameters of public callables and methods, by dotted name."""
    parameters = {}
    for name, value in PUBLIC.items():
        if is_record(value) or not callable(value):
            continue
        methods = vars(value) if inspect.isclass(value) else {}
        callables = {name: value} | {
            f"{name}.{method}": function
            for method, function in methods.items()
            if inspect.isfunction(function) and not method.startswith("_")
        }
        for dotted, function in callables.items():
            try:
                parameters[dotted] = list(inspect.signature(function).parameters)
            except ValueError:
                assert issubclass(function, Warning), dotted
    return parameters


@functools.cache
def places():
    """Public callables by the names of their arguments, and records by the names of their fields."""
    arguments, fields = defaultdict(set), defaultdict(set)
    for dotted, names in signatures().items():
        for name in names:
            arguments[name].add(dotted)
    for dotted, value in PUBLIC.items():
        if is_record(value):
            for name in value._fields:
                fields[name].add(dotted)
    return arguments, fields


def with_synonyms(names):
    """Pairs of a wrong name and its place, and the right name."""
    wrong = {
        synonym: right for right, synonyms in SYNONYMS.items() for synonym in synonyms
    }
    return {
        (name, place): wrong[name]
        for name in names
        if name in wrong
        for place in names[name]
    }


def is_excepted(name, place):
    return any(name == word and place.startswith(prefix) for word, prefix in EXCEPTIONS)


@pytest.mark.parametrize("kind", [0, 1], ids=["arguments", "fields"])
def test_one_thing_has_one_name(kind):
    wrong = with_synonyms(places()[kind])
    assert {
        pair: right for pair, right in wrong.items() if not is_excepted(*pair)
    } == {}


def test_every_exception_is_needed():
    pairs = [pair for names in places() for pair in with_synonyms(names)]
    for word, prefix in EXCEPTIONS:
        assert any(
            name == word and place.startswith(prefix) for name, place in pairs
        ), (word, prefix)


def glossary_names():
    """Names in the first columns of the tables."""
    text = GLOSSARY.read_text().split("## Names of arguments and fields")[1]
    cells = re.findall(r"^\|([^|]*)\|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def owner(place):
    """The function, or the class of a method; of a class at top level the method."""
    parts = place.split(".")
    return parts[-1] if place in PUBLIC or len(parts) == 2 else parts[-2]


def test_the_glossary_names_what_two_callables_share():
    arguments, _ = places()
    callables = {
        name: {owner(place) for place in places} for name, places in arguments.items()
    }
    common = {name for name, owners in callables.items() if len(owners) > 1} - COMMON
    assert common - set(glossary_names()) == set()


def test_the_glossary_names_what_exists_and_once():
    names = glossary_names()
    assert sorted(names) == sorted(set(names))
    arguments, fields = places()
    assert set(names) - set(arguments) - set(fields) == set()


def assigned_names(tree):
    """Names that a module gives to values, arguments, functions, classes and fields, with their lines."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name, node.lineno
            case (
                ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield name, node.lineno


@pytest.mark.parametrize("room", ROOMS)
def test_names_are_nouns_and_verbs(room):
    paths = [path for path in MODULES if module_of(path) == room]
    words = BANNED | INVENTED
    banned = {
        f"{identify(path)}:{line}": name
        for path in paths
        for name, line in assigned_names(parse(path))
        if name.strip("_") in words
    }
    assert banned == {}


def test_the_parser_sees_every_kind_of_name():
    source = """
class found:
    kept: int
def moved(own, *held, told=1, **seen):
    made, (taken, known) = 1, (2, 3)
    for given in []:
        pass
    with open("") as shown:
        state.gone = (built := 3)
    [asked for here in []]
"""
    assert {name for name, _ in assigned_names(ast.parse(source))} == {
        *(
            "found",
            "kept",
            "moved",
            "own",
            "held",
            "told",
            "seen",
            "made",
            "taken",
            "known",
        ),
        *("given", "shown", "gone", "built", "here"),
    }


def texts():
    """Sources, pages and examples by room or folder."""
    folders = {
        f"numpyro_tempered/{room}": [
            path for path in MODULES if module_of(path) == room
        ]
        for room in ROOMS
    }
    folders["docs"] = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    folders["examples"] = [
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "examples").rglob("*.ipynb"),
    ]
    return folders


def read(path):
    """The text on one line, of a notebook that of its cells."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return re.sub(r"\s+(?:# )?", " ", text)


@pytest.mark.parametrize("folder", texts())
def test_texts_name_no_private_document_and_no_odd_phrase(folder):
    paths = {str(path): read(path) for path in texts()[folder]}
    assert {
        name: PRIVATE.findall(text)
        for name, text in paths.items()
        if PRIVATE.search(text)
    } == {}
    assert {
        name: ODD.findall(text) for name, text in paths.items() if ODD.search(text)
    } == {}


@pytest.mark.parametrize(
    "phrase",
    [
        "See MATH section 6.",
        "as in DESIGN.md",
        "one a column",
        "the look for bad data",
        "Up to so many data",
    ],
)
def test_the_patterns_see_what_they_should(phrase):
    assert PRIVATE.search(phrase) or ODD.search(phrase)
