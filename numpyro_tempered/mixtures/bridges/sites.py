"""A mixture as NumPyro's sites: the model and the guide, from the component and its hyperparameters."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Guide,
    Model,
    Params,
    Shape,
    as_array,
    automatic_mesh,
    is_traced,
    spans_processes,
)
from numpyro_tempered.mixtures.components import base, derived
from numpyro_tempered.mixtures.components.base import Component, Hyperparameters
from numpyro_tempered.mixtures.components.matrices import (
    cholesky,
    inverse_root,
    log_det,
)
from numpyro_tempered.mixtures.components.product import ColumnsOf
from numpyro_tempered.mixtures.components.special import LOG_TWO_PI
from numpyro_tempered.mixtures.prepare import check_weight
from numpyro_tempered.mixtures.weights import draw

COMPONENTS, ROWS, DATA = "components", "rows", "x"


def mixture_model(
    component: Component, prior: Hyperparameters, concentration: np.ndarray | Array
) -> Model:
    """The model of a mixture with K = ``len(concentration)``; see :func:`numpyro_model`."""
    size = concentration.shape[0]

    def model(x: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        rows = component.check(_on_host(x, f"{component.name}: the data"))
        if is_traced(rows):
            # Their values are unknown: entries may be missing wherever the family allows it.
            may_miss = component.with_missing is not None
        else:
            may_miss = base.missing_form(component, rows) is not component
        rows = jnp.asarray(rows)
        weight = None
        if sample_weight is not None:
            values = _on_host(sample_weight, "sample_weight")
            check_weight(values, rows)
            weight = jnp.asarray(values, rows.dtype)
        hyperparameters, of_weights = base.as_dtype((prior, concentration), rows.dtype)
        weights = draw(_sample_site, of_weights)
        sample = _sampler(component, hyperparameters, size)
        parameters = component.draw(
            sample, _prior_of_all(component, hyperparameters, size)
        )
        components = component.distribution(parameters)
        observed = ~jnp.isnan(rows) if may_miss else None
        if observed is not None:
            components = mask_missing(components, observed)
        with numpyro.plate(ROWS, rows.shape[0]), _counted(weight, observed):
            numpyro.sample(DATA, Mixture(weights, components), obs=rows)

    return model


def mixture_guide(
    component: Component,
    prior: Hyperparameters,
    concentration: Array,
    posterior: Hyperparameters,
    change: Callable[[str, dist.Distribution], dist.Distribution] = lambda name, fn: fn,
) -> Guide:
    """The factor of the weights and posteriors of the components as a guide.

    Args:
        component: The component.
        prior: Of one component.
        concentration: Of the factor of the weights, leading axis K.
        posterior: Hyperparameters with leading axis K.
        change: Name of a site and its distribution, before it stands in a plate, to another distribution.
    """
    sample = _sampler(component, prior, concentration.shape[0])

    def guide(
        x: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> None:
        draw(lambda name, fn: _sample_site(name, change(name, fn)), concentration)
        component.draw(lambda name, fn: sample(name, change(name, fn)), posterior)

    return guide


def rows_of_draw(
    component: Component,
    prior: Hyperparameters,
    concentration: Array,
    posterior: Hyperparameters,
) -> Callable[[Array, Params, int], Array]:
    """From a key, values of the sites and a number to so many rows of the mixture with these values.

    The arguments are those of :func:`mixture_guide`.
    """
    sample = _sampler(component, prior, concentration.shape[0])

    def rows(rng_key: Array, values: Params, num_rows: int) -> Array:
        at = handlers.substitute(data=values)
        with handlers.block(), handlers.seed(rng_seed=rng_key), at:
            weights = draw(_sample_site, concentration)
            parameters = component.draw(sample, posterior)
        mixture = Mixture(weights, component.distribution(parameters))
        return mixture.sample(rng_key, (num_rows,))

    return rows


class Mixture(dist.MixtureSameFamily):
    """A mixture of any components of one family, whose data may have missing entries.

    NumPyro's ``MixtureSameFamily`` refuses components whose support has arguments, such as the categorical, and
    has no density for NaN.

    Args:
        weights: Of the components, ``(K,)``.
        components: Batch shape ``(K,)``, or ``(n, K)`` where entries are missing; see :func:`mask_missing`.
    """

    def __init__(self, weights: Array, components: dist.Distribution) -> None:
        self._mixing_distribution = dist.Categorical(probs=weights)
        self._component_distribution = components
        self._mixture_size = jnp.shape(weights)[-1]
        # Skips the checks of MixtureSameFamily. Missing entries are outside of every support: no validation.
        super(dist.MixtureSameFamily, self).__init__(
            components.batch_shape[:-1], components.event_shape, validate_args=False
        )


def mask_missing(components: dist.Distribution, observed: Array) -> dist.Distribution:
    """Components for rows ``(n, d)`` with missing entries, marginalised.

    Args:
        components: Batch shape ``(K,)``; Gaussians, or with columns that are independent where some are missing.
        observed: Which entries are observed, ``(n, d)``.

    Returns:
        Batch shape ``(n, K)``. Its draws are complete.
    """
    if isinstance(components, ColumnsOf):
        pairs = zip(components.parts, components.columns, strict=True)
        return ColumnsOf(
            [
                mask_missing(part, observed[:, np.asarray(where)])
                for part, where in pairs
            ],
            components.columns,
        )
    if isinstance(components, dist.Independent) and len(components.event_shape) == 1:
        return components.base_dist.mask(observed[:, None, :]).to_event(1)
    if isinstance(components, dist.MultivariateNormal):
        return ObservedNormal(components, observed)
    # Entries are never missing here: the component refuses that.
    return components.expand((observed.shape[0], *components.batch_shape))


class ObservedNormal(dist.Distribution):
    """Gaussian rows with missing entries, which are integrated out. Draws are complete.

    Args:
        normal: Batch shape ``(K,)``.
        observed: Which entries are observed, ``(n, d)``.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012
    support = constraints.real_vector
    pytree_data_fields = ("normal", "observed")

    def __init__(self, normal: dist.MultivariateNormal, observed: Array) -> None:
        self.normal, self.observed = normal, observed
        # NaN is outside of every support.
        super().__init__(
            (observed.shape[0], *normal.batch_shape),
            normal.event_shape,
            validate_args=False,
        )

    def sample(self, key: Array, sample_shape: Shape = ()) -> Array:
        """Complete rows."""
        return self.normal.expand(self.batch_shape).sample(key, sample_shape)

    def log_prob(self, value: Array) -> Array:
        """The log density of the observed entries, of rows ``(n, 1, d)``."""
        # Where nothing is missing, which is not known while rows are traced, one factor serves all rows.
        return jax.lax.cond(
            jnp.all(self.observed),
            self.normal.log_prob,
            self._log_prob_of_observed,
            value,
        )

    def _log_prob_of_observed(self, value: Array) -> Array:
        mask = self.observed[:, None, :]
        root = self.normal.scale_tril
        covariance = jnp.matmul(root, jnp.swapaxes(root, -1, -2), precision="highest")
        both = mask[..., None] & mask[..., None, :]
        root = cholesky(
            jnp.where(
                both, covariance, jnp.eye(covariance.shape[-1], dtype=covariance.dtype)
            )
        )
        deviations = jnp.where(mask, value - self.normal.loc, 0.0)
        whitened = jnp.einsum(
            "...ij,...j->...i", inverse_root(root), deviations, precision="highest"
        )
        number = jnp.sum(mask, axis=-1)
        return -0.5 * (
            number * LOG_TWO_PI + log_det(root) + jnp.sum(jnp.square(whitened), axis=-1)
        )


