"""Online variational inference for NumPyro models."""

import functools
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_tempered.core import (
    ArgumentStructure,
    Array,
    ArrayLike,
    Guide,
    Model,
    Numbers,
    Params,
    Shape,
    check_key,
    check_record,
    is_traced,
    on_arrays,
    read_chunk,
    separate,
)
from numpyro_tempered.gaussian.expectations.base import Expectation, Predictors
from numpyro_tempered.gaussian.expectations.monte_carlo import monte_carlo
from numpyro_tempered.gaussian.families.base import Gaussian, family_of
from numpyro_tempered.handlers.effects import handler_chain, is_same
from numpyro_tempered.handlers.likelihood import latent_sites, plain_arrays
from numpyro_tempered.handlers.numpyro_private import unpack_and_constrain
from numpyro_tempered.infer import online_checks as checks
from numpyro_tempered.infer.elbo import bind
from numpyro_tempered.infer.guides.online import StartsAtPrior
from numpyro_tempered.infer.online_checks import observed_arguments, support_check
from numpyro_tempered.infer.online_posterior import StreamPosterior
from numpyro_tempered.infer.online_prior import add_residual, as_prior, residual
from numpyro_tempered.infer.online_state import OnlineVIState
from numpyro_tempered.online import Losses, Rule, drivers, run_chunks, rvga, stream
from numpyro_tempered.online.predictions import PredictorsOf, require_predictors
from numpyro_tempered.online.service import Parts, Service

# One for all, so that compiled rounds are shared.
_DEFAULT_RULE = rvga()


