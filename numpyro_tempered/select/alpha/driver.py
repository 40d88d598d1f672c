"""The choice of alpha: checks, fits along a grid, and the report."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.elbo import ELBO
from numpyro.infer.mcmc import MCMCKernel

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.typing import Array, ArrayLike, Model
from numpyro_tempered.gaussian.families import family_of
from numpyro_tempered.handlers.likelihood import plain_arrays
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.report.arviz import Coords, Dims
from numpyro_tempered.select.alpha.base import AlphaChoice, Criterion, Fits, Plan, Verdict
from numpyro_tempered.select.alpha.mcmc import sample_all
from numpyro_tempered.select.alpha.online import run_all
from numpyro_tempered.select.alpha.report import report, summary
from numpyro_tempered.select.alpha.safe_bayes import safe_bayes
from numpyro_tempered.select.alpha.svi import fit_all
from numpyro_tempered.select.alpha.task import Task

NUM_ALPHAS, LEAST = 10, 2.0**-6


def select_alpha(
    rng_key: Array,
    model: Model,
    method: Callable[[Model], Any],
    *data: Any,
    alphas: ArrayLike | None = None,
    criterion: Criterion | None = None,
    diagnostics: Sequence[Criterion] = (),
    plate: str | None = None,
    num_samples: int = 1000,
    num_refit_samples: int = 200,
    num_steps: int = 3000,
    num_refit_steps: int | None = None,
    optim: Any = None,
    loss: ELBO | None = None,
    num_warmup: int = 500,
    num_chains: int = 1,
    chain_method: str = "sequential",
    coords: Coords | None = None,
    dims: Dims | None = None,
    **kwargs: Any,
) -> AlphaChoice:
    r"""Choose the power alpha of the likelihood, by a criterion whose aim is stated.

    ====================== ========== ========================================================================
    criterion              aim        chooses the alpha ...
    ====================== ========== ========================================================================
    ``safe_bayes()``       risk       whose posteriors on the first data predict the next best, draw by draw
    ``lyddon()``           coverage   at which the posterior's spread is that of the minimiser's bootstrap
    ``bootstrap_fisher()`` coverage   whose posterior is nearest to the bootstrap in Fisher divergence
    ``gpc(level)``         coverage   whose credible sets hold the minimiser in that share of resamples
    ``coarsening(a)``      robustness 1/(1 + n/a): right up to a distortion that n = a would not show
    ``theory_default()``   risk       1/2, at which the bound on it is least
    ====================== ========== ========================================================================

    Risk and coverage are different aims, and give different alphas by design. None of the criteria is the
    evidence or the ELBO, whose derivative in alpha has the sign of the log-likelihood and so of the units of the
    data, nor the predictive density of left-out data; :func:`numpyro_tempered.alpha.held_out` and
    :func:`numpyro_tempered.alpha.loo` may be looked at among the ``diagnostics``.

    ``method`` makes the posterior. A guide factory fits all alphas by SVI under one ``vmap``, in one compiled
    loop, each refit started at the fit before. An MCMC kernel factory samples them by one compiled program,
    likewise. A factory of :class:`OnlineVI` runs all alphas side by side over the stream, whose own losses are
    SafeBayes'.

    The group ``alpha_selection`` of the result, with dim ``alpha``, has

    - ``criterion``, least at the best, and ``criterion_se``, where the criterion has them; NaN at an alpha
      between those of the grid, which a criterion may choose by interpolation,
    - ``expected_log_lik``, the untempered E[log L] on all data, its Monte Carlo standard error
      ``expected_log_lik_se``,
    - ``effective_parameters``, 2 α² Var[log L], which is d where the data determine d parameters,
    - ``selected``, true at the chosen alpha, and the columns of the diagnostics.

    The other groups are those of the posterior at the chosen alpha.

    Args:
        rng_key: Key of the whole.
        model: NumPyro model, without powers and scales of its likelihood. Its data are the rows of one plate, or
            vectors; they are taken for exchangeable, given the latents.
        method: From tempered model to guide, kernel or :class:`OnlineVI`: ``AutoNormal``, ``NUTS``,
            ``lambda model: nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi())``.
        *data: Arguments of the model.
        alphas: Increasing positive powers; ten from 1/64 to 1, evenly spaced in their logarithm, by default. A
            criterion that names an alpha outright has it added.
        criterion: From :mod:`numpyro_tempered.alpha`; ``safe_bayes()`` by default.
        diagnostics: Scores to be reported beside: ``nt.alpha.held_out()``, ``nt.alpha.loo()``.
        plate: Name of the plate whose rows are the data, where there are several.
        num_samples: Draws of each posterior on all data; of each chain under MCMC.
        num_refit_samples: Draws of each posterior on a part of the data, under SVI.
        num_steps: SVI: steps of the fits to all data.
        num_refit_steps: SVI: steps of each refit to a part of them; ``num_steps`` by default.
        optim: SVI: NumPyro or optax optimiser; that of :func:`fit_svi` by default.
        loss: SVI: ELBO of NumPyro to optimise; ``Trace_ELBO`` with ten particles by default.
        num_warmup: MCMC: steps of adaptation for each posterior.
        num_chains: MCMC: number of chains.
        chain_method: MCMC: ``"sequential"`` or ``"vectorized"``.
        coords: Coordinate values by dimension, of the chosen posterior.
        dims: Names of the event dimensions by variable.
        **kwargs: Keyword arguments of the model; those with the name of an argument above go by position, or by
            ``functools.partial``.

    Returns:
        An :class:`AlphaChoice`: the alpha, the fit at it, ArviZ data, and a sentence of advice.
        :func:`numpyro_tempered.alpha_table` turns the group into pandas.

    Raises:
        TypeError: If ``method`` is a guide or kernel already, or makes none; or ``criterion`` is no criterion.
        ValueError: If the criterion is one that must not choose; ``alphas`` are not as above; the model cannot be
            taken apart by rows, has powers already, or is not finite; or the criterion refuses, saying why.

    Warns:
        UserWarning: If a loss still falls at its end, or chains have not mixed.

    References:
        GvO; LHW; Mat; SM19; MD19; AR.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> y = 2.0 * jnp.array([-1.0, 1.0] * 10)  # variance 4, where the model has 1
        >>> choice = nt.select_alpha(
        ...     jax.random.key(0), model, AutoNormal, y, criterion=nt.alpha.lyddon(), num_steps=500
        ... )
        >>> print(f"{choice.alpha:.2f}")
        0.25
        >>> int(nt.alpha_table(choice.data)["selected"].sum())
        1
    """
    grid = _check_alphas(alphas)
    criterion = safe_bayes() if criterion is None else criterion
    _check_criteria(criterion, diagnostics)
    if num_samples < 4 or num_refit_samples < 4:
        raise ValueError(
            f"num_samples and num_refit_samples must be at least 4, got {num_samples, num_refit_samples}."
        )
    data, kwargs = plain_arrays((data, kwargs))
    model_key, method_key, criterion_key, *keys = jax.random.split(rng_key, 3 + len(diagnostics))
    task = Task(model, model_key, data, kwargs, plate)
    built = _build(method, task, float(grid[-1]))
    verdict = None
    if criterion.plan is None and criterion.stream is None:
        verdict = criterion.decide(criterion_key, task, grid, None)
        _check_verdict(criterion, verdict)
        grid = np.union1d(grid, [verdict.alpha])
    if isinstance(built, OnlineVI):
        if diagnostics:
            raise ValueError(
                "an online rule has no posteriors on reweighted data for the diagnostics: take a guide."
            )
        if criterion.plan is not None and criterion.stream is None:
            raise ValueError(
                f"{criterion.name} needs posteriors on reweighted data, which a stream does not have: take a "
                "guide or a kernel."
            )
        fits, verdict = _stream(
            method_key, criterion_key, task, method, built, grid, criterion, verdict, num_samples
        )
    else:
        refit_steps = num_steps if num_refit_steps is None else num_refit_steps

        def fit(key: Array, alphas: np.ndarray, plans: Sequence[Plan], pointwise: bool) -> Fits:
            # A guide is set up once, by the program that fits it.
            built = _build(method, task, float(alphas[-1]))
            if isinstance(built, MCMCKernel):
                return sample_all(
                    key,
                    task,
                    method,
                    built,
                    alphas,
                    plans,
                    pointwise=pointwise,
                    num_warmup=num_warmup,
                    num_samples=num_samples,
                    num_chains=num_chains,
                    chain_method=chain_method,
                )
            return fit_all(
                key,
                task,
                method,
                built,
                alphas,
                plans,
                pointwise=pointwise,
                num_steps=num_steps,
                num_refit_steps=refit_steps,
                num_samples=num_samples,
                num_refit_samples=num_refit_samples,
                optim=optim,
                loss=loss,
            )

        asked = list(zip((criterion, *diagnostics), (criterion_key, *keys), strict=True))
        planned = [(c, k) for c, k in asked if c.plan is not None]
        plans = [c.plan(k, task) for c, k in planned]  # type: ignore[misc]
        fits = fit(method_key, grid, plans, any(c.pointwise for c in diagnostics))
        kept = {id(c): part for (c, _), part in zip(planned, fits.reduced, strict=True)}
        if verdict is None:
            verdict = criterion.decide(criterion_key, task, grid, kept[id(criterion)])
            _check_verdict(criterion, verdict)
        for diagnostic, key in asked[1:]:
            found = fits.pointwise if diagnostic.pointwise else kept[id(diagnostic)]
            verdict.columns.update(diagnostic.decide(key, task, grid, found).columns)
    columns = {**verdict.columns, **summary(grid, fits.log_lik)}
    if verdict.alpha in grid:
        chosen = fits.fit_at(int(np.flatnonzero(grid == verdict.alpha)[0]))
    else:
        # Between two alphas of the grid: a fit of its own, which has its row too.
        own = fit(jax.random.fold_in(method_key, 1), np.array([verdict.alpha]), [], False)
        chosen = own.fit_at(0)
        extra = summary(np.array([verdict.alpha]), own.log_lik)
        columns = {name: np.append(v, extra.get(name, np.nan)) for name, v in columns.items()}
        grid = np.append(grid, verdict.alpha)
        order = np.argsort(grid)
        grid, columns = grid[order], {name: v[order] for name, v in columns.items()}
    columns["selected"] = grid == verdict.alpha
    return report(task, criterion, verdict, grid, columns, chosen, coords, dims, num_samples)


def _check_alphas(alphas: ArrayLike | None) -> np.ndarray:
    if alphas is None:
        return np.geomspace(LEAST, 1.0, NUM_ALPHAS)
    grid = np.asarray(alphas, dtype=np.float64)
    if grid.ndim != 1 or grid.size == 0 or not np.all(np.isfinite(grid)) or grid.min() <= 0:
        raise ValueError(f"alphas must be a list of positive finite powers, got {alphas!r}.")
    if np.any(np.diff(grid) <= 0):
        raise ValueError(f"alphas must increase from each to the next, got {grid}.")
    return grid


def _check_criteria(criterion: Any, diagnostics: Sequence[Any]) -> None:
    for value in (criterion, *diagnostics):
        if not isinstance(value, Criterion):
            raise TypeError(
                f"a criterion is a value such as nt.alpha.safe_bayes(), got {value!r}: functions are to be "
                "called."
            )
    if criterion.refusal is not None:
        raise ValueError(criterion.refusal)
    for value in diagnostics:
        if value.refusal is None:
            raise ValueError(f"{value.name} chooses alpha, and is no diagnostic: pass it as criterion.")


def _check_verdict(criterion: Criterion, verdict: Verdict) -> None:
    if not (np.isfinite(verdict.alpha) and verdict.alpha > 0):
        raise ValueError(
            f"{criterion.name} names the alpha {verdict.alpha}, which is not a positive number: the data do not "
            "determine one by it."
        )


def _build(method: Any, task: Task, alpha: float) -> Any:
    advice = (
        "Pass a class, or a callable from model to guide, kernel or OnlineVI such as `lambda model: NUTS(model)`."
    )
    if isinstance(method, AutoGuide | MCMCKernel | OnlineVI):
        raise TypeError(f"this {type(method).__name__} is built already, for one alpha. {advice}")
    if not callable(method):
        raise TypeError(f"method must be a callable, got {method!r}. {advice}")
    try:
        built = method(task.model)
    except Exception as error:
        raise TypeError(f"method failed on the model. {advice}") from error
    if isinstance(built, OnlineVI):
        return built
    built = method(temper(task.model, alpha))
    if not callable(built) and not isinstance(built, MCMCKernel):
        raise TypeError(f"method returned {type(built).__name__}, neither guide, kernel nor OnlineVI. {advice}")
    return built


def _stream(
    method_key: Array,
    criterion_key: Array,
    task: Task,
    method: Any,
    online: OnlineVI,
    grid: np.ndarray,
    criterion: Criterion,
    verdict: Verdict | None,
    num_samples: int,
) -> tuple[Fits, Verdict]:
    """The grid on a stream, with the posteriors of its own order at the end."""

    def run(order: np.ndarray) -> Any:
        return run_all(method_key, task.original, method, online, grid, order, task.args, task.kwargs, task.plate)

    whole = run(np.arange(task.num_data))
    if verdict is None:
        verdict = criterion.stream(criterion_key, grid, task.num_data, run)  # type: ignore[misc]

    unpack = whole.fit_at(0)[0].guide._unpack_latent

    @jax.jit
    def losses(flat: Array) -> Array:
        return map_batches(lambda theta: jnp.sum(task.losses(unpack(theta))), flat, 64)

    def log_lik(k: int) -> np.ndarray:
        _, state = whole.fit_at(k)
        flat = family_of(state.posterior).sample(
            jax.random.fold_in(method_key, k), state.posterior, (num_samples,)
        )
        return -np.asarray(losses(flat), np.float64)[None]

    return Fits([], np.stack([log_lik(k) for k in range(len(grid))]), None, whole.fit_at), verdict
