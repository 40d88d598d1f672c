"""Which small errors in the package the tests notice.

Cosmic Ray makes the errors, one at a time, in a copy of the tree, and runs tests on it. A seed draws the
places: one sample among those that compute, another among refusals and messages. Each mutant meets the files of
tests that are nearest to its module, then the others of the default tier that run the module, then the full tier
of the nearest.

`--map` measures which files of tests run which module, which takes as long as the tests alone, and writes
docs/results/mutants_nearest.csv. Mutants that change nothing that a user could see are listed in
tests/benchmarks/mutants_equivalent.csv with the reason, and leave the score.
"""

import argparse
import ast
import csv
import json
import multiprocessing
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.operators.operator import Operator
from cosmic_ray.work_item import MutationSpec, TestOutcome
from provenance import describe

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
NEAREST = "mutants_nearest.csv"
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.csv")
PACKAGE = "numpyro_tempered"
# A file of tests is near a module if it runs at least this share of the lines that any file runs.
NEAR_SHARE, MOST_NEAR = 0.5, 4
# Seconds after which a run of tests counts as one that noticed: an endless loop.
LIMITS = {"nearest": 400, "default": 900, "full": 1200}
UNIT, FULL = "-m 'not slow and not full'", "-m 'full and not slow'"
# They walk over all that is public, and may run no line of a module: calls with their defaults, keys that are
# forgotten, how results are shown.
OF_ALL = [
    "tests/test_package.py",
    "tests/test_wrong_calls.py",
    "tests/core/test_display.py",
]
# What reads the source, and not what it does.
READERS = (
    "tests/test_sizes.py",
    "tests/test_vocabulary.py",
    "tests/test_licences.py",
    "tests/docs/",
)


class Mistake(Operator):
    """An operator of our own."""

    @classmethod
    def examples(cls):
        return ()


class DropArgument(Mistake):
    """Forget an option: leave out a keyword argument of a call."""

    def mutation_positions(self, node):
        if node.type == "arglist":
            for child in self._keywords(node):
                yield child.start_pos, child.end_pos

    @staticmethod
    def _keywords(node):
        return [
            c
            for c in node.children
            if c.type == "argument"
            and c.children[1].type == "operator"
            and c.children[1].value == "="
        ]

    def mutate(self, node, index):
        at = node.children.index(self._keywords(node)[index])
        # With the comma before it: an argument by keyword is seldom the first.
        del node.children[max(at - 1, 0) : at + (2 if at == 0 else 1)]
        return node


class DropFactor(Mistake):
    """Forget a factor or a term: keep what stands left of an operator."""

    def mutation_positions(self, node):
        if node.type in ("arith_expr", "term"):
            for operator in node.children[1::2]:
                yield operator.start_pos, operator.end_pos

    def mutate(self, node, index):
        del node.children[2 * index + 1 : 2 * index + 3]
        return node


class LoseText(Mistake):
    """Lose the words of a message: replace a string, or a stretch of a formatted one, by other letters."""

    def mutation_positions(self, node):
        if (
            node.type == "string" and not node.value.startswith(('"""', "'''"))
        ) or node.type == "fstring_string":
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        if node.type == "fstring_string":
            node.value = "XX"
        else:
            node.value = '"XX"'
        return node


OURS = {
    operator.__name__: operator for operator in (DropArgument, DropFactor, LoseText)
}
cosmic_ray.plugins.OPERATOR_PROVIDERS["here"] = OURS

# Of each kind the mistakes that people make: the neighbouring operator, not each of twelve.
REPLACED = {
    "BinaryOperator": "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Div Mod_Mul Pow_Mul BitOr_BitAnd BitAnd_BitOr",
    "ComparisonOperator": "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_GtE Gt_LtE Is_IsNot IsNot_Is",
    "UnaryOperator": "USub_UAdd Delete_Not Delete_Invert",
}
OPERATORS = [
    *(
        f"core/Replace{kind}_{pair}"
        for kind, pairs in REPLACED.items()
        for pair in pairs.split()
    ),
    *(
        f"core/{name}"
        for name in (
            "AddNot",
            "ReplaceTrueWithFalse",
            "ReplaceFalseWithTrue",
            "ReplaceAndWithOr",
            "ReplaceOrWithAnd",
            "ReplaceBreakWithContinue",
            "ReplaceContinueWithBreak",
            "NumberReplacer",
            "RemoveDecorator",
            "ZeroIterationForLoop",
        )
    ),
    "here/DropArgument",
    "here/DropFactor",
    "here/LoseText",
]


