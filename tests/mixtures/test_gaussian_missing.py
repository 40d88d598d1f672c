"""Missing entries of Gaussians with full covariance: the ascent row by row, densities by scipy, EM, recovery."""

import functools

import jax
import numpy as np
import pytest
import scipy.optimize
from conftest import enable_x64, tiered
from mixture_oracles import NormalInverseWishart, dirichlet_kl
from numpyro import handlers
from scipy import stats
from scipy.special import digamma, logsumexp, softmax

import numpyro_tempered as nt
from numpyro_tempered.mixtures.components import gaussian_missing
from numpyro_tempered.mixtures.components.checking import _completion_identities
from numpyro_tempered.mixtures.components.gaussian import NormalWishart, gaussian
from numpyro_tempered.mixtures.components.tied_gaussian import tied_gaussian

ALPHA, A = 0.5, 0.75
PRIOR = {"loc": np.array([1.0, -0.5, 0.0]), "mean_precision": 0.5, "df": 6.0}
PSI = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.25], [0.0, 0.25, 3.0]])
# One number of components, rows and columns, so that the families are compiled once.
N, D, K = 60, 3, 3


def make_data(n=N):
    """Three groups with correlated columns, about a third of the entries missing, of one row all."""
    rng = np.random.default_rng(0)
    root = np.array([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [-0.5, 0.5, 0.7]])
    labels = np.arange(n) % K
    complete = (
        rng.normal(size=(n, D)) @ root.T
        + np.array([[0.0, 0.0, 0.0], [4.0, 0.0, 2.0], [0.0, -4.0, 3.0]])[labels]
    )
    x = np.where(rng.random((n, D)) < 0.3, np.nan, complete)
    x[7] = np.nan
    return complete, x, labels


COMPLETE, X, LABELS = make_data()
WEIGHT = np.where(np.arange(N) % 5 == 0, 2.0, 1.0)
WEIGHT[11] = 0.0


def make(family=gaussian):
    return family(D, **PRIOR, scale=PSI)


def fit(x=X, component=None, **options):
    usual = {
        "num_components": K,
        "alpha": ALPHA,
        "concentration": A,
        "num_restarts": 1,
        "num_draws": 0,
    }
    usual |= {
        "init": nt.mixtures.starts.given_responsibilities(LABELS),
        "max_iter": 500,
    }
    component = make() if component is None else component
    return nt.mixtures.fit(jax.random.key(0), x, component, **usual | options)


