"""A mixture as a NumPyro model, and its fitted factors as a guide."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_tempered.core.typing import Array, ArrayLike, Guide, Model
from numpyro_tempered.mixtures.bridges.distribution import Mixture, masked
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.prepare import as_dtype, check_concentration, check_count
from numpyro_tempered.mixtures.result import MixtureFit

WEIGHTS, COMPONENTS, ROWS, DATA = "weights", "components", "rows", "x"


def numpyro_model(
    mixture: MixtureFit | Component, num_components: int | None = None, *, concentration: ArrayLike = 1.0
) -> Model:
    r"""A mixture as a NumPyro model.

    Sites: ``weights`` ~ Dirichlet; the parameters of the components in the plate ``components``, with what all
    components share outside of it; the data ``x`` in the plate ``rows``, whose labels are summed out. The model
    is not tempered: put :class:`temper` around it. Its bound at :func:`numpyro_guide`, by ``Trace_ELBO``, is E1
    of the fit.

    Args:
        mixture: A fit, whose priors the model takes; or a component.
        num_components: K, for a component.
        concentration: Dirichlet prior of the weights, one number or ``(K,)``, for a component.

    Returns:
        ``model(x, sample_weight=None)``, of data as in ``nt.mixtures.fit``. A row of weight 0 has no density.

    Raises:
        TypeError: If ``mixture`` is neither a fit nor a component.
        ValueError: If K is missing, or given beside a fit, or, while the model runs, the data are not of the
            family.

    Example:
        >>> import jax, numpy as np
        >>> from numpyro.infer.util import log_density
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.known_variance(1, prior_scale=10.0)
        >>> model = nt.temper(nt.mixtures.numpyro_model(component, 2), alpha=0.5)
        >>> theta = {"weights": np.array([0.5, 0.5]), "loc": np.array([[0.0], [9.0]])}
        >>> density = jax.jit(lambda theta: log_density(model, (x,), {}, theta)[0])(theta)
        >>> print(f"{density:.2f}")  # the prior's, -6.85, and half the log-likelihood, -6.46
        -10.08
    """
    component, prior, prior_weights = _priors(mixture, num_components, concentration)
    size = prior_weights.shape[0]

    def model(x: Any, sample_weight: Any = None) -> None:
        rows = component.check(_on_host(x))
        with_missing = _has_missing(component, rows)
        rows = jnp.asarray(rows)
        weight = None if sample_weight is None else _check_weight(_on_host(sample_weight), rows)
        own_prior, own_concentration = as_dtype((prior, prior_weights), rows.dtype)
        width = jax.eval_shape(component.statistics, rows[:1].T).shape[0]
        weights = numpyro.sample(WEIGHTS, dist.Dirichlet(own_concentration))
        sample = _sampler(sites_by_component(component, own_prior, size, width), size)
        parameters = component.draw(sample, prior_of_all(component, own_prior, size, width))
        components = component.distribution(parameters)
        observed = ~jnp.isnan(rows) if with_missing else None
        if observed is not None:
            components = masked(components, observed)
        with numpyro.plate(ROWS, rows.shape[0]), _weighted(weight), _without_empty(observed):
            numpyro.sample(DATA, Mixture(weights, components), obs=rows)

    return model


def numpyro_guide(fit: MixtureFit) -> Guide:
    """The factors of a fit as a guide for :func:`numpyro_model`, with the same sites.

    Args:
        fit: A fitted mixture.

    Returns:
        ``guide(x=None, sample_weight=None)``, which has no parameters and looks at no data.

    Example:
        >>> import jax, numpy as np
        >>> from numpyro.infer import Trace_ELBO
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(jax.random.key(0), x, component, num_components=2, alpha=0.5)
        >>> model, guide = nt.temper(nt.mixtures.numpyro_model(fit), fit.alpha), nt.mixtures.numpyro_guide(fit)
        >>> loss = jax.jit(lambda key: Trace_ELBO(num_particles=2000).loss(key, {}, model, guide, x))
        >>> bool(abs(-loss(jax.random.key(1)) - fit.bound.value) < 0.3)
        True
    """
    return guide_of(fit, lambda name, fn: fn)


def guide_of(fit: MixtureFit, change: Callable[[str, dist.Distribution], dist.Distribution]) -> Guide:
    """The factors of a fit as a guide, each factor's distribution changed.

    Args:
        fit: A fitted mixture.
        change: Name of a site and its distribution, before it stands in a plate, to another distribution.
    """
    check_fit(fit)
    component, posterior, size = fit.component, fit.posterior, fit.num_components
    width = jax.eval_shape(component.coefficients, posterior)[1].shape[1]
    by_component = sites_by_component(component, fit.problem.prior, size, width)

    def guide(x: Any = None, sample_weight: Any = None) -> None:
        numpyro.sample(WEIGHTS, change(WEIGHTS, dist.Dirichlet(fit.factors.concentration)))
        sample = _sampler(by_component, size)
        component.draw(lambda name, fn: sample(name, change(name, fn)), posterior)

    return guide


def prior_of_all(component: Component, prior: Any, num_components: int, num_statistics: int) -> Any:
    """The prior in the form of a posterior: an axis K where components have their own, none where they share."""
    dtype = jax.tree.leaves(prior)[0].dtype
    return component.update(
        prior, jnp.zeros(num_components, dtype), jnp.zeros((num_components, num_statistics), dtype)
    )


def sites_by_component(
    component: Component, prior: Any, num_components: int, num_statistics: int
) -> dict[str, bool]:
    """Names of the parameters, and whether each component has its own."""

    def batch_shapes(size: int) -> dict[str, tuple[int, ...]]:
        found = {}

        def build(prior: Any) -> None:
            def record(name: str, fn: dist.Distribution) -> Array:
                found[name] = fn.batch_shape
                return jnp.zeros(fn.shape())

            component.draw(record, prior_of_all(component, prior, size, num_statistics))

        jax.eval_shape(build, prior)
        return found

    # What is shared has the same shape whatever K.
    here, with_one_more = batch_shapes(num_components), batch_shapes(num_components + 1)
    return {name: here[name] != with_one_more[name] for name in here}


def prior_in_place(fit: MixtureFit) -> Any:
    """The prior of one component, in the data's own coordinates."""
    if fit.centre is None:
        return fit.problem.prior
    shift = jnp.asarray(fit.centre, fit.problem.concentration.dtype)
    return fit.component.translate(fit.problem.prior, shift)  # type: ignore[misc]


