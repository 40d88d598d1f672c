"""Every number in the prose of some pages is that of a result or of the code, or is listed with its reason.

The pages are README, front page, benchmarks and the page on first calls. A claim is a piece of a sentence with
the numbers that a file has: an edit of the page or of the file breaks it.
"""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
pytestmark = pytest.mark.skipif(
    not RESULTS.exists(), reason="docs/results is not in the source distribution"
)
WORDS = [
    "none",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
]
TENS = [
    "",
    "ten",
    "twenty",
    "thirty",
    "forty",
    "fifty",
    "sixty",
    "seventy",
    "eighty",
    "ninety",
    "hundred",
]
PARTS = [
    "dozens?",
    "hundreds",
    "thousands?",
    "millions?",
    "half",
    "twice",
    "thirds?",
    "quarters?",
    "tenths?",
]
NUMBER = re.compile(
    rf"\d+|\b(?:{'|'.join([*WORDS[2:], *TENS[2:], *PARTS])})\b", re.IGNORECASE
)
# What is no result: versions, definitions, and what others promise.
GIVEN = {
    "Python 3.11 or newer": "a requirement",
    "more than two of its standard errors, as one in twenty should be": "a definition",
    "less three standard errors of NUTS": "a definition",
    "95% interval": "a definition",
    "95% intervals": "a definition",
    "from 250 people": "given to the script",
    "sixty samples of 250 people": "given to the script",
    "alpha = 1 is efficient": "Bayes",
    "less log(1/b)": "a formula",
    "a power below 1": "Bayes",
    "on the way to 1": "Bayes",
    "Apache-2.0": "a licence",
    "Two commands": "a title",
    "The three pillars": "sections of a page",
    "the three pillars": "sections of a page",
    "in under two minutes": "a promise",
    "in under five": "a promise",
    "in five minutes": "a promise",
    "seven traps": "the headings of a page",
    "The two are apart.": "tables",
    "float32": "a type",
    "float64": "a type",
    "below 1 ours is faster": "a definition",
    "above 1 our step is faster": "a definition",
    "the two products of a pass": "an algorithm",
    "under jax 0.7": "a version",
    "under ArviZ 0.x": "a version",
    "the two go together": "two settings",
    "for six months": "a promise of jax",
    "the next power of two": "a definition",
}


def rows(name):
    """Rows of a table of results; numbers are floats."""
    with open(RESULTS / f"{name}.csv", encoding="utf-8") as file:
        return [
            {key: number(cell) for key, cell in row.items()}
            for row in csv.DictReader(file)
        ]


def number(cell):
    try:
        return float(cell)
    except ValueError:
        return cell


def column(name, key, **where):
    """Cells of the rows whose columns are as in ``where``, empty ones left out."""
    return [
        row[key]
        for row in rows(name)
        if all(row[k] == v for k, v in where.items()) and row[key] != ""
    ]


def cell(name, key, **where):
    (value,) = column(name, key, **where)
    return value


def across(name, key, value, columns=("2", "30", "54", "1000")):
    """A row of a table whose columns are d, without empty cells."""
    (row,) = [row for row in rows(name) if row[key] == value]
    return [row[each] for each in columns if row[each] != ""]