def _sample_site(name: str, fn: dist.Distribution) -> Array:
    """``numpyro.sample`` of a site outside of plates."""
    return numpyro.sample(name, fn.to_event(len(fn.batch_shape)))


def _on_host(values: ArrayLike, name: str) -> base.Rows:
    """Values that can be checked, also where NumPyro compiles the model; traced and shared ones as they are."""
    if is_traced(values):
        return values  # type: ignore[return-value]
    array = as_array(values, name)
    return automatic_mesh(array) if spans_processes(array) else np.asarray(array)


def _prior_of_all(
    component: Component, prior: Hyperparameters, num_components: int
) -> Hyperparameters:
    """The prior in the form of a posterior: an axis K where each component has its own, none where they share."""
    priors = base.broadcast_prior(prior, num_components)
    counts, sums = jax.tree.map(
        jnp.zeros_like, jax.eval_shape(partial(derived.coefficients, component), priors)
    )
    return component.update(prior, counts, sums)


def _sampler(
    component: Component, prior: Hyperparameters, num_components: int
) -> base.Sample:
    """``numpyro.sample`` of parameters, in the plate of the components where each has its own."""

    def batch_shapes(size: int) -> dict[str, Shape]:
        shapes = {}

        def record(name: str, fn: dist.Distribution) -> Array:
            shapes[name] = fn.batch_shape
            return jnp.zeros(fn.shape())

        jax.eval_shape(
            lambda prior: component.draw(record, _prior_of_all(component, prior, size)),
            prior,
        )
        return shapes

    # The shape of a shared parameter does not depend on K.
    shapes, one_more = batch_shapes(num_components), batch_shapes(num_components + 1)

    def sample(name: str, fn: dist.Distribution) -> Array:
        if shapes[name] == one_more[name]:
            return _sample_site(name, fn)
        with numpyro.plate(COMPONENTS, num_components):
            return numpyro.sample(name, fn.to_event(len(fn.batch_shape) - 1))

    return sample


@contextmanager
def _counted(weight: Array | None, observed: Array | None) -> Iterator[None]:
    """Count each row as often as its weight says, and rows without an observed entry not at all.

    The density of the latter is 1 up to rounding.
    """
    with ExitStack() as stack:
        if weight is not None:
            # NumPyro has no scale of 0.
            stack.enter_context(
                handlers.scale(scale=jnp.where(weight > 0, weight, 1.0))
            )
            stack.enter_context(handlers.mask(mask=weight > 0))
        if observed is not None:
            stack.enter_context(handlers.mask(mask=jnp.any(observed, axis=1)))
        yield
