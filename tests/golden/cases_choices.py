"""Golden cases of what is chosen and checked after a fit, of the theory's quantities, and of the estimators."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_tempered as nt
from golden.table import (
    COUNT,
    KEY,
    LABEL,
    SIGN,
    D,
    X,
    Y,
    case,
    full_rank,
    linear,
    logistic,
    mean,
    mean_field,
)

FEW = [nt.warnings.ConvergenceWarning]
AT_ETA = nt.expectations.gauss_hermite(predictor="eta")
ALPHAS = [0.5, 1.0]


def columns_of(result, name=None):
    """A table's columns, the labels of its rows included."""
    table = nt.table(result, name) if name else nt.table(result)
    table = table.reset_index()
    return {str(column): table[column].tolist() for column in sorted(table, key=str)}


@functools.cache
def fit_of(alpha=1.0):
    return nt.fit_gaussian(
        KEY, logistic, AutoMultivariateNormal, X, LABEL, alpha=alpha, expectation=AT_ETA
    )


@functools.cache
def mean_fit():
    return nt.fit_svi(
        KEY, mean, AutoNormal, Y, alpha=0.5, num_steps=150, num_particles=50
    )


# The choice of alpha.

CRITERIA = {
    "safe_bayes": nt.alpha.safe_bayes(blocks=3),
    "safe_bayes, plugin": nt.alpha.safe_bayes("plugin", blocks=3, permutations=2),
    "lyddon": nt.alpha.lyddon(),
    "magnitude": nt.alpha.magnitude(),
    "bootstrap_fisher": nt.alpha.bootstrap_fisher(num_bootstrap=20),
    "gpc": nt.alpha.gpc(0.9, num_bootstrap=50),
}
OPTIONS = {
    "num_samples": 30,
    "num_refit_samples": 10,
    "tolerance": 0.5,
    "progress_bar": False,
}
for name, criterion in CRITERIA.items():

    @case(f"alpha by {name}", criterion, ignore=[*FEW, UserWarning])
    def select_alpha(criterion):
        choice = nt.select_alpha(
            KEY, mean, AutoNormal, Y, alphas=ALPHAS, criterion=criterion, **OPTIONS
        )
        return {
            "alpha": choice.alpha,
            "table": columns_of(choice),
            "params": choice.fit.params,
        }


@case("alpha, diagnostics", ignore=[*FEW, UserWarning])
def diagnose_alpha():
    diagnostics = [nt.alpha.held_out(3), nt.alpha.loo()]
    options = OPTIONS | {"criterion": nt.alpha.magnitude(), "diagnostics": diagnostics}
    choice = nt.select_alpha(KEY, mean, AutoNormal, Y, alphas=ALPHAS, **options)
    return {"alpha": choice.alpha, "table": columns_of(choice)}


@case("powers of parameters")
def calibrate_powers():
    return {"table": columns_of_frame(nt.alpha.calibrated_powers(KEY, linear, X, Y))}


def columns_of_frame(frame):
    frame = frame.reset_index()
    return {str(column): frame[column].tolist() for column in sorted(frame, key=str)}


@case("coverage of intervals", ignore=[*FEW, UserWarning])
def check_coverage():
    options = {
        "num_bootstrap": 20,
        "num_draws": 100,
        "num_steps": 100,
        "levels": [0.5, 0.9],
    }
    check = nt.alpha.check_coverage(
        KEY, mean, AutoNormal, Y, alpha=0.5, progress_bar=False, **options
    )
    return {"table": columns_of(check)}


@case("prescribed powers")
def prescribe():
    return {"alpha": [nt.alpha.coarsening(30.0, 90), nt.alpha.theory_default()]}


# Paths, comparisons, checks.


for name, method in {"guide": AutoNormal, "sampler": NUTS}.items():

    @case(f"path, {name}", method, ignore=[*FEW, UserWarning])
    def follow_path(method):
        options = {
            "num_samples": 10,
            "num_warmup": 10,
            "num_steps": 100,
            "progress_bar": False,
        }
        path = nt.temper_path(KEY, mean, method, Y, alphas=[0.0, 0.5, 1.0], **options)
        return {"table": columns_of(path)}


@case("comparison")
def compare():
    fits = {"logistic": fit_of(0.5), "again": fit_of(0.5)}
    data = nt.compare(
        fits, nt.dyadic, log_p0=nt.bounds.known_density(0.0), num_samples=10
    )
    return {"selected": str(data.attrs["selected"]), "table": columns_of(data)}


