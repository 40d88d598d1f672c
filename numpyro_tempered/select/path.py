"""The path of tempered posteriors from the prior upwards."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.elbo import ELBO
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import log_density

from numpyro_tempered.core import (
    CLOCK,
    Array,
    ArrayLike,
    Columns,
    Guide,
    Model,
    Params,
    ProgressBar,
    advise_cache,
    check_count,
    doubles,
    map_batches,
    progress_bars,
    progress_within,
    run_program,
    runs_models,
    warn_caller,
)
from numpyro_tempered.handlers.arguments import check_call
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.settle import ConvergenceWarning
from numpyro_tempered.infer.svi import NUM_STEPS
from numpyro_tempered.report.arviz import Coords, Dims, assemble, dataset, versions
from numpyro_tempered.report.draws import name_of, plate_dims
from numpyro_tempered.select.alpha.guides import (
    GuideOptions,
    build_fitter,
    check_guide_options,
    draw,
    list_alphas,
    shortfall,
    unconverged,
)
from numpyro_tempered.select.alpha.mcmc import (
    ChainSampler,
    MCMCOptions,
    divergence_fields,
    warn_if_not_mixed,
)
from numpyro_tempered.select.alpha.model_data import (
    CountsRuns,
    Method,
    build_method,
    check_alphas,
    check_powers,
)
from numpyro_tempered.select.evidence import check_finite, mcmc_columns, svi_columns

DEFAULT_GRID = np.linspace(0.0, 1.0, 21) ** 5


class _Path(NamedTuple):
    """The posteriors along a path; axes ``(chain, draw, alpha, ...)``, or ``(alpha, ...)``.

    Attributes:
        columns: The table, ``(alpha,)`` each.
        values: Arrays by latent site.
        stats: Of each draw: ``log_lik``, and ``diverging`` where the kernel has it.
        variational: Losses ``(alpha, step)`` of SVI; empty for MCMC.
    """

    columns: Columns
    values: Columns
    stats: Columns
    variational: Columns


@runs_models
def temper_path(
    rng_key: Array,
    model: Model,
    method: Method,
    *args: object,
    alphas: ArrayLike | None = None,
    num_samples: int = 1000,
    num_warmup: int = 500,
    num_chains: int = 1,
    chain_method: str = "sequential",
    num_steps: int = NUM_STEPS,
    tolerance: float = 0.05,
    loss: ELBO | None = None,
    coords: Coords | None = None,
    dims: Dims | None = None,
    progress_bar: ProgressBar = None,
    **kwargs: object,
) -> Any:
    r"""The tempered posteriors of a grid of alphas, with the evidence and the expected log-likelihood of each.

    ``method`` makes the posterior: a guide factory fits all alphas side by side, as :func:`fit_svi` does; an MCMC
    kernel factory samples them one after the other by one compiled program, each started at the last
    draws of the alpha below. At alpha = 0 the draws are exact where the prior can be sampled.

    With log L the log-likelihood, :math:`E_\alpha` the mean over the posterior
    :math:`\pi_\alpha \propto L^\alpha \pi` and :math:`Z_\alpha = \int L^\alpha d\pi`,

    .. math:: \log Z_\alpha = \int_0^\alpha E_a[\log L]\, da, \qquad
        \frac{d}{d\alpha} E_\alpha[\log L] = \mathrm{Var}_\alpha[\log L].

    The result is ArviZ data. Group ``tempered_path``, with dim ``alpha``, always has
    ``expected_log_lik`` (untempered) with its standard error ``expected_log_lik_se``, ``var_log_lik`` and ``kl``,
    the divergence from the prior. MCMC adds

    - ``log_z``: by stepping stones, the sum of :math:`\log E_{a_i}[L^{a_{i+1} - a_i}]`, and its Monte Carlo
      standard error ``log_z_se``, which counts the autocorrelation of the draws. It has no discretisation error.
    - ``log_z_integral``: the integral by the trapezoidal rule, corrected by the variances at the ends of each
      interval, from the same draws, and its Monte Carlo standard error ``log_z_integral_se``, which knows nothing
      of the grid. The first interval, from 0, is a stepping stone too: :math:`E_0[\log L]` may be minus infinity.
      An increment is clipped to its Riemann sums. Where it is far from ``log_z`` the grid is coarse, and the
      standard error of either too small: take a finer one.
    - ``log_z_left``, ``log_z_right``: Riemann sums. The integrand increases, so they lie below and above
      the integral, up to Monte Carlo error.
    - ``log_z_trapezoid``: the rule without correction.
    - ``ess`` of log L, ``r_hat``, the largest split R-hat of log L and the latents, and, under HMC and NUTS,
      the number of ``divergences``.

    SVI adds

    - ``elbo`` with every constant and its Monte Carlo standard error ``elbo_se``.
    - ``elbo_integral``: the ELBO at 0 plus the integral of ``expected_log_lik`` by the trapezoidal rule, its
      standard error ``elbo_integral_se`` and its Riemann sums ``elbo_left`` and ``elbo_right``. At the optimum of
      the guide's family the derivative of the ELBO is :math:`E_q[\log L]` (the envelope theorem), so this
      is a second estimate of ``elbo``, which checks the fits; it is not another bound.

    The other groups are ``posterior`` (dims chain, draw, alpha, then the site's own), ``sample_stats`` with
    ``log_lik`` of each draw, ``observed_data``, and by SVI ``variational`` with the losses.

    **Never maximise log Z or the ELBO over alpha.** The derivative is :math:`E_\alpha[\log L]`, whose sign
    depends on the units of the data: of the same data the best alpha may be 0 in millimetres and infinite
    in metres. log Z at one alpha compares models; it does not compare alphas.

    The likelihood is that of ``model``, with its own powers and scales; powers multiply.
    ``temper(model, factors=...)`` says whether factors belong to it. L is conditional on all latents, also on
    those of single data. ``log_z`` is relative to the prior; where a factor or a reparameterisation adds terms to
    the prior, to their normalised product.

    Args:
        rng_key: Key of the path.
        model: NumPyro model.
        method: From tempered model to guide or kernel: ``AutoNormal``, ``NUTS``,
            ``lambda model: NUTS(model, target_accept_prob=0.9)``.
        *args: Arguments of the model.
        alphas: Increasing powers, at least two; 0 is prepended if it is not the first. By default
            (i/20)^5 for i = 0, ..., 20, which are dense near 0, where E[log L] changes fastest.
        num_samples: Draws at each alpha; of each chain under MCMC.
        num_warmup: MCMC: steps of adaptation at each alpha.
        num_chains: MCMC: number of chains.
        chain_method: MCMC: ``"sequential"`` or ``"vectorized"``.
        num_steps: SVI: the most steps, as of :func:`fit_svi`: all alphas end together, where all have converged.
        tolerance: SVI: in nats, on the estimated distance of each ELBO from its optimum.
        loss: SVI: ELBO of NumPyro to optimise; by default that of :func:`fit_svi`.
        coords: Coordinate values by dimension.
        dims: Names of the event dimensions by variable, without chain, draw and alpha.
        progress_bar: Whether to show steps or alphas, by tqdm; None: where they take some seconds.
        **kwargs: Keyword arguments of the model.

    Returns:
        ``arviz.InferenceData`` under ArviZ 0.x, ``xarray.DataTree`` under 1.x. :func:`table` turns the
        group ``tempered_path`` into pandas.

    Raises:
        TypeError: If ``method`` is a guide or kernel already, or returns neither, or an ensemble kernel.
        ValueError: If ``alphas`` are not as above; the model observes nothing, has params, a subsampling
            plate, an improper prior or ``local_plates``; its log-likelihood is not finite at a draw, where
            MCMC allows a likelihood of 0 at alpha = 0; the guide is a point or runs its model; or the kernel
            leaves latents out.

    Warns:
        ConvergenceWarning: If a fit has not converged.
        UserWarning: If E[log L] falls along the path, or R-hat exceeds 1.1.

    References:
        N. Friel, M. Hurn, J. Wyse, *Improving power posterior estimation of statistical evidence*, Statistics
        and Computing 2014; W. Xie et al., *Improving marginal likelihood estimation for Bayesian
        phylogenetic model selection*, Systematic Biology 2011.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> path = nt.temper_path(jax.random.key(0), model, AutoNormal, jnp.ones(6), alphas=[0.0, 0.5, 1.0])
        >>> nt.table(path)["expected_log_lik"].is_monotonic_increasing
        True
    """
    began, grid = (
        CLOCK.read(),
        check_alphas(DEFAULT_GRID if alphas is None else alphas, 2, "[0, inf)"),
    )
    grid = grid if grid[0] == 0 else np.concatenate([[0.0], grid])
    check_count(num_samples, "num_samples", 4)
    args, kwargs = check_call(temper_path, rng_key, model, method, args, kwargs)
    key, model_key = jax.random.split(rng_key)
    data = Target(CountsRuns(model), args, kwargs, model_key)
    check_powers(data, dims)
    # Starting values at the largest alpha serve all.
    algorithm = build_method(method, temper(data.model, float(grid[-1])))
    if isinstance(algorithm, MCMCKernel):
        chains = MCMCOptions(num_warmup, num_samples, num_chains, chain_method)
        with progress_bars(progress_bar):
            path = _sample(
                key,
                ChainSampler(data, method, chains),
                grid,
                divergence_fields(algorithm, data),
            )
    else:
        options = check_guide_options(GuideOptions(num_steps, tolerance, loss, None))
        with progress_bars(progress_bar):
            path = _fit(key, data, algorithm, grid, num_samples, options)
    advise_cache("temper_path", began)
    return _report(path, data, grid, name_of(algorithm), coords or {}, dims or {})


def _fit(
    rng_key: Array,
    data: Target,
    guide: Guide,
    grid: np.ndarray,
    num_samples: int,
    options: GuideOptions,
) -> _Path:
    """Fit the guide at every alpha, side by side, and draw from each fit."""
    start_key, fit_key, key = jax.random.split(rng_key, 3)
    inputs = (jax.device_put(grid),)
    fitter = build_fitter(
        start_key, data, guide, lambda alpha: temper(data.model, alpha), inputs, options
    )
    fitted = fitter.fit(fit_key, inputs)

    def draws(keys: Array, params: Params) -> tuple[Params, Array, Array]:
        def one(part: tuple[Array, Params]) -> tuple[Params, Array, Array]:
            def of_key(key: Array) -> tuple[Params, Array, Array]:
                values, log_q = draw(key, data, guide, part[1])
                log_prior = log_density(
                    temper(data.seeded, 0.0), data.args, data.kwargs, values
                )[0]
                return values, data.log_lik(values), log_prior - log_q

            return map_batches(of_key, jax.random.split(part[0], num_samples), 64)

        return jax.lax.map(one, (keys, params))

    values, log_lik, log_ratio = jax.device_get(
        run_program(draws, jax.random.split(key, len(grid)), fitted.params)
    )
    finite = np.all(np.isfinite(log_ratio), axis=1)
    if not np.all(finite):
        raise ValueError(
            f"the fits at alpha = {list_alphas(grid[~finite])} ended in values that are not finite: look for NaN "
            "in the data, or give the guide an init_loc_fn."
        )
    if np.any(bad := unconverged(fitted.evidence)):
        warn_caller(
            f"the fits at alpha = {list_alphas(grid[bad])} have not converged "
            f"({shortfall(fitted.evidence[int(np.flatnonzero(bad)[0])])}): take a larger num_steps, or another "
            "guide or parameterisation.",
            ConvergenceWarning,
        )
    # From (alpha, draw, ...) to (chain, draw, alpha, ...).
    values = {name: np.swapaxes(value, 0, 1)[None] for name, value in values.items()}
    log_lik, log_ratio = (doubles(part).T[None] for part in (log_lik, log_ratio))
    check_finite(grid, log_lik, at_zero=False)
    columns = svi_columns(grid, log_lik, log_ratio)
    return _Path(columns, values, {"log_lik": log_lik}, {"loss": fitted.losses})


def _sample(
    rng_key: Array, sampler: ChainSampler, grid: np.ndarray, fields: tuple[str, ...]
) -> _Path:
    """Sample each alpha from the last draws of the one below."""
    data, options = sampler.data, sampler.options

    def run(
        key: Array, alpha: ArrayLike, start: object
    ) -> tuple[tuple[dict, dict], object]:
        chains = sampler.run(key, temper(data.model, alpha), start, fields)
        log_lik = jax.lax.map(
            lambda chain: map_batches(data.log_lik, chain, 64), chains.values
        )
        return (chains.values, {"log_lik": log_lik, **chains.fields}), chains.last

    program = jax.jit(run)
    keys = jax.random.split(rng_key, len(grid))
    if data.prior_is_exact:
        shape = (options.num_chains, options.num_samples)
        prior_keys = jax.random.split(keys[0], shape)
        draw = jax.jit(
            lambda k: jax.lax.map(
                lambda chain: map_batches(data.draw_prior, chain, 64), k
            )
        )
        values, log_lik = draw(prior_keys)
        check_finite(grid[:1], np.asarray(log_lik)[..., None], at_zero=True)
        first = (
            values,
            {"log_lik": log_lik, **{name: jnp.zeros(shape, bool) for name in fields}},
        )
        start = jax.jit(jax.vmap(data.unconstrain))(_last_possible(values, log_lik))
        start = (
            start
            if options.num_chains > 1
            else jax.tree.map(lambda value: value[0], start)
        )
    else:
        # A concrete 0 leaves the likelihood out, gradients and all.
        first, start = jax.jit(lambda key: run(key, 0.0, None))(keys[0])
    path = [first]
    with progress_within(len(grid) - 1, "alphas") as bar:
        for key, alpha in zip(keys[1:], grid[1:], strict=True):
            draws, start = program(key, jnp.asarray(alpha), start)
            path.append(draws)
            jax.block_until_ready(start)
            bar.update()
    values, stats = jax.tree.map(lambda *parts: np.stack(parts, axis=2), *path)
    stats["log_lik"] = stats["log_lik"].astype(np.float64)
    check_finite(grid, stats["log_lik"], at_zero=data.prior_is_exact)
    columns = mcmc_columns(grid, values, stats, data.prior_is_exact)
    warn_if_not_mixed(
        grid,
        columns["expected_log_lik"],
        columns["expected_log_lik_se"],
        columns["r_hat"],
    )
    return _Path(columns, values, stats, {})


def _last_possible(values: Params, log_lik: Array) -> Params:
    """The last draw of each chain whose likelihood is not 0; the last of all where there is none."""
    possible = np.isfinite(log_lik)
    last = np.where(
        possible.any(axis=1),
        possible.shape[1] - 1 - np.argmax(possible[:, ::-1], axis=1),
        -1,
    )
    return {name: value[np.arange(len(last)), last] for name, value in values.items()}


def _report(
    path: _Path, data: Target, grid: np.ndarray, method: str, coords: Coords, dims: Dims
) -> Any:
    """The path as ArviZ data."""
    attrs = {
        "algorithm": "svi" if path.variational else "mcmc",
        "method": method,
        **versions(),
    }
    plates = plate_dims(
        data.trace, {name: value.shape[3:] for name, value in path.values.items()}, dims
    )
    event_dims = {
        name: list(
            {**plates, **dims}.get(name)
            or [f"{name}_dim_{i}" for i in range(value.ndim - 3)]
        )
        for name, value in path.values.items()
    }
    plates |= plate_dims(
        data.trace,
        {name: np.shape(value) for name, value in data.observed.items()},
        dims,
    )
    groups: dict[str, tuple[Mapping[str, ArrayLike], Dims]] = {
        "tempered_path": (path.columns, {name: ["alpha"] for name in path.columns}),
        "posterior": (
            path.values,
            {name: ["alpha", *names] for name, names in event_dims.items()},
        ),
        "sample_stats": (path.stats, {name: ["alpha"] for name in path.stats}),
        "observed_data": (
            data.observed,
            {k: v for k, v in {**plates, **dims}.items() if k in data.observed},
        ),
        "variational": (
            path.variational,
            {name: ["alpha", "step"] for name in path.variational},
        ),
    }
    along = {**coords, "alpha": grid.tolist()}
    datasets = {
        name: dataset(
            values,
            ("chain", "draw") if name in ("posterior", "sample_stats") else (),
            along,
            names,
            attrs,
        )
        for name, (values, names) in groups.items()
    }
    return assemble(datasets, attrs)