class OnlineVI:
    """Online variational inference on a NumPyro model, shaped like NumPyro's SVI.

    Each batch is one round: its losses (negative log-likelihoods) are summed, reported untempered
    and unscaled before the update, and the rule moves the guide's Gaussian. Tempering enters the
    gradients. A round whose data, loss or update are not finite leaves posterior and count as they
    were and adds one to ``state.rejected``.

    Args:
        model: NumPyro model, tempered or not, with its data as arguments.
        guide: An online guide of the model, or its class: ``AutoOnlineDiagonalNormal``,
            ``AutoOnlineMultivariateNormal``, ``AutoOnlineLowRankNormal`` or an ``AutoOnlineGuide`` of your own.
            It decides the Gaussian family.
        rule: An online rule; ``nt.online.rvga()`` by default.
        expectation: ``monte_carlo(num_particles=4, antithetic=True)`` by default, or
            ``gauss_hermite(predictor=...)`` where the model names its predictor.

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
        >>> online = nt.OnlineVI(model, guide, expectation=nt.expectations.gauss_hermite(predictor="eta"))
        >>> x, y = jnp.ones(3), jnp.array([1.0, 2.0, 3.0])
        >>> state, losses = online.run(jax.random.key(0), x, y)
        >>> posterior = online.get_posterior(state)
        >>> print(f"{posterior.loc[0]:.3f} {posterior.scale[0]:.3f}")
        1.500 0.500
    """

    def __init__(
        self,
        model: Model,
        guide: Guide,
        rule: Rule | None = None,
        expectation: Expectation | None = None,
    ) -> None:
        instance = guide(model) if isinstance(guide, type) else guide
        if not isinstance(instance, StartsAtPrior):
            raise TypeError(
                "OnlineVI needs an AutoOnlineDiagonalNormal, AutoOnlineMultivariateNormal or "
                "AutoOnlineLowRankNormal, which start at the prior, or an AutoOnlineGuide of your own, got "
                f"{type(instance).__name__}."
            )
        if not is_same(handler_chain(instance.model)[-1], handler_chain(model)[-1]):
            raise ValueError(
                "the guide is built on another model, whose prior would start the run: build it on this one."
            )
        expectation = (
            monte_carlo(num_particles=4, antithetic=True)
            if expectation is None
            else expectation
        )
        rule = (
            _DEFAULT_RULE
            if rule is None
            else check_record(rule, "rule", Rule, "nt.online.ngvi()")
        )
        self.model, self.guide, self.rule, self.expectation = (
            model,
            instance,
            rule,
            expectation,
        )
        self._bound = bind(expectation, model, instance)
        self._by_structure: dict[Hashable, Expectation] = {}
        self._checked_shapes: set[Hashable] = set()
        self._num_axes: dict[Hashable, Shape] = {}
        # Of the tables of the stream, by argument.
        self.columns: dict[str, tuple] = {}

    def init(
        self, rng_key: Array, *args: object, prior: Any = None, **kwargs: object
    ) -> OnlineVIState:
        """The state before the first datum, at q = prior.

        Args:
            rng_key: Key of the run.
            *args: Arguments of the model, as in the first round: shapes are read, values are not.
            prior: Start from this posterior instead of the model's prior: the state of another run, a fit, an
                MCMC, a mixture or PCA at its data (``fit.on(x)``), or a Gaussian on the flat unconstrained scale.
                One of another family than the guide's, or of another support of a latent, is matched in mean and
                (co)variance, as far as the guide's family holds it.
            **kwargs: Keyword arguments of the model.

        Raises:
            ValueError: If the model cannot be run online, or ``prior`` is of another shape or outside of its
                supports.
            TypeError: If ``prior`` is none of these, or a fit that is not Gaussian.
        """
        check_key(
            rng_key, "OnlineVI.init(rng_key, *args) or OnlineVI.run(rng_key, *args)"
        )
        args, kwargs = checks.stream_arguments(
            OnlineVI.init, self.model, args, kwargs, self.columns, is_first=True
        )
        model_prior = checks.set_up_guide(rng_key, self.model, self.guide, args, kwargs)
        start = model_prior if prior is None else as_prior(prior, self.guide)
        state = OnlineVIState(self.rule.init(start), rng_key, self.guide.layout)
        arrays, structure, expectation = self._split(args, kwargs)
        self._num_axes[structure] = tuple(array.ndim for array in arrays)
        # Raise for a model that does not fit here rather than in the first round.
        jax.eval_shape(
            lambda s, data: stream.step(self.rule, expectation, s, data, rng_key),
            state.rule_state,
            arrays,
        )
        return state

    def update(
        self, state: OnlineVIState, *args: object, **kwargs: object
    ) -> tuple[OnlineVIState, Losses]:
        """One round on one batch.

        Args:
            state: From :meth:`init`, or an earlier round.
            *args: Arguments of the model: a batch, or a single datum with a leading axis of 1. Arrays and floats
                are data; strings, None, booleans and integers are compiled in, once each.
            **kwargs: Keyword arguments of the model.

        Returns:
            The state, and the scalar :class:`Losses` before the update.

        Raises:
            ValueError: If :meth:`init` has not been called, or model or data do not fit the rule or a support.
            TypeError: If an argument is neither data nor hashable.
        """
        return self._round(state, None, args, kwargs)

    def update_masked(
        self,
        state: OnlineVIState,
        mask: Numbers | None,
        *args: object,
        **kwargs: object,
    ) -> tuple[OnlineVIState, Losses]:
        """One round on the rows of a batch where ``mask`` is True: one compilation serves ragged batches.

        ``nt.online.pad_batch`` makes the batch and its mask, which is no keyword: a model may have one of that
        name. A round without a row changes nothing.

        Args:
            state: From :meth:`init`, or an earlier round.
            mask: Booleans, shape ``(n,)``; None for all rows.
            *args: Arguments of the model, a batch of n rows. Values in rows that are off do not matter.
            **kwargs: Keyword arguments of the model.

        Returns:
            The state, and the scalar :class:`Losses` before the update, of the rows that are on.

        Raises:
            ValueError: As :meth:`update`; and if an observed site has not one log-probability for each row.
        """
        return self._round(state, mask, args, kwargs)

    def _round(
        self, state: OnlineVIState, mask: Numbers | None, args: tuple, kwargs: dict
    ) -> tuple[OnlineVIState, Losses]:
        arrays, _, expectation = self.prepare_round(mask, args, kwargs)
        start, key = state.rule_state, state.rng_key
        rule_state, losses = drivers.update(
            self.rule, expectation, start, *arrays, rng_key=key, mask=mask
        )
        return state._replace(rule_state=rule_state), losses

    def prepare_round(
        self, mask: Numbers | None, args: tuple, kwargs: dict
    ) -> tuple[tuple[Array, ...], ArgumentStructure, Expectation]:
        """The arrays of a batch that fits the model, the structure around them, and the expectation of arrays."""
        self.require_set_up()
        args, kwargs = checks.stream_arguments(
            OnlineVI.update, self.model, args, kwargs, self.columns
        )
        arrays, structure, expectation = self._split(args, kwargs)
        # Once for each shape.
        shapes = (mask is None, *(array.shape for array in arrays))
        if shapes in self._checked_shapes:
            return arrays, structure, expectation
        checks.check_axes(arrays, structure, self._num_axes.get(structure))
        if not is_traced(arrays):
            checks.check_batch(
                self.model, self.guide, self.expectation, mask, args, kwargs
            )
            self._checked_shapes.add(shapes)
        return arrays, structure, expectation

    def run(
        self, rng_key: Array | OnlineVIState, *args: object, **kwargs: object
    ) -> tuple[OnlineVIState, Losses]:
        """One pass over a stream: every row of the arguments is a round, in one compiled loop.

        The numbers are those of :meth:`update` on ``x[t:t+1]``, row by row. It warns as ``nt.online.run`` does.

        Args:
            rng_key: Key of the run, or a state to go on from.
            *args: Arguments of the model with one common leading axis of T rounds. Scalars, strings
                and None are passed to every round as they are.
            **kwargs: Keyword arguments of the model, likewise.

        Returns:
            The state, and :class:`Losses` of shape ``(T,)`` each.

        Raises:
            ValueError: If the leading axes differ, T is 0, or data are outside of a support or nowhere finite.
        """
        is_first = not isinstance(rng_key, OnlineVIState)
        args, kwargs = checks.stream_arguments(
            OnlineVI.run, self.model, args, kwargs, self.columns, is_first=is_first
        )
        num_rounds = drivers.check_rows(
            [a for a in separate(args, kwargs)[0] if a.ndim]
        )
        state = self._start(rng_key, args, kwargs)
        arrays, _, expectation = self._split(args, kwargs)
        # Rows keep a leading axis of 1, so that the model sees a batch.
        rows = tuple(
            a[:, None] if a.ndim else jnp.broadcast_to(a, (num_rounds,)) for a in arrays
        )
        rule_state, losses = drivers.run_rounds(
            self.rule, expectation, state.rule_state, rows, state.rng_key
        )
        return state._replace(rule_state=rule_state), losses

    def run_chunks(
        self,
        rng_key: Array | OnlineVIState,
        chunks: Iterable[tuple[ArrayLike, ...]],
        **options: Any,
    ) -> tuple[OnlineVIState, Losses | None]:
        """One pass over a stream in chunks, such as a file in row groups, with memory for a few of them.

        Args:
            rng_key: Key of the run, or a state to go on from.
            chunks: Tuples of arrays, the model's positional arguments, each with a leading axis of rounds.
            **options: ``size``, ``skip``, ``keep``, ``progress_bar`` and ``total`` of
                :func:`numpyro_tempered.online.run_chunks`.

        Returns:
            The state, and the :class:`Losses` of the rounds asked for.

        Raises:
            ValueError: As :meth:`run`, and if there is no chunk or a chunk differs in form from the first.
        """
        iterator = map(read_chunk, chunks, itertools.count())
        first = next(iterator, None)
        if first is None:
            raise ValueError(
                "the stream has no chunk. One pass exhausts an iterator: pass a new one each time."
            )
        one = jax.tree.map(lambda leaf: leaf[:1], first)
        state = self._start(rng_key, one, {})
        *_, expectation = self._split(one, {})
        rows = (
            jax.tree.map(lambda leaf: leaf[:, None], c)
            for c in itertools.chain([first], iterator)
        )
        rule_state, losses = run_chunks(
            self.rule,
            expectation,
            state.rule_state,
            rows,
            rng_key=state.rng_key,
            **options,
        )
        return state._replace(rule_state=rule_state), losses

    def with_prior(
        self,
        state: OnlineVIState,
        *args: object,
        num_particles: int = 1000,
        num_iter: int = 40,
        **kwargs: object,
    ) -> OnlineVIState:
        """The state with the prior of the model instead of the Gaussian at the start of the run.

        A prior that is not Normal on the unconstrained scale is matched in two moments at the start, and the
        residual log-prior, log π - log q_1, is left out of the stream. This adds it as a last site, a Gaussian
        approximation around the posterior by natural gradients. Apply it once, to a copy for reporting: the
        stream goes on from the state without.

        Args:
            state: Of a run by an accumulating :func:`~numpyro_tempered.online.ngvi`.
            *args: Arguments of the model: shapes matter, data do not.
            num_particles: Draws for the expectation of the residual's gradients.
            num_iter: Steps to a fixed point, each half of the way.
            **kwargs: Keyword arguments of the model.

        Returns:
            A state with another posterior; counts and losses are those of ``state``. The same state where every
            prior is Normal.

        Raises:
            TypeError: If the rule holds no evidence, or the family is low rank.
            ValueError: If the run started from another posterior, or no Gaussian is left.
        """
        self.require_set_up()
        if not self.guide.moment_matched:
            return state
        pairs = zip(
            jax.tree.leaves(state.rule_state.prior),
            jax.tree.leaves(self.guide.prior),
            strict=True,
        )
        if not all(np.array_equal(a, b) for a, b in pairs):
            raise ValueError(
                "the run started from another posterior, whose prior would be counted twice."
            )
        args, kwargs = plain_arrays((args, kwargs))
        # Another stream of keys than that of the rounds.
        key = jax.random.fold_in(state.rng_key, 2**31 - 2)
        rest = residual(self.guide.model, self.guide, num_particles, args, kwargs)
        return state._replace(
            rule_state=add_residual(key, self.rule, rest, state.rule_state, num_iter)
        )

    def get_posterior(self, state: OnlineVIState) -> dist.Distribution:
        """The posterior on the flat unconstrained scale: the guide's Gaussian, or a Delta for a point rule."""
        if self.rule.point:
            return dist.Delta(state.posterior.loc, event_dim=0)
        return self.guide.get_posterior(self.get_params(state))

    def get_params(self, state: OnlineVIState) -> Params:
        """Parameters for ``Predictive`` and the guide's own methods, such as ``median``."""
        return self.guide.to_params(state.posterior)

    def _start(
        self, rng_key: Array | OnlineVIState, args: tuple, kwargs: dict
    ) -> OnlineVIState:
        """The state to go on from, or that before the first row."""
        if isinstance(rng_key, OnlineVIState):
            self.require_set_up()
            return rng_key
        args, kwargs = jax.tree.map(
            lambda a: a[:1] if jnp.ndim(a) else a, (args, kwargs)
        )
        return self.init(rng_key, *args, **kwargs)

    def require_set_up(self) -> None:
        """Raise ValueError if :meth:`init` has not been called."""
        if self.guide.prototype_trace is None:
            raise ValueError("call OnlineVI.init before update, or run with a key.")

    def _split(
        self, args: tuple, kwargs: dict
    ) -> tuple[tuple[Array, ...], ArgumentStructure, Expectation]:
        """The data among the arguments, what is around them, and the expectation as a function of them alone."""
        arrays, structure = separate(args, kwargs)
        if structure not in self._by_structure:
            bound = self._bound
            self._by_structure[structure] = bound._replace(
                evaluate=on_arrays(bound.evaluate, structure),
                predictors=None
                if bound.predictors is None
                else on_arrays(bound.predictors, structure),
                loss=None if bound.loss is None else on_arrays(bound.loss, structure),
                check=checks.support_check(self.model, arrays, structure),
            )
        return arrays, structure, self._by_structure[structure]

    def sample_posterior(
        self, rng_key: Array, state: OnlineVIState, num_samples: int = 1000
    ) -> Params:
        """Draws of the latent sites, on the scale of the model.

        Args:
            rng_key: Key.
            state: Of a run.
            num_samples: Number of draws S.

        Returns:
            By site, with a leading axis of S.
        """
        flat = family_of(state.posterior).sample(
            rng_key, state.posterior, (num_samples,)
        )
        samples = unpack_and_constrain(self.guide, flat, self.get_params(state))
        return {k: samples[k] for k in latent_sites(self.guide.prototype_trace)}

    def posterior(
        self, state: OnlineVIState, losses: Losses | None = None
    ) -> StreamPosterior:
        """The posterior at a state, for draws, predictions and every verb that takes a fit.

        Args:
            state: Of a run.
            losses: The losses of the run, to be shown by :func:`to_inference_data`.

        Example:
            >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
            >>> import numpyro_tempered as nt
            >>> def model(x, y=None):
            ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
            ...     numpyro.sample("y", dist.Normal(x * theta, 1.0), obs=y)
            >>> online = nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal)
            >>> state, losses = online.run(jax.random.key(0), jnp.ones(3), jnp.array([1.0, 2.0, 3.0]))
            >>> posterior = online.posterior(state)
            >>> print(f"{posterior.mean['theta']:.1f} {posterior.sd['theta']:.1f}")
            1.5 0.5
        """
        return StreamPosterior(self, state, losses)

    def service(
        self,
        state: OnlineVIState,
        *args: object,
        labels: Sequence[float] | None = None,
        **kwargs: object,
    ) -> Service:
        """Rounds and predictions of a NumPyro model one at a time, at a few microseconds each.

        ``service.learn`` takes the arrays among the arguments, in their order, with or without the leading
        axis of 1; predictions, of the named predictor, take those that no site observes. ``service.state`` is
        an :class:`.OnlineVIState`.

        Args:
            state: From its ``init``, or of a run.
            *args: Arguments of the model, a batch of the size of every round, such as 1. Shapes matter; strings,
                None, booleans and integers are compiled in.
            labels: All values of an outcome, as of :class:`Service`; without them
                ``service.class_probabilities`` are those of 0 and 1.
            **kwargs: Keyword arguments of the model, likewise.

        Raises:
            ValueError: As :meth:`OnlineVI.update`.

        Example:
            >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
            >>> import numpyro_tempered as nt
            >>> def model(x, y=None):
            ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            ...     eta = numpyro.deterministic("eta", x @ theta)
            ...     numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)
            >>> logits = nt.expectations.gauss_hermite(predictor="eta")
            >>> online = nt.OnlineVI(model, nt.guides.AutoOnlineMultivariateNormal, expectation=logits)
            >>> x, y = jnp.ones((1, 2)), jnp.ones(1)
            >>> service = online.service(online.init(jax.random.key(0), x, y), x, y)
            >>> losses = service.learn([1.0, -2.0], 1)
            >>> print(f"{service.class_probabilities([1.0, -2.0])[1]:.3f}")
            0.719
        """
        arrays, structure, expectation = self.prepare_round(None, args, kwargs)
        shapes = tuple(
            jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays
        )
        outcomes = {
            site.argument for site in observed_arguments(self.model, shapes, structure)
        }
        inputs = tuple(
            number for number in range(len(arrays)) if number not in outcomes
        )
        parts = Parts(
            self.rule,
            expectation,
            inputs,
            functools.partial(_predictors_of, expectation, shapes, inputs),
            lambda rule_state, rng_key: state._replace(
                rule_state=rule_state,
                rng_key=rng_key,  # type: ignore[arg-type]
            ),
            (0.0, 1.0),
        )
        return Service.of_parts(parts, state.rule_state, arrays, state.rng_key, labels)

    def bare_loss(
        self, rng_key: Array, *args: object, **kwargs: object
    ) -> tuple[Expectation, Gaussian]:
        """Return the likelihood as a loss of arrays, and the prior, for ``nt.online.partitioned``.

        A posterior of the loss goes back into the model by ``online.init(rng_key, *args, prior=posterior)``,
        whose state predicts, serves and draws the sites.

        Args:
            rng_key: Key of the set-up.
            *args: Arguments of the model, some rows of data: of arrays shapes matter, all else is part of the
                loss.
            **kwargs: Keyword arguments of the model, likewise.

        Returns:
            The expectation of the negative log-likelihood, as a function of the arrays among the arguments and
            tempered as the model is; and the prior on the flat unconstrained scale, a Gaussian of the guide's
            family.

        Raises:
            ValueError: As :meth:`init`, of a model that cannot be run online.

        Example:
            >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
            >>> import numpyro_tempered as nt
            >>> def model(x, y=None):
            ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
            ...     eta = numpyro.deterministic("eta", x * theta)
            ...     numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)
            >>> at_eta = nt.expectations.gauss_hermite(predictor="eta")
            >>> online = nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, expectation=at_eta)
            >>> x, y = jnp.ones(3), jnp.array([1.0, 2.0, 3.0])
            >>> loss, prior = online.bare_loss(jax.random.key(0), x, y)
            >>> pvi = nt.online.partitioned(loss, damping=1.0)
            >>> run = nt.online.run_partitioned(pvi, prior, [(x[:2], y[:2]), (x[2:], y[2:])])
            >>> print(f"{run.posterior.loc[0]:.3f} {run.posterior.scale[0]:.3f}")
            1.500 0.500
        """
        check_key(rng_key, "bare_loss(rng_key, *args)")
        prior = self.init(rng_key, *args, **kwargs).posterior
        bound = bind(self.expectation, self.model, self.guide)
        arrays, structure = separate(args, kwargs)
        expectation = bound._replace(
            evaluate=on_arrays(bound.evaluate, structure),
            predictors=None
            if bound.predictors is None
            else on_arrays(bound.predictors, structure),
            loss=None if bound.loss is None else on_arrays(bound.loss, structure),
            check=support_check(self.model, arrays, structure),
        )
        return expectation, prior