class Mutant(NamedTuple):
    """One small error: where it stands, and which operator makes it there."""

    module: str
    line: int
    column: int
    operator: str
    occurrence: int
    end: tuple[int, int]
    is_refusal: bool

    @property
    def kind(self):
        return "refusal" if self.is_refusal else "code"

    @property
    def name(self):
        return f"{self.module}:{self.line}:{self.column} {self.operator.split('/')[1]} {self.occurrence}"


# Where the mutants are.


def read_spans(tree):
    """Spans (first, last, each a line and a column) of refusals, and of what no test can reach."""
    refusals, unreached = [], []
    span = lambda node: (  # noqa: E731
        (node.lineno, node.col_offset),
        (node.end_lineno, node.end_col_offset),
    )

    def refuses(statement):
        return isinstance(statement, ast.Raise) or (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and ast.unparse(statement.value.func)
            .split(".")[-1]
            .lstrip("_")
            .startswith(("warn", "check", "refuse", "raise"))
        )

    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and refuses(node):
            refusals.append(span(node))
        elif isinstance(node, ast.If) and all(refuses(s) for s in node.body):
            refusals.append(span(node.test))
        elif isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith(
            ("check", "refuse", "require", "warn", "raise")
        ):
            refusals.append(span(node))
        if isinstance(node, ast.FunctionDef):
            unreached += [
                span(n)
                for a in [*node.args.args, *node.args.kwonlyargs]
                if (n := a.annotation)
            ]
            unreached += [span(node.returns)] if node.returns else []
        if isinstance(node, ast.AnnAssign):
            unreached.append(span(node.annotation))
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            unreached.append(span(node))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            unreached.append(span(node))
    return refusals, unreached


def find_mutants(modules):
    """Every mutant of the modules."""
    mutants = []
    operators = {name: cosmic_ray.plugins.get_operator(name)() for name in OPERATORS}
    for module in modules:
        refusals, unreached = read_spans(ast.parse((ROOT / module).read_text()))
        nodes = list(ast_nodes(get_ast_from_path(ROOT / module)))
        for name, operator in operators.items():
            places = [
                place for node in nodes for place in operator.mutation_positions(node)
            ]
            for occurrence, (start, end) in enumerate(places):
                inside = lambda spans, at=start: any(  # noqa: E731
                    first <= at < last for first, last in spans
                )
                if inside(unreached) or (
                    name == "here/LoseText" and not inside(refusals)
                ):
                    continue
                mutants.append(
                    Mutant(module, *start, name, occurrence, end, inside(refusals))
                )
    return mutants


def draw(mutants, count, seed):
    """Draw places first and then an error in each: a place where many are possible counts once.

    By a hash of the line, and not of its number, so that changes elsewhere leave the sample as it is.
    """
    by_place = defaultdict(list)
    for mutant in mutants:
        by_place[mutant.module, mutant.line, mutant.column].append(mutant)
    sources = {
        module: (ROOT / module).read_text().splitlines()
        for module in {m.module for m in mutants}
    }
    seen, ranked = Counter(), []
    for place in sorted(by_place):
        module, line, column = place
        text = (module, sources[module][line - 1], column)
        seen[text] += 1
        ranked.append((random.Random(f"{seed} {text} {seen[text]}"), place))
    chosen = sorted((rng.random(), place, rng) for rng, place in ranked)[:count]
    return [rng.choice(by_place[place]) for _, place, rng in chosen]


# Which tests meet them.


def copy_tree(folder):
    """Copy what git tracks, and what it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith("docs/results/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    # Some tests read committed tables.
    (folder / "docs" / "results").symlink_to(RESULTS)


def measure_map(workers):
    """Files of tests of each module, nearest first, as rows of a table."""
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        )
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "lines_run",
                "-n",
                str(workers),
                "tests",
            ],
            cwd=ROOT,
            env=os.environ | {"LINES_RUN": folder, "PYTHONPATH": paths},
            check=True,
        )
        measured = {}
        for path in Path(folder).iterdir():
            measured |= json.loads(path.read_text())
    return order(measured)


def order(measured):
    """Rows of a module, how many files of tests are near it, and all that run it, the nearest first."""
    by_module = defaultdict(list)
    for test, run in measured.items():
        if not test.startswith(READERS):
            for module, lines in run["lines"].items():
                by_module[module].append((lines, run["seconds"], test))
    rows = []
    for module, runs in sorted(by_module.items()):
        most = max(lines for lines, _, _ in runs)
        # The quickest of those that run enough of it, and then the others by what they run.
        near = sorted(
            (r for r in runs if r[0] >= NEAR_SHARE * most), key=lambda r: r[1]
        )[:MOST_NEAR]
        rest = sorted((r for r in runs if r not in near), key=lambda r: (-r[0], r[1]))
        rows.append((module, len(near), " ".join(test for _, _, test in near + rest)))
    return rows


def read_map(path):
    """Files of tests of each module, and how many of them are near: where none runs it, those of its room."""
    with path.open() as file:
        near = {
            row["module"]: (row["tests"].split(), int(row["nearest"]))
            for row in csv.DictReader(file)
        }
    for module in (ROOT / PACKAGE).rglob("*.py"):
        name, room = (
            str(module.relative_to(ROOT)),
            module.relative_to(ROOT / PACKAGE).parts[0],
        )
        tests = sorted(
            str(path.relative_to(ROOT))
            for path in (ROOT / "tests" / room).rglob("test_*.py")
        )
        near.setdefault(name, (tests, len(tests)))
    return near


def command(tests, options):
    """The command that runs files of tests until one fails. Files without a test of the tier have not failed."""
    pytest = " ".join(
        [sys.executable, "-m pytest -x -q -p no:cacheprovider", options, *tests]
    )
    return f'sh -c "{pytest}; r=$?; test $r = 5 || exit $r"'


def enter(template):
    """Give a worker a tree of its own, beside the first copy and removed with it."""
    folder = Path(tempfile.mkdtemp(dir=Path(template).parent))
    shutil.copytree(template, folder, symlinks=True, dirs_exist_ok=True)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)


def check_sound(folder, tests, workers):
    """Refuse to begin where tests fail without an error: every mutant would count as noticed."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        shlex.split(command(tests, f"-n {workers} {UNIT}")),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(
            f"tests fail without any error in the package:\n{done.stdout[-2000:]}"
        )


