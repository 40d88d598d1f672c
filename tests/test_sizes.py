"""Sizes of package, modules, functions and signatures in tokens, and how much goes untyped."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

import numpyro_tempered as nt

PACKAGE = Path(nt.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
START, END = (getattr(tokenize, f"FSTRING_{name}", -1) for name in ("START", "END"))
# Tokens of code: of the package, a module, and a function without those within.
PACKAGE_TOKENS, MODULE, FUNCTION = 360_000, 3300, 1000
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def identify(path):
    return str(path.relative_to(PACKAGE))


def docstring_lines(tree):
    lines = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
            and ast.get_docstring(node) is not None
        ):
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def tokens_by_line(source):
    """Tokens of code by line, an f-string as one: no docstring, comment or layout."""
    docstrings, inside, counts = docstring_lines(ast.parse(source)), 0, Counter()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in LAYOUT or token.start[0] in docstrings:
            continue
        # From Python 3.12 on an f-string is many tokens.
        inside += (token.type == START) - (token.type == END)
        if token.type == START or (inside == 0 and token.type != END):
            counts[token.start[0]] += 1
    return counts


def own_lines(function):
    """The lines of a function without those of functions within."""
    lines = set(range(function.lineno, function.end_lineno + 1))
    for node in ast.walk(function):
        if isinstance(node, FUNCTIONS) and node is not function:
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return lines


def functions(source):
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTIONS)]


def test_tokens_leave_out_docstrings_comments_and_layout():
    source = (
        '"""Module."""\n\n# why\ndef f(a):\n    """F.\n\n    More.\n    """\n'
        '    return (\n        f"{a} b"\n    )\n'
    )
    assert tokens_by_line(source) == {4: 6, 9: 2, 10: 1, 11: 1}


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
    counts = tokens_by_line(source)
    if counts.total() > MODULE:
        yield f"{counts.total()} tokens"
    for function in functions(source):
        if (length := sum(counts[line] for line in own_lines(function))) > FUNCTION:
            yield f"{function.name} has {length} tokens of its own"
        positional = [arg.arg for arg in function.args.posonlyargs + function.args.args]
        if len(set(positional) - {"self", "cls"}) > 6:
            yield f"{function.name} takes {positional}"


def test_excesses_are_told():
    inner = "    def inner():\n" + "        a\n" * 600
    long_function = "def f(a, b, c, d, e, g, h):\n" + "    a\n" * 1100 + inner
    assert list(excesses(long_function * 2)) == [
        "3446 tokens",
        *2
        * [
            "f has 1118 tokens of its own",
            "f takes ['a', 'b', 'c', 'd', 'e', 'g', 'h']",
        ],
    ]


@pytest.mark.full
def test_modules_and_functions_are_short():
    assert not {
        identify(path): told
        for path in MODULES
        if (told := list(excesses(path.read_text())))
    }


@pytest.mark.full
def test_the_package_is_small():
    assert (
        sum(tokens_by_line(path.read_text()).total() for path in MODULES)
        <= PACKAGE_TOKENS
    )