def written(path, pattern):
    """What a file of text says, as a string."""
    (found,) = set(
        re.findall(
            pattern, (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE
        )
    )
    return found


def noted(name, pattern):
    """What the text beside a table says."""
    return written(f"docs/results/{name}.txt", pattern)


def constant(path, name):
    """An integer of the package: 8 or 2**13."""
    base, _, power = written(
        f"numpyro_tempered/{path}", rf"^{name} = ([\d*.]+)"
    ).partition("**")
    return int(float(base) ** int(power or 1))


def span(values):
    """Two digits of the least and of the greatest."""
    return f"{min(values):.2g} to {max(values):.2g}"


def inverse(values):
    return [1.0 / value for value in values]


def front(figure, name):
    return cell("front", "value", figure=figure, number=name)


def decimals(value, digits):
    """Without the leading zero, as the pages write it."""
    return f"{value:.{digits}f}".removeprefix("0")


def spent_on_dispatch(name):
    """The largest d at which all rules take more than twice the time of numba, which has the arithmetic alone."""
    sizes = {row["d"] for row in rows(name)}
    return max(d for d in sizes if min(column(name, "time / numba", d=d)) > 2.0)


def from_python():
    """Microseconds of a call of a compiled step from Python."""
    ours = [row for row in rows("calls_py313") if not row["call"].startswith("river")]
    return [row[d] for row in ours for d in ("2", "30", "54", "1000") if row[d] != ""]


def outside():
    """How many lines of the running times lie outside of their band, and which."""
    table, work = rows("overhead_time_py313"), rows("overhead_flops_py313")
    (row,) = [row for row in table if row["inside"] == "no"]
    largest = max(row["n"] for row in table)
    cheapest = min(
        (row for row in work if row["n"] == largest),
        key=lambda row: row["flops a datum"],
    )["model"]
    which = (
        "the cheapest likelihood at its largest size"
        if (row["model"], row["n"]) == (cheapest, largest)
        else row
    )
    assert len(table) % 10 == 0
    return f"One line of {TENS[len(table) // 10]} lies outside: {which}"


def flops(model, key):
    return cell("overhead_flops_py313", key, model=model, n=100_000.0)


def share(model):
    return 100.0 * (flops(model, "energy and gradient") - 1.0)


def filled():
    return constant("mixtures/array.py", "NUM_TOGETHER")


def benchmarks():
    """Claims of the page of benchmarks, in its order."""
    nodes = written("docs/results/model_step_py313.csv", r"NGVI, model, (\d+) nodes")
    yield f", {nodes} nodes; *bare*"
    python, jax = (
        noted("online_step_py311", r"Python (3\.\d+)"),
        noted("online_step_py311", r"jax (0\.\d+)"),
    )
    yield f"### Python {python} The program is the same; the CPU runtime of jax {jax} dispatches"
    yield f"which costs more than the arithmetic up to d = {spent_on_dispatch('online_step_py311'):.0f}."
    yield f"n = {noted('first_calls_py313', r'n = ([0-9]+)')}, all options at their defaults, one process"
    calls = [key for key in rows("fit_calls_py311")[0] if key.startswith("seconds")]
    yield f"Seconds of {WORDS[len(calls)]} calls in a fresh process"
    steps = int(written("tests/benchmarks/fit_calls.py", r"svi\.run\(key, (\d+),"))
    yield f"beside {steps:,} steps of NumPyro's"
    where = {"model": "linear, latent sigma", "way": "fit_gaussian, quadrature"}
    later = [cell("fit_calls_py311", f"seconds {call}", **where) for call in (2, 3)]
    yield f"With a latent scale by quadrature it takes {decimals(sum(later) / 2, 2)} s:"
    (d,) = set(column("sparse_speed", "d"))
    yield f"over d = {d:,.0f} variables"
    taken = r"over (\d+) rows at d = (\d+): ([\d.]+) s of CPU time"
    count, d, seconds = noted("peers_py313", taken)
    microseconds = decimals(1e6 * float(seconds) / int(count), 2)
    yield f"a step of the bare rule in a compiled loop takes {microseconds} microseconds at d = {d}, a call"
    yield f"a call of a compiled step from Python {min(from_python()):.0f} to {max(from_python()):.0f}."
    bare = across("peers_py313", "contestant", "numba, NGVI, hinge")
    assert bare == sorted(bare)
    yield f"The bare rule takes {span(inverse(bare))} times as long as numba's loop (d = 1000 to 2), the full"
    full = across("peers_py313", "contestant", "numba, full covariance")
    yield f"the full covariance {span(inverse(full))} times"
    yield "and the short streams of d = 2 most."
    model = across("peers_py313", "contestant", "NGVI, NumPyro model")
    yield f"A NumPyro model costs {span(model)} bare rules"
    yield f"the implicit step {span(across('peers_py313', 'contestant', 'R-VGA, NumPyro model'))} explicit ones."
    scan = across("peers_py313", "contestant", "NumPyro SVI, scan")
    yield f"The model rule is {span(scan)} times faster than a scan around SVI's step"
    blackjax = across(
        "peers_py313", "contestant", "blackjax meanfield_vi, scan", ("30", "54", "1000")
    )
    yield f"from d = 30 on {span(blackjax)} times than one around blackjax's"
    gaussian, poisson = (
        flops("location", "flops a datum"),
        flops("poisson", "flops a datum"),
    )
    yield f"to a Gaussian density and gradient of {gaussian:.0f} operations this is {share('location'):.0f}%"
    yield f"relative to a Poisson of {round(poisson, -1):.0f} it is {share('poisson'):.1f}%"
    yield f"median of {WORDS[int(noted('overhead_py313', r'300 rounds in ([0-9]+) blocks'))]} blocks of rounds"
    yield outside()
    labels = written("tests/workloads.py", r"dist\.Dirichlet\(jnp\.ones\((\d)\)\)")
    yield f"compared with , {WORDS[int(labels)]} components, both tempered"
    last = rows("mixture_speed")[-1]
    assert last["precision"] == "float32"
    faster = last["scikit-learn float64 / ours"]
    yield f"at {last['ours / floor']:.1f} times the floor it is {faster:.1f} times as fast as scikit-learn"
    k = rows("mixture_speed")[0]["K"]
    yield f"The first rows fill {WORDS[int(k)]} components up to {WORDS[filled()]}, so"
    rounding = written(
        "numpyro_tempered/mixtures/coordinate_ascent.py",
        r"^COMMON_ROUNDING = ([\d.e-]+)",
    )
    yield f"({float(rounding):.4f} nat of a log density)"
    n, d, k = noted("mixture_speed", r"= \[\((\d+), (\d+), (\d+)\)")
    passes = column("mixture_speed_restarts", "32 restarts a pass / one")
    yield (
        f"Restarts, n = {n}, d = {d}, K = {k}, in groups of {WORDS[filled()]} side by side. 32 restarts take"
        f" {min(passes):.0f} to {max(passes):.0f} single passes"
    )
    n, d, k, restarts = written(
        "tests/benchmarks/mixture_speed.py",
        r"small else \((\w+), (\d+), (\d+), (\d+)\)$",
    )
    yield f"n = {int(n):,}, d = {d}, K = {k}, {WORDS[int(restarts)]} restarts one after the other"
    n, k = written(
        "tests/benchmarks/mixture_peers.py", r"x = draw\((\d+), \d+, (\d+), seed\)"
    )
    yield f"Seconds of a whole fit of {n} rows, K = {k}, with defaults and one start"
    n, d = noted("alpha_cost", r"n = (\d+), d = (\d+)")
    yield f"Logistic regression on {WORDS[int(d) - 1]} features of the breast cancer data (n = {n}, d = {d})"
    alphas = int(
        written(
            "numpyro_tempered/select/alpha/driver.py",
            r"^DEFAULT_GRID = np\.geomspace\(.*, (\d+)\)",
        )
    )
    blocks = constant("select/alpha/safe_bayes.py", "NUM_BLOCKS")
    yield f"SafeBayes fits {WORDS[alphas]} alphas to all data and to {WORDS[blocks - 1]} parts of them"
    path = written(
        "numpyro_tempered/select/path.py", r"^DEFAULT_GRID = np\.linspace\(.*, (\d+)\)"
    )
    yield f"until all have converged; fits {path}."
    total = {
        key: sum(row[key] for row in rows("fit_checks"))
        for key in ("checks", "bounds", "estimates", "misses")
    }
    violated = sum(
        row[f"{kind} violations"]
        for row in rows("fit_checks")
        for kind in ("mean", "sd")
    )
    outcome = "none was violated" if violated == 0 else f"{violated:.0f} were violated"
    means = (
        f"In {total['checks']:,.0f} checks with {total['bounds']:,.0f} bounds on means"
    )
    yield f"{means}, and as many on standard deviations, {outcome}"
    yield f"{100 * total['misses'] / total['estimates']:.1f} % of the corrected means missed"


def start_fast():
    """Claims of the page on first calls."""
    yield f"compile for more than {constant('core/compilation.py', 'LONG')} s without a cache"
    yield f"and {WORDS[int(cell('service_start_py313', 'programs', way='exported update'))]} program to compile"
    few, full = constant("mixtures/sweep.py", "FEW_ROWS"), filled()
    yield f"Up to {few:,} rows a family of components is compiled once"
    yield f"for all numbers of components up to {full} (then {2 * full}, {4 * full}, ...)"


def index():
    """Claims of the front page."""
    yield f"cover the estimate from everybody {front('temper', 'bayes_covers'):.0f} times"
    yield f"each sample chooses, {decimals(front('temper', 'mean_alpha'), 2)} on average"
    yield f"they cover it {front('temper', 'tempered_covers'):.0f} times"
    yield f"up to {decimals(front('stream', 'largest_gap_in_sds'), 1)} standard deviations"
    yield f"the petals of {front('choose', 'flowers'):.0f} irises"
    yield f"says {WORDS[int(front('choose', 'selected'))]}"
    stories = [
        path
        for path in (ROOT / "docs" / "stories").glob("*.md")
        if path.stem != "index"
    ]
    yield f"{WORDS[len(stories)].capitalize()} problems"


def readme():
    """Claims of the README."""
    yield (
        f"covers the estimate from all people {front('temper', 'bayes_covers'):.0f} times of"
        f" {front('temper', 'samples'):.0f}"
    )
    yield f"covers it {front('temper', 'tempered_covers'):.0f} times"
    samples = TENS[int(front("temper", "samples")) // 10]
    yield f"{samples.capitalize()} intervals by Bayes, of which many miss the estimate from all people"
    yield f"and {samples} tempered ones, of which few do"


CLAIMS = {
    "docs/index.md": index,
    "README.md": readme,
    "docs/reference/benchmarks.md": benchmarks,
    "docs/howto/start_fast.md": start_fast,
}


def prose(page):
    """The text of a page without its header, code, targets of links and formulas, with single blanks."""
    text = re.sub(
        r"\A---\n.*?\n---\n",
        " ",
        (ROOT / page).read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    text = re.sub(r"^```.*?^```$", " ", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(
        r"\]\([^)]*\)|^\[[^\]]*\]: .*$|`[^`]*`|\$[^$]*\$|^:+.*$|<[^>]*>",
        " ",
        text,
        flags=re.MULTILINE,
    )
    return " ".join(text.split())


def left_over(text, sentences):
    """Numbers that stand in none of the sentences, with what is around them."""
    inside = [
        at.span()
        for sentence in sentences
        for at in re.finditer(re.escape(sentence), text)
    ]
    return [
        text[max(0, at.start() - 30) : at.end() + 10]
        for at in NUMBER.finditer(text)
        if not any(begin <= at.start() and at.end() <= end for begin, end in inside)
    ]


@pytest.mark.parametrize("page", CLAIMS)
def test_what_a_page_says_is_what_the_results_say(page):
    text = prose(page)
    assert [sentence for sentence in CLAIMS[page]() if sentence not in text] == []


@pytest.mark.parametrize("page", CLAIMS)
def test_every_other_number_of_a_page_is_given(page):
    assert left_over(prose(page), [*CLAIMS[page](), *GIVEN]) == []


def test_what_is_given_is_on_a_page():
    text = " ".join(prose(page) for page in CLAIMS)
    assert [phrase for phrase in GIVEN if phrase not in text] == []


@pytest.mark.parametrize("page", CLAIMS)
def test_a_table_that_differs_is_seen(page, monkeypatch):
    claims, read, used = list(CLAIMS[page]()), rows, set()

    def record(name):
        used.add(name)
        return read(name)

    monkeypatch.setitem(globals(), "rows", record)
    list(CLAIMS[page]())
    assert used
    for changed in used:

        def scale(name, changed=changed):
            factor = 3.0 if name == changed else 1.0
            return [
                {
                    key: value if isinstance(value, str) else factor * value
                    for key, value in row.items()
                }
                for row in read(name)
            ]

        monkeypatch.setitem(globals(), "rows", scale)
        try:
            others = list(CLAIMS[page]())
        except (IndexError, ValueError):  # no such row, or no word for the number
            continue
        assert others != claims, changed


def test_a_number_that_differs_is_seen(monkeypatch):
    read = prose
    monkeypatch.setitem(
        globals(),
        "prose",
        lambda page: read(page).replace("takes 1.1 to", "takes 1.2 to"),
    )
    with pytest.raises(AssertionError):
        test_what_a_page_says_is_what_the_results_say("docs/reference/benchmarks.md")
    with pytest.raises(AssertionError):
        test_every_other_number_of_a_page_is_given("docs/reference/benchmarks.md")
    assert NUMBER.findall("in under 4 minutes, nine tenths of ninety") == [
        "4",
        "nine",
        "tenths",
        "ninety",
    ]


def test_commands_of_results_name_no_place_of_one_machine():
    commands = {
        path.name: line
        for path in RESULTS.glob("*.txt")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("command: ")
    }
    assert len(commands) > 10
    assert {
        name: line for name, line in commands.items() if re.search(r"[ =][/~]", line)
    } == {}