@case("check of a fit")
def check_fit():
    check = nt.check_fit(KEY, fit_of(), num_draws=100)
    return {"bounds": [check.w1_bound, check.w2_bound], "table": columns_of(check)}


@case("calibration", ignore=[*FEW, UserWarning])
def check_calibration():
    options = {
        "num_simulations": 20,
        "num_draws": 20,
        "num_steps": 100,
        "progress_bar": False,
    }
    check = nt.check_calibration(KEY, mean, AutoNormal, Y[:8], alpha=0.5, **options)
    return {"ranks": check.ranks, "truths": check.truths, "table": columns_of(check)}


@case("risk")
def certify_risk():
    certificate = nt.certify_risk(KEY, fit_of(0.5), "y", num_draws=50)
    return {"certificate": numbers_of(certificate)}


@case("standard errors")
def sandwich():
    errors = nt.sandwich(KEY, fit_of(), num_draws=100)
    return {"table": columns_of(errors), "covariance": errors.covariance}


@case("leave one out", ignore=[UserWarning])
def leave_one_out():
    data = nt.to_inference_data(fit_of(0.5), num_samples=100, posterior_predictive=True)
    result = nt.loo(data, pointwise=True)
    draws = {
        name: np.asarray(data[name][site])
        for name, site in (("posterior", "w"), ("posterior_predictive", "y"))
    }
    # ArviZ 0 and 1.
    pointwise = result.loo_i if hasattr(result, "loo_i") else result.elpd_i
    return {"draws": draws, "pointwise": np.asarray(pointwise)}


# Regret, comparators and bounds.

BOX = nt.online.Box(1.0, 1.0)


def numbers_of(record):
    """The numbers in a record, without the words, which say where they come from."""
    return [
        np.asarray(value)
        for value in record
        if isinstance(value, (int, float, np.ndarray, jax.Array))
    ]


def softplus(theta, x, y):
    return jax.nn.softplus(-y * (x @ theta))


HINDSIGHTS = {
    "hinge": lambda: nt.bounds.hindsight.hinge(X, SIGN, BOX),
    "absolute": lambda: nt.bounds.hindsight.absolute(X, Y),
    "pinball": lambda: nt.bounds.hindsight.pinball(X, Y, level=0.9),
    "squared": lambda: nt.bounds.hindsight.squared(X, Y, box=nt.online.Ball(0.5)),
    "convex": lambda: nt.bounds.hindsight.convex(softplus, jnp.zeros(D), X, SIGN),
}
for name, best in HINDSIGHTS.items():

    @case(f"hindsight {name}", best)
    def look_back(best):
        return {"theta": best().theta, "all": best()}


@case("hindsight gaussian")
def best_gaussian():
    return {
        "best": nt.bounds.hindsight.gaussian(
            nt.expectations.logistic(), full_rank(), 0.5, X, SIGN
        )
    }


@case("hindsight sequential")
def fit_sequentially():
    fit = nt.bounds.hindsight.sequential(
        nt.expectations.logistic(), mean_field(), 0.5, X[:12], SIGN[:12]
    )
    return {"losses": fit.losses, "posteriors": fit.posteriors}


@case("ledger")
def keep_ledger():
    lipschitz, diameter = nt.bounds.lipschitz(X), nt.bounds.diameter(BOX, d=D)
    rate = nt.online.svb_rate(
        nt.online.svb_constant(lipschitz=lipschitz, diameter=diameter)
    )
    rule = nt.online.svb(rate, box=BOX)
    _, losses = nt.online.run(
        rule, nt.expectations.hinge(), rule.init(mean_field()), X, SIGN
    )
    bound = nt.bounds.svb(
        np.arange(1, len(X) + 1), lipschitz=lipschitz, diameter=diameter
    )
    best = nt.bounds.hindsight.hinge(X, SIGN, BOX)
    data = nt.bounds.regret_ledger(
        {"svb": losses}, hindsight=best, bounds={"svb": bound}
    )
    return {"table": columns_of(data)}


def poisson_partition(eta):
    return jnp.exp(eta[0])


def log_normal(loc):
    return lambda x: -0.5 * (x - loc) ** 2 - 0.5 * np.log(2 * np.pi)


