"""Effect handlers: ``temper`` raises the likelihood of a NumPyro model to a power."""

import functools
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, Never, overload

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.primitives import get_mask

from numpyro_tempered.core import ArrayLike, Guide, Model
from numpyro_tempered.handlers import effects, observed, powers
from numpyro_tempered.handlers.dependence import get_structure
from numpyro_tempered.handlers.effects import P, Q, R, S
from numpyro_tempered.handlers.imputation import argument_key, check_values
from numpyro_tempered.handlers.mixing import check_elements
from numpyro_tempered.handlers.numpyro_private import COERCIONS, STACK
from numpyro_tempered.handlers.powers import check_alpha, is_power


class temper(effects.DecoratedModel[P, R], effects.Handler):
    r"""Raise the likelihood to the power ``alpha`` and leave the prior alone.

    The decorated model targets the tempered (fractional) posterior

    .. math:: \pi_{n,\alpha}(\theta) \propto L_n(\theta)^\alpha\, \pi(\theta)

    under every NumPyro algorithm that honours scales. Each observed site's log-probability is multiplied
    by ``alpha``; latent sites, and the Jacobian and reparameterisation factors that NumPyro itself emits as
    observed sites, are not. Works as function, decorator, of methods too, and context manager, composes with
    subsampling plates and other scales, and multiplies when nested.

    ``alpha`` below 1 tempers, 1 is Bayes, 0 is the prior, above 1 is a cold posterior that counts the
    data more than once. A mapping gives each observed site a power of its own, as in a power prior with
    historical data.

    Latents of a plate are parameters, whose prior is left alone, unless they are summed out by
    :class:`marginalize` or named local by ``local_plates``: a Gibbs kernel that samples local discrete
    latents has the posterior of parameters and latents together for its target.

    Apply it outside of what makes data observed, ``temper(condition(model, data))``, since a handler sees
    only what happened inside it, and outside of :class:`marginalize`. Build guides on the tempered model,
    because several keep it. Give missing data a latent with their prior and observe the data that are there,
    ``obs=x[there]``, so that the power is on these alone; that no observed value depends on a latent is
    checked where ``temper`` is given the model, not where it is a context manager.

    Args:
        fn: Model to temper; None for a decorator or a context manager.
        alpha: Power on the likelihood, a number >= 0; an array of the data's shape, with a power for each
            datum (in a plate that subsamples, for each of all data); or a mapping from site names to these, in
            which every likelihood site is named. It may be traced, so that a grid of alphas compiles
            once under ``vmap``. A traced 0 gives the density of the prior, but 0 in place of the
            log-likelihood for its derivative in alpha, and a NaN gradient where the parameters make the
            likelihood 0: take a concrete 0 for the prior alone. At a concrete 0 NumPyro's own
            ``log_likelihood`` sees no data and gives zeros; ``to_inference_data`` does not.
        factors: What a ``numpyro.factor`` of the model is: part of the likelihood (True, the default), of
            the prior (False), or the names of those that are part of the likelihood.
        strict: Raise where a site is observed by a handler outside of this one, which leaves it untempered.
            Gibbs kernels, ``Predictive(infer_discrete=True)``, DCC and SDVI fix latents in this way and may.
        local_plates: Names of the plates whose continuous latents are local, one for each datum. Their
            log-probabilities are multiplied by ``alpha`` too, in the model and, by :meth:`guide`, in the
            guide: the bound of alpha-variational Bayes (YPB) on the tempered marginal likelihood.
        discrete_parameters: Names of discrete latents of plates that are parameters, as a group's own. They may
            be enumerated, if the data of each element of the plate depend on that element alone.

    Raises:
        TypeError: If ``factors``, ``local_plates`` or ``discrete_parameters`` is of another type.
        ValueError: If ``alpha`` is not as above (where it is concrete), or, while the model runs, if

            - a mapping does not name a likelihood site, or names one that is observed outside only,
            - a site is observed outside, and ``strict``, or an observed one is made a latent outside,
            - it is a latent of the model,
            - an observed value depends on a latent, or broadcasts against its distribution to more data,
            - an array has another shape than the data,
            - a name of an argument is not met in the model,
            - an enumerated discrete latent is local (of a plate or of a scan): raising its observed sites to
              a power inside the sum is another target; see :class:`marginalize`,
            - the guide did not scale a local latent,
            - ``handlers.collapse`` has merged likelihood and prior,
            - the kernel is ``HMCECS``, which ignores scales,
            - SVI's guide is one that samples or approximates the model it keeps, and keeps the untempered.

    Warns:
        UserWarning: Where SVI fits the latent of an ``obs_mask``, whose entries without a density leave the ELBO
            without a maximum; or if the potential energy of a model with local latents is asked for, by MCMC. It
            samples them from their tempered joint density with the parameters, and not the tempered marginal.

    References:
        AR; BPY; YPB for local latents.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> @nt.temper(alpha=0.5)
        ... def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(1.0)
        >>> print(trace["theta"]["scale"], trace["y"]["scale"])
        None 0.5
    """

    def __init__(
        self,
        fn: Callable[P, R] | None = None,
        alpha: ArrayLike | Mapping[str, ArrayLike] = 1.0,
        *,
        factors: bool | Collection[str] = True,
        strict: bool = True,
        local_plates: Collection[str] = (),
        discrete_parameters: Collection[str] = (),
    ) -> None:
        self._made_inside = bool(STACK)
        observed.refuse_drawn_power(alpha)
        self.alpha = check_alpha(alpha)
        if isinstance(factors, str) or not isinstance(factors, bool | Collection):
            raise TypeError(
                f"factors must be a bool or a collection of names, got {factors!r}."
            )
        named = {
            "local_plates": local_plates,
            "discrete_parameters": discrete_parameters,
        }
        for name, names in named.items():
            if isinstance(names, str) or not isinstance(names, Collection):
                raise TypeError(f"{name} must be a collection of names, got {names!r}.")
        if local_plates and (isinstance(self.alpha, dict) or jnp.ndim(self.alpha)):
            raise ValueError(
                "local_plates need one alpha for all sites and data, got a mapping or an array."
            )
        if local_plates and is_power(self.alpha, 0.0):
            raise ValueError(
                "alpha = 0 leaves local latents without a target: take alpha > 0, or no local_plates."
            )
        self.factors = factors if isinstance(factors, bool) else frozenset(factors)
        self.strict = strict
        self.local_plates = frozenset(local_plates)
        self.discrete_parameters = frozenset(discrete_parameters)
        # What the calls whose observed values have been checked were given.
        self._checked: set[str] = set()
        self._inventory = Inventory()
        self._twins: list[temper] = []
        super().__init__(fn)

    def __enter__(self) -> None:
        """Start to scale."""
        if self in STACK:
            # One handler has one place on the stack: its twin takes the other.
            twin = self._copy(None)
            self._twins.append(twin)
            twin.__enter__()
            return
        self._inventory = Inventory()
        COERCIONS.append(self._inventory.note_collapse)
        super().__enter__()

    def __exit__(self, exc_type: object, exc_value: object, traceback: object) -> None:
        """Stop, and refuse names that the model does not have."""
        if self._twins:
            self._twins.pop().__exit__(exc_type, exc_value, traceback)
            return
        COERCIONS.remove(self._inventory.note_collapse)
        # A model may leave factors out where Predictive masks it.
        masked = exc_type is None and get_mask() is False
        super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None and not masked:
            alphas = set(self.alpha) if isinstance(self.alpha, dict) else set()
            factors = set() if isinstance(self.factors, bool) else self.factors
            self._inventory.check_names(
                alphas, factors, self.local_plates, self.discrete_parameters
            )

    @overload
    def __call__(
        self: "temper[..., Never]", fn: Callable[Q, S], /
    ) -> "temper[Q, S]": ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Run the tempered model, or decorate one."""
        if self.fn is not None:
            result = super().__call__(*args, **kwargs)
            self._check_dependence(args, kwargs)
            return result
        return self._decorate(args, kwargs)

    def _copy(self, fn: Model | None) -> "temper":
        return temper(
            fn,
            self.alpha,
            factors=self.factors,
            strict=self.strict,
            local_plates=self.local_plates,
            discrete_parameters=self.discrete_parameters,
        )

    def guide(self, guide: Guide) -> Guide:
        """The guide with its latents in ``local_plates`` scaled as those of the model.

        Pass this one to ``SVI`` and other losses, and keep the original for its own methods, such as
        ``sample_posterior``. Without ``local_plates`` it is the original.

        Args:
            guide: A guide whose local latents are in plates of the same names, as in ``AutoNormal`` or
                a hand-written guide.

        Example:
            >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
            >>> from numpyro.infer import SVI, Trace_ELBO
            >>> from numpyro.infer.autoguide import AutoNormal
            >>> import numpyro_tempered as nt
            >>> def model(x):
            ...     theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
            ...     with numpyro.plate("n", len(x)):
            ...         z = numpyro.sample("z", dist.Normal(theta, 1.0))
            ...         numpyro.sample("x", dist.Normal(z, 0.5), obs=x)
            >>> tempered = nt.temper(model, alpha=0.25, local_plates=["n"])
            >>> guide = AutoNormal(tempered)
            >>> svi = SVI(tempered, tempered.guide(guide), numpyro.optim.Adam(0.01), Trace_ELBO())
        """
        return (
            powers.scale_local(guide, self.alpha, self.local_plates)
            if self.local_plates
            else guide
        )

    def process_message(self, msg: effects.Message) -> None:
        """Scale observed sites and local latents; see the class."""
        if msg["type"] == "control_flow":
            effects.wrap_bodies(msg, effects.mark_prior_factors)
        self._inventory.note_collapse()
        if msg["type"] == "plate":
            self._inventory.plates.add(msg["name"])
        if msg["type"] != "sample":
            return
        self._inventory.plates |= effects.plates_of(msg)
        self._inventory.sites.add(msg["name"])
        # `do` sends a copy of the message through the stack a second time. The place of a handler marks it, not
        # its identity: the branches of a `cond` must be equal.
        place, names = STACK.index(self), dict(msg.get(effects.PLACES, ()))
        if place in names:
            return
        msg[effects.PLACES] = (*names.items(), (place, msg["name"]))
        if not msg["is_observed"]:
            powers.scale_if_local(msg, self.alpha, self.local_plates)
        elif msg.get("_control_flow_done") and observed.is_fixed_by_gibbs(msg):
            # A latent, which the body of a scan has observed before it is seen here.
            return
        elif self._is_likelihood(msg):
            self._raise_to_power(msg)
        else:
            msg[effects.PRIOR_FACTOR] = True

    def postprocess_message(self, msg: effects.Message) -> None:
        """Refuse what only the outer handlers decide."""
        if msg["type"] != "sample":
            return
        # A scope outside has changed the name by now.
        name = dict(msg.get(effects.PLACES, ())).get(STACK.index(self))
        if name is None:
            return
        if msg["is_observed"]:
            # A mapping names all that is to be tempered.
            power = (
                self.alpha.get(name, 1.0)
                if isinstance(self.alpha, dict)
                else self.alpha
            )
            reached = (
                effects.ALPHA in msg
                or msg.get(effects.PRIOR_FACTOR)
                or "_intervener_id" in msg
            )
            if (
                not reached
                and not is_power(power, 1.0)
                and (self.strict or isinstance(self.alpha, dict))
            ):
                observed.check_observer(msg, name)
            return
        if not is_power(msg.get(effects.ALPHA, 1.0), 1.0):
            raise ValueError(
                f"a handler outside of temper has made the observed site {name!r} a latent, which would have the "
                "power too: write temper(uncondition(model), ...)."
            )
        if effects.is_reading():
            return
        is_local = msg["cond_indep_stack"] or msg.get("_control_flow_done")
        if (
            is_local
            and msg["infer"].get("enumerate") == "parallel"
            and not is_power(self.alpha, 1.0)
        ):
            if name in self.discrete_parameters:
                self._inventory.enumerated.add(name)
                return
            observed.refuse_enumerated(name)
        powers.check_guide(msg)

    def _check_dependence(self, args: tuple, kwargs: dict) -> None:
        """Refuse what only the whole model shows, once for all calls that are traced alike.

        These are observed values that depend on latents, and enumerated latents whose elements are mixed.
        """
        values, self._inventory.values = self._inventory.values, []
        leaves = {id(leaf) for leaf in jax.tree.leaves((args, kwargs))}
        # What the model gets as it is cannot depend on its latents.
        is_computed = any(id(value) not in leaves for value in values)
        enumerated = self._inventory.enumerated
        # Predictive's density is masked.
        if not (is_computed or enumerated) or get_mask() is False:
            return
        key = f"{argument_key(args, kwargs)} {is_computed} {sorted(enumerated)}"
        if key not in self._checked:
            model = functools.partial(self.fn, *args, **kwargs)
            if is_computed:
                check_values(model, self.alpha)
            if enumerated:
                check_elements(model, get_structure(model), enumerated)
            self._checked.add(key)

    def _raise_to_power(self, msg: effects.Message) -> None:
        alpha = powers.at_data(self._power(msg), msg)
        self._inventory.has_data = True
        if self._made_inside:
            msg[effects.MADE_INSIDE] = True
        # A product with 1 would be another tracer, which must not leave the body of a scan.
        msg[effects.ALPHA] = (
            alpha * msg[effects.ALPHA] if effects.ALPHA in msg else alpha
        )
        if effects.is_reading() or is_power(alpha, 1.0):
            return
        powers.check_algorithm(self, msg, alpha)
        if effects.SUM_PARTS not in msg:
            observed.check_shape(msg)
        if isinstance(msg["value"], jax.Array) and msg["value"].size:
            self._inventory.values.append(msg["value"])
        if is_power(alpha, 0.0):
            msg["fn"] = msg["fn"].mask(False)
            return
        if not (
            isinstance(alpha, float) or (isinstance(alpha, np.ndarray) and alpha.all())
        ):
            # A traced 0 times a log-probability of -inf would be NaN. A mask by the log-probability itself would
            # keep the derivative in alpha at 0, and compute each of them three times.
            msg["fn"] = msg["fn"].mask(alpha != 0)
        powers.scale(msg, alpha)

    def _power(self, msg: effects.Message) -> powers.Power:
        if not isinstance(self.alpha, dict):
            return self.alpha
        if msg["name"] not in self.alpha:
            kind, hint = (
                ("factor", "; or factors=False")
                if effects.is_unit(msg)
                else ("observed site", "")
            )
            raise ValueError(
                f"{kind} {msg['name']!r} has no alpha: the mapping names {sorted(self.alpha)}. Name every "
                f"likelihood site, with 1.0 for those that are not tempered{hint}."
            )
        return self.alpha[msg["name"]]

    def _is_likelihood(self, msg: effects.Message) -> bool:
        if effects.SUM_PARTS in msg:
            return self._is_sum_likelihood(msg)
        if not effects.is_unit(msg):
            return True
        if effects.is_prior_factor(msg):
            return False
        if not is_power(self.alpha, 1.0) and self._inventory.is_collapsed(msg["name"]):
            raise ValueError(
                f"temper met the factor {msg['name']!r} of handlers.collapse, which holds prior and likelihood "
                "in one: a power of it is another target. Leave the latents in the model."
            )
        return self._is_factor_likelihood(msg["name"])

    def _is_factor_likelihood(self, name: str) -> bool:
        self._inventory.factors.add(name)
        if isinstance(self.factors, bool):
            return self.factors
        return name in self.factors

    def _is_sum_likelihood(self, msg: effects.Message) -> bool:
        """The policy for the factors that ``marginalize`` has summed over, perhaps together with data."""
        factors, has_data = msg[effects.SUM_PARTS]
        parts = {self._is_factor_likelihood(name) for name in factors} | (
            {True} if has_data else set()
        )
        if len(parts) > 1:
            raise ValueError(
                f"site {msg['name']!r} is a sum over local discrete latents, and temper's `factors` leaves "
                f"some of {sorted(factors)} to the prior: a power of a part of the sum is another target."
            )
        return parts.pop()


class Inventory:
    """What the model has, as one run shows it."""

    def __init__(self) -> None:
        self.sites: set[str] = set()
        self.plates: set[str] = set()
        self.factors: set[str] = set()
        # Of the discrete_parameters.
        self.enumerated: set[str] = set()
        self.has_data = False
        # Of observed sites that are tempered, where they may be computed by the model.
        self.values: list[Any] = []
        self.collapses: set[handlers.collapse] = set()

    def note_collapse(self, *_: object) -> None:
        """List the ``handlers.collapse`` around a new distribution: the messages of its sites end there."""
        self.collapses |= {
            handler for handler in STACK if isinstance(handler, handlers.collapse)
        }

    def is_collapsed(self, factor: str) -> bool:
        """Whether a factor has the name of a site in a ``handlers.collapse`` that is over."""
        over = self.collapses.difference(STACK)
        return any(factor.endswith(name) for handler in over for name in handler.trace)

    def check_names(
        self,
        alphas: Set[str],
        factors: Set[str],
        plates: Set[str],
        parameters: Set[str],
    ) -> None:
        """Refuse names that the model does not have.

        Args:
            alphas: Sites that ``alpha`` names.
            factors: Factors that ``factors`` names.
            plates: Plates that ``local_plates`` names.
            parameters: Sites that ``discrete_parameters`` names.
        """
        if missing := sorted(plates - self.plates):
            raise ValueError(
                f"the model has no plates {missing}, which local_plates names."
            )
        if missing := sorted(parameters - self.sites):
            raise ValueError(
                f"the model has no sites {missing}, which discrete_parameters names."
            )
        # Without data the model may leave observed sites out.
        if (missing := sorted((alphas - self.sites) | (factors - self.factors))) and (
            self.has_data or self.factors
        ):
            raise ValueError(
                f"the model has no sites {missing}, which alpha or factors names. It has "
                f"{sorted(self.sites)}, of which {sorted(self.factors)} are factors."
            )