class Ascent:
    """The ascent from labels, row by row."""

    def __init__(
        self, x, weight, omega, prior=(PRIOR["loc"], 0.5, 6.0, PSI), tied=False
    ):
        self.family, self.prior = NormalInverseWishart(*prior), prior
        self.tied = tied
        self.x, self.weight = x, np.where(np.isnan(x).all(axis=1), 0.0, weight)
        self.moments = [self.first_moments(omega[:, j]) for j in range(omega.shape[1])]
        self.omega = omega
        self.update()

    def first_moments(self, omega):
        """Of missing entries: those of the posterior of the column by itself."""
        m0, kappa0, nu0, psi0 = self.prior
        w = ALPHA * self.weight * omega
        mean, variance = np.zeros(len(m0)), np.zeros(len(m0))
        for c in range(len(m0)):
            seen = ~np.isnan(self.x[:, c])
            mean[c] = (kappa0 * m0[c] + w[seen] @ self.x[seen, c]) / (
                kappa0 + w[seen].sum()
            )
            scatter = w[seen] @ (self.x[seen, c] - mean[c]) ** 2
            variance[c] = (psi0[c, c] + scatter) / (nu0 + w[seen].sum())
        moments = []
        for row in self.x:
            absent = np.isnan(row)
            moments.append(
                (np.where(absent, mean, row), np.diag(np.where(absent, variance, 0.0)))
            )
        return moments

    def update(self):
        """The factors given responsibilities and moments of the missing entries."""
        self.factors = []
        nu0, psi0 = self.prior[2:]
        for j, moments in enumerate(self.moments):
            w = ALPHA * self.weight * self.omega[:, j]
            m, kappa, nu, psi = self.family.posterior(
                np.array([mean for mean, _ in moments]), w
            )
            self.factors.append(
                (
                    m,
                    kappa,
                    nu,
                    psi
                    + sum(wi * cov for wi, (_, cov) in zip(w, moments, strict=True)),
                )
            )
        if self.tied:
            nu = nu0 + sum(q[2] - nu0 for q in self.factors)
            psi = psi0 + sum(q[3] - psi0 for q in self.factors)
            self.factors = [(m, kappa, nu, psi) for m, kappa, _, _ in self.factors]
        self.concentration = A + ALPHA * (self.weight @ self.omega)

    def step(self):
        """F at the factors, and the next ones."""
        n, k = self.omega.shape
        joint, self.moments = np.zeros((n, k)), [[] for _ in range(k)]
        expected_log = digamma(self.concentration) - digamma(self.concentration.sum())
        for j, (m, kappa, nu, psi) in enumerate(self.factors):
            d = len(m)
            p = nu * np.linalg.inv(psi)
            log_det = (
                sum(digamma((nu - i) / 2) for i in range(d))
                + d * np.log(2)
                - np.linalg.slogdet(psi)[1]
            )
            for i, row in enumerate(self.x):
                o = ~np.isnan(row)
                inside = p[np.ix_(~o, ~o)]
                y = row[o] - m[o]
                shift = -np.linalg.solve(inside, p[np.ix_(~o, o)] @ y)
                schur = p[np.ix_(o, o)] - p[np.ix_(o, ~o)] @ np.linalg.solve(
                    inside, p[np.ix_(~o, o)]
                )
                value = 0.5 * (
                    log_det - d / kappa - y @ schur @ y - np.linalg.slogdet(inside)[1]
                )
                joint[i, j] = (
                    expected_log[j] + value - 0.5 * o.sum() * np.log(2 * np.pi)
                )
                mean, cov = row.copy(), np.zeros((d, d))
                mean[~o] = m[~o] + shift
                cov[np.ix_(~o, ~o)] = np.linalg.inv(inside)
                self.moments[j].append((mean, cov))
        family = self.family
        if self.tied:
            kl = sum(map(family.mean_kl, self.factors)) + family.precision_kl(
                self.factors[0]
            )
        else:
            kl = sum(map(family.kl, self.factors))
        if k > 1:
            kl = kl + dirichlet_kl(self.concentration, np.full(k, A))
        value = ALPHA * self.weight @ logsumexp(joint, axis=1) - kl
        self.omega = softmax(joint, axis=1)
        self.update()
        return value


@pytest.mark.parametrize(
    "family", [gaussian, pytest.param(tied_gaussian, marks=pytest.mark.full)]
)
def test_the_ascent_is_that_row_by_row(family, x64):
    """F of the first passes, and the factors."""
    by_row = Ascent(X, WEIGHT, np.eye(K)[LABELS], tied=family is tied_gaussian)
    with pytest.warns(
        UserWarning, match=r"^the best.*has not converged in max_iter.*or the tolerance"
    ):
        ours = fit(component=make(family), sample_weight=WEIGHT, max_iter=9)
    expected = [by_row.step() for _ in range(8)]
    np.testing.assert_allclose(ours.trace[:8], expected, rtol=1e-10)
    assert np.diff(expected).min() > 0
    for j, q in enumerate(by_row.factors):
        for found, value in zip(jax.tree.leaves(ours.posterior), q, strict=True):
            np.testing.assert_allclose(found[j], value, rtol=1e-8, atol=1e-8)


@functools.cache
def converged():
    """A fit in double precision with draws for E1."""
    with enable_x64():
        return fit(sample_weight=WEIGHT, num_draws=100)


def observed_log_density(
    x, means, covariances, logpdf=stats.multivariate_normal.logpdf, **arguments
):
    """Of the observed entries of each row under each component, ``(n, K)``; 0 of none."""
    values = np.zeros((len(x), len(means)))
    for pattern in np.unique(np.isnan(x), axis=0):
        rows, o = (np.isnan(x) == pattern).all(axis=1), ~pattern
        for j, (mean, covariance) in enumerate(zip(means, covariances, strict=True)):
            if o.any():
                each = {name: value[j] for name, value in arguments.items()}
                values[rows, j] = logpdf(
                    x[rows][:, o], mean[o], covariance[np.ix_(o, o)], **each
                )
    return values


