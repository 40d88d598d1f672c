"""The risk of a fit on new data, certified."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Params,
    check_count,
    check_number,
    compiled_map,
    doubles,
    key_first,
    runs_models,
)
from numpyro_tempered.gaussian.expectations.differentiate import which_depend
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.effects import base_distribution
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.handlers.rows import DataRows, find_data
from numpyro_tempered.handlers.target import Target, check_density
from numpyro_tempered.infer.guide_laws import location_scale_of
from numpyro_tempered.infer.guides.prior import unindexed
from numpyro_tempered.infer.tempered_fit import TemperedFit
from numpyro_tempered.report.draws import bind
from numpyro_tempered.select.check.target import BATCH
from numpyro_tempered.theory.bounds import RiskCertificate, pac_bayes

Loss = Callable[..., Array]
# What a model that reads values of its data raises.
_UNTRACEABLE = (
    jax.errors.JAXTypeError,
    jax.errors.JAXIndexError,
    TypeError,
    ValueError,
)
_NEEDS = {
    "params": ", fitted, which no prior pays for: the bound would be too small. Give them priors.",
    "no prior terms": ": the prior times these may not integrate to 1.",
    "unscaled priors": ", and a power of a density does not integrate to 1: leave the latent sites out of "
    "handlers.scale.",
}


@key_first
@runs_models
def certify_risk(
    rng_key: Array,
    fit: object,
    loss: Loss | str,
    *,
    lower: float = 0.0,
    upper: float = 1.0,
    delta: float = 0.05,
    num_draws: int = 4000,
    delta_draws: float = 0.01,
    method: str = "kl",
    inverse_temperature: ArrayLike | None = None,
    grid_size: int = 1,
    log_prior: float = 0.0,
    prior_is_fixed: bool = False,
) -> RiskCertificate:
    r"""An upper bound on the risk of a fit on new rows, for a bounded loss, from the data that it was fitted to.

    The risk is that of the Gibbs predictor, :math:`E_{\theta\sim q} E_z\,\ell(\theta, z)`. No data are set aside,
    the model may be wrong, and alpha is any. The loss of the data is averaged over ``num_draws`` draws of q, at
    the price of ``delta_draws``; KL(q, prior) is in closed form for a Gaussian guide and Normal priors with fixed
    parameters. For others it is that of the fit's ELBO, an average over draws, and the result says ``estimate``.

    Args:
        rng_key: For the draws. One key: the smallest of several certificates is none.
        fit: A posterior with a density that holds its data: of :func:`fit_svi` or :func:`fit_gaussian`, or
            ``fit.on(x)`` of a mixture, ``fit.on(x, y)`` of a regression, ``online.posterior(state).on(x, y)``.
        loss: A function of the latents of one draw, by site, and of the model's arguments, to the losses of the n
            rows, shape ``(n,)``, each in [lower, upper]; in functions that jax can trace. Or the name of an
            observed site with finitely many values, for its 0-1 loss: whether the value is another than the most
            probable one at that draw.
        lower: Lower end of the interval of the loss.
        upper: Upper end.
        delta: Probability that the bound fails for the data, in (0, 1).
        num_draws: Draws of q.
        delta_draws: Probability that it fails for the draws, which adds to ``delta``.
        method: As for :func:`~numpyro_tempered.bounds.pac_bayes`.
        inverse_temperature: Likewise.
        grid_size: Number of fits, such as those of a grid of alphas, of which the data chose this one.
        log_prior: If the data chose among priors, the logarithm of the weight of this one, fixed before.
        prior_is_fixed: Of a mixture or PCA, whether its prior was fixed before the data came, as it is not by
            default and by ``mixtures.components.scaled_to``.

    Returns:
        A :class:`~numpyro_tempered.bounds.RiskCertificate`.

    Raises:
        TypeError: If ``fit`` is another result, or jax traces the key.
        ValueError: If a loss is NaN or outside of [lower, upper], or not one for each row; if the model has
            fitted params, prior terms, a latent for each row, or a prior without a finite integral, or computes a
            prior from the data; if an argument is out of range.

    References:
        As :func:`~numpyro_tempered.bounds.pac_bayes`.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(x, y):
        ...     slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
        ...     with numpyro.plate("n", len(x)):
        ...         numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)
        >>> x = jnp.linspace(-3.0, 3.0, 100)
        >>> fit = nt.fit_svi(jax.random.key(0), model, AutoNormal, x, (x > 0).astype(int), alpha=0.5)
        >>> certificate = nt.certify_risk(jax.random.key(1), fit, "y", num_draws=500)
        >>> bool(certificate.value < 0.2), certificate.estimate
        (True, False)
    """
    bound = bind(fit, rng_key=rng_key)
    if not isinstance(bound, TemperedFit):
        raise TypeError(
            f"certify_risk takes a posterior with a density, got {type(fit).__name__}. Of others average the "
            "loss over draws, and call nt.bounds.pac_bayes with num_draws= and their KL."
        )
    if getattr(bound.source, "is_symmetric", False) and not prior_is_fixed:
        raise ValueError(
            f"the prior of a {type(bound.source).__name__} is of its data by default, and the theorem needs one "
            "that was fixed before: pass prior_is_fixed=True if it was."
        )
    check_count(num_draws, "num_draws", 2)
    check_number(lower, "lower")
    check_number(upper, "upper", f"({lower}, inf)")
    bound = bound if bound.elbo is not None else bound.evaluate()
    target = bound.target
    check_density(target)
    check_prior(target, bound)
    function = zero_one(target, loss) if isinstance(loss, str) else loss
    draws = bound.sample_posterior(rng_key, (num_draws,))
    risk, rows = _average(function, draws, target, (lower, upper))
    check_rows(target, rows.size)
    kl, is_known = gaussian_kl(target, bound), True
    if kl is None:
        # An average over draws may fall below.
        kl, is_known = max(bound.elbo.kl, 0.0), bound.elbo.se == 0.0
    return pac_bayes(
        risk,
        kl,
        rows.num_data,
        lower=lower,
        upper=upper,
        delta=delta,
        method=method,
        inverse_temperature=inverse_temperature,
        num_draws=num_draws,
        delta_draws=delta_draws,
        grid_size=grid_size,
        log_prior=log_prior,
        estimate=not is_known,
    )


def check_prior(target: Target, fit: TemperedFit) -> None:
    """Refuse a model whose prior is not one that was fixed before the data.

    Raises:
        ValueError: With the site, and what to do.
    """
    require(target.trace, _NEEDS)
    if fit.elbo.improper:
        raise ValueError(
            f"latent sites {list(fit.elbo.improper)} have a prior that does not integrate to 1."
        )
    if depends := prior_on_data(target):
        raise ValueError(
            f"the prior of {depends[0]!r} is computed from the data that the model is called with: the theorem "
            "needs one that was fixed before. Scale by units, or by data that are set aside for it."
        )


def check_rows(target: Target, num_data: int) -> None:
    """Refuse a latent for each row.

    Raises:
        ValueError: With the site, and what to do.
    """
    observed = likelihood.observed_sites(target.trace)
    frames = {
        frame.name for site in observed.values() for frame in site["cond_indep_stack"]
    }
    for name, site in target.latents.items():
        for frame in site["cond_indep_stack"]:
            if frame.name in frames and frame.size == num_data:
                raise ValueError(
                    f"latent {name!r} is in plate {frame.name!r} of the data: a new row has a value of its own, "
                    "of which the bound says nothing. Integrate it out of the model."
                )


def prior_on_data(target: Target) -> list[str]:
    """Latent sites whose prior is computed from an array of rows.

    As far as tracing can tell, and, of a model that reads values of its data, as far as other rows can: the first
    half of them twice, and the second.
    """
    observed = likelihood.observed_sites(target.trace).values()
    sizes = {np.shape(site["value"])[0] for site in observed if np.ndim(site["value"])}
    leaves, structure = jax.tree.flatten((target.args, target.kwargs))
    places = [i for i, leaf in enumerate(leaves) if sizes.intersection(np.shape(leaf))]
    values = target.values

    def parameters(rows: list[Array]) -> dict[str, tuple[Array, ...]]:
        filled = list(leaves)
        for place, row in zip(places, rows, strict=True):
            filled[place] = row
        args, kwargs = jax.tree.unflatten(structure, filled)
        return _parameters(target, values, args, kwargs)

    try:
        depends = which_depend(parameters, [jnp.asarray(leaves[i]) for i in places])
    except _UNTRACEABLE:
        try:
            first, second = (
                parameters([_half(leaves[i], sizes, which) for i in places])
                for which in (0, 1)
            )
        except _UNTRACEABLE:
            # Such rows are none to this model, as where groups are missing.
            return []
        return [name for name in first if not _same_values(first[name], second[name])]
    return [name for name, flags in depends.items() if any(flags)]


def _half(rows: Array, sizes: set[int], which: int) -> Array:
    """An array with one half of its rows twice."""
    array = np.asarray(rows)
    axis = next(i for i, size in enumerate(array.shape) if size in sizes)
    size = array.shape[axis]
    places = np.arange(size) % max(size // 2, 1) + which * (size // 2)
    return jnp.asarray(np.take(array, np.minimum(places, size - 1), axis=axis))


def _same_values(one: tuple[Array, ...], other: tuple[Array, ...]) -> bool:
    """Whether parameters are, as far as they have one shape: a number of groups is no value of the data."""
    pairs = zip(one, other, strict=True)
    return all(
        np.shape(a) != np.shape(b) or np.array_equal(a, b, equal_nan=True)
        for a, b in pairs
    )


def gaussian_kl(target: Target, fit: TemperedFit) -> float | None:
    """KL(q, prior) of a Gaussian guide and Normal priors with fixed parameters; None of others."""
    q = location_scale_of(fit.guide, fit.params)
    values = target.values
    depends = which_depend(
        lambda latents: _parameters(target, latents, target.args, target.kwargs), values
    )
    if q is None or q.is_heavy or any(any(flags) for flags in depends.values()):
        return None
    means, precisions, log_dets = [], [], 0.0
    for site in target.coordinates.values():
        fn, shape = unindexed(site["fn"]), np.shape(site["value"])
        if type(fn) is dist.Normal:
            loc, scale = (
                np.ravel(np.broadcast_to(doubles(p), shape)) for p in (fn.loc, fn.scale)
            )
            means.append(loc)
            precisions.append(np.diag(scale**-2.0))
            log_dets += 2.0 * np.log(scale).sum()
        elif type(fn) is dist.MultivariateNormal and fn.event_shape == shape:
            root = doubles(fn.scale_tril)
            inverse = np.linalg.solve(root, np.eye(len(root)))
            means.append(doubles(fn.loc))
            precisions.append(inverse.T @ inverse)
            log_dets += 2.0 * np.log(np.diagonal(root)).sum()
        else:
            return None
    gap, start, total = (
        q.loc - np.concatenate(means),
        0,
        log_dets - np.linalg.slogdet(q.cov)[1] - len(q.loc),
    )
    for precision in precisions:
        at = slice(start, start + len(precision))
        total += np.sum(precision * q.cov[at, at]) + gap[at] @ precision @ gap[at]
        start = at.stop
    return max(0.5 * float(total), 0.0)


def zero_one(target: Target, name: str) -> Loss:
    """Whether the observed value of a site is another than the most probable one, for each row.

    Raises:
        ValueError: If there is no such site, or its values are not one of finitely many for each row.
    """
    observed = likelihood.observed_sites(target.trace)
    if name not in observed:
        raise ValueError(f"the observed sites are {sorted(observed)}, got {name!r}.")
    site = observed[name]
    fn, shape = base_distribution(site["fn"]), np.shape(site["value"])
    if not fn.has_enumerate_support or fn.event_shape or len(shape) != 1:
        raise ValueError(
            f"the 0-1 loss is of a site with one of finitely many values for each row; {name!r} is "
            f"{type(fn).__name__} of shape {shape}. Pass loss= as a function to the losses (n,)."
        )

    def loss(latents: Params, *args: object, **kwargs: object) -> Array:
        trace = likelihood.get_trace(_seeded(target, latents), args, kwargs)
        fn, value = base_distribution(trace[name]["fn"]), trace[name]["value"]
        support = fn.enumerate_support(expand=False)
        most_probable = jnp.argmax(fn.log_prob(support), axis=0)
        return jnp.broadcast_to(
            jnp.ravel(support)[most_probable] != value, jnp.shape(value)
        )

    return loss


def _average(
    loss: Loss, draws: Params, target: Target, interval: tuple[float, float]
) -> tuple[float, DataRows]:
    """The loss averaged over data and draws, and the rows of the data.

    Raises:
        ValueError: If it is no bounded loss of the rows.
    """
    lower, upper = interval

    def losses(latents: Params) -> Array:
        return jnp.asarray(loss(latents, *target.args, **target.kwargs))

    first = {name: draw[0] for name, draw in draws.items()}
    form = jax.eval_shape(losses, first)
    shape = form.shape
    if jnp.issubdtype(form.dtype, jnp.complexfloating):
        raise ValueError(f"losses must be real numbers, got {form.dtype}.")
    sites = likelihood.observed_sites(target.trace)
    observed = {name: np.shape(site["value"]) for name, site in sites.items()}
    rows = DataRows(shape[0], -1, shape[0]) if len(shape) == 1 else None
    if rows and any(likelihood.is_masked(site["fn"]) for site in sites.values()):
        rows = find_data(target.trace, None)
    if (
        rows is None
        or rows.size != shape[0]
        or not any(rows.size in of_site for of_site in observed.values())
    ):
        raise ValueError(
            f"loss must return one number for each row, shape (n,), got {shape}; the data have shapes {observed}."
        )

    def one(latents: Params) -> tuple[Array, Array, Array]:
        values = rows.take(losses(latents)).astype(float)
        return values.mean(), values.min(), values.max()

    means, least, most = (doubles(part) for part in compiled_map(one, draws, BATCH))
    slack = 1e-6 * max(abs(lower), abs(upper), upper - lower)
    if not (least.min() >= lower - slack and most.max() <= upper + slack):
        raise ValueError(
            f"losses must lie in [{lower:g}, {upper:g}], got {least.min():g} to {most.max():g}: pass the lower= "
            "and upper= that the loss has by construction, for new data too, or clip it."
        )
    return float(np.clip(means.mean(), lower, upper)), rows


def _parameters(
    target: Target, values: Params, args: tuple, kwargs: dict
) -> dict[str, tuple[Array, ...]]:
    """The parameters of the priors at values of the latents."""
    with handlers.block():
        sites = likelihood.latent_sites(
            likelihood.get_trace(_seeded(target, values), args, kwargs)
        )
    return {
        name: tuple(map(jnp.asarray, jax.tree.leaves(site["fn"])))
        for name, site in sites.items()
    }


def _seeded(target: Target, values: Params) -> Callable[..., object]:
    return handlers.substitute(handlers.seed(target.model, rng_seed=0), data=values)
