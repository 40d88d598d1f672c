"""Sizes of modules, functions and signatures, and how much goes untyped."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

import numpyro_tempered as nt

PACKAGE = Path(nt.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def identify(path):
    return str(path.relative_to(PACKAGE))


def docstring_lines(tree):
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None:
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def code_lines(source):
    """Numbers of the lines that hold code: no docstring, comment or blank line."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(ast.parse(source))


def functions(source):
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTIONS)]


def test_code_lines_leave_out_docstrings_comments_and_blanks():
    source = (
        '"""Module."""\n\n# why\ndef f(a):\n    """F.\n\n    More.\n    """\n    return (\n        a\n    )\n'
    )
    assert code_lines(source) == {4, 9, 10, 11}


@pytest.mark.full
def test_little_is_of_any_type():
    names = [
        node
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == "Any"
    ]
    assert len(names) < 300


def excesses(source):
    """What of a module is too long, in words."""
    if (length := len(source.splitlines())) > 350:
        yield f"{length} lines"
    lines = code_lines(source)
    for function in functions(source):
        if (length := len(lines & set(range(function.lineno, function.end_lineno + 1)))) > 80:
            yield f"{function.name} has {length} lines of code"
        positional = [arg.arg for arg in function.args.posonlyargs + function.args.args]
        if len(set(positional) - {"self", "cls"}) > 6:
            yield f"{function.name} takes {positional}"


def test_excesses_are_told():
    long_function = "def f(a, b, c, d, e, g, h):\n" + "    a\n" * 80
    assert [words.split(" ", 1)[1] for words in excesses(long_function + "\n" * 300)] == [
        "lines",
        "has 81 lines of code",
        "takes ['a', 'b', 'c', 'd', 'e', 'g', 'h']",
    ]


@pytest.mark.full
def test_modules_and_functions_are_short():
    assert not {identify(path): told for path in MODULES if (told := list(excesses(path.read_text())))}
