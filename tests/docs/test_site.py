"""The built site in a browser that reaches no other host: every page, on a phone and a screen, light and dark."""

import base64
import concurrent.futures
import contextlib
import functools
import http.server
import os
import shutil
import threading
import urllib.parse
from pathlib import Path

import pytest
from built_site import SITE, lines, needs_site, page_of, pages, stem_of

webdriver = pytest.importorskip(
    "selenium.webdriver", reason="selenium is not installed"
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    needs_site,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="no chromium and chromedriver: apt-get install chromium-driver",
    ),
]
CHECKS = (Path(__file__).parent / "page_checks.js").read_text()
SCREEN, PHONE = 1280, 390
# What a reader types, and the page that should come first, by the stem of its source.
QUERIES = {
    "alpha": "choose_alpha",
    "ArviZ": "read_results_in_arviz",
    "calibration": "is_it_calibrated",
    "changepoint": "follow_a_drift",
    "clustered survey": "clustered_survey",
    "coverage": "how_much_to_temper",
    "cross-validation": "read_results_in_arviz",
    "drift": "follow_a_drift",
    "GPU": "use_a_device",
    "how many clusters": "how_many_components",
    "install": "index",
    "learning rate": "learn_without_a_learning_rate",
    "did it work": "did_it_work",
    "misspecified": "power_or_divergence",
    "missing values": "decorate_a_model",
    "mixture of my own family": "write_a_component",
    "NUTS": "mcmc_on_tempered_targets",
    "OnlineVI": "numpyro_tempered.OnlineVI",
    "optimiser": "which_batch_optimiser",
    "outliers": "survive_bad_data",
    "overdispersed counts": "overdispersed_counts",
    "partial_fit": "learn_a_long_stream",
    "power posterior": "decorate_a_model",
    "power prior": "temper_some_data",
    "regret": "keep_a_regret_ledger",
    "SafeBayes": "safe_bayes",
    "save state": "keep_state_safe",
    "scikit-learn": "use_scikit_learn",
    "select_alpha": "numpyro_tempered.select_alpha",
    "start fast": "start_fast",
    "stream": "learn_a_long_stream",
    "temper prior": "what_tempering_is_not",
    "variable selection": "sparse_regression",
    "which model": "which_of_five_models",
}
PICTURED = [
    *("index", "quickstart", "choose_alpha", "read_results_in_arviz"),
    *("theory_mixtures", "mixtures_real_data", "benchmarks", "which_rule"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address():
    """The site on a free port of this machine."""
    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Browser:
    """Chromium with one window, that reaches this machine alone."""

    def __init__(self):
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        # The sandbox needs what containers do not allow, and root may not have it.
        flags = (
            "headless=new",
            "hide-scrollbars",
            "disable-gpu",
            "no-sandbox",
            "disable-dev-shm-usage",
        )
        for flag in (*flags, "host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"):
            options.add_argument(f"--{flag}")
        self.driver = webdriver.Chrome(
            options=options, service=webdriver.ChromeService(executable_path=DRIVER)
        )
        self.driver.set_script_timeout(30)
        self.command = self.driver.execute_cdp_cmd
        self.command(
            "Page.addScriptToEvaluateOnNewDocument",
            {"source": CHECKS.replace("const checks", "window.checks", 1)},
        )

    def close(self):
        self.driver.quit()

    def resize(self, width, height=900):
        size = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        self.command("Emulation.setDeviceMetricsOverride", size)

    def dress(self, scheme):
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.command("Emulation.setEmulatedMedia", {"features": features})

    def check(self, *names):
        """What these checks of page_checks.js find, by their names."""
        return self.driver.execute_script(
            f"return {{{', '.join(f'{name}: checks.{name}()' for name in names)}}}"
        )

    def open(self, address):
        self.driver.get(address)
        failed = self.driver.execute_async_script(
            "const done = arguments[0]; checks.settled().then(() => done(null), (error) => done(String(error)))"
        )
        assert failed is None, failed

    def messages(self):
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("WARNING", "SEVERE")
        ]


@pytest.fixture(scope="module")
def browser():
    with contextlib.closing(Browser()) as opened:
        yield opened


def visit(browser, address):
    """Everything that the checks find on a page."""
    browser.resize(SCREEN)
    browser.dress("light")
    browser.open(address)
    found = browser.check(
        "rawTex",
        "brokenImages",
        "requestsElsewhere",
        "contrast",
        "overflow",
        "splitWords",
    )
    for check, name in (
        ("contrast", "light"),
        ("overflow", f"overflow{SCREEN}"),
        ("splitWords", f"splitWords{SCREEN}"),
    ):
        found[name] = found.pop(check)
    browser.dress("dark")
    found |= browser.check("contrast", "darkFigures")
    found["dark"] = found.pop("contrast")
    browser.resize(PHONE)
    found |= {
        f"{name}{PHONE}": each
        for name, each in browser.check("overflow", "splitWords").items()
    }
    return found | {"console": browser.messages()}


def visit_all(address, names):
    with contextlib.closing(Browser()) as browser:
        return {
            name: visit(browser, address + urllib.parse.quote(name)) for name in names
        }


@pytest.fixture(scope="module")
def visits(address):
    """What the checks find, by page; two browsers share the pages."""
    names = list(pages())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        halves = list(
            pool.map(functools.partial(visit_all, address), (names[::2], names[1::2]))
        )
    return halves[0] | halves[1]


@pytest.mark.parametrize(
    "check",
    [
        *(
            "console",
            "requestsElsewhere",
            "rawTex",
            "brokenImages",
            "light",
            "dark",
            "darkFigures",
        ),
        *(
            f"{name}{width}"
            for name in ("overflow", "splitWords")
            for width in (SCREEN, PHONE)
        ),
    ],
)
def test_no_page_has(check, visits):
    assert len(visits) > 20
    wrong = {name: found[check] for name, found in visits.items()}
    assert not any(wrong.values()), lines(wrong)


BROKEN = """<!DOCTYPE html><html><head><title>Broken</title><style>
body {{ margin: 0; background: #fff; color: #000 }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111 }} }}
</style></head><body><article>
<h1 style="width: 3em; overflow-wrap: anywhere">Incomprehensibilities</h1>
<p>A posterior \\(L^\\alpha\\).</p><img src="none.png" alt=""><img src="data:image/svg+xml,{svg}" alt="">
<div style="width: 2000px">wide</div><p style="color: #bbb">pale</p>
<div style="width: 50px; overflow: hidden"><div style="width: 300px">cut</div></div>
<script>console.error("broken"); fetch("https://elsewhere.example/").catch(() => null)</script>
</article></body></html>"""
DOT = urllib.parse.quote(
    '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
)


def test_every_check_sees_a_broken_page(browser, tmp_path):
    page = tmp_path / "broken.html"
    page.write_text(BROKEN.format(svg=DOT))
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path)
    ) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = visit(browser, f"http://127.0.0.1:{server.server_port}/broken.html")
        server.shutdown()
    assert [check for check, problems in found.items() if not problems] == []
    assert any("broken" in message for message in found["console"])
    assert found["requestsElsewhere"] == ["https://elsewhere.example/"]
    assert found["brokenImages"] == ["none.png"]
    assert found["splitWords390"] == ["Incomprehensibilities"]
    assert any(place.startswith("1.9") for place in found["light"])
    assert any("cut" in place for place in found["overflow1280"])


