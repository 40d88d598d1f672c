"""The free energy of a NumPyro model on its unconstrained scale."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.infer.util import potential_energy
from numpyro.primitives import Messenger

from numpyro_tempered.core import (
    Array,
    Model,
    Params,
    PyTree,
    join,
    run_program,
    separate,
    to_host,
)
from numpyro_tempered.gaussian.descent import Derivatives, Objective
from numpyro_tempered.gaussian.descent.base import add, entropy, of_evaluation
from numpyro_tempered.gaussian.expectations import Expectation, monte_carlo
from numpyro_tempered.gaussian.expectations.base import ModelLoss, Shared, require_key
from numpyro_tempered.gaussian.expectations.differentiate import depends_on
from numpyro_tempered.gaussian.expectations.outputs import product_rule
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.model_loss import model_loss
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.online_checks import check_rows_apart
from numpyro_tempered.infer.priors import Latents, Priors, closed_priors

# Nodes in each coordinate that likelihoods share, and how many coordinates have a product rule.
_SHARED_NODES, _MAX_DIMENSION = 16, 2
# Beyond, the second derivatives of each datum in them are more than the predictors are worth.
MAX_SHARED = 16


class FreeEnergy(NamedTuple):
    """What :func:`model_objective` finds of a model.

    Attributes:
        objective: The function of q.
        linearised: Whether a quadrature linearises a predictor that is not affine in the latents.
        kl: ``q -> KL(q, prior)``, or None where a prior is averaged over draws.
    """

    objective: Objective
    linearised: bool
    kl: Callable[[Gaussian], float] | None


class without(Messenger):
    """Leave the prior of some latent sites out of the log-density, with the Jacobian of its transform."""

    def __init__(self, fn: Model, names: frozenset[str]) -> None:
        # potential_energy adds the Jacobian as a factor of this name, whatever becomes of the site itself.
        self.names = names | {f"_{name}_log_det" for name in names}
        super().__init__(fn)

    def process_message(self, msg: likelihood.Site) -> None:
        """Mask a site."""
        if msg["type"] == "sample" and msg["name"] in self.names:
            msg["fn"] = msg["fn"].mask(False)


def model_objective(
    model: temper,
    latents: Latents,
    q: Gaussian,
    args: tuple,
    kwargs: dict,
    *,
    expectation: Expectation | None,
    num_draws: int,
) -> FreeEnergy:
    """The function f = -α log L - log π of a tempered model, on its flat unconstrained scale.

    Priors with fixed parameters that are Normal, multivariate Normal or Laplace are integrated in closed form,
    others of independent scalars by quadrature, the likelihood by ``expectation``. All other terms are averaged
    over draws, as is the likelihood without one.

    Args:
        model: The tempered model.
        latents: Its latent sites.
        q: A Gaussian, for shapes and for a point to trace the model at.
        args: Positional arguments of the model.
        kwargs: Its keyword arguments.
        expectation: Of a model's likelihood, or None.
        num_draws: Draws, antithetic, for what has neither closed form nor expectation.

    Returns:
        A :class:`FreeEnergy`.

    Raises:
        TypeError: If the expectation is of a bare loss.
        ValueError: If the model has params, subsamples, observes nothing or scales local latents, or a datum
            depends on the predictor of another or on too many latents besides its own.
    """
    arrays, structure = separate(args, kwargs)
    predictor = None if expectation is None else expectation.predictor
    with numpyro.validation_enabled(False):
        priors = closed_priors(
            model, latents, q, args, kwargs, by_draws=predictor is None
        )
    needs_draws = (
        expectation is None
        or priors.has_factors
        or len(priors.names) < len(latents.names)
    )
    parts, loss, draws = [], None, False
    if expectation is not None:
        if expectation.bind is None:
            raise TypeError(
                "this expectation is of a bare loss: take gauss_hermite(predictor=...) or monte_carlo() for a "
                "model's likelihood, or nt.gaussian.descent.objective and minimise for a loss."
            )
        with numpyro.validation_enabled(False):
            loss = _model_loss(
                model, latents, q, (args, kwargs), expectation, num_draws
            )
            check_rows_apart(loss, q.loc, args, kwargs)
        bound = expectation.bind(weigh(loss))
        draws = bound.needs_key

        def expected_loss(
            q: Gaussian, data: PyTree, rng_key: Array | None
        ) -> Derivatives:
            return of_evaluation(
                q, bound.evaluate(q, *join(data, structure), rng_key=rng_key)
            )

        parts.append(expected_loss)
    if needs_draws:
        rest = without(
            model if expectation is None else temper(model, alpha=0.0), priors.names
        )

        def draws_of_the_rest(
            q: Gaussian, data: PyTree, rng_key: Array | None
        ) -> Derivatives:
            args, kwargs = join(data, structure)

            def potential(theta: Array) -> Array:
                return potential_energy(
                    rest, args, kwargs, latents.unpack(theta)
                ).astype(theta.dtype)

            expectation = monte_carlo(
                potential, num_particles=num_draws, antithetic=True
            )
            return of_evaluation(q, expectation.evaluate(q, rng_key=rng_key))

        parts.append(draws_of_the_rest)

    def evaluate(q: Gaussian, data: PyTree, rng_key: Array | None) -> Derivatives:
        arrays, term, kinks = data
        keys = (
            [None] * len(parts)
            if rng_key is None
            else list(jax.random.split(rng_key, len(parts)))
        )
        terms = [part(q, arrays, key) for part, key in zip(parts, keys, strict=True)]
        return add([*terms, *priors._replace(term=term, kinks=kinks).derivatives(q)])

    exact = linearised = certified = False
    if loss is not None and loss.predictor is not None:
        affine = _is_affine(loss, q, args, kwargs)
        linearised = not affine and not draws
        # Then all priors are known too.
        is_known = (priors.is_smooth or loss.kinks is not None) and priors.is_concave
        exact = affine and is_known and not (needs_draws or draws)
        gaussian = priors.kinks is None and not priors.scalars
        certified = (
            exact
            and gaussian
            and loss.shared is None
            and _is_convex(loss, q, args, kwargs)
        )
    return FreeEnergy(
        Objective(
            evaluate,
            (arrays, priors.term, priors.kinks),
            needs_draws or draws,
            priors.term.precision if certified else None,
            exact,
        ),
        linearised,
        kl=None if needs_draws else partial(_kl, priors),
    )


def _kl(priors: Priors, q: Gaussian) -> float:
    """KL(q, prior)."""
    return float(
        run_program(lambda q: add(priors.derivatives(q)).value - entropy(q), q)
    )


def _model_loss(
    model: temper,
    latents: Latents,
    q: Gaussian,
    data: tuple[tuple, dict],
    expectation: Expectation,
    num_draws: int,
) -> ModelLoss:
    """The losses of the model, with what they share besides the expectation's predictor, and their kinks."""
    predictor, num_outputs = expectation.predictor, expectation.num_outputs
    integrates = expectation.integrates and num_outputs is None

    def of_latents(latents: Latents) -> ModelLoss:
        return model_loss(
            model,
            latents,
            predictor,
            num_outputs,
            prior_factors=True,
            alone=not integrates,
        )

    loss = of_latents(latents)
    if loss.predictor is None or not integrates:
        return loss._replace(kinks=None)
    u, values, places = loss.predictor(q.loc, *data), latents.unpack(q.loc), {}
    loc = np.asarray(q.loc)
    # One site at a time, as all together are slices of one vector, which a traced program does not tell apart.
    for name, at in latents.places(q.loc.shape[0]).items():
        losses_at = of_latents(
            Latents(latents.names, partial(_with_site, values, name))
        ).losses_given_predictor
        if losses_at is None:
            continue
        of_site = partial(_first_of, losses_at, u, data)
        if depends_on(of_site, loc[at]):
            places[name] = at
    if places:
        coordinates = np.concatenate(list(places.values()))
        if len(coordinates) > MAX_SHARED:
            raise ValueError(
                f"the likelihood depends on {len(coordinates)} coordinates of the sites {sorted(places)} besides "
                f"predictor {predictor!r}, and at most {MAX_SHARED} are integrated: let the predictor take them "
                "in, or use monte_carlo()."
            )
        loss = loss._replace(shared=shared_nodes(coordinates, num_draws))
    return (
        loss if _kinks_at_outcomes(loss, u, q.loc, *data) else loss._replace(kinks=None)
    )