def regret_bounds():
    rounds = np.array([10, 100])
    convexity = nt.bounds.strong_convexity(mean_field())
    of_ewa = nt.bounds.ewa(1, step_size=0.5, loss_range=1.0, kl=2.0)
    options = {"step_size": 0.1, "lipschitz": 2.0}
    return [
        nt.bounds.lipschitz_squared(X, Y, BOX),
        numbers_of(of_ewa),
        numbers_of(nt.bounds.ewa_point(rounds, step_size=0.1, loss_range=1.0, d=D)),
        numbers_of(
            nt.bounds.sva(
                rounds, strong_convexity=convexity, kl=4.0, comparator=50.0, **options
            )
        ),
        numbers_of(
            nt.bounds.sva_point(
                rounds, prior=mean_field(), theta=[0.5, -0.5, 0.0], **options
            )
        ),
        numbers_of(nt.bounds.svb_strongly_convex(rounds, lipschitz=2.0, curvature=0.5)),
        numbers_of(nt.bounds.hedge(rounds, 8, rate=0.5)),
        numbers_of(nt.bounds.doubling(rounds, of_ewa)),
        numbers_of(nt.bounds.online_to_batch(rounds, np.sqrt(rounds))),
        numbers_of(
            nt.bounds.online_to_batch_risk(1000, 300.0, loss_range=1.0, delta=0.05)
        ),
    ]


def certificates():
    known = nt.bounds.known_density(-300.0)
    return [
        numbers_of(nt.bounds.tempered_certificate(-160.0, known, 200, alpha=0.5)),
        numbers_of(
            nt.bounds.selection_certificate(
                [-170.0, -160.0], np.log([0.5, 0.25]), known, 200, alpha=0.5
            )
        ),
        nt.bounds.empirical_entropy(COUNT.astype(int)).value,
        nt.bounds.maximum_likelihood(-30.1).value,
        numbers_of(nt.bounds.pac_bayes(0.05, kl=12.0, num_data=569)),
        numbers_of(nt.bounds.pac_bayes(0.05, kl=12.0, num_data=569, num_draws=100)),
    ]


def divergences():
    return [
        nt.bounds.renyi_normal(0.5, [0.0, 2.0], 1.0, 0.0, 1.5),
        nt.bounds.renyi_gaussian(
            0.5, [2.0, 0.0], np.eye(2), [0.0, 0.0], 2.0 * np.eye(2)
        ),
        nt.bounds.renyi_exponential_family(
            0.5, poisson_partition, [0.0], np.log([4.0])
        ),
        nt.bounds.renyi_discrete(0.5, [0.5, 0.5], [0.75, 0.25]),
        nt.bounds.renyi_quadrature(0.5, log_normal(0.0), log_normal(2.0), -10.0, 12.0),
        nt.bounds.change_order(0.25, 0.2, to=0.5),
        nt.bounds.hellinger_bound(0.02, order=0.5),
        nt.bounds.total_variation_bound(0.02, order=0.5),
    ]


@case("bounds")
def evaluate_bounds():
    return {
        "regret": regret_bounds(),
        "certificates": certificates(),
        "divergences": divergences(),
    }


# Estimators.


@case("estimator of classes")
def classify():
    model = nt.estimators.OnlineClassifier(alpha=0.5).fit(X, LABEL)
    first = model.predict_proba(X)
    for rows in (slice(20), slice(20, 40)):
        model.partial_fit(X[rows], LABEL[rows])
    return {"fitted": first, "more": model.predict_proba(X)}


@case("estimator of numbers")
def regress():
    model = nt.estimators.OnlineRegressor(alpha=0.5).fit(X, Y)
    first = model.predict(X, return_std=True)
    for rows in (slice(20), slice(20, 40)):
        model.partial_fit(X[rows], Y[rows])
    return {"fitted": first, "more": model.predict(X, return_std=True)}


@case("estimators, one row at a time")
def learn_rows():
    classes, numbers = nt.estimators.OnlineClassifier(), nt.estimators.OnlineRegressor()
    answers = []
    for row, label, y in zip(X[:15], LABEL, Y, strict=False):
        x = dict(zip("abc", row.tolist(), strict=True))
        classes.learn_one(x, int(label))
        numbers.learn_one(x, float(y))
        answers.append(
            [classes.predict_proba_one(x).get(1, 0.0), numbers.predict_one(x)]
        )
    return {"answers": np.array(answers)}


@case("estimator of mixtures", ignore=[UserWarning])
def cluster():
    model = nt.estimators.TemperedMixture(
        2, component="diag", n_init=2, max_iter=15, random_state=0
    ).fit(X[:, :2])
    return {
        "means": model.means_,
        "weights": model.weights_,
        "probabilities": model.predict_proba(X[:, :2]),
    }


@case("estimator of factors", ignore=[UserWarning])
def decompose():
    model = nt.estimators.TemperedPCA(2, max_iter=20, random_state=0).fit(X)
    return {
        "components": model.components_,
        "scores": model.transform(X),
        "densities": model.score_samples(X),
    }