def meet(mutant, tests, nearest, with_full):
    """Run tests on a mutant until one fails: the stage that killed it, or `survived`, and what failed."""
    spec = MutationSpec(
        Path(mutant.module),
        mutant.operator,
        mutant.occurrence,
        (mutant.line, mutant.column),
        mutant.end,
    )
    stages = {
        "nearest": (tests[:nearest], UNIT),
        "default": ([*dict.fromkeys(OF_ALL + tests[nearest:])], UNIT),
        "full": (tests[:nearest], FULL),
    }
    diff = said = ""
    for stage, (files, options) in stages.items():
        if not files or (stage == "full" and not with_full):
            continue
        result = mutate_and_test([spec], command(files, options), LIMITS[stage])
        diff = result.diff or diff
        if result.test_outcome == TestOutcome.KILLED:
            said = next(
                (
                    line
                    for line in result.output.splitlines()
                    if line.startswith(("FAILED", "ERROR"))
                ),
                result.output[-200:],
            )
            # Only the unit tier is known to pass as it stands.
            failed = (
                said.removeprefix("FAILED ").split(" - ")[:1]
                if said.startswith("FAILED")
                else files
            )
            if (
                stage == "full"
                and subprocess.run(
                    [sys.executable, "-m", "pytest", "-q", "-m", "", *failed]
                ).returncode
            ):
                return (
                    mutant,
                    "incompetent",
                    f"fails without the error: {said[:200]}",
                    diff,
                )
            return mutant, stage, said[:200], diff
        if result.test_outcome == TestOutcome.INCOMPETENT:
            return mutant, "incompetent", (result.output or "")[-300:], diff
    return mutant, "survived" if with_full else "survived default", said, diff