@pytest.mark.full
def test_e1_is_above_the_objective_and_that_of_draws_by_scipy():
    ours, rng = converged(), np.random.default_rng(1)
    assert ours.converged
    assert ours.objective < ours.bound.value + 5 * ours.bound.se
    m, kappa, df, psi = (np.asarray(leaf) for leaf in ours.posterior)
    family = NormalInverseWishart(PRIOR["loc"], 0.5, 6.0, PSI)
    kl = sum(family.kl(q) for q in zip(m, kappa, df, psi, strict=True))
    kl += dirichlet_kl(np.asarray(ours.factors.concentration), np.full(K, A))
    np.testing.assert_allclose(ours.kl, kl, rtol=1e-9)
    weight, values = np.where(np.isnan(X).all(axis=1), 0.0, WEIGHT), []
    for _ in range(300):
        precisions = [
            stats.wishart.rvs(df[j], np.linalg.inv(psi[j]), random_state=rng)
            for j in range(K)
        ]
        covariances = [np.linalg.inv(p) for p in precisions]
        means = [
            rng.multivariate_normal(m[j], covariances[j] / kappa[j]) for j in range(K)
        ]
        log_p = np.log(rng.dirichlet(np.asarray(ours.factors.concentration)))
        values.append(
            weight
            @ logsumexp(log_p + observed_log_density(X, means, covariances), axis=1)
        )
    values = ALPHA * np.array(values) - kl
    se = np.hypot(values.std(ddof=1) / np.sqrt(len(values)), ours.bound.se)
    assert abs(values.mean() - ours.bound.value) < 5 * se


def test_the_density_of_a_row_is_the_marginal_of_what_it_has(x64):
    m, kappa, df = (
        np.array([[1.0, -0.5, 0.0], [0.0, 2.0, 1.0]]),
        np.array([0.5, 7.0]),
        np.array([6.0, 4.5]),
    )
    psi = np.stack([PSI, PSI[::-1, ::-1]])
    x = X[np.unique(np.isnan(X), axis=0, return_index=True)[1]]
    freedom = df - D + 1
    scale = psi * ((1 + 1 / kappa) / freedom)[:, None, None]
    expected = observed_log_density(
        x, m, scale, stats.multivariate_t.logpdf, df=freedom
    )
    found = jax.jit(gaussian_missing.log_predictive)(
        NormalWishart(m, kappa, df, psi), x.T
    )
    assert len(x) > 5
    np.testing.assert_allclose(found, expected.T, rtol=1e-12, atol=1e-12)


@pytest.mark.full
def test_densities_of_rows_are_marginals_by_scipy(x64):
    ours = converged()
    m, kappa, df, psi = (np.asarray(leaf) for leaf in ours.posterior)
    freedom = df - D + 1
    scale = psi * ((1 + 1 / kappa) / freedom)[:, None, None]
    parts = observed_log_density(X, m, scale, stats.multivariate_t.logpdf, df=freedom)
    a = np.asarray(ours.factors.concentration)
    expected = logsumexp(np.log(a / a.sum()) + parts, axis=1)
    np.testing.assert_allclose(
        nt.mixtures.log_predictive(ours, X), expected, rtol=1e-10, atol=1e-10
    )
    # The factor of the labels, of which a row without entries knows nothing.
    omega = np.asarray(nt.mixtures.responsibilities(ours, X))
    np.testing.assert_allclose(omega[7], softmax(digamma(a)), rtol=1e-10)
    np.testing.assert_allclose(
        (WEIGHT * (np.arange(N) != 7)) @ omega, ours.counts, rtol=1e-6
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "family", [gaussian, pytest.param(tied_gaussian, marks=pytest.mark.slow)]
)
def test_without_missing_entries_it_is_the_component_itself(family, x64):
    component = make(family)
    plain = fit(COMPLETE, component, sample_weight=WEIGHT, num_draws=10)
    form = component.with_missing()._replace(prior=component.prior)
    ours = fit(COMPLETE, form, sample_weight=WEIGHT, num_draws=10)
    np.testing.assert_allclose(ours.trace, plain.trace, rtol=1e-12)
    np.testing.assert_allclose(
        (ours.objective, *ours.bound), (plain.objective, *plain.bound), rtol=1e-12
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11),
        ours.posterior,
        plain.posterior,
    )
    for function in (nt.mixtures.responsibilities, nt.mixtures.log_predictive):
        np.testing.assert_allclose(
            function(ours, COMPLETE), function(plain, COMPLETE), rtol=1e-10, atol=1e-13
        )


