"""SafeBayes: its blocks and rules exactly, and its posteriors by each method against the closed form."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import NUTS
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.select.alpha.base import Task
from numpyro_tempered.select.alpha.dependence import Dependence
from numpyro_tempered.select.alpha.online import Streams
from numpyro_tempered.select.alpha.safe_bayes import block_edges, judge, places

ALPHAS = np.array([0.1, 0.5, 1.0])
PRIOR_SD = 3.0


def model(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, PRIOR_SD))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def location_data(n=60, sd=2.0, seed=3):
    return 1.0 + sd * np.random.default_rng(seed).standard_normal(n)


def posterior(y, alpha):
    precision = PRIOR_SD**-2 + alpha * len(y)
    return alpha * np.sum(y) / precision, 1.0 / precision


def closed_form(y, alpha, edges):
    """Cumulative R-log and I-log by refits on y[:edge], from the conjugate formulas."""
    gibbs = plugin = 0.0
    for start, end in zip(edges, [*edges[1:], len(y)], strict=True):
        mean, var = posterior(y[:start], alpha)
        at_mean = 0.5 * np.log(2 * np.pi) + 0.5 * (y[start:end] - mean) ** 2
        plugin += at_mean.sum()
        gibbs += (at_mean + 0.5 * var).sum()
    return gibbs, plugin


def exact_reduction(y, weights):
    """What a plan would keep if the posteriors were exact, ``(P, A, n)``."""
    gibbs, plugin = [], []
    for row in weights:
        of_row = [posterior(y[row > 0], alpha) for alpha in ALPHAS]
        at_mean = [
            0.5 * np.log(2 * np.pi) + 0.5 * (y - mean) ** 2 for mean, _ in of_row
        ]
        plugin.append(at_mean)
        gibbs.append(
            [loss + 0.5 * var for loss, (_, var) in zip(at_mean, of_row, strict=True)]
        )
    return {"gibbs": np.array(gibbs), "plugin": np.array(plugin)}


@pytest.mark.parametrize("blocks", [4, [5, 20, 33], 60])
def test_exact_posteriors_give_the_closed_form(key, blocks):
    y = location_data()
    task = Task(model, key, (y,), {})
    criterion = nt.alpha.safe_bayes(blocks=blocks, permutations=0)
    plan = criterion.plan(key, task)
    columns = criterion.decide(
        key, task, ALPHAS, exact_reduction(y, plan.weights)
    ).columns
    edges = block_edges(blocks, len(y))
    expected = np.array([closed_form(y, alpha, edges) for alpha in ALPHAS])
    np.testing.assert_allclose(columns["gibbs"], expected[:, 0], rtol=1e-12)
    np.testing.assert_allclose(columns["plugin"], expected[:, 1], rtol=1e-12)


def test_permutations_are_averaged(key):
    y = location_data()
    task = Task(model, key, (y,), {})
    criterion = nt.alpha.safe_bayes(blocks=4, permutations=3)
    plan = criterion.plan(key, task)
    columns = criterion.decide(
        key, task, ALPHAS, exact_reduction(y, plan.weights)
    ).columns
    orders = [np.argsort(place) for place in places(key, Dependence(len(y)), 3)]
    edges = block_edges(4, len(y))
    expected = [
        np.mean([closed_form(y[order], alpha, edges)[0] for order in orders])
        for alpha in ALPHAS
    ]
    np.testing.assert_allclose(columns["gibbs"], expected, rtol=1e-12)


def test_rules():
    losses = {
        "gibbs": np.array(
            [[0.0, 0.0, 0.0, 0.0], [0.3, -0.2, 0.3, -0.2], [1.0, 1.0, 1.1, 0.9]]
        )
    }
    assert judge(losses, "gibbs", "min", ALPHAS).alpha == 0.1
    verdict = judge(losses, "gibbs", "one_se", ALPHAS)
    # The differences to the best sum to .2, with a standard error of 2 * .2887; those of alpha = 1 to 4.
    np.testing.assert_allclose(
        verdict.columns["criterion_se"][1], 2 * np.std(losses["gibbs"][1], ddof=1)
    )
    assert verdict.alpha == 0.5
    with pytest.raises(
        ValueError, match=r"^the cumulative loss is.*not finite.*and at extreme data"
    ):
        judge({"gibbs": np.array([[0.0, np.inf]])}, "gibbs", "min", np.array([1.0]))


def test_the_advice_says_when_there_is_no_need():
    losses = {"gibbs": np.array([[1.0, 1.0], [0.5, 0.6], [0.1, 0.2]])}
    assert "no need to temper" in judge(losses, "gibbs", "one_se", ALPHAS).advice
    assert (
        "try smaller"
        in judge({"gibbs": losses["gibbs"][::-1]}, "gibbs", "one_se", ALPHAS).advice
    )


METHODS = {
    "svi": (AutoNormal, {"tolerance": 0.01, "num_refit_samples": 1000}),
    "nuts": (NUTS, {"num_warmup": 200, "num_samples": 1000}),
}


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_the_closed_form(key, method):
    y = location_data()
    kind, options = METHODS[method]
    criterion = nt.alpha.safe_bayes(blocks=3, permutations=0, rule="min")
    choice = nt.select_alpha(
        key, model, kind, jnp.asarray(y), alphas=ALPHAS, criterion=criterion, **options
    )
    table = nt.table(choice.data)
    edges = block_edges(3, len(y))
    expected = np.array([closed_form(y, alpha, edges) for alpha in ALPHAS])
    # A block of m data has a Gibbs loss with the standard deviation of its m theta²/2 - theta sum(y) over draws.
    draws = 1000 if method == "svi" else 300
    sd = np.zeros(len(ALPHAS))
    for k, alpha in enumerate(ALPHAS):
        for start, end in zip(edges, [*edges[1:], len(y)], strict=True):
            mean, var = posterior(y[:start], alpha)
            m = end - start
            slope = m * mean - y[start:end].sum()
            sd[k] += slope**2 * var + 0.5 * (m * var) ** 2
    error = 5 * np.sqrt(sd / draws)
    np.testing.assert_array_less(np.abs(table["gibbs"] - expected[:, 0]), error)
    np.testing.assert_array_less(np.abs(table["plugin"] - expected[:, 1]), error)
    # On all data: E[log L], and one parameter.
    mean, var = np.transpose([posterior(y, alpha) for alpha in ALPHAS])
    full = (
        -0.5 * len(y) * np.log(2 * np.pi)
        - 0.5 * ((y - mean[:, None]) ** 2).sum(axis=1)
        - 0.5 * len(y) * var
    )
    np.testing.assert_array_less(
        np.abs(table["expected_log_lik"] - full),
        6 * table["expected_log_lik_se"] + 0.01,
    )
    np.testing.assert_allclose(table["effective_parameters"], 1.0, atol=0.35)


@pytest.mark.parametrize(
    "alphas", [[0.5, 1.0], pytest.param([0.1, 0.5, 1.0], marks=pytest.mark.full)]
)
def test_an_online_rule_is_refitted_at_every_datum(key, alphas):
    y = location_data()

    def named(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, PRIOR_SD))
        eta = numpyro.deterministic("eta", theta * jnp.ones(len(y)))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)

    def online(model):
        exact = nt.expectations.gauss_hermite(predictor="eta")
        return nt.OnlineVI(
            model, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi(), exact
        )

    criterion = nt.alpha.safe_bayes("plugin", permutations=0, rule="min")
    choice = nt.select_alpha(
        key, named, online, jnp.asarray(y), alphas=alphas, criterion=criterion
    )
    edges = np.arange(1, len(y))
    at_zero = 0.5 * np.log(2 * np.pi) + 0.5 * y[0] ** 2
    first = np.array([at_zero + 0.5 * PRIOR_SD**2, at_zero])
    expected = np.array([closed_form(y, alpha, edges) + first for alpha in alphas])
    table = nt.table(choice.data)
    np.testing.assert_allclose(table[["gibbs", "plugin"]], expected, rtol=1e-5)
    assert choice.alpha == alphas[np.argmin(expected[:, 1])]
    assert choice.fit.state.count == len(y)
    # The state handed over is that of the chosen alpha, in the order of the data.
    np.testing.assert_allclose(
        choice.fit.state.posterior.loc, posterior(y, choice.alpha)[0], rtol=1e-4
    )


def test_all_that_a_round_takes_is_put_in_its_order(key):
    """A regression on rows of two features: the stream in another order is that of data in this order."""
    y = location_data()[:12]
    x = np.random.default_rng(0).normal(size=(12, 2))

    def of_rows(x, y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        eta = numpyro.deterministic("eta", x @ theta)
        # Another deterministic site, which is no predictor.
        noise = numpyro.deterministic("noise", jnp.ones(2))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(eta, noise[0]), obs=y)

    def online(model):
        exact = nt.expectations.gauss_hermite(predictor="eta")
        return nt.OnlineVI(
            model, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi(), exact
        )

    def losses(order, *data):
        task = Task(
            of_rows, key, tuple(jnp.asarray(part, jnp.float32) for part in data), {}
        )
        return (
            Streams(key, task, online, online(of_rows), np.ones(1))
            .losses(order)
            .expected
        )

    order = np.roll(np.arange(12)[::-1], 3)
    np.testing.assert_array_equal(
        losses(order, x, y), losses(np.arange(12), x[order], y[order])
    )


@pytest.mark.full
def test_a_loss_of_ones_own(key):
    y = jnp.asarray(location_data())
    criterion = nt.alpha.safe_bayes(
        lambda values: jnp.square(y - values["theta"]), blocks=3, permutations=0
    )
    choice = nt.select_alpha(
        key, model, AutoNormal, y, alphas=[0.5, 1.0], criterion=criterion
    )
    table = nt.table(choice.data)
    # The square is twice the log-loss without its constant.
    constant = 0.5 * np.log(2 * np.pi) * (len(y) - block_edges(3, len(y))[0])
    np.testing.assert_allclose(
        table["criterion"], 2 * (table["gibbs"] - constant), rtol=1e-4
    )
    short = nt.alpha.safe_bayes(lambda values: values["theta"], blocks=3)
    with pytest.raises(ValueError, match="one number for each datum"):
        nt.select_alpha(key, model, AutoNormal, y, alphas=[1.0], criterion=short)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss": "log"}, r"loss must be.*of the latents, got"),
        ({"rule": "max"}, "rule must be"),
        ({"permutations": -1}, "permutations"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        nt.alpha.safe_bayes(**options)


@pytest.mark.parametrize(
    "blocks", [1, 61, [0, 3], [3, 3], [30, 60], [10, 20, 60], [], 2.5]
)
def test_bad_blocks(blocks):
    with pytest.raises(ValueError, match="blocks"):
        block_edges(blocks, 60)


def test_few_data_or_groups_have_a_block_each():
    np.testing.assert_array_equal(block_edges(None, 80), block_edges(8, 80))
    np.testing.assert_array_equal(block_edges(None, 6), [1, 2, 3, 4, 5])


def test_discrete_latents_have_no_plugin_loss(key):
    def discrete(y):
        side = numpyro.sample("side", dist.Bernoulli(0.5))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(side, 1.0), obs=y)

    task = Task(discrete, key, (jnp.ones(5),), {})
    with pytest.raises(ValueError, match=r"^latent sites.*'side'.*gibbs"):
        nt.alpha.safe_bayes("plugin").plan(key, task)
    assert nt.alpha.safe_bayes(blocks=2).plan(key, task).weights.shape == (1, 5)


def test_orders_are_permutations(key):
    seven, three = Dependence(7), Dependence(3)
    for place in places(key, seven, 4):
        assert sorted(place) == list(range(7))
    assert len({tuple(place) for place in places(key, seven, 4)}) > 1
    np.testing.assert_array_equal(places(key, three, 0)[0], [0, 1, 2])
    assert [place.shape for place in places(key, three, None)] == [(3,)]