def changed_lines(diff):
    """The line before and after, of a difference."""
    lines = [
        line
        for line in diff.splitlines()
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    return tuple(
        " ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--count", type=int, default=300, help="mutants of code that computes"
    )
    parser.add_argument(
        "--refusals", type=int, default=100, help="mutants of refusals and messages"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rooms",
        nargs="*",
        default=[],
        help="only modules whose path has one of these",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument(
        "--map",
        action="store_true",
        help="measure which tests run which module, and stop",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="only the mutants that mutants.csv shows to survive, or lacks",
    )
    parser.add_argument(
        "--default-only",
        action="store_true",
        help="without the full tier, which takes half of the time",
    )
    parser.add_argument(
        "--small", action="store_true", help="three mutants of one room"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.map:
        rows = measure_map(args.workers)
        with (args.output / NEAREST).open("w") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [("module", "nearest", "tests"), *rows]
            )
        return
    if args.small:
        args.count, args.refusals, args.rooms = 2, 1, ["theory/bounds"]
    # Where pytest keeps the programs of a run by hand.
    os.environ.setdefault(
        "JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "d" / "jax")
    )
    nearest = read_map(RESULTS / NEAREST)
    modules = sorted(
        m for m in nearest if not args.rooms or any(room in m for room in args.rooms)
    )
    mutants = find_mutants(modules)
    drawn = draw([m for m in mutants if not m.is_refusal], args.count, args.seed)
    drawn += draw([m for m in mutants if m.is_refusal], args.refusals, args.seed)
    start, rows = time.monotonic(), {}
    if args.again:
        # What survived stays in the report until it is met again.
        rows = read_rows(args.output / "mutants.csv", drawn)
    settled = {name for name, row in rows.items() if is_settled(row)}
    # Refusals first, which are the quickest.
    left = [mutant for mutant in reversed(drawn) if mutant.name not in settled]
    print(
        f"{len(mutants)} mutants in {len(modules)} modules, {len(drawn)} drawn, {len(left)} to meet",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "tree"
        template.mkdir()
        copy_tree(template)
        check_sound(
            template,
            sorted({t for mutant in left for t in nearest[mutant.module][0]}),
            args.workers,
        )
        with ProcessPoolExecutor(
            args.workers, multiprocessing.get_context("spawn"), enter, (template,)
        ) as pool:
            runs = [
                pool.submit(
                    meet, mutant, *nearest[mutant.module], not args.default_only
                )
                for mutant in left
            ]
            for done in as_completed(runs):
                mutant, stage, said, diff = done.result()
                before, after = changed_lines(diff)
                rows[mutant.name] = (
                    mutant.name,
                    mutant.kind,
                    stage,
                    before,
                    after,
                    said,
                )
                write(rows.values(), args)
                print(
                    f"{time.monotonic() - start:6.0f} s {stage:10} {mutant.name} | {before} -> {after} | {said}",
                    flush=True,
                )
    print(write(rows.values(), args))


def read_equivalents():
    with EQUIVALENT.open() as file:
        return {
            (row["module"], row["before"], row["after"]): row["reason"]
            for row in csv.DictReader(file)
        }


def read_rows(path, drawn):
    """Rows of an earlier run by name: of mutants that are drawn now, found by their line's text."""
    if not path.exists():
        return {}
    found = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            place, operator, _ = row["mutant"].split(" ")
            module, _, column = place.split(":")
            found[module, int(column), operator].append(tuple(row.values()))
    sources = {
        module: (ROOT / module).read_text().splitlines()
        for module in {m.module for m in drawn}
    }
    rows = {}
    for m in drawn:
        line = sources[m.module][m.line - 1].strip()
        # Some errors take out several lines.
        same = [
            r
            for r in found[m.module, m.column, m.operator.split("/")[1]]
            if r[3].startswith(line)
        ]
        if same:
            rows[m.name] = (m.name, *same[0][1:])
    return rows


def is_settled(row):
    """Whether tests noticed a mutant before, as they still do if no test has gone, or nobody can."""
    name, _, stage, before, after, _ = row
    return (
        stage in ("nearest", "default", "full")
        or (name.split(":")[0], before, after) in read_equivalents()
    )


def write(rows, args):
    """Write one row a mutant, and the score by room."""
    rows = sorted(rows)
    equivalents = read_equivalents()
    table = []
    for name, kind, stage, before, after, said in rows:
        module = name.split(":")[0]
        stage = "equivalent" if (module, before, after) in equivalents else stage
        table.append((name, kind, stage, before, after, said))
    with (args.output / "mutants.csv").open("w") as file:
        columns = ("mutant", "kind", "outcome", "before", "after", "test")
        csv.writer(file, lineterminator="\n").writerows([columns, *table])
    lines = [
        describe(
            f"{args.count} mutants of code, {args.refusals} of refusals, seed {args.seed}"
        )
    ]
    half = sum(stage == "survived default" for _, _, stage, *_ in table)
    lines.append(
        f"{len(table)} have met the default tier, {half} of its survivors have not met the full one"
    )
    lines.append(
        f"{'room':12} {'kind':8} {'mutants':>8} {'default':>8} {'with full':>10} {'equivalent':>11}"
    )
    rooms = defaultdict(Counter)
    for name, kind, stage, *_ in table:
        for room in (name.split("/")[1].removesuffix(".py"), "all"):
            rooms[room, kind][stage] += 1
    for (room, kind), stages in sorted(
        rooms.items(), key=lambda item: (item[0][1], item[0][0] == "all", item[0][0])
    ):
        number = sum(stages.values()) - stages["equivalent"] - stages["incompetent"]
        default = stages["nearest"] + stages["default"]
        shares = [
            f"{100 * k / number:.0f} %" if number else "-"
            for k in (default, default + stages["full"])
        ]
        lines.append(
            f"{room:12} {kind:8} {number:8} {shares[0]:>8} {shares[1]:>10} {stages['equivalent']:11}"
        )
    lines.append("\nsurvivors")
    lines += [
        f"{name}\n  {before}\n  {after}"
        for name, _, stage, before, after, _ in table
        if stage.startswith("survived")
    ]
    (args.output / "mutants.txt").write_text("\n".join(lines) + "\n")
    return "\n".join(lines[1:])


if __name__ == "__main__":
    main()