def _first_of(losses: Callable, u: Array, data: tuple, theta: Array) -> Array:
    return losses(u, theta, *data)[0]


def _with_site(values: Params, name: str, flat: Array) -> Params:
    return {**values, name: jnp.reshape(flat, jnp.shape(values[name]))}


def shared_nodes(coordinates: np.ndarray, num_draws: int) -> Shared:
    """Nodes of a product rule for few coordinates, antithetic draws for more."""
    m = len(coordinates)
    if m <= _MAX_DIMENSION:
        rule = product_rule(_SHARED_NODES, m, "monte_carlo()")

        def nodes(rng_key: Array | None) -> tuple[Array, Array]:
            z, weights = rule.at(None, 1, jnp.result_type(float))
            return z[:, 0], weights

        return Shared(coordinates, nodes, needs_key=False)

    def draws(rng_key: Array | None) -> tuple[Array, Array]:
        half = jax.random.normal(
            require_key("shared latents", rng_key), (num_draws // 2, m)
        )
        return jnp.concatenate([half, -half]), jnp.full((num_draws,), 1.0 / num_draws)

    return Shared(coordinates, draws, needs_key=True)


def _kinks_at_outcomes(
    loss: ModelLoss, u: Array, theta: Array, args: tuple, kwargs: dict
) -> bool:
    """Whether all kinks of the losses are where the predictor is the outcome."""
    if loss.kinks is None:
        return False

    kinks = loss.kinks

    def locations(u: Array, theta: Array) -> Array:
        return kinks(u, theta, args, kwargs)[0]

    rows = ~np.all(np.isnan(to_host(locations(u, theta))), axis=1)
    if not rows.any():
        return False
    if depends_on(lambda theta: locations(u, theta)[rows], theta):
        return False
    return all(
        bool(np.all(to_host(locations(at, theta))[rows] == to_host(at)))
        for at in (u, u + 1.0)
    )


def _is_affine(loss: ModelLoss, q: Gaussian, args: tuple, kwargs: dict) -> bool:
    """Whether the derivative of the predictor along a line does not depend on the latents."""
    predict, _ = loss.by_predictor()
    line = jnp.asarray(np.random.default_rng(0).normal(size=q.loc.shape), q.loc.dtype)

    def slope(theta: Array) -> Array:
        return jax.jvp(lambda t: predict(t, args, kwargs), (theta,), (line,))[1]

    return not depends_on(slope, q.loc)


def _is_convex(loss: ModelLoss, q: Gaussian, args: tuple, kwargs: dict) -> bool:
    """Whether each datum's loss has no negative curvature on a grid of predictors."""
    predict, weighted = weigh(loss).by_predictor()
    u = predict(q.loc, args, kwargs)
    if u.ndim != 1:
        return False
    slopes = jax.grad(lambda v: jnp.sum(weighted(v, q.loc, args, kwargs)[0]))

    def curvature(at: Array) -> Array:
        return jax.jvp(slopes, (at,), (jnp.ones_like(at),))[1]

    # Off the kinks that a loss may have at whole numbers, and around each predictor in any unit.
    wide = (
        np.concatenate([np.linspace(-50.0, 50.0, 101), np.linspace(-5.0, 5.0, 101)])
        + 0.013
    )
    near = np.geomspace(1e-6, 1e6, 81)
    offsets = np.concatenate([wide, -near, near]).astype(u.dtype)
    is_near = np.arange(len(offsets)) >= len(wide)

    def is_convex(u: Array) -> Array:
        def step(
            extremes: tuple[Array, Array], point: tuple[Array, Array]
        ) -> tuple[tuple[Array, Array], None]:
            offset, near = point
            value = curvature(jnp.where(near, u, 0.0) + offset)
            value = jnp.where(jnp.isfinite(value), value, 0.0)
            return (
                jnp.minimum(extremes[0], value),
                jnp.maximum(extremes[1], jnp.abs(value)),
            ), None

        # The rows stay where they are: no value of a row comes to the host.
        zeros = jnp.zeros_like(u)
        points = jnp.asarray(offsets), jnp.asarray(is_near)
        (least, largest), _ = jax.lax.scan(step, (zeros, zeros), points)
        return jnp.all(least >= -1e-5 * largest)

    return bool(run_program(is_convex, u))


def weigh(model: ModelLoss) -> ModelLoss:
    """The losses times their weights, so that an expectation's value is the tempered one."""

    def weighted(losses_and_weights: tuple[Array, Array]) -> tuple[Array, Array]:
        losses, weights = losses_and_weights
        # A power of 0 takes a loss out, an infinite one too.
        return jnp.where(weights == 0, 0.0, losses * weights).astype(
            losses.dtype
        ), jnp.ones_like(losses)

    losses_given = model.losses_given_predictor
    return model._replace(
        losses=lambda theta, *data: weighted(model.losses(theta, *data)),
        losses_given_predictor=(
            None
            if losses_given is None
            else lambda u, theta, *data: weighted(losses_given(u, theta, *data))
        ),
    )