@pytest.mark.parametrize("dim", tiered([1, 2, 5], unit=[2]))
def test_both_ways_to_invert_are_that_of_numpy(dim, x64):
    rng = np.random.default_rng(dim)
    root = rng.normal(size=(2, dim, 2 * dim))
    # Columns in units that are far apart.
    units = np.logspace(0, 6, dim)
    matrix, chosen = (
        root @ np.swapaxes(root, 1, 2) / np.outer(units, units),
        rng.random((2, dim, 9)) < 0.5,
    )
    for function in (
        gaussian_missing.inverse_by_sweeps,
        gaussian_missing.inverse_by_roots,
    ):
        inverses, log_dets = function(matrix, chosen)
        for k in range(2):
            for i in range(9):
                here = np.ix_(chosen[k, :, i], chosen[k, :, i])
                expected = np.zeros((dim, dim))
                expected[here] = np.linalg.inv(matrix[k][here])
                np.testing.assert_allclose(
                    inverses[k, :, :, i] / np.outer(units, units),
                    expected / np.outer(units, units),
                    atol=1e-11,
                )
                np.testing.assert_allclose(
                    log_dets[k, i], np.linalg.slogdet(matrix[k][here])[1], atol=1e-11
                )


@pytest.mark.full
def test_rows_in_pieces_are_rows_at_once(x64, monkeypatch):
    form = make().with_missing()
    rng = np.random.default_rng(0)
    omega, rows = rng.random((K, N)), np.broadcast_to(X.T, (K, D, N))
    posterior = form.update(
        make().prior, omega.sum(axis=1), form.location.sums(omega, rows)
    )
    weights = form.coefficients(posterior)[1]

    def values():
        return (
            form.location.linear(weights, rows),
            form.location.completed(weights, omega, rows),
            form.log_predictive(posterior, X.T),
        )

    at_once = values()
    monkeypatch.setattr(gaussian_missing, "AT_A_TIME", K * D**2 * 7)
    for a, b in zip(values(), at_once, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize(
    "family", [gaussian, pytest.param(tied_gaussian, marks=pytest.mark.slow)]
)
def test_em_climbs_to_the_maximum_of_the_observed_likelihood(family, x64):
    # As many as no component is without a maximum.
    _, x, labels = make_data(5 * N)
    weight = np.tile(WEIGHT, 5)
    options = {
        "init": nt.mixtures.starts.given_responsibilities(labels),
        "tolerance": 1e-15,
        "max_iter": 2000,
    }
    ours = nt.mixtures.em(
        jax.random.key(0),
        x,
        family(D),
        num_components=K,
        sample_weight=weight,
        num_restarts=1,
        **options,
    )
    assert np.diff(ours.trace).min() > -1e-9
    covariances = np.linalg.inv(ours.parameters["precision"])
    weight = np.where(np.isnan(x).all(axis=1), 0.0, weight)

    def log_likelihood(log_weights, means, covariances):
        return weight @ logsumexp(
            log_weights + observed_log_density(x, means, covariances), axis=1
        )

    at = np.log(ours.weights), ours.parameters["loc"], covariances
    np.testing.assert_allclose(ours.log_likelihood, log_likelihood(*at), rtol=1e-10)
    assert ours.num_parameters == 2 + K * D + (K if family is gaussian else 1) * 6
    # It is stationary in each parameter.
    step, slopes = 1e-5, []
    for part in (1, 2):
        for place in np.ndindex(at[part].shape):
            ends = []
            for sign in (-1, 1):
                moved = [np.array(value) for value in at]
                j, *entry = place
                where = (
                    slice(None) if part == 2 and family is tied_gaussian else j,
                    *entry,
                )
                moved[part][where] += sign * step
                if part == 2 and entry[0] != entry[1]:
                    moved[part][(*where[:1], *entry[::-1])] += sign * step
                ends.append(log_likelihood(*moved))
            slopes.append((ends[1] - ends[0]) / (2 * step))
    # Central differences are off by the square of the step.
    assert np.abs(slopes).max() < 1e-4


@pytest.mark.full
def test_em_of_a_component_that_closes_in_on_a_plane_has_collapsed(x64):
    """Two columns that one component observes together in two rows alone: a line through them."""
    x = make_data()[0][:, :2]
    x[3:30:2, 0], x[4:30:2, 1] = np.nan, np.nan
    x[:30] += 50.0
    with pytest.raises(FloatingPointError, match="every restart of EM collapsed"):
        nt.mixtures.em(
            jax.random.key(0), x[1:], gaussian(2), num_components=2, num_restarts=1, max_iter=5000, tolerance=0.0,
            init=nt.mixtures.starts.given_responsibilities(np.repeat([0, 1], [29, 30])),
        )  # fmt: skip


@pytest.mark.full
def test_em_of_one_component_is_the_maximum_by_scipy(x64):
    x = X[:, :2]
    ours = nt.mixtures.em(
        jax.random.key(0),
        x,
        gaussian(2),
        num_components=1,
        num_restarts=1,
        tolerance=1e-15,
        max_iter=5000,
    )

    def loss(theta):
        root = np.array([[np.exp(theta[2]), 0.0], [theta[3], np.exp(theta[4])]])
        return -observed_log_density(x, [theta[:2]], [root @ root.T]).sum()

    first = np.array([*np.nanmean(x, axis=0), *np.log(np.nanstd(x, axis=0)), 0.0])[
        [0, 1, 2, 4, 3]
    ]
    best = scipy.optimize.minimize(loss, first, method="BFGS", options={"gtol": 1e-6})
    np.testing.assert_allclose(ours.log_likelihood, -best.fun, rtol=1e-9)
    np.testing.assert_allclose(ours.parameters["loc"][0], best.x[:2], atol=1e-5)
    root = np.array([[np.exp(best.x[2]), 0.0], [best.x[3], np.exp(best.x[4])]])
    np.testing.assert_allclose(
        np.linalg.inv(ours.parameters["precision"][0]), root @ root.T, atol=1e-4
    )


@pytest.mark.full
def test_single_precision_and_units_and_places_do_not_matter():
    """Columns in units of 1 and a million, 10,000 of them from 0, with the prior in the same units."""
    expected, units, place = converged(), np.array([1.0, 1e6, 1.0]), 1e4
    shift = place * units
    component = gaussian(
        D,
        loc=PRIOR["loc"] * units + shift,
        mean_precision=0.5,
        df=6.0,
        scale=PSI * np.outer(units, units),
    )
    ours = fit(X * units + shift, component, sample_weight=WEIGHT)
    assert ours.posterior.loc.dtype == np.float64
    assert ours.factors.posterior.loc.dtype == np.float32
    change = ALPHA * np.sum(WEIGHT[:, None] * ~np.isnan(X) * np.log(units))
    np.testing.assert_allclose(ours.objective + change, expected.objective, rtol=1e-4)
    np.testing.assert_allclose(
        (ours.posterior.loc - shift) / units, expected.posterior.loc, atol=2e-2
    )
    scale = ours.posterior.scale / np.outer(units, units)
    np.testing.assert_allclose(scale, expected.posterior.scale, rtol=1e-2, atol=0.2)


@pytest.mark.full
def test_what_is_missing_at_random_biases_nothing_and_means_in_its_place_do(x64):
    """Two groups of correlated columns, 30 per cent of their entries missing."""
    rng, n = np.random.default_rng(4), 3000
    covariances = np.array([[[1.0, 0.9], [0.9, 1.0]], [[1.0, -0.8], [-0.8, 1.0]]])
    means, label = np.array([[0.0, 0.0], [6.0, 6.0]]), rng.integers(2, size=n)
    x = means[label] + np.einsum(
        "nij,nj->ni", np.linalg.cholesky(covariances)[label], rng.normal(size=(n, 2))
    )
    x = np.where(rng.random((n, 2)) < 0.3, np.nan, x)

    def errors(rows):
        start = nt.mixtures.starts.given_responsibilities(label)
        one = nt.mixtures.fit(
            jax.random.key(0),
            rows,
            gaussian(2),
            num_components=2,
            init=start,
            num_restarts=1,
            num_draws=0,
        )
        q = one.posterior
        # Standard errors: a product of two entries has a standard deviation of at most 1.5.
        scale = np.sqrt(0.7 * n / 2)
        return (
            scale * np.abs(q.loc - means).max(),
            scale * np.abs(q.scale / q.df[:, None, None] - covariances).max() / 1.5,
        )

    ours, imputed = errors(x), errors(np.where(np.isnan(x), np.nanmean(x, axis=0), x))
    assert max(ours) < 4
    assert imputed[1] > 20


@pytest.mark.full
def test_chunks_are_the_array(x64):
    whole = fit(num_draws=10)
    options = {
        "num_components": K,
        "alpha": ALPHA,
        "concentration": A,
        "num_restarts": 1,
        "num_draws": 10,
    }
    options |= {
        "init": nt.mixtures.starts.given_responsibilities(LABELS),
        "max_iter": 500,
    }
    chunks = nt.mixtures.fit(
        jax.random.key(0), [X[:7], X[7:8], X[8:41], X[41:]], make(), size=25, **options
    )
    np.testing.assert_allclose(
        (chunks.objective, *chunks.bound), (whole.objective, *whole.bound), rtol=1e-9
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8),
        chunks.posterior,
        whole.posterior,
    )