def _priors(
    mixture: MixtureFit | Component, num_components: int | None, concentration: ArrayLike
) -> tuple[Component, Any, Any]:
    if isinstance(mixture, MixtureFit):
        if num_components is not None:
            raise ValueError(
                "a fit has its own number of components: pass num_components with a component alone."
            )
        return mixture.component, prior_in_place(mixture), mixture.problem.concentration
    if not isinstance(mixture, Component):
        raise TypeError(
            f"numpyro_model takes a fit or a component such as nt.mixtures.gaussian(dim), got a "
            f"{type(mixture).__name__}."
        )
    if num_components is None:
        raise ValueError("a component has no number of components: pass num_components.")
    size = check_count(num_components, "num_components")
    return mixture, mixture.prior, check_concentration(concentration, size)


def check_fit(fit: Any) -> None:
    """Raise TypeError where this is not a fitted mixture."""
    if not isinstance(fit, MixtureFit):
        raise TypeError(f"expected the result of nt.mixtures.fit, got a {type(fit).__name__}.")


def _has_missing(component: Component, rows: Any) -> bool:
    """Whether entries are, or may be, missing.

    Raises:
        ValueError: If some are and the family cannot marginalise them.
    """
    if isinstance(rows, jax.core.Tracer):
        return component.with_missing is not None
    missing = bool(np.any(np.isnan(rows)))
    if missing and component.with_missing is None:
        raise ValueError(
            f"{component.name}: the data have missing entries (NaN), which this family does not marginalise. "
            "Take one with independent columns, such as diagonal_gaussian, or leave the rows out."
        )
    return missing


def _on_host(values: Any) -> Any:
    """Values that can be looked at, also where NumPyro compiles the model; traced ones as they are."""
    return values if isinstance(values, jax.core.Tracer) else np.asarray(values)


def _check_weight(weight: Any, rows: Array) -> Array:
    if weight.shape != rows.shape[:1]:
        raise ValueError(f"sample_weight has shape {weight.shape}; expected ({rows.shape[0]},), one a row.")
    if not isinstance(weight, jax.core.Tracer) and not np.all(np.isfinite(weight) & (weight >= 0)):
        raise ValueError("sample_weight must be finite and not negative.")
    return jnp.asarray(weight, rows.dtype)


def _sampler(by_component: dict[str, bool], num_components: int) -> Callable[[str, dist.Distribution], Array]:
    """``numpyro.sample`` of parameters, in the plate of the components where they have their own."""

    def sample(name: str, fn: dist.Distribution) -> Array:
        if not by_component[name]:
            return numpyro.sample(name, fn.to_event(len(fn.batch_shape)))
        with numpyro.plate(COMPONENTS, num_components):
            return numpyro.sample(name, fn.to_event(len(fn.batch_shape) - 1))

    return sample


@contextmanager
def _weighted(weight: Array | None) -> Iterator[None]:
    """Count each row as often as its weight says."""
    if weight is None:
        yield
        return
    held = weight > 0
    # NumPyro has no scale of 0.
    with handlers.scale(scale=jnp.where(held, weight, 1.0)), handlers.mask(mask=held):
        yield


@contextmanager
def _without_empty(observed: Array | None) -> Iterator[None]:
    """Leave out rows without an observed entry, whose density is 1 up to rounding."""
    if observed is None:
        yield
        return
    with handlers.mask(mask=jnp.any(observed, axis=1)):
        yield