@pytest.mark.skipif(
    not os.environ.get("SITE_SCREENSHOTS"), reason="SITE_SCREENSHOTS names no folder"
)
def test_pictures_of_pages_are_taken(browser, address):
    folder = Path(os.environ["SITE_SCREENSHOTS"])
    folder.mkdir(parents=True, exist_ok=True)
    for stem in PICTURED:
        browser.resize(SCREEN)
        browser.open(address + page_of(stem))
        for scheme in ("light", "dark"):
            browser.dress(scheme)
            for width in (SCREEN, PHONE):
                browser.resize(width, 1800)
                picture = browser.command("Page.captureScreenshot", {"format": "png"})[
                    "data"
                ]
                (folder / f"{stem}_{width}_{scheme}.png").write_bytes(
                    base64.b64decode(picture)
                )
    assert len(list(folder.glob("*.png"))) >= 4 * len(PICTURED)


def first_found(browser, address, query):
    """The stem of the page that the site's search shows first."""
    browser.open(f"{address}search.html?q={urllib.parse.quote_plus(query)}")
    link = browser.driver.execute_async_script(
        """const done = arguments[0];
        const look = () => {
          const results = document.querySelector("#search-results"), link = results?.querySelector("li a");
          if (link || /did not match/.test(results?.textContent)) done(link?.pathname);
          else setTimeout(look, 10);
        };
        look();"""
    )
    return link and stem_of(link)


def test_the_search_finds_the_right_page_first(browser, address):
    browser.resize(SCREEN)
    first = {query: first_found(browser, address, query) for query in QUERIES}
    wrong = {
        query: f"{page}, not {QUERIES[query]}"
        for query, page in first.items()
        if page != QUERIES[query]
    }
    assert wrong == {}, lines(wrong)