@pytest.mark.full
def test_a_part_of_a_product_may_miss_all_its_entries(x64):
    """Rows that have no entry of the Gaussian part count for the other part alone."""
    other = np.where(np.arange(N) % 2 == 0, 1.0, 0.0)[:, None]
    x = np.concatenate([X, other], axis=1)
    x[:20, :D] = np.nan
    parts = {"size": make(), "kind": nt.mixtures.components.bernoulli(1)}
    component = nt.mixtures.components.product(parts, {"size": D, "kind": 1})
    options = {"num_components": 1, "alpha": ALPHA, "num_restarts": 1, "num_draws": 0}
    both = nt.mixtures.fit(jax.random.key(0), x, component, **options)
    alone = [
        nt.mixtures.fit(jax.random.key(0), rows, part, **options)
        for rows, part in (
            (x[:, :D], make()),
            (other, nt.mixtures.components.bernoulli(1)),
        )
    ]
    np.testing.assert_allclose(
        both.objective, sum(each.objective for each in alone), rtol=1e-8
    )
    np.testing.assert_allclose(
        both.posterior["size"].df, alone[0].posterior.df, rtol=1e-12
    )


@pytest.mark.full
def test_a_column_without_an_entry_stays_at_its_prior(x64):
    x = X.copy()
    x[:, 1] = np.nan
    component = gaussian(
        D, loc=PRIOR["loc"], mean_precision=0.5, df=6.0, scale=np.diag(PSI)
    )
    ours = fit(x, component)
    q = ours.posterior
    assert ours.converged
    np.testing.assert_allclose(q.loc[:, 1], PRIOR["loc"][1], atol=1e-6)
    np.testing.assert_allclose(q.scale[:, 1, 1] / q.df, PSI[1, 1] / 6.0, rtol=1e-6)
    with pytest.raises(FloatingPointError, match=r"no maximum|collapsed"):
        nt.mixtures.em(jax.random.key(0), x, gaussian(D), num_components=2)


