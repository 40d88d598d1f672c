"""The experiment of GvO in closed form: its formulas, its direction in small, its numbers at n = 100."""

from itertools import pairwise

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import safe_bayes_oracles as gvo
from numpy.testing import assert_allclose
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy import stats
from scipy.optimize import minimize
from scipy.special import psi, softmax

import numpyro_tempered as nt

ALPHAS = 2.0 ** -np.arange(9.0)


def data(num_data, wrong=True, dim=51, seed=0):
    x, y = gvo.draw(np.random.default_rng(seed), num_data, wrong)
    return x[:, :dim], y


def explicit_losses(x, y, alpha, row, outcome):
    """R-log, I-log and predictive loss of one row in each nested model, from the normal equations."""
    found = []
    for dim in range(1, x.shape[1] + 1):
        q = gvo.posterior(x[:, :dim], y, alpha)
        loc, h = row[:dim] @ q.mean, row[:dim] @ q.cov @ row[:dim]
        # 1/s2 is Gamma with mean shape/rate, and E log s2 = log rate - psi(shape).
        gibbs = (
            np.log(2 * np.pi)
            + np.log(q.rate)
            - psi(q.shape)
            + (outcome - loc) ** 2 * q.shape / q.rate
            + h
        )
        mean_s2 = stats.invgamma(q.shape, scale=q.rate).mean()
        plug_in = -stats.norm(loc, np.sqrt(mean_s2)).logpdf(outcome)
        scale = np.sqrt(q.rate / q.shape * (1 + h))
        found.append(
            (
                0.5 * gibbs,
                plug_in,
                -stats.t(2 * q.shape, loc, scale).logpdf(outcome),
                loc,
                mean_s2,
            )
        )
    return np.array(found).T


@pytest.mark.parametrize("alpha", [0.01, 0.3, 1.0])
def test_the_rank_one_recursion_ends_in_the_normal_equations(alpha):
    x, y = data(80)
    q = gvo.prior(x.shape[1])
    for row, outcome in zip(x, y, strict=True):
        q = gvo.update(q, row, outcome, alpha)
    for one, other in zip(q, gvo.posterior(x, y, alpha), strict=True):
        assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_evidence_is_that_of_a_multivariate_t():
    x, y = data(30)
    q = gvo.of_data(x, y, 1.0)
    for dim in (1, 5, 51):
        shape = gvo.RATE / gvo.SHAPE * (np.eye(len(y)) + x[:, :dim] @ x[:, :dim].T)
        expected = stats.multivariate_t(
            np.zeros(len(y)), shape, df=2 * gvo.SHAPE
        ).logpdf(y)
        assert_allclose(q.log_evidence[dim - 1], expected, rtol=1e-10)


@pytest.mark.parametrize("alpha", [0.1, 0.7])
def test_the_tempered_evidence_grows_by_the_expected_log_likelihood(alpha):
    x, y = data(10, dim=6)
    step = 1e-4
    slope = (
        gvo.of_data(x, y, alpha + step).log_evidence
        - gvo.of_data(x, y, alpha - step).log_evidence
    ) / (2 * step)
    expected_log_lik = -sum(
        explicit_losses(x, y, alpha, *datum)[0] for datum in zip(x, y, strict=True)
    )
    assert_allclose(slope, expected_log_lik, rtol=1e-5)


def test_without_data_the_tempered_evidence_is_one():
    assert_allclose(
        gvo.of_data(np.zeros((0, 7)), np.zeros(0), 0.4).log_evidence, 0.0, atol=1e-12
    )


@pytest.mark.parametrize("alpha", [0.05, 1.0])
def test_nested_posteriors_from_one_factor_are_those_of_each_model(alpha):
    x, y = data(41, dim=12)
    x, row, y, outcome = x[:40], x[40], y[:40], y[40]
    q = gvo.of_data(x, y, alpha)
    gibbs, plug_in, predictive, loc, mean_s2 = explicit_losses(
        x, y, alpha, row, outcome
    )
    weights = softmax(q.log_evidence)
    found = gvo.losses(q, row[None], outcome[None])
    assert_allclose(np.ravel(found["gibbs"]), [weights @ gibbs, gibbs[-1]], rtol=1e-10)
    assert_allclose(found["plugin"][1], plug_in[-1:], rtol=1e-10)
    averaged = -stats.norm(weights @ loc, np.sqrt(weights @ mean_s2)).logpdf(outcome)
    assert_allclose(found["plugin"][0], [averaged], rtol=1e-10)
    mixture = -np.log(weights @ np.exp(-predictive))
    assert_allclose(
        np.ravel(found["predictive"]), [mixture, predictive[-1]], rtol=1e-10
    )
    means = [gvo.posterior(x[:, :d], y, alpha).mean for d in range(1, 13)]
    padded = np.array([np.r_[mean, np.zeros(12 - len(mean))] for mean in means])
    assert_allclose(gvo.coefficients(q, True), weights @ padded, rtol=1e-9, atol=1e-12)
    assert_allclose(gvo.coefficients(q, False), means[-1], rtol=1e-9, atol=1e-12)
    assert_allclose(gvo.expected_size(q), weights @ np.arange(12), rtol=1e-12)


