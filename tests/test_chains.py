"""How deep calls go, from public functions to leaves, read from the sources."""

import ast
import functools
from pathlib import Path

import numpyro_tempered as nt

PACKAGE = Path(nt.__file__).parent
# NumPyro's own is 9, by the same reading.
LONGEST = 14


def sources(package):
    modules = {}
    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return modules


class Names:
    """Where the names of each module are defined."""

    def __init__(self, modules):
        self.modules, self.own, self.imported = modules, {}, {}
        for name, tree in modules.items():
            self.own[name] = {
                node.name
                for node in tree.body
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
            }
            self.imported[name] = {
                alias.asname or alias.name: (node.module, alias.name)
                for node in tree.body
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }

    def find(self, module, name):
        """The module and name of a definition, or a module and None."""
        if name in self.own.get(module, ()):
            return module, name
        if name not in self.imported.get(module, ()):
            return None
        package, name = self.imported[module][name]
        if f"{package}.{name}" in self.modules and name not in self.own.get(
            package, ()
        ):
            return f"{package}.{name}", None
        return self.find(package, name)

    def called(self, module, class_name, node):
        """What a call calls, where its text shows it."""
        if isinstance(node, ast.Name):
            return self.find(module, node.id)
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            return None
        if node.value.id == "self":
            return module, f"{class_name}.{node.attr}"
        owner = self.find(module, node.value.id)
        if owner is None:
            return None
        return (
            self.find(owner[0], node.attr)
            if owner[1] is None
            else (owner[0], f"{owner[1]}.{node.attr}")
        )


def calls(modules):
    """By function what it calls."""
    names, graph = Names(modules), {}
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                functions, owner = {node.name: node}, None
            elif isinstance(node, ast.ClassDef):
                owner = node.name
                functions = {
                    f"{owner}.{each.name}": each
                    for each in node.body
                    if isinstance(each, ast.FunctionDef)
                }
                graph[module, owner] = {(module, f"{owner}.__init__")}
            else:
                continue
            for name, function in functions.items():
                graph[module, name] = {
                    names.called(module, owner, call.func)
                    for call in ast.walk(function)
                    if isinstance(call, ast.Call)
                }
    return {
        start: {end for end in ends if end in graph} for start, ends in graph.items()
    }


def longest_chain(graph):
    """The longest chain of calls; one that comes back to itself ends there."""
    active = set()

    @functools.cache
    def from_here(name):
        active.add(name)
        tails = [
            from_here(other) for other in sorted(graph[name]) if other not in active
        ]
        active.discard(name)
        return [name, *max(tails, key=len, default=[])]

    return max((from_here(name) for name in sorted(graph)), key=len)


def test_chains_are_read_through_imports_methods_and_circles():
    first = "from p.b import g, K\nfrom p import c\ndef f():\n    g(), c.h(), K().m()\n"
    second = "def g(): ...\nclass K:\n    def m(self): self.n()\n    def n(self): g()\n"
    third = "from p.b import K\ndef h():\n    K.m(), h()\n"
    modules = {"p.a": first, "p.b": second, "p.c": third}
    graph = calls({name: ast.parse(text) for name, text in modules.items()})
    assert longest_chain(graph) == [
        ("p.a", "f"),
        ("p.c", "h"),
        ("p.b", "K.m"),
        ("p.b", "K.n"),
        ("p.b", "g"),
    ]


def test_no_chain_of_calls_is_long():
    chain = longest_chain(calls(sources(PACKAGE)))
    assert LONGEST - 2 <= len(chain) <= LONGEST, [".".join(each) for each in chain]
