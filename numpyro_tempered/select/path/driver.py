"""The driver of a tempered path: checks, the two methods, and the report."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.elbo import ELBO
from numpyro.infer.mcmc import MCMCKernel

from numpyro_tempered.core.typing import Array, ArrayLike, Guide, Model
from numpyro_tempered.handlers.likelihood import plain_arrays
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.report.arviz import Coords, Dims, assemble, dataset, group, group_names, versions
from numpyro_tempered.select.path.mcmc import sample_path
from numpyro_tempered.select.path.problem import Problem, name_of
from numpyro_tempered.select.path.svi import fit_path

NUM_INTERVALS, POWER = 20, 5


def temper_path(
    rng_key: Array,
    model: Model,
    method: Callable[[Model], Guide | MCMCKernel],
    *args: Any,
    alphas: ArrayLike | None = None,
    num_samples: int = 1000,
    num_warmup: int = 500,
    num_chains: int = 1,
    chain_method: str = "sequential",
    num_steps: int = 3000,
    optim: Any = None,
    loss: ELBO | None = None,
    coords: Coords | None = None,
    dims: Dims | None = None,
    **kwargs: Any,
) -> Any:
    r"""The tempered posteriors of a grid of alphas, with the evidence and the expected log-likelihood of each.

    ``method`` makes the posterior: a guide factory fits each alpha by SVI, all in one compiled ``vmap``; an
    MCMC kernel factory samples them one after the other by one compiled program, each started at the last
    draws of the alpha below. At alpha = 0 the draws are exact where the prior can be sampled.

    With log L the log-likelihood, :math:`E_\alpha` the mean over the posterior
    :math:`\pi_\alpha \propto L^\alpha \pi` and :math:`Z_\alpha = \int L^\alpha d\pi`,

    .. math:: \log Z_\alpha = \int_0^\alpha E_a[\log L]\, da, \qquad
        \frac{d}{d\alpha} E_\alpha[\log L] = \mathrm{Var}_\alpha[\log L].

    The result is ArviZ data. Group ``tempered_path``, with dim ``alpha``, has by either method
    ``expected_log_lik`` (untempered) with its standard error ``expected_log_lik_se``, ``var_log_lik`` and ``kl``,
    the divergence from the prior. By MCMC further

    - ``log_z``: the integral by the trapezoidal rule, corrected by the variances at the ends of each interval,
      and its Monte Carlo standard error ``log_z_se``, which counts the autocorrelation of the draws. The first
      interval, from 0, is a stepping stone instead: :math:`E_0[\log L]` may be minus infinity. An increment
      outside of its Riemann sums is cut back to them.
    - ``log_z_left``, ``log_z_right``: Riemann sums. As the integrand increases they lie below and above
      the integral, up to Monte Carlo error: the bracket of the grid.
    - ``log_z_trapezoid``: the rule without correction, whose distance to ``log_z`` shows the size of the
      discretisation error. Where that matters take a finer grid.
    - ``log_z_stones``: stepping stones, the sum of :math:`\log E_{a_i}[L^{a_{i+1} - a_i}]`, and its standard
      error ``log_z_stones_se``. It has no discretisation error, and shares the draws.
    - ``ess`` of log L, ``r_hat``, the largest split R-hat of log L and the latents, and, under HMC and NUTS,
      the number of ``divergences``.

    By SVI further

    - ``elbo`` with every constant and its Monte Carlo standard error ``elbo_se``.
    - ``elbo_integral``: the ELBO at 0 plus the integral of ``expected_log_lik`` by the trapezoidal rule, its
      standard error ``elbo_integral_se`` and its Riemann sums ``elbo_left`` and ``elbo_right``. At the optimum of
      the guide's family the derivative of the ELBO is :math:`E_q[\log L]` (the envelope theorem), so this
      is ``elbo`` from a second direction and checks the fits; it is not another bound.

    The other groups are ``posterior`` (dims chain, draw, alpha, then the site's own), ``sample_stats`` with
    ``log_lik`` of each draw, ``observed_data``, and by SVI ``variational`` with the losses.

    **Never maximise log Z or the ELBO over alpha.** The derivative is :math:`E_\alpha[\log L]`, whose sign
    depends on the units of the data: of the same data the best alpha may be 0 in millimetres and infinite
    in metres. log Z at one alpha compares models; it does not compare alphas.

    The likelihood is that of ``model`` as given: powers and scales that it has already are kept, and powers
    multiply. What its factors are is said by ``temper(model, factors=...)``. Latents that belong to one
    datum are latents like any other, and L is given them. ``log_z`` is relative to the prior; where the prior has
    terms of its own, from a factor or a reparameterisation, to their normalised product.

    Args:
        rng_key: Key of the path.
        model: NumPyro model.
        method: From tempered model to guide or kernel: ``AutoNormal``, ``NUTS``,
            ``lambda model: NUTS(model, target_accept_prob=0.9)``.
        *args: Arguments of the model.
        alphas: Increasing powers, at least two; 0 is prepended where they do not start there. By default
            (i/20)^5 for i = 0, ..., 20: near 0, where E[log L] changes fastest, they are dense.
        num_samples: Draws at each alpha; by MCMC of each chain.
        num_warmup: MCMC: steps of adaptation at each alpha.
        num_chains: MCMC: number of chains.
        chain_method: MCMC: ``"sequential"`` or ``"vectorized"``.
        num_steps: SVI: steps of the optimiser.
        optim: SVI: NumPyro or optax optimiser; that of :func:`fit_svi` by default.
        loss: SVI: ELBO of NumPyro to optimise; ``Trace_ELBO()`` by default.
        coords: Coordinate values by dimension.
        dims: Names of the event dimensions by variable, without chain, draw and alpha.
        **kwargs: Keyword arguments of the model.

    Returns:
        ``arviz.InferenceData`` under ArviZ 0.x, ``xarray.DataTree`` under 1.x. :func:`path_table` turns the
        group ``tempered_path`` into pandas.

    Raises:
        TypeError: If ``method`` is a guide or kernel already, or returns neither, or an ensemble kernel.
        ValueError: If ``alphas`` are not as above; the model observes nothing, has params, a subsampling
            plate, an improper prior or ``local_plates``; its log-likelihood is not finite at a draw, where
            a likelihood of 0 at alpha = 0 is allowed under MCMC and counts as such; the guide is a point or
            uses the model it keeps; or the kernel leaves latents out.

    Warns:
        UserWarning: If E[log L] falls along the path, R-hat exceeds 1.1, or a loss still falls at its end.

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
        >>> nt.path_table(path)["expected_log_lik"].is_monotonic_increasing
        True
    """
    grid = _check_alphas(alphas)
    if num_samples < 4:
        raise ValueError(f"num_samples must be at least 4, got {num_samples}.")
    args, kwargs = plain_arrays((args, kwargs))
    key, model_key = jax.random.split(rng_key)
    problem = Problem(model, model_key, args, kwargs)
    problem.check(dims)
    built = _build(method, problem, float(grid[-1]))
    if isinstance(built, MCMCKernel):
        path = sample_path(
            key, problem, method, built, grid, num_warmup, num_samples, num_chains, chain_method=chain_method
        )
    else:
        path = fit_path(key, problem, built, grid, num_samples, num_steps, optim=optim, loss=loss)
    attrs = {"algorithm": "svi" if path.variational else "mcmc", "method": name_of(built), **versions()}
    given = dict(dims or {})
    along: dict[str, dict[str, list[str]]] = {
        "tempered_path": {name: ["alpha"] for name in path.columns},
        "posterior": {
            name: ["alpha", *(given.get(name) or [f"{name}_dim_{i}" for i in range(value.ndim - 3)])]
            for name, value in path.values.items()
        },
        "sample_stats": {name: ["alpha"] for name in path.stats},
        "observed_data": {name: list(given[name]) for name in problem.observed if name in given},
        "variational": {name: ["alpha", "step"] for name in path.variational},
    }
    groups: list[dict[str, Any]] = [path.columns, path.values, path.stats, problem.observed, path.variational]
    samples = ("chain", "draw")
    datasets = {
        name: dataset(
            group,
            samples if name in ("posterior", "sample_stats") else (),
            {**(coords or {}), "alpha": grid.tolist()},
            along[name],
            attrs,
        )
        for name, group in zip(along, groups, strict=True)
    }
    return assemble(datasets, attrs)


def path_table(data: Any) -> Any:
    """The ``tempered_path`` group as a pandas DataFrame.

    Args:
        data: The result of :func:`temper_path`.

    Returns:
        A ``pandas.DataFrame`` indexed by alpha.

    Raises:
        ValueError: If ``data`` has no such group.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> path = nt.temper_path(jax.random.key(0), model, AutoNormal, jnp.ones(6), alphas=[0.0, 0.5, 1.0])
        >>> nt.path_table(path).index.tolist()
        [0.0, 0.5, 1.0]
    """
    if "tempered_path" not in group_names(data):
        raise ValueError("the data have no group tempered_path: pass a result of temper_path.")
    return group(data, "tempered_path").to_dataframe()


def _check_alphas(alphas: ArrayLike | None) -> np.ndarray:
    if alphas is None:
        return np.linspace(0.0, 1.0, NUM_INTERVALS + 1) ** POWER
    grid = np.asarray(alphas, dtype=np.float64)
    if grid.ndim != 1 or len(grid) < 2:
        raise ValueError(f"alphas must be a list of at least two powers, got {alphas!r}.")
    if not np.all(np.isfinite(grid)) or grid.min() < 0:
        raise ValueError(f"alphas must be finite and at least 0, got {grid}.")
    if np.any(np.diff(grid) <= 0):
        raise ValueError(f"alphas must increase from each to the next, got {grid}.")
    return grid if grid[0] == 0 else np.concatenate([[0.0], grid])


def _build(method: Any, problem: Problem, alpha: float) -> Any:
    """The guide or kernel at the largest alpha, where starting values are found that serve all."""
    advice = "Pass a class, or a callable from model to guide or kernel such as `lambda model: NUTS(model)`."
    if isinstance(method, AutoGuide | MCMCKernel):
        raise TypeError(f"this {type(method).__name__} is built already, for one alpha. {advice}")
    if not callable(method):
        raise TypeError(f"method must be a callable from model to guide or kernel, got {method!r}. {advice}")
    try:
        built = method(temper(problem.model, alpha))
    except Exception as error:
        raise TypeError(f"method failed on the model. {advice}") from error
    if not callable(built) and not isinstance(built, MCMCKernel):
        raise TypeError(f"method returned {type(built).__name__}, neither guide nor kernel. {advice}")
    return built