def test_prequential_losses_are_those_of_the_recursion():
    x, y = data(25, dim=6)
    alpha = 0.4
    q, expected = gvo.prior(6), []
    for row, outcome in zip(x, y, strict=True):
        e, h = outcome - row @ q.mean, row @ q.cov @ row
        expected.append(
            0.5
            * (np.log(2 * np.pi * q.rate) - psi(q.shape) + e**2 * q.shape / q.rate + h)
        )
        q = gvo.update(q, row, outcome, alpha)
    found = gvo.prequential(x, y, [alpha])
    assert_allclose(found[0, 1, 0], expected, rtol=1e-9)
    assert_allclose(gvo.prequential(x, y, [alpha], np.arange(26)), found, rtol=1e-9)


def test_predictive_losses_at_alpha_one_add_up_to_the_evidence():
    x, y = data(60)
    total = gvo.prequential(x, y, [1.0])[gvo.LOSSES.index("predictive"), :, 0].sum(-1)
    log_evidence = gvo.of_data(x, y, 1.0).log_evidence
    averaged = np.logaddexp.reduce(log_evidence) - np.log(log_evidence.size)
    assert_allclose(-total, [averaged, log_evidence[-1]], rtol=1e-10)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_leave_one_out_is_that_of_refits(alpha):
    x, y = data(30)
    found = gvo.leave_one_out(x, y, alpha)
    for i in range(0, 30, 7):
        q = gvo.of_data(np.delete(x, i, 0), np.delete(y, i), alpha)
        expected = gvo.losses(q, x[i : i + 1], y[i : i + 1])["predictive"]
        assert_allclose(found[:, i], -np.ravel(expected), rtol=1e-8)


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_the_best_gaussian_guide_by_direct_search(alpha):
    x, y = data(13, dim=3)
    x, row, y, outcome = x[:12], x[12:], y[:12], y[12:]
    shape = gvo.SHAPE + 0.5 * (alpha * 12 + 3)

    def unpack(values):
        factor = np.zeros((4, 4))
        factor[np.tril_indices(4)] = values[4:]
        return values[:4], factor @ factor.T

    def negative_elbo(values):
        """Of q(beta, u) with u = log s2, up to a constant; weighting by 1/s2 shifts beta by -Cov(beta, u)."""
        mean, cov = unpack(values)
        coef, u, v = mean[:3] - cov[:3, 3], mean[3], cov[3, 3]
        precision = alpha * x.T @ x + np.eye(3)
        quadratic = (
            alpha * np.sum((y - x @ coef) ** 2)
            + coef @ coef
            + np.sum(precision * cov[:3, :3])
        )
        entropy = 0.5 * np.linalg.slogdet(cov)[1]
        return shape * u + np.exp(0.5 * v - u) * (gvo.RATE + 0.5 * quadratic) - entropy

    start = np.r_[0.1, -0.1, 0.2, -2.0, (0.3 * np.eye(4) + 0.05)[np.tril_indices(4)]]
    mean, cov = unpack(
        minimize(negative_elbo, start, options={"gtol": 1e-9, "maxiter": 2000}).x
    )
    assert_allclose(cov[:3, 3], 0.0, atol=1e-4)
    precision, h = np.exp(0.5 * cov[3, 3] - mean[3]), row[0] @ cov[:3, :3] @ row[0]
    error2 = (outcome[0] - row[0] @ mean[:3]) ** 2
    gibbs = 0.5 * (gvo.LOG_2PI + mean[3] + precision * (error2 + h))
    plug_in = -stats.norm(row[0] @ mean[:3], np.exp(0.5 * mean[3])).logpdf(outcome[0])
    assert_allclose(
        gvo.guide_losses(x, y, alpha, row, outcome)[:, 0], [gibbs, plug_in], rtol=1e-4
    )


def test_the_one_se_rule_is_paired():
    alphas = [1.0, 0.5, 0.25]
    noise = 10 * np.random.default_rng(0).normal(size=400)
    # Of the same data: what separates the alphas is small, and yet certain for the first.
    each = np.stack([noise + 0.1, noise + np.tile([0.05, -0.04], 200), noise])
    assert gvo.choose(alphas, each, "min") == 0.25
    assert gvo.choose(alphas, each, "one_se") == 0.25
    each[1] = noise + np.tile([0.5, -0.49], 200)
    assert gvo.choose(alphas, each, "one_se") == 0.5


