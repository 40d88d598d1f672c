"""Online variational inference for NumPyro models."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_tempered._typing import Array, Model
from numpyro_tempered.elbo import bind
from numpyro_tempered.expectations.base import Evaluation, Expectation
from numpyro_tempered.expectations.monte_carlo import monte_carlo
from numpyro_tempered.families.mean_field import MeanField
from numpyro_tempered.fit import TemperedFit, unconstrained_moments
from numpyro_tempered.guides import AutoOnlineDiagonalNormal
from numpyro_tempered.likelihood import Layout, check_model, check_rows_apart, model_loss, plain_arrays
from numpyro_tempered.messages import handler_chain
from numpyro_tempered.online import stream
from numpyro_tempered.online.base import Losses, OnlineState, Rule


class OnlineVIState(NamedTuple):
    """State of an :class:`OnlineVI`: a pytree of arrays.

    Attributes:
        rule_state: State of the rule, on the flat unconstrained scale.
        rng_key: Key of the run; each round derives its own from it.
        layout: Names and shapes of the sites in the flat vector; holds no array.
    """

    rule_state: OnlineState
    rng_key: Array
    layout: Layout

    @property
    def posterior(self) -> MeanField:
        """The Gaussian q_t on the flat unconstrained scale."""
        return self.rule_state.posterior

    @property
    def count(self) -> Array:  # type: ignore[override]
        """Rounds taken."""
        return self.rule_state.count

    @property
    def rejected(self) -> Array:
        """Rounds refused because data, loss or update were not finite."""
        return self.rule_state.rejected

    @property
    def cumulative(self) -> Losses:
        """Sums of the untempered losses over the rounds taken."""
        return Losses(*(total.value for total in self.rule_state.cumulative))


class OnlineVI:
    """Online variational inference on a NumPyro model, shaped like NumPyro's SVI.

    Each batch is one round: its losses (negative log-likelihoods) are summed, reported untempered
    and unscaled before the update, and the rule moves the guide's Gaussian. Tempering enters the
    gradients. A round whose data, loss or update are not finite leaves posterior and count as they
    were and adds one to ``state.rejected``.

    Args:
        model: NumPyro model, tempered or not, with its data as arguments.
        guide: ``AutoOnlineDiagonalNormal`` of the model, or that class.
        rule: An online rule, such as ``nt.online.ngvi()``.
        expectation: ``monte_carlo()`` by default, or ``gauss_hermite(predictor=...)`` where the
            model names its predictor.

    Raises:
        TypeError: If the guide is another, or the expectation is of a bare loss.
        ValueError: If the guide is built on another model.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(x, y=None):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     eta = numpyro.deterministic("eta", x * theta)
        ...     numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)
        >>> guide = nt.guides.AutoOnlineDiagonalNormal(model)
        >>> online = nt.OnlineVI(
        ...     model, guide, nt.online.ngvi(), nt.expectations.gauss_hermite(predictor="eta")
        ... )
        >>> x, y = jnp.ones(3), jnp.array([1.0, 2.0, 3.0])
        >>> state, losses = online.run(jax.random.key(0), x, y)
        >>> posterior = online.get_posterior(state)
        >>> print(f"{posterior.loc[0]:.3f} {posterior.scale[0]:.3f}")
        1.500 0.500
    """

    def __init__(
        self,
        model: Model,
        guide: Any,
        rule: Rule,
        expectation: Expectation | None = None,
    ) -> None:
        if isinstance(guide, type):
            guide = guide(model)
        if not isinstance(guide, AutoOnlineDiagonalNormal):
            raise TypeError(
                "OnlineVI needs an AutoOnlineDiagonalNormal, which starts at the prior, got "
                f"{type(guide).__name__}."
            )
        if handler_chain(guide.model)[-1] is not handler_chain(model)[-1]:
            raise ValueError(
                "the guide is built on another model, whose prior the run would start at: build it on this "
                "one, tempered or not."
            )
        expectation = monte_carlo() if expectation is None else expectation
        self.model, self.rule, self.expectation = model, rule, expectation
        self.guide = guide
        self._bound = bind(expectation, model, guide)
        self._by_structure: dict[Any, Expectation] = {}
        self._checked_shapes: set[Any] = set()

    def init(
        self,
        rng_key: Array,
        *args: Any,
        prior: OnlineVIState | TemperedFit | MeanField | None = None,
        **kwargs: Any,
    ) -> OnlineVIState:
        """The state before any datum, at q = prior.

        Args:
            rng_key: Key of the run.
            *args: Arguments of the model, as in the first round: shapes are read, values are not.
            prior: Start from this posterior instead of the model's prior: the state of another run,
                a :class:`TemperedFit`, or a Gaussian on the flat unconstrained scale. A fit that is
                not a mean-field Gaussian is matched in mean and standard deviation.
            **kwargs: Keyword arguments of the model.

        Raises:
            ValueError: If the model cannot be run online, or ``prior`` is of another shape.
            TypeError: If ``prior`` is none of these, or a fit that is not Gaussian.
        """
        args, kwargs = plain_arrays((args, kwargs))
        model_prior = self._set_up(rng_key, args, kwargs)
        start = model_prior if prior is None else self._as_prior(prior)
        state = OnlineVIState(self.rule.init(start), rng_key, self.guide.layout)
        arrays, expectation = self._split(args, kwargs)
        # Raise for a model that does not fit here rather than in the first round.
        jax.eval_shape(
            lambda s, data: stream.step(self.rule, expectation, s, data, rng_key),
            state.rule_state,
            arrays,
        )
        return state

    def update(self, state: OnlineVIState, *args: Any, **kwargs: Any) -> tuple[OnlineVIState, Losses]:
        """One round on one batch.

        Args:
            state: From :meth:`init`, or an earlier round.
            *args: Arguments of the model: a batch, or a single datum with a leading axis of 1.
            **kwargs: Keyword arguments of the model.

        Returns:
            The state, and the scalar :class:`Losses` before the update.

        Raises:
            ValueError: If :meth:`init` has not been called, or the model does not fit the rule.
            TypeError: If an argument is neither data nor hashable.

        Arrays and floats are data; strings, None, booleans and integers are compiled in, once each.
        """
        self.require_set_up()
        args, kwargs = plain_arrays((args, kwargs))
        arrays, expectation = self._split(args, kwargs)
        self._check_batch(arrays, args, kwargs)
        rule_state, losses = stream.update(
            self.rule, expectation, state.rule_state, *arrays, rng_key=state.rng_key
        )
        return state._replace(rule_state=rule_state), losses

    def run(
        self,
        rng_key: Array | OnlineVIState,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[OnlineVIState, Losses]:
        """One pass over a stream: every row of the arguments is a round, in one compiled loop.

        The numbers are those of :meth:`update` on ``x[t:t+1]``, row by row.

        Args:
            rng_key: Key of the run, or a state to go on from.
            *args: Arguments of the model with one common leading axis of T rounds. Scalars, strings
                and None are passed to every round as they are.
            **kwargs: Keyword arguments of the model, likewise.

        Returns:
            The state, and :class:`Losses` of shape ``(T,)`` each.

        Raises:
            ValueError: If the leading axes differ, or T is 0.
        """
        args, kwargs = plain_arrays((args, kwargs))
        arrays, expectation = self._split(args, kwargs)
        num_rounds = stream.check_rows([a for a in arrays if a.ndim])
        if isinstance(rng_key, OnlineVIState):
            state = rng_key
        else:
            first = jax.tree.map(lambda a: a[:1] if jnp.ndim(a) else a, (args, kwargs))
            state = self.init(rng_key, *first[0], **first[1])
        self.require_set_up()
        # Rows keep a leading axis of 1, so that the model sees a batch.
        rows = [a[:, None] if a.ndim else jnp.broadcast_to(a, (num_rounds,)) for a in arrays]
        rule_state, losses = stream.run(self.rule, expectation, state.rule_state, *rows, rng_key=state.rng_key)
        return state._replace(rule_state=rule_state), losses

    def get_posterior(self, state: OnlineVIState) -> dist.Distribution:
        """The posterior on the flat unconstrained scale: a Normal, or a Delta for a point rule."""
        q = state.posterior
        if self.rule.point:
            return dist.Delta(q.loc, event_dim=0)
        return self.guide.get_posterior(self.get_params(state))

    def get_params(self, state: OnlineVIState) -> dict[str, Array]:
        """Parameters for ``Predictive`` and the guide's own methods, such as ``median``.

        A scale of 0 is returned as the smallest positive number, which NumPyro's Normal admits and
        whose draws are the point itself.
        """
        q, prefix = state.posterior, self.guide.prefix
        scale = jnp.maximum(q.scale, jnp.finfo(q.scale.dtype).tiny)
        return {f"{prefix}_loc": q.loc, f"{prefix}_scale": scale}

    def _set_up(self, rng_key: Array, args: tuple, kwargs: dict) -> MeanField:
        """Set the guide up at the first call; the prior of the model with these arguments."""
        leaves = jax.tree.leaves((rng_key, args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise ValueError(
                "OnlineVI.init sets the guide up, which keeps Python state: call it once outside of "
                "jit, vmap and scan; update and run can be transformed."
            )
        guide = self.guide
        if guide.prototype_trace is not None:
            # The prior may depend on the arguments, and the guide keeps that of its first call.
            guide = AutoOnlineDiagonalNormal(self.guide.model, prefix=self.guide.prefix)
        # Shapes alone matter here: NumPyro's validation of the values waits for the rounds.
        with handlers.block(), numpyro.validation_enabled(False):
            check_model(rng_key, self.model, args, kwargs)
            handlers.seed(guide, rng_key)(*args, **kwargs)
        if guide.layout != self.guide.layout:
            raise ValueError(
                f"the latent sites are {guide.layout.sites}, at the first call they were "
                f"{self.guide.layout.sites}: build a new guide and OnlineVI for another shape."
            )
        return guide.prior

    def _check_batch(self, arrays: tuple[Array, ...], args: tuple, kwargs: dict) -> None:
        """Check once for each shape that a quadrature may take the rows of a batch apart."""
        shapes = tuple(array.shape for array in arrays)
        traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
        if self.expectation.predictor is None or traced or shapes in self._checked_shapes:
            return
        model = model_loss(self.model, self.guide, self.expectation.predictor)
        with numpyro.validation_enabled(False):
            check_rows_apart(model, self.guide.prior.loc, args, kwargs)
        self._checked_shapes.add(shapes)

    def require_set_up(self) -> None:
        """Raise ValueError if :meth:`init` has not been called."""
        if self.guide.prototype_trace is None:
            raise ValueError("call OnlineVI.init before update, or run with a key.")

    def _split(self, args: tuple, kwargs: dict) -> tuple[tuple[Array, ...], Expectation]:
        """The arrays among the arguments, and the expectation as a function of them alone."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        is_array = tuple(hasattr(leaf, "ndim") or isinstance(leaf, float) for leaf in leaves)
        static = tuple(None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
        key = (structure, is_array, static, tuple(type(leaf) for leaf in static))
        try:
            known = key in self._by_structure
        except TypeError as error:
            kinds = sorted({type(leaf).__name__ for leaf in static})
            raise TypeError(
                f"arguments must be arrays or hashable values, got objects of types {kinds}."
            ) from error
        if not known:
            self._by_structure[key] = self._bound._replace(
                evaluate=_merge_arguments(self._bound.evaluate, structure, is_array, static)
            )
        arrays = tuple(jnp.asarray(leaf) for leaf, array in zip(leaves, is_array, strict=True) if array)
        return arrays, self._by_structure[key]

    def _as_prior(self, prior: Any) -> MeanField:
        if isinstance(prior, MeanField):
            if jnp.shape(prior.loc) != self.guide.prior.loc.shape:
                raise ValueError(
                    f"prior has {jnp.shape(prior.loc)} coordinates, the model {self.guide.prior.loc.shape}."
                )
            return prior
        if isinstance(prior, OnlineVIState):
            locs, scales = (prior.layout.split(leaf) for leaf in prior.posterior)
        elif isinstance(prior, TemperedFit):
            sites = unconstrained_moments(prior)
            locs = {name: moments.loc for name, moments in sites.items()}
            scales = {name: moments.scale for name, moments in sites.items()}
        else:
            raise TypeError(
                f"prior must be an OnlineVIState, a TemperedFit or a MeanField, got {type(prior).__name__}."
            )
        shapes = {name: jnp.shape(value) for name, value in locs.items()}
        if shapes != dict(self.guide.layout.sites):
            raise ValueError(
                f"prior has latent sites {shapes}, the model has {dict(self.guide.layout.sites)}: names and "
                "shapes must agree."
            )
        return MeanField(self.guide.pack(locs), self.guide.pack(scales))


def _merge_arguments(
    evaluate: Callable[..., Evaluation], structure: Any, is_array: tuple, static: tuple
) -> Callable[..., Evaluation]:
    def merged(q: MeanField, *arrays: Array, **options: Any) -> Evaluation:
        remaining = iter(arrays)
        leaves = [next(remaining) if array else leaf for leaf, array in zip(static, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        return evaluate(q, args, kwargs, **options)

    return merged
