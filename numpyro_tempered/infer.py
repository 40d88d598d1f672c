"""Online variational inference for NumPyro models."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
from numpyro_tempered.likelihood import check_model
from numpyro_tempered.online import stream
from numpyro_tempered.online.base import Losses, OnlineState, Rule


class OnlineVIState(NamedTuple):
    """State of an :class:`OnlineVI`: a pytree of arrays.

    Attributes:
        rule_state: State of the rule, on the flat unconstrained scale.
        rng_key: Key of the run; each round derives its own from it.
    """

    rule_state: OnlineState
    rng_key: Array

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
        expectation = monte_carlo() if expectation is None else expectation
        self.model, self.rule, self.expectation = model, rule, expectation
        self.guide = guide
        self._bound = bind(expectation, model, guide)
        self._by_structure: dict[Any, Expectation] = {}

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
        """
        self._set_up(rng_key, args, kwargs)
        start = self.guide.prior if prior is None else self._as_prior(prior)
        state = OnlineVIState(self.rule.init(start), rng_key)
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
        """
        self.require_set_up()
        arrays, expectation = self._split(args, kwargs)
        rule_state, losses = stream.update(
            self.rule, expectation, state.rule_state, *arrays, rng_key=state.rng_key
        )
        return state._replace(rule_state=rule_state), losses

    def run(
        self,
        rng_key: Array | OnlineVIState,
        *args: Any,
        init_state: OnlineVIState | None = None,
        **kwargs: Any,
    ) -> tuple[OnlineVIState, Losses]:
        """One pass over a stream: every row of the arguments is a round, in one compiled loop.

        The numbers are those of :meth:`update` on ``x[t:t+1]``, row by row.

        Args:
            rng_key: Key of the run, or a state to go on from.
            *args: Arguments of the model with one common leading axis of T rounds. Scalars, strings
                and None are passed to every round as they are.
            init_state: State to go on from.
            **kwargs: Keyword arguments of the model, likewise.

        Returns:
            The state, and :class:`Losses` of shape ``(T,)`` each.

        Raises:
            ValueError: If the leading axes differ, or T is 0.
        """
        if isinstance(rng_key, OnlineVIState):
            init_state = rng_key
            rng_key = init_state.rng_key
        arrays, expectation = self._split(args, kwargs)
        num_rounds = stream.check_rows([a for a in arrays if a.ndim])
        if init_state is None:
            first = jax.tree.map(lambda a: a[:1] if jnp.ndim(a) else a, (args, kwargs))
            init_state = self.init(rng_key, *first[0], **first[1])
        self.require_set_up()
        # Rows keep a leading axis of 1, so that the model sees a batch.
        rows = [a[:, None] if a.ndim else jnp.broadcast_to(a, (num_rounds,)) for a in arrays]
        rule_state, losses = stream.run(
            self.rule, expectation, init_state.rule_state, *rows, rng_key=init_state.rng_key
        )
        return init_state._replace(rule_state=rule_state), losses

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

    def _set_up(self, rng_key: Array, args: tuple, kwargs: dict) -> None:
        if self.guide.prototype_trace is not None:
            return
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((rng_key, args, kwargs))):
            raise ValueError(
                "OnlineVI.init sets the guide up, which keeps Python state: call it once outside of "
                "jit, vmap and scan; update and run can be transformed."
            )
        # Shapes alone matter here: NumPyro's validation of the values waits for the rounds.
        with handlers.block(), numpyro.validation_enabled(False):
            check_model(rng_key, self.model, args, kwargs)
            handlers.seed(self.guide, rng_key)(*args, **kwargs)

    def require_set_up(self) -> None:
        """Raise ValueError if :meth:`init` has not been called."""
        if self.guide.prototype_trace is None:
            raise ValueError("call OnlineVI.init before update, or run with a key.")

    def _split(self, args: tuple, kwargs: dict) -> tuple[tuple[Array, ...], Expectation]:
        """The arrays among the arguments, and the expectation as a function of them alone."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        is_array = tuple(hasattr(leaf, "ndim") and not isinstance(leaf, np.generic) for leaf in leaves)
        static = tuple(None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
        key = (structure, is_array, static, tuple(type(leaf) for leaf in static))
        if key not in self._by_structure:
            self._by_structure[key] = self._bound._replace(
                evaluate=_merge_arguments(self._bound.evaluate, structure, is_array, static)
            )
        arrays = tuple(jnp.asarray(leaf) for leaf, array in zip(leaves, is_array, strict=True) if array)
        return arrays, self._by_structure[key]

    def _as_prior(self, prior: Any) -> MeanField:
        if isinstance(prior, OnlineVIState):
            q = prior.posterior
        elif isinstance(prior, MeanField):
            q = prior
        elif isinstance(prior, TemperedFit):
            sites = unconstrained_moments(prior)
            expected = self.guide._unpack_latent(self.guide.prior.loc)
            if {k: v.loc.shape for k, v in sites.items()} != {k: v.shape for k, v in expected.items()}:
                raise ValueError(
                    f"the fit has latent sites {sorted(sites)}, the model has "
                    f"{ {k: v.shape for k, v in expected.items()} }: names and shapes must agree."
                )
            pack = self.guide.pack
            q = MeanField(
                pack({k: v.loc for k, v in sites.items()}),
                pack({k: v.scale for k, v in sites.items()}),
            )
        else:
            raise TypeError(
                f"prior must be an OnlineVIState, a TemperedFit or a MeanField, got {type(prior).__name__}."
            )
        if jnp.shape(q.loc) != self.guide.prior.loc.shape:
            raise ValueError(
                f"prior has {jnp.shape(q.loc)} coordinates, the model {self.guide.prior.loc.shape}."
            )
        return q


def _merge_arguments(
    evaluate: Callable[..., Evaluation], structure: Any, is_array: tuple, static: tuple
) -> Callable[..., Evaluation]:
    def merged(q: MeanField, *arrays: Array, **options: Any) -> Evaluation:
        remaining = iter(arrays)
        leaves = [next(remaining) if array else leaf for leaf, array in zip(static, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        return evaluate(q, args, kwargs, **options)

    return merged