def replicate(num_seeds, alphas, num_data, wrong):
    """Excess risk and E p at alpha = 1 and by SafeBayes, ``(seeds, 2)`` each, and losses against the best."""
    found, excess = {}, []
    for seed in range(num_seeds):
        x, y = gvo.draw(np.random.default_rng([seed, int(wrong)]), num_data, wrong)
        each = dict(zip(gvo.LOSSES, gvo.prequential(x, y, alphas)[:, 0], strict=True))
        chosen = {"Bayes": 1.0} | {
            (loss, rule): gvo.choose(alphas, each[loss], rule)
            for loss in ("gibbs", "plugin")
            for rule in ("min", "one_se")
        }
        for name, alpha in chosen.items():
            q = gvo.of_data(x, y, alpha)
            row = (
                gvo.excess_risk(gvo.coefficients(q, True), wrong),
                gvo.expected_size(q),
            )
            found.setdefault(name, []).append(row)
        best = -stats.norm(x @ gvo.COEF, np.sqrt(gvo.NOISE)).logpdf(y).sum()
        excess.append(
            [
                each[loss][list(alphas).index(1.0)].sum() - best
                for loss in ("predictive", "gibbs")
            ]
        )
    return {name: np.array(rows) for name, rows in found.items()}, np.array(excess)


@pytest.mark.full
def test_tempering_repairs_the_average_and_costs_nothing_where_the_model_is_right():
    wrong, excess = replicate(8, ALPHAS, 100, True)
    risk, size = wrong.pop("Bayes").mean(0)
    assert size > 20
    for rows in wrong.values():
        assert rows[:, 0].mean() < 0.5 * risk
        assert rows[:, 1].mean() < 8
    # The mixture predicts better than the best of the model, and its own draws far worse.
    assert excess[:, 0].mean() < 0 < excess[:, 1].mean()
    correct, excess = replicate(8, ALPHAS, 100, False)
    risk = correct.pop("Bayes")[:, 0].mean()
    assert all(rows[:, 0].mean() < 1.25 * risk for rows in correct.values())
    assert np.all(excess > 0)


@pytest.mark.slow
def test_the_numbers_of_the_experiment():
    alphas = 2.0 ** -(np.arange(21) / 2)
    wrong, _ = replicate(100, alphas, 100, True)
    risk, size = wrong.pop("Bayes").mean(0)
    assert 0.034 <= risk <= 0.077
    assert size > 30
    for rows in wrong.values():
        assert 0.0019 <= rows[:, 0].mean() <= 0.0061
        assert 2.8 <= rows[:, 1].mean() <= 4.6
    correct, _ = replicate(100, alphas, 100, False)
    risk = correct.pop("Bayes")[:, 0].mean()
    assert all(0.8 <= rows[:, 0].mean() / risk <= 1.25 for rows in correct.values())


def ridge(x, y=None):
    s2 = numpyro.sample("s2", dist.InverseGamma(gvo.SHAPE, gvo.RATE))
    coef = numpyro.sample(
        "coef", dist.Normal(0.0, jax.numpy.sqrt(s2)).expand([x.shape[1]]).to_event(1)
    )
    eta = numpyro.deterministic("eta", x @ coef)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(eta, jax.numpy.sqrt(s2)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_select_alpha_finds_the_cumulative_losses_of_the_closed_form(seed):
    num_data, alphas = 100, 2.0 ** -np.arange(6.0, -1.0, -1.0)
    edges = num_data * np.arange(9) // 8
    x, y = gvo.draw(np.random.default_rng([seed, 0]), num_data, True)
    choice = nt.select_alpha(
        jax.random.key(seed),
        ridge,
        AutoMultivariateNormal,
        jax.numpy.asarray(x),
        jax.numpy.asarray(y),
        alphas=alphas,
        criterion=nt.alpha.safe_bayes(blocks=8, permutations=0),
        num_refit_samples=1000,
    )
    # Blocks after the first, whose losses are those of the prior.
    each = gvo.prequential(x, y, alphas, edges)[
        gvo.LOSSES.index("gibbs"), 1, :, edges[1] :
    ]
    guide = [
        sum(
            gvo.guide_losses(x[:a], y[:a], alpha, x[a:b], y[a:b])[0].sum()
            for a, b in pairwise(edges[1:])
        )
        for alpha in alphas
    ]
    best = int(np.argmin(each.sum(1)))
    excess = each - each[best]
    margin = 2 * np.sqrt(each.shape[1]) * np.delete(excess, best, 0).std(1, ddof=1)
    found = nt.table(choice.data)["gibbs"].to_numpy()
    for reference in (each.sum(1), np.array(guide)):
        difference = (found - found[best]) - (reference - reference[best])
        assert np.all(np.abs(np.delete(difference, best)) < margin)
    # The first alpha of the rule is a matter of a nat at its border.
    assert abs(np.log2(choice.alpha / gvo.choose(alphas, each, "one_se"))) <= 1


@pytest.mark.slow
def test_the_peak_of_the_risk_moves_with_the_number_of_covariates(monkeypatch):
    monkeypatch.setattr(gvo, "NUM_COVARIATES", 100)
    monkeypatch.setattr(gvo, "COEF", np.r_[0.0, np.full(4, 0.1), np.zeros(96)])
    risk = {100: [], 200: [], 400: []}
    for seed in range(30):
        x, y = gvo.draw(np.random.default_rng([seed, 7]), 400, True)
        for n, found in risk.items():
            found.append(
                gvo.excess_risk(
                    gvo.coefficients(gvo.of_data(x[:n], y[:n], 1.0), True), True
                )
            )
    risk = {n: np.mean(found) for n, found in risk.items()}
    assert risk[200] > 2 * risk[100] > 20 * risk[400]
