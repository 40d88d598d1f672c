"""Calls that are refused before anything is computed, each with its message from the first words on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import RenyiELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.infer.guides.heavy_tails import StudentT

KEY = jax.random.key(0)
X, Y = jnp.ones((4, 2)), jnp.ones(4)
Q = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
FULL = nt.gaussian.families.FullRank(jnp.zeros(2), jnp.eye(2))
SQUARED, GAUSSIAN = nt.expectations.squared(), nt.mixtures.components.gaussian(2)
STARTS = nt.mixtures.starts.given_responsibilities
stochastic = functools.partial(nt.mixtures.stochastic, num_components=2)


def model(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def too_narrow(y):
    theta = numpyro.sample("theta", dist.Laplace(0.0, 1e-30))
    numpyro.sample("y", dist.Normal(theta, 1.0).expand([len(y)]), obs=y)


def unfitted(guide=AutoNormal, of=model):
    """A fit that nobody has fitted."""
    return nt.results.TemperedFit(of, guide(of), {}, 1.0, None, None, {}, (Y,), {}, KEY)


def fit_mixture(**options):
    return nt.mixtures.fit(
        KEY, np.arange(8.0).reshape(4, 2), GAUSSIAN, **({"num_components": 2} | options)
    )


def of_ivon(order):
    guide = AutoNormal(model)
    svi = numpyro.infer.SVI(model, guide, nt.optim.IVON(guide), RenyiELBO(alpha=order))
    return svi.update(svi.init(KEY, Y), Y)


CASES = {
    "a mixture of complex numbers": (
        lambda: nt.mixtures.fit(KEY, 1j * np.ones((4, 2)), GAUSSIAN, num_components=2),
        TypeError,
        "^gaussian: the data must be real numbers, got dtype complex128, such as '1j'. Pass real and imaginary",
    ),
    "PCA of complex numbers": (
        lambda: nt.ppca.fit(KEY, 1j * np.ones((4, 2)), num_factors=1),
        TypeError,
        "^x must be real numbers, got dtype complex128, such as '1j'. Pass real and imaginary parts, or absolute",
    ),
    "a mixture of objects": (
        lambda: nt.mixtures.fit(
            KEY, np.array([[object()], [2.0]]), GAUSSIAN, num_components=2
        ),
        TypeError,
        r"^gaussian: the data must be real numbers, got dtype object, .*\. Encode them as real numbers\.$",
    ),
    "PCA of objects": (
        lambda: nt.ppca.fit(KEY, np.array([[object()], [2.0]]), num_factors=1),
        TypeError,
        r"^x must be real numbers, got dtype object, .*\. Pass a float array, NaN where missing\.$",
    ),
    "rows of another number of columns": (
        lambda: GAUSSIAN.check(np.ones((4, 3))),
        ValueError,
        r"^gaussian: the data have shape \(4, 3\); \(n, 2\) with n >= 1 is needed\.$",
    ),
    "rows of a family of one column": (
        lambda: nt.mixtures.components.gaussian(1).check(np.ones((4, 3))),
        ValueError,
        r"; \(n, 1\) or \(n,\) with n >= 1 is needed\.$",
    ),
    "a mixture of numbers of eight bits": (
        lambda: GAUSSIAN.check(jnp.ones((4, 2), jnp.float8_e4m3fn)),
        TypeError,
        r"^gaussian: the data must be real numbers, got dtype float8_e4m3fn\. Encode them as real numbers\.$",
    ),
    "PCA of numbers of eight bits": (
        lambda: nt.ppca.fit(KEY, jnp.ones((4, 2), jnp.float8_e4m3fn), num_factors=1),
        TypeError,
        r"^x must be real numbers, got dtype float8_e4m3fn\. Pass a float array, NaN where missing\.$",
    ),
    "a Lipschitz constant of batches": (
        lambda: nt.bounds.lipschitz(np.ones((2, 3, 4))),
        ValueError,
        r"^x must have shape \(d,\) or \(T, d\), got \(2, 3, 4\)\.$",
    ),
    "a Lipschitz constant of batches, of squared losses": (
        lambda: nt.bounds.lipschitz_squared(
            np.ones((2, 3, 4)), np.ones(3), nt.online.Box(loc=1.0, scale=1.0)
        ),
        ValueError,
        r"^expected x of shape \(T, d\) and y of shape \(T,\), got \(2, 3, 4\), \(3,\)\.$",
    ),
    "a Lipschitz constant of a column of outcomes": (
        lambda: nt.bounds.lipschitz_squared(
            X, np.ones((4, 1)), nt.online.Box(loc=1.0, scale=1.0)
        ),
        ValueError,
        r"^expected x of shape \(T, d\) and y of shape \(T,\), got \(4, 2\), \(4, 1\)\.$",
    ),
    "a grid of what is no rule": (
        lambda: nt.online.grid(
            lambda a: nt.online.ngvi() if a else "rule", a=[0.0, 1.0]
        ),
        TypeError,
        r"^the factory must return an online rule, got str\.$",
    ),
    "labels that are no integers": (
        lambda: STARTS([0.5, 1.0]),
        ValueError,
        "^labels must be integers from 0, got dtype float64",
    ),
    "labels below 0": (
        lambda: STARTS([-1, 1]),
        ValueError,
        "^labels must be integers from 0, got dtype int64",
    ),
    "responsibilities of three axes": (
        lambda: STARTS(np.ones((2, 2, 2))),
        ValueError,
        r"^expected labels \(n,\) or responsibilities \(n, K\), got shape \(2, 2, 2\)",
    ),
    "responsibilities that do not sum to 1": (
        lambda: STARTS([[0.5, 0.6]]),
        ValueError,
        "^responsibilities must not be negative, and each row must sum to 1",
    ),
    "negative responsibilities": (
        lambda: STARTS([[1.5, -0.5]]),
        ValueError,
        "^responsibilities must not be neg",
    ),
    "a start of other rows": (
        lambda: fit_mixture(init=STARTS([0, 1])),
        ValueError,
        "^the start has 2 rows, the data have 4",
    ),
    "a start of more labels": (
        lambda: fit_mixture(init=STARTS([0, 1, 2, 1])),
        ValueError,
        "^the start has label 2, num_components is 2",
    ),
    "a start of more components": (
        lambda: fit_mixture(init=STARTS(np.eye(4))),
        ValueError,
        "^the start has 4 components, num_components is 2",
    ),
    "concentrations of another length": (
        lambda: fit_mixture(concentration=[1.0, 1.0, 1.0]),
        ValueError,
        r"^concentration has shape \(3,\); expected \(\) or \(2,\)",
    ),
    "a mixture under jit": (
        lambda: jax.jit(lambda x: nt.mixtures.fit(KEY, x, GAUSSIAN, num_components=2))(
            X
        ),
        TypeError,
        "^a mixture is fitted from the host, which decides on restarts and warnings: call it outside",
    ),
    "scales under jit": (
        lambda: jax.jit(lambda x: nt.mixtures.components.scaled_to(x)["prior_loc"])(X),
        TypeError,
        "^scaled_to reads the data on the host: call it outside of jit, vmap and",
    ),
    "no levels": (
        lambda: nt.mixtures.components.categorical([]),
        ValueError,
        "^categorical: levels is empty; expected the number of levels of each column",
    ),
    "counts that are moved": (
        lambda: stochastic(nt.mixtures.components.poisson(1), centre=np.zeros(1)),
        ValueError,
        "^poisson: data of this family may not be moved; leave out centre",
    ),
    "two first responsibilities": (
        lambda: fit_mixture(init=[STARTS([0, 1, 0, 1]), STARTS([0, 0, 1, 1])]),
        ValueError,
        "^init has 2 first responsibilities; expected at most one, for all restarts",
    ),
    "moves of chunks": (
        lambda: nt.mixtures.fit(KEY, [X], GAUSSIAN, num_components=2, num_moves=3),
        ValueError,
        "^num_moves=3, and moves need all rows in memory: leave it out for chunks",
    ),
    "weights beside chunks": (
        lambda: nt.mixtures.fit(
            KEY, [X], GAUSSIAN, num_components=2, sample_weight=np.ones(4)
        ),
        ValueError,
        "^chunks bring their weights: give tuples",
    ),
    "a warm start among numbers of components": (
        lambda: nt.mixtures.select_num_components(
            KEY, X, GAUSSIAN, num_components=[1], init=[]
        ),
        ValueError,
        "^each fit starts from that of the next smaller K, or larger alpha: leave fits out of init",
    ),
    "no rows to share": (
        lambda: nt.mixtures.shard_rows(np.ones((0, 2)), jax.make_mesh((1,), ("rows",))),
        ValueError,
        r"^x has shape \(0, 2\); at least one row is needed",
    ),
    "a chunk that is a number": (
        lambda: nt.mixtures.fit(KEY, lambda: [3.0], GAUSSIAN, num_components=2),
        TypeError,
        r"^chunk 0 is 3.0; expected an array of rows, or \(rows, sample_weight\)",
    ),
    "an expectation of the parameters": (
        lambda: nt.expectations.linearised(
            lambda theta, x: theta[0], nt.expectations.monte_carlo(lambda t, x: t)
        ),
        TypeError,
        "^linearised needs the expectation of a predictor's loss, squared.. or the like, got one of a model",
    ),
    "no expectation": (
        lambda: nt.expectations.linearised(lambda theta, x: theta[0], 3.0),
        TypeError,
        "^linearised needs the expectation of a predictor's loss, squared.. or the like, got 3.0",
    ),
    "a predictor of another shape": (
        lambda: nt.expectations.linearised(lambda theta, x: theta, SQUARED).evaluate(
            Q, X[0], 1.0
        ),
        ValueError,
        r"^predict must return shape \(\) for one datum, got \(2,\)",
    ),
    "rows and outcomes of two lengths": (
        lambda: nt.expectations.linearised(lambda theta, x: theta[0], SQUARED).evaluate(
            Q, X, Y[:3]
        ),
        ValueError,
        r"^expected x of shape \(n, f\) with y of shape \(n, ...\), got \(4, 2\) and \(3,\)",
    ),
    "a box of another length": (
        lambda: nt.online.sva(0.1, box=nt.online.Box(loc=jnp.ones(3))).init(Q),
        ValueError,
        r"^box.loc must have shape \(\) or \(2,\), got \(3,\)",
    ),
    "doubling of an aggregate": (
        lambda: nt.online.doubling(
            lambda rate: nt.online.aggregate(
                nt.online.grid(nt.online.sva, step_size=[rate])
            ),
            0.1,
        ),
        TypeError,
        "^doubling restarts a rule that is an evaluation and an update, not an aggregate",
    ),
    "a traced evidence": (
        lambda: jax.jit(
            lambda evidence: nt.online.svb(0.1, evidence=evidence).init(Q).count
        )(10.0),
        ValueError,
        "^evidence must be a known number, not a traced one",
    ),
    "predictions of no inputs": (
        lambda: nt.online.predict(SQUARED, Q),
        TypeError,
        r"^no inputs: the call is predict\(expectation, state, x\)",
    ),
    "a full covariance under sva_point": (
        lambda: nt.bounds.sva_point(
            9, step_size=0.1, lipschitz=1.0, prior=FULL, theta=[0.5, 0.5]
        ),
        TypeError,
        "^sva_point compares under a MeanField prior, got FullRank: for another family give kl and comparator to",
    ),
    "a Student's t without a key": (
        lambda: StudentT(5.0, 0.0, 1.0).sample(None, (2,)),
        TypeError,
        "^a draw needs a key of jax.random, got None",
    ),
    "IVON under a bound of a high order": (
        lambda: of_ivon(2.0),
        ValueError,
        "(?s)^nt.optim.IVON takes a RenyiELBO of an order alpha below 1, got 2.0: far from its optimum a bound "
        "of an order above 1 shrinks .* by which IVON measures its steps.*Use an order below 1, or .* Trace_ELBO",
    ),
    "a guide that fails": (
        lambda: nt.fit_svi(KEY, model, lambda m: m.nothing, Y),
        TypeError,
        "^the guide factory failed on the model: for a hand-written guide pass `lambda model: my_guide`",
    ),
    "a Gaussian fit of a Student's t": (
        lambda: nt.fit_gaussian(KEY, model, nt.guides.AutoDiagonalStudentT, Y),
        TypeError,
        "^fit_gaussian fits Gaussians, and AutoDiagonalStudentT is a Student's t: fit it by fit_svi, or take",
    ),
    "a check with data too many": (
        lambda: nt.check_fit(KEY, unfitted(), Y),
        ValueError,
        "^a TemperedFit holds its data: pass it alone, got 1 further values",
    ),
    "a check of nothing": (
        lambda: nt.check_fit(KEY, 3),
        TypeError,
        r"^got int, which is no tempered posterior: pass a fit; of a stream online\.posterior\(state\)",
    ),
    "a check of a stream without data": (
        lambda: nt.check_fit(
            KEY,
            nt.OnlineVI(
                model, nt.guides.AutoOnlineDiagonalNormal(model), nt.online.ngvi()
            ),
        ),
        TypeError,
        r"^got OnlineVI, which is no tempered posterior: pass a fit; of a stream online\.posterior\(state\)",
    ),
    "a certificate under jit": (
        lambda: jax.jit(lambda key: nt.certify_risk(key, unfitted(), "y"))(KEY),
        TypeError,
        "^certify_risk looks at numbers: call it outside of jit, vmap and grad",
    ),
    "a grid of no point": (
        lambda: nt.online.ewa_grid(np.ones((0, 2)), step_size=1.0),
        ValueError,
        r"^points must have shape \(K, d\), got shape \(0, 2\)",
    ),
    "a number for an expectation": (
        lambda: nt.OnlineVI(
            model, nt.guides.AutoOnlineDiagonalNormal(model), nt.online.ngvi(), 3.0
        ).init(KEY, Y),
        TypeError,
        r"^expectation must be a Expectation, such as nt\.expectations\.monte_carlo\(\), got 3\.0",
    ),
    "a prior without a width": (
        lambda: nt.OnlineVI(
            too_narrow, nt.guides.AutoOnlineDiagonalNormal(too_narrow), nt.online.ngvi()
        ).init(KEY, Y),
        ValueError,
        "^the standard deviation of the prior of 'theta' on the unconstrained scale must be .* at the prior",
    ),
    "a stream of no chunk": (
        lambda: nt.OnlineVI(
            model, nt.guides.AutoOnlineDiagonalNormal(model), nt.online.ngvi()
        ).run_chunks(KEY, []),
        ValueError,
        "^the stream has no chunk. One pass exhausts an iterator: pass a new one each time",
    ),
}


@pytest.mark.filterwarnings("ignore:the priors of")
@pytest.mark.parametrize("name", CASES)
def test_the_call_is_refused(name):
    call, error, message = CASES[name]
    with pytest.raises(error, match=message):
        call()
