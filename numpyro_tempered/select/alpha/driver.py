"""The choice of alpha: checks, fits along a grid, and the report."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from numpyro.infer.elbo import ELBO
from numpyro.infer.mcmc import MCMCKernel

from numpyro_tempered.core import (
    CLOCK,
    Array,
    ArrayLike,
    Columns,
    Labels,
    Model,
    ProgressBar,
    advise_cache,
    axis_labels,
    doubles,
    progress_bars,
    runs_models,
)
from numpyro_tempered.gaussian.expectations import Expectation
from numpyro_tempered.handlers.arguments import check_call
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.infer.svi import NUM_STEPS
from numpyro_tempered.infer.tempered_fit import TemperedFit, with_names
from numpyro_tempered.report.arviz import (
    ArviZData,
    Coords,
    Dims,
    dataset,
    group,
    with_group,
)
from numpyro_tempered.report.inference_data import to_inference_data
from numpyro_tempered.select.alpha.base import (
    AlphaChoice,
    Criterion,
    Decision,
    Fits,
    Request,
    Task,
)
from numpyro_tempered.select.alpha.coverage import (
    LEVELS,
    NUM_BOOTSTRAP,
    NUM_DRAWS,
    STREAMS,
    Design,
    coverage_of,
)
from numpyro_tempered.select.alpha.coverage_report import CoverageCheck
from numpyro_tempered.select.alpha.dependence import Block
from numpyro_tempered.select.alpha.guides import (
    GuideOptions,
    Recipe,
    Sizes,
    check_guide_options,
    check_sizes,
    fit_all,
)
from numpyro_tempered.select.alpha.independence import warn_of_dependence
from numpyro_tempered.select.alpha.mcmc import MCMCOptions, sample_all
from numpyro_tempered.select.alpha.model_data import Method, build_method, check_alphas
from numpyro_tempered.select.alpha.online import Streams
from numpyro_tempered.select.alpha.powers import (
    Powers,
    advise_on_coverage,
    find_coverage,
    powers_dataset,
)
from numpyro_tempered.select.alpha.safe_bayes import safe_bayes
from numpyro_tempered.select.evidence import mean_se

DEFAULT_GRID = np.geomspace(2.0**-6, 1.0, 10)


@runs_models
def select_alpha(
    rng_key: Array,
    model: Model,
    method: Method,
    *data: object,
    alphas: ArrayLike | None = None,
    criterion: Criterion | None = None,
    diagnostics: Sequence[Criterion] = (),
    plate: str | None = None,
    groups: ArrayLike | None = None,
    block: Block = None,
    coverage: bool = False,
    num_samples: int = 1000,
    num_refit_samples: int = 200,
    num_steps: int = NUM_STEPS,
    tolerance: float = 0.05,
    loss: ELBO | None = None,
    expectation: Expectation | None = None,
    num_warmup: int = 500,
    num_chains: int = 1,
    chain_method: str = "sequential",
    coords: Coords | None = None,
    dims: Dims | None = None,
    progress_bar: ProgressBar = None,
    **kwargs: object,
) -> AlphaChoice:
    r"""Choose the power alpha of the likelihood, by a criterion with a stated aim.

    ====================== ========== ========================================================================
    criterion              aim        chooses the alpha ...
    ====================== ========== ========================================================================
    ``safe_bayes()``       risk       whose posteriors on the first data predict the next best, draw by draw
    ``lyddon()``           coverage   at which the posterior's spread is that of the minimiser's bootstrap
    ``magnitude()``        coverage   at which the likelihood ratio has the mean of its limit; no units in it
    ``bootstrap_fisher()`` coverage   whose posterior is nearest to the bootstrap in Fisher divergence
    ``gpc(level)``         coverage   whose credible sets hold the minimiser in that share of resamples
    ====================== ========== ========================================================================

    Risk and coverage are different aims, and give different alphas by design: the advice and the report have both
    side by side. :func:`numpyro_tempered.alpha.coarsening` and :func:`numpyro_tempered.alpha.theory_default` are
    powers that do not look at the data. Neither the evidence nor the ELBO
    is a criterion: their derivative in alpha has the sign of the log-likelihood, which depends on the units of
    the data. Nor is the predictive density of left-out data: :func:`numpyro_tempered.alpha.held_out` and
    :func:`numpyro_tempered.alpha.loo` are ``diagnostics``.

    ``method`` makes the posterior. A guide factory fits all alphas side by side, as :func:`fit_svi` does, until
    all have converged; refits to parts of the data use the same programs. An MCMC kernel factory samples them by
    one compiled program. A factory of :class:`OnlineVI` runs all alphas side by side over the stream, and
    SafeBayes takes the losses of the stream.

    The group ``alpha_selection`` of the result, with dim ``alpha``, has

    - ``criterion``, least at the best, and ``criterion_se``, where the criterion has them; NaN at an alpha
      between those of the grid, which a criterion may choose by interpolation,
    - ``expected_log_lik``, the untempered E[log L] on all data, its Monte Carlo standard error
      ``expected_log_lik_se``,
    - ``effective_parameters``, 2 α² Var[log L], which is d where the data determine d parameters,
    - ``selected``, true at the chosen alpha, and the columns of the diagnostics.

    The group ``calibrated_powers``, with dim ``parameter``, has the power at which the intervals of each
    parameter cover what they say, as :func:`numpyro_tempered.alpha.calibrated_powers` finds it, and what they
    cover at the chosen alpha. It is left out where the curvature cannot tell, which the advice then says. With
    ``coverage=True`` the group ``coverage`` has what they cover in resamples of the rows. The other groups are
    those of the posterior at the chosen alpha.

    Args:
        rng_key: Key of all fits and draws.
        model: NumPyro model, without powers and scales of its likelihood. Its data are the rows of one plate, or
            vectors; they must be independent, given the latents, but for what ``groups`` and ``block`` say.
        method: From tempered model to guide, kernel or :class:`OnlineVI`: ``AutoNormal``, ``NUTS``,
            ``lambda model: nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi())``.
        *data: Arguments of the model.
        alphas: Increasing positive powers; ten from 1/64 to 1, evenly spaced in their logarithm, by default. An
            alpha that a criterion names without fits is added, and where nobody else needs fits it is by default
            the only one.
        criterion: From :mod:`numpyro_tempered.alpha`; ``safe_bayes()`` by default.
        diagnostics: Further scores to report: ``nt.alpha.held_out()``, ``nt.alpha.loo()``.
        plate: Name of the plate whose rows are the data, where there are several.
        groups: A label for each datum, ``(n,)``: data of one label depend on each other, as those of a patient, a
            school or an original with its copies. Scores are summed within groups, resamples are of whole groups,
            and SafeBayes predicts whole groups. At least d + 2 groups for d latents, better 5 (d + 2).
        block: For a series, in the order of time: how many successive data depend on each other, or ``"auto"`` to
            estimate it from the scores. Their variance is then that of Newey and West, resamples are of blocks,
            and SafeBayes keeps the order.
        coverage: Whether to check by 200 resamples of the rows what intervals at the chosen alpha cover, as
            :func:`numpyro_tempered.alpha.check_coverage` does with the same method; for guides and kernels. It
            takes 201 fits more, side by side, and so several times as long as a selection by the curvature.
        num_samples: Draws of each posterior on all data; of each chain under MCMC.
        num_refit_samples: Guides: draws of each posterior on a part of the data.
        num_steps: Guides: the most steps of each fit, as of :func:`fit_svi`. All alphas end together, where all
            have converged.
        tolerance: Guides: in nats, on the estimated distance of each ELBO from its optimum.
        loss: Guides: ELBO of NumPyro to optimise; by default that of :func:`fit_svi`.
        expectation: Guides: of the likelihood, such as ``nt.expectations.gauss_hermite(predictor="eta")``, for
            fits by natural gradients, as of :func:`fit_gaussian`, instead of stochastic ones.
        num_warmup: MCMC: steps of adaptation for each posterior.
        num_chains: MCMC: number of chains.
        chain_method: MCMC: ``"sequential"`` or ``"vectorized"``.
        coords: Coordinate values by dimension, of the chosen posterior.
        dims: Names of the event dimensions by variable.
        progress_bar: Whether to show steps or alphas, by tqdm; None: where they take some seconds.
        **kwargs: Keyword arguments of the model; those with the name of an argument above go by position, or by
            ``functools.partial``.

    Returns:
        An :class:`AlphaChoice`: the alpha, the fit at it, ArviZ data, and a sentence of advice.
        :func:`numpyro_tempered.table` turns the group into pandas.

    Raises:
        TypeError: If ``method`` is a guide or kernel already, or makes none; or ``criterion`` is no criterion.
        ValueError: If the criterion is one that must not choose; ``alphas``, ``groups`` or ``block`` are not as
            above; the model cannot be taken apart by rows, has powers already, or is not finite; a fit has not
            converged or chains have not mixed; or the criterion refuses, saying why.

    Warns:
        DependenceWarning: If rows repeat others exactly or the scores of successive rows are correlated, and
            neither ``groups`` nor ``block`` is given.

    References:
        GvO; LHW; Mat; SM19. Where risk and coverage part: MFFK. Other ways to choose: WM; HW.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> y = 2.0 * jnp.array([-1.0, 1.0] * 10)  # variance 4, where the model has 1
        >>> choice = nt.select_alpha(jax.random.key(0), model, AutoNormal, y, criterion=nt.alpha.magnitude())
        >>> print(f"{choice.alpha:.2f}")
        0.25
        >>> int(nt.table(choice)["selected"].sum())
        1
    """
    began, grid = (
        CLOCK.read(),
        check_alphas(DEFAULT_GRID if alphas is None else alphas, 1, "(0, inf)"),
    )
    criterion = safe_bayes() if criterion is None else criterion
    _check_criteria(criterion, diagnostics)
    options = _Options(
        check_guide_options(GuideOptions(num_steps, tolerance, loss, expectation)),
        check_sizes(Sizes(num_samples, num_refit_samples)),
        MCMCOptions(num_warmup, num_samples, num_chains, chain_method),
        progress_bar,
    )
    call = data, kwargs
    labels = axis_labels(call)
    same = {
        "alphas": grid,
        "num_samples": num_samples,
        "groups": groups,
        "block": block,
        "coverage": coverage,
    }
    data, kwargs = check_call(
        select_alpha, rng_key, model, method, data, kwargs, **same
    )
    model_key, method_key, *keys = jax.random.split(rng_key, 3 + len(diagnostics))
    task = Task(model, model_key, data, kwargs, plate, groups=groups, block=block)
    algorithm = build_method(method, task.model, online=True)
    estimate, powers = find_coverage(task)
    warn_of_dependence(task.rows, None if estimate is None else estimate.influence)
    judges = list(zip((criterion, *diagnostics), keys, strict=True))
    decisions: list[Decision] = []
    if criterion.plan is None and criterion.stream is None:
        decisions.append(
            _check_decision(criterion, criterion.decide(keys[0], task, grid, None))
        )
        judges = judges[1:]
        # What no criterion looks at is not fitted unless it is asked for.
        grid = np.union1d(
            grid if judges or alphas is not None else [], [decisions[0].alpha]
        )
    if isinstance(algorithm, OnlineVI):
        _check_streamed((judge for judge, _ in judges), coverage=coverage)
        streams = Streams(method_key, task, method, algorithm, grid)
        of_stream = grid, task.dependence, streams.losses
        decisions += [
            judge.stream(key, *of_stream)
            for judge, key in judges
            if judge.stream is not None
        ]
        fits = streams.fits(num_samples)
    else:
        plans = tuple(
            judge.plan(key, task) for judge, key in judges if judge.plan is not None
        )
        request = Request(grid, plans, any(judge.pointwise for judge, _ in judges))
        fits = _fit_grid(method_key, task, method, request, options)
        summaries = iter(fits.summaries)
        for judge, key in judges:
            summary = None if judge.plan is None else next(summaries)
            decisions.append(
                judge.decide(
                    key, task, grid, fits.pointwise if judge.pointwise else summary
                )
            )
    decision, fit_alphas = _check_decision(criterion, decisions[0]), grid
    columns = {
        name: column for each in decisions for name, column in each.columns.items()
    }
    columns |= posterior_columns(grid, fits.log_lik)
    if decision.alpha not in grid:
        # Between two alphas of the grid it gets a fit and a row of its own.
        fit_alphas = np.array([decision.alpha])
        fits = _fit_grid(
            jax.random.fold_in(method_key, 1),
            task,
            method,
            Request(fit_alphas, (), False),
            options,
        )
        grid, columns = insert_row(
            grid, columns, decision.alpha, posterior_columns(fit_alphas, fits.log_lik)
        )
    columns["selected"] = grid == decision.alpha
    fit, args, of_fit = fits.fit_at(fit_alphas.tolist().index(decision.alpha))
    if isinstance(fit, TemperedFit):
        fit = with_names(fit, select_alpha, model, call)
    posterior = to_inference_data(
        fit, *args, num_samples=num_samples, coords=coords, dims=dims, **of_fit
    )
    where = labels, coords or {}, dims or {}
    check = (
        _check_intervals(method_key, task, method, options, decision.alpha, where)
        if coverage
        else None
    )
    advice = join_advice(criterion, decision, powers, check)
    advise_cache("select_alpha", began)
    attrs = {
        "criterion": criterion.name,
        "aim": criterion.aim,
        "advice": advice,
        **decision.attrs,
    }
    return AlphaChoice(
        decision.alpha,
        fit,
        report(posterior, grid, columns, powers, check, attrs),
        advice,
        check,
    )


def _check_streamed(judges: Iterable[Criterion], *, coverage: bool) -> None:
    """Refuse criteria and checks that a stream cannot serve."""
    if coverage:
        raise ValueError(f"coverage=True: {STREAMS}")
    if names := [judge.name for judge in judges if judge.stream is None]:
        raise ValueError(
            f"the criteria {names} weigh the data, which a stream cannot: take a guide or a kernel."
        )


class _Options(NamedTuple):
    """The options of all methods."""

    guides: GuideOptions
    sizes: Sizes
    mcmc: MCMCOptions
    progress_bar: ProgressBar


def _fit_grid(
    rng_key: Array, task: Task, method: Method, request: Request, options: _Options
) -> Fits:
    """The posteriors of a request, by a guide or a kernel."""
    # A guide is set up once, by the program that fits it.
    algorithm = build_method(
        method, temper(task.model, float(request.alphas[-1])), online=True
    )
    with progress_bars(options.progress_bar):
        if isinstance(algorithm, MCMCKernel):
            return sample_all(rng_key, task, method, algorithm, request, options.mcmc)
        return fit_all(
            rng_key,
            task,
            Recipe(method, algorithm),
            request,
            options.guides,
            options.sizes,
        )


def _check_intervals(
    rng_key: Array,
    task: Task,
    method: Method,
    options: _Options,
    alpha: float,
    names: tuple[Labels, Coords, Dims],
) -> CoverageCheck:
    """What intervals at the chosen alpha cover in resamples."""
    chains = options.mcmc._replace(
        num_samples=NUM_DRAWS, num_chains=1, chain_method="sequential"
    )
    design = Design(
        alpha, np.asarray(LEVELS), NUM_BOOTSTRAP, NUM_DRAWS, options.guides, chains
    )
    labels, coords, dims = names
    with progress_bars(options.progress_bar):
        return coverage_of(
            jax.random.fold_in(rng_key, 2),
            task,
            method,
            design,
            labels,
            coords,
            dims=dims,
        )


def _check_criteria(criterion: Criterion, diagnostics: Sequence[Criterion]) -> None:
    for value in (criterion, *diagnostics):
        if isinstance(value, int | float):
            raise TypeError(
                f"criterion = {value!r} is a power already: there is nothing to choose. Fit at it, by "
                f"nt.fit_svi(..., alpha={value!r}) or nt.temper(model, alpha={value!r})."
            )
        if not isinstance(value, Criterion):
            raise TypeError(
                f"a criterion is what nt.alpha.safe_bayes() and others return, got {value!r}: call the function."
            )
    if criterion.refusal is not None:
        raise ValueError(criterion.refusal)
    for value in diagnostics:
        if value.refusal is None:
            raise ValueError(
                f"{value.name} chooses alpha, and is no diagnostic: pass it as criterion."
            )


def _check_decision(criterion: Criterion, decision: Decision) -> Decision:
    if not (np.isfinite(decision.alpha) and decision.alpha > 0):
        raise ValueError(
            f"{criterion.name} names alpha = {decision.alpha}, not a positive number: take another."
        )
    return decision


def report(
    posterior: ArviZData,
    grid: np.ndarray,
    columns: Columns,
    powers: Powers | str,
    check: CoverageCheck | None,
    attrs: dict[str, object],
) -> ArviZData:
    """The posterior at the chosen alpha with the groups along the grid and by parameter in front."""
    attrs["selected"] = alpha = float(grid[columns["selected"]][0])
    if check is not None:
        posterior = with_group(posterior, "coverage", group(check.data, "coverage"), {})
    if not isinstance(powers, str):
        by_parameter = powers_dataset(powers, alpha, attrs)
        posterior = with_group(posterior, "calibrated_powers", by_parameter, {})
    selection = dataset(
        columns,
        coords={"alpha": grid.tolist()},
        dims={name: ["alpha"] for name in columns},
        attrs={**posterior.attrs, **attrs},
    )
    return with_group(posterior, "alpha_selection", selection, attrs)


def join_advice(
    criterion: Criterion,
    decision: Decision,
    powers: Powers | str,
    check: CoverageCheck | None,
) -> str:
    """The advice of a criterion, with what the curvature and resamples say about coverage."""
    sentences = [decision.advice]
    if isinstance(powers, str):
        sentences.append(
            f"Whether its intervals cover what they say is not known: {powers}"
        )
    elif criterion.aim != "coverage":
        sentences.append(advise_on_coverage(decision.alpha, powers))
    if check is not None:
        sentences.append(check.advice)
    return " ".join(sentences)


def posterior_columns(grid: np.ndarray, log_lik: np.ndarray) -> Columns:
    """Columns from the draws of the log-likelihood of each posterior, ``(A, C, S)``."""
    log_lik = doubles(log_lik)
    return {
        "expected_log_lik": log_lik.mean(axis=(1, 2)),
        "expected_log_lik_se": np.array(
            [mean_se(draws, False)[1] for draws in log_lik]
        ),
        "effective_parameters": 2.0 * grid**2 * log_lik.var(axis=(1, 2), ddof=1),
    }


def insert_row(
    grid: np.ndarray, columns: Columns, alpha: float, row: Columns
) -> tuple[np.ndarray, Columns]:
    """The grid and its columns with a row for another alpha, NaN where the row has no value."""
    grid = np.append(grid, alpha)
    order = np.argsort(grid)
    return grid[order], {
        name: np.append(v, row.get(name, np.nan))[order] for name, v in columns.items()
    }