def _predictors_of(
    expectation: Expectation, shapes: tuple[jax.ShapeDtypeStruct, ...], inputs: Shape
) -> PredictorsOf:
    """The predictors of a model: outcomes, which they do not depend on, are filled in."""
    predictors = require_predictors(expectation)
    rows = [number for number in inputs if shapes[number].ndim]

    def at(
        theta: Array, values: tuple[Array, ...], label: Array | None
    ) -> tuple[Predictors, bool]:
        if label is not None and len(inputs) == len(shapes):
            raise TypeError(
                "class_probabilities needs a model that observes one of its arguments as it is: obs=y."
            )
        by_number = dict(zip(inputs, values, strict=True))
        is_one = any(by_number[number].ndim < shapes[number].ndim for number in rows)
        if is_one:
            by_number |= {number: by_number[number][None] for number in rows}
        num_rows = by_number[rows[0]].shape[0] if rows else 1

        def array_of(number: int, like: jax.ShapeDtypeStruct) -> Array:
            if number in by_number:
                return by_number[number]
            outcome = (
                jnp.zeros((), like.dtype) if label is None else label.astype(like.dtype)
            )
            return jnp.broadcast_to(outcome, (num_rows, *like.shape[1:]))

        return predictors(
            theta, *(array_of(number, like) for number, like in enumerate(shapes))
        ), is_one

    return at