@pytest.mark.full
def test_steps_over_batches_reach_the_fit(x64):
    """With all data in a batch and a step of 1 they are the ascent."""
    rule = nt.mixtures.stochastic(
        make(), num_components=K, alpha=ALPHA, concentration=A, total=N - 1.0, step_size=1.0, missing=True,
        init=nt.mixtures.starts.given_responsibilities(LABELS),
    )  # fmt: skip
    state = rule.init(jax.random.key(0), X)
    step = jax.jit(rule.update)
    for _ in range(400):
        state, _ = step(state, X)
    expected = fit(tolerance=1e-13)
    np.testing.assert_allclose(
        rule.factors(state).posterior.loc, expected.posterior.loc, atol=1e-3
    )
    assert int(state.rejected) == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "family", [gaussian, pytest.param(tied_gaussian, marks=pytest.mark.slow)]
)
def test_the_model_has_the_density_of_observed_entries_and_its_derivatives(family, x64):
    component = make(family)
    model = nt.mixtures.numpyro_model(component, 2)
    rng, identity = np.random.default_rng(0), np.eye(D) + 0.3
    values = {"weights": np.array([0.3, 0.7]), "loc": rng.normal(size=(2, D))}
    values["precision"] = (
        identity if family is tied_gaussian else np.stack([identity, 2.0 * identity])
    )
    precisions = np.broadcast_to(values["precision"], (2, D, D))

    def expected(x, loc):
        parts = observed_log_density(x, loc, np.linalg.inv(precisions))
        return (
            WEIGHT[~np.isnan(x).all(axis=1)]
            @ logsumexp(np.log(values["weights"]) + parts, axis=1)[
                ~np.isnan(x).all(axis=1)
            ]
        )

    @jax.jit
    def found(x, loc):
        sites = values | {"loc": loc}
        trace = handlers.trace(
            handlers.seed(handlers.substitute(model, sites), 0)
        ).get_trace(x, WEIGHT)
        return jax.numpy.sum(
            trace["x"]["scale"]
            * trace["x"]["fn"].log_prob(trace["x"]["value"])
            * (WEIGHT > 0)
        )

    # Traced rows, complete or not, take one program.
    for x in (X, COMPLETE):
        np.testing.assert_allclose(
            found(x, values["loc"]), expected(x, values["loc"]), rtol=1e-10
        )
    slopes, step = jax.grad(found, 1)(X, values["loc"]), 1e-6
    for place in np.ndindex(2, D):
        move = np.zeros((2, D))
        move[place] = step
        ends = [expected(X, values["loc"] + sign * move) for sign in (1, -1)]
        np.testing.assert_allclose(
            slopes[place], (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-6
        )


WRONG = [
    (
        lambda: fit(np.where(np.isnan(X), np.nan, np.inf)),
        ValueError,
        "row 0, column 0 of the data is inf",
    ),
    (
        lambda: fit(np.full((4, D), np.nan), init=None),
        ValueError,
        "no row has both a positive weight",
    ),
    (lambda: fit(X[:, :2]), ValueError, r"the data have shape \(60, 2\); \(n, 3\)"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_data_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_completed_rows_are_held_to_the_derivatives_of_their_likelihood(factor, x64):
    component = gaussian(2, df=5.0)
    form = component.with_missing()
    right = form.location.completed
    form = form._replace(
        location=form.location._replace(completed=lambda *each: factor * right(*each))
    )
    columns = np.array([[0.3, -1.0, np.nan, 2.0], [np.nan, 0.5, 1.5, -0.5]])
    prior = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), component.prior)
    ((ours, slopes),) = _completion_identities(
        form._replace(prior=None), prior, columns
    ).values()
    np.testing.assert_allclose(ours, factor * slopes, rtol=1e-9)
    assert np.all(np.abs(slopes) > 1e-6)


@pytest.mark.full
def test_functions_that_do_not_belong_together_are_named(key):
    component = make()
    nt.mixtures.components.check_component(key, component, X)
    form = component.with_missing()
    right = form.location.completed
    wrong = form._replace(
        location=form.location._replace(
            completed=lambda *arguments: 1.01 * right(*arguments)
        )
    )
    with pytest.raises(
        ValueError, match=r"location\.completed and the derivatives of location\.linear"
    ):
        nt.mixtures.components.check_component(
            key, component._replace(with_missing=lambda: wrong), X
        )
