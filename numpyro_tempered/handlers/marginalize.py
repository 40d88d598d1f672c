"""Effect handlers: ``marginalize`` sums the local discrete latents of a NumPyro model out."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.primitives import Messenger, apply_stack

from numpyro_tempered.core import Array, Model, Shape
from numpyro_tempered.handlers import effects
from numpyro_tempered.handlers.dependence import (
    IN_FORWARD_SCAN,
    TOKEN,
    Structure,
    get_structure,
)
from numpyro_tempered.handlers.effects import P, R
from numpyro_tempered.handlers.elimination import Sum, sum_out
from numpyro_tempered.handlers.imputation import argument_key
from numpyro_tempered.handlers.mixing import check_elements
from numpyro_tempered.handlers.numpyro_private import STACK
from numpyro_tempered.handlers.observed import draws_discrete
from numpyro_tempered.handlers.robust import robust
from numpyro_tempered.handlers.temper import temper

_INSIDE_OUT = "marginalize(temper(model)) puts the power inside the sum: write temper(marginalize(model), alpha)."


class MarginalLikelihood(dist.Distribution):
    """The distribution of data whose local latents are summed out, known by its log-density at the data.

    Args:
        log_probs: Log-density at the data, the batch shape.
        event_shape: Shape of one datum.
    """

    pytree_data_fields = ("log_probs",)

    def __init__(self, log_probs: Array, event_shape: Shape = ()) -> None:
        self.log_probs = log_probs
        super().__init__(
            batch_shape=jnp.shape(log_probs),
            event_shape=event_shape,
            validate_args=False,
        )

    @property
    def support(self) -> constraints.Constraint:
        """Real numbers: the data, which are given."""
        return constraints.independent(constraints.real, len(self.event_shape))

    def sample(self, key: Array, sample_shape: Shape = ()) -> Array:
        """Not available: the model without data draws them with their local latents."""
        raise NotImplementedError(
            "data whose local latents are summed out are not drawn from their marginal: run Predictive on the "
            "model without its data."
        )

    def log_prob(self, value: Array) -> Array:
        """The log-density at the data, whatever ``value``."""
        return self.log_probs


class marginalize(effects.DecoratedModel[P, R]):
    r"""Sum the local discrete latents out of a model, so that its likelihood can be tempered.

    The power belongs outside of the sum over the values of a local discrete latent z,

    .. math:: \alpha \sum_i \log \sum_z p(z \mid \theta)\, p(x_i \mid z, \theta),

    and ``temper(marginalize(model), alpha)`` has this target under NUTS and SVI alike. The marginalised
    model shows its continuous latents, global discrete ones, params and plates as they are, and observes
    each datum of a plate (or the whole of a ``scan``) with its log-probability summed over z. Data that do
    not depend on z are observed as before.

    A discrete latent is local where it is in a plate or in a ``scan``; it must have an enumerable support. The
    sums are exact, by variable elimination in funsor (the extra ``enum``); in a ``scan`` by parallel products
    of transition matrices. A latent that ``handlers.mask`` or ``obs_mask`` hides counts for nothing. Where the
    data are not given the model runs as it is, so that ``Predictive`` draws them with their local latents.

    Within a plate each datum must depend on the latent of its own element alone: enumeration, NumPyro's own
    included, does not see what mixes the elements of a plate, such as a cumulative sum along it.

    Given x and :math:`\theta` the local latents are not tempered: ``Predictive(model, posterior_samples,
    infer_discrete=True)`` of the undecorated ``model`` draws them.

    Args:
        fn: Model with local discrete latents.

    Raises:
        ImportError: While the model runs, if funsor is absent.
        TypeError: If ``fn`` is not callable.
        ValueError: If the model is tempered already (the power would be inside of the sum) or robust, or, while
            the model runs, if

            - a continuous latent depends on a local discrete one,
            - data depend on a plate's latents from outside of it, on those of other elements of the plate, or
              on the state that leaves a ``scan``,
            - a latent has other values than 0, ..., K - 1,
            - a ``scan`` runs backwards, or without history,
            - data are given to the model by a handler outside of this one,
            - ``Predictive(infer_discrete=True)`` runs it,
            - a discrete latent outside of the plates is being enumerated,
            - a ``handlers.scale`` (other than a plate's) is around a site in the sum.

    References:
        YPB for the target; :class:`numpyro.infer.TraceEnum_ELBO` and NUTS scale inside of the sum or
        outside of it, each its own way.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.util import log_density
        >>> import numpyro_tempered as nt
        >>> def mixture(x):
        ...     loc = numpyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        ...     with numpyro.plate("n", len(x)):
        ...         z = numpyro.sample("z", dist.Categorical(probs=jnp.array([0.4, 0.6])))
        ...         numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)
        >>> model = nt.temper(nt.marginalize(mixture), alpha=0.3)
        >>> x, theta = jnp.array([0.1, 2.5, 2.2]), {"loc": jnp.array([0.0, 2.0])}
        >>> density = jax.jit(lambda theta: log_density(model, (x,), {}, theta)[0])  # needs no labels z
        >>> print(f"{density(theta):.2f}")  # the prior's, -4.26, and .3 of the log-likelihood, -4.53
        -5.62
    """

    def __init__(self, fn: Callable[P, R]) -> None:
        if not callable(fn):
            raise TypeError(f"marginalize takes a model, got {fn!r}.")
        if any(isinstance(part, temper) for part in effects.handler_chain(fn)):
            raise ValueError(_INSIDE_OUT)
        if any(isinstance(part, robust) for part in effects.handler_chain(fn)):
            raise ValueError(
                "marginalize(robust(model)) sums over losses, and the divergence of a sum is not known from its "
                "terms: give robust a model without local discrete latents."
            )
        self.fn = fn
        # What the calls whose plates have been checked were given.
        self._checked: set[str] = set()
        functools.update_wrapper(self, fn, updated=())

    def _copy(self, fn: Callable) -> "marginalize":
        return marginalize(fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the model without its local discrete latents."""
        if draws_discrete():
            raise ValueError(
                "the local discrete latents are summed out here: draw them by the model without marginalize, "
                "Predictive(model, posterior_samples, infer_discrete=True)."
            )
        if plates := [
            handler.name for handler in STACK if isinstance(handler, numpyro.plate)
        ]:
            raise ValueError(
                f"marginalize stands inside of the plates {plates}, whose latents and data it cannot see: put it "
                "around the whole model."
            )
        model = functools.partial(self.fn, *args, **kwargs)
        structure = get_structure(model)
        if any(effects.ALPHA in site for site in structure.sites.values()):
            raise ValueError(_INSIDE_OUT)
        # Those that no data depend on sum to 1.
        latents = set(structure.latents) if structure.data else set()
        if not latents:
            # Without data nothing is summed, and latents are drawn.
            sampled = handlers.infer_config(model, lambda _: {"enumerate": None})
            with _refuse_data_from_outside(structure):
                return (model if structure.data else sampled)()
        _check(structure, latents)
        if (call := argument_key(args, kwargs)) not in self._checked:
            check_elements(model, structure, latents)
            self._checked.add(call)
        key = numpyro.prng_key()
        inner = {
            name for name, parents in structure.depends.items() if parents & latents
        }
        with (
            _hide(inner, {structure.sites[name][TOKEN] for name in latents}),
            handlers.trace() as outer_trace,
        ):
            result = model()
        for term in sum_out(
            model if key is None else handlers.seed(model, key),
            outer_trace,
            structure,
            latents,
        ):
            _observe(term, outer_trace)
        return result


def _check(structure: Structure, latents: set[str]) -> None:
    """Refuse what cannot be summed out."""
    for name in sorted(latents):
        _check_latent(name, structure.sites[name])
    for name, site in structure.sites.items():
        parents = sorted(structure.depends.get(name, frozenset()) & latents)
        if site["type"] != "sample" or not parents:
            continue
        if IN_FORWARD_SCAN in site and site["is_observed"] and effects.is_unit(site):
            raise ValueError(
                f"the factor {name!r} in a scan depends on the local discrete {parents}: "
                "NumPyro's enumeration counts it in the first step only. Observe a distribution instead."
            )
        for latent in parents:
            if outside := effects.plates_of(
                structure.sites[latent]
            ) - effects.plates_of(site):
                raise ValueError(
                    f"site {name!r} depends on the local discrete {latent!r} and is outside of its plates "
                    f"{sorted(outside)}: put several data of one latent in a plate inside the latent's plate, "
                    "padded to an array with a mask, and not in a plate of their own by an index."
                )
        if name not in structure.data | structure.latents:
            raise ValueError(
                f"the latent {name!r} depends on the local discrete {parents}: marginalize sums out only what "
                "stands between parameters and data. If it is data given from outside, write "
                "marginalize(condition(model, data)); if it is to be predicted, give no data at all."
            )


def _check_latent(name: str, site: effects.Message) -> None:
    fn = effects.base_distribution(site["fn"])
    if not fn.has_enumerate_support:
        raise ValueError(
            f"the local discrete latent {name!r} is a {type(fn).__name__}, whose values cannot be "
            "enumerated: only latents with finitely many values can be summed out."
        )
    first = getattr(fn.support, "lower_bound", 0)
    if fn.event_dim or not isinstance(first, int) or first != 0:
        raise ValueError(
            f"the local discrete latent {name!r} is a {type(fn).__name__}: only latents with values 0, 1, "
            "... can be summed out. Draw a Categorical, and compute the value from it."
        )
    if not site.get(IN_FORWARD_SCAN, True):
        raise ValueError(
            f"the local discrete latent {name!r} is in a scan with reverse=True or history=0, whose chain "
            "NumPyro does not enumerate: scan forwards over reversed data, with history=1."
        )


class _hide(Messenger):
    """Keep the local discrete latents, and what depends on them, from outer handlers."""

    def __init__(self, names: set[str], tokens: set[tuple[str, int]]) -> None:
        self.names, self.tokens = names, tokens
        self.count = 0
        super().__init__()

    def process_message(self, msg: effects.Message) -> None:
        if msg["type"] == "control_flow":
            self.count += 1
            inside = {name for name, number in self.tokens if number == self.count}
            effects.wrap_bodies(msg, functools.partial(_first_values, names=inside))
        elif msg.get("name") in self.names and msg["type"] in (
            "sample",
            "deterministic",
        ):
            msg[effects.IS_HIDDEN], msg["stop"] = True, True
            if msg["type"] == "sample" and not msg["is_observed"]:
                _take_first_value(msg)


class _first_values(Messenger):
    """Give the hidden latents of a control-flow body a value, and mark prior factors."""

    def __init__(self, fn: Model, names: set[str]) -> None:
        self.names = names
        super().__init__(fn)

    def process_message(self, msg: effects.Message) -> None:
        effects.mark(msg)
        if (
            msg["type"] == "sample"
            and not msg["is_observed"]
            and msg["name"] in self.names
        ):
            _take_first_value(msg)


def _take_first_value(msg: effects.Message) -> None:
    """Some value, which nothing that is seen depends on."""
    if msg["value"] is None:
        msg["value"] = jnp.zeros(effects.draw_shape(msg), int)


class _refuse_data_from_outside(Messenger):
    """Refuse data that an outer handler gives to a site which depends on a local discrete latent."""

    def __init__(self, structure: Structure) -> None:
        inside = structure.latents | structure.data
        self.names = {
            name
            for name, parents in structure.depends.items()
            if parents and name not in inside
        }
        super().__init__()
        for handler in STACK:
            if isinstance(handler, handlers.condition):
                # Before the latents are drawn, for which there may be no key.
                self._refuse(self.names & set(handler.data or ()))

    def process_message(self, msg: effects.Message) -> None:
        if (
            msg["type"] == "sample"
            and not msg["is_observed"]
            and msg["name"] in self.names
        ):
            msg[effects.DATA_NAME] = msg["name"]

    def postprocess_message(self, msg: effects.Message) -> None:
        if (
            effects.DATA_NAME in msg
            and msg["is_observed"]
            and "_intervener_id" not in msg
        ):
            self._refuse({msg[effects.DATA_NAME]})

    def _refuse(self, names: set[str]) -> None:
        if names:
            raise ValueError(
                f"sites {sorted(names)} are observed by a handler outside of marginalize, which has not summed "
                "out their latents: write marginalize(condition(model, data)), or pass the data to the model."
            )


def _observe(term: Sum, outer_trace: effects.Trace) -> None:
    """Observe the data of one sum, with its log-probability."""
    depth = jnp.ndim(term.log_prob)
    values = [_by_plate(outer_trace[name], term) for name in term.observed]
    if len(values) > 1:
        rows = [jnp.reshape(value, (*jnp.shape(value)[:depth], -1)) for value in values]
        values = [jnp.concatenate(rows, axis=-1)]
    (value,) = values
    factors = frozenset(
        name for name in term.observed if effects.is_unit(outer_trace[name])
    )
    msg = {
        **outer_trace[term.observed[0]],
        "name": "+".join(term.observed),
        "fn": MarginalLikelihood(term.log_prob, jnp.shape(value)[depth:]),
        "value": value,
        "scale": term.scale,
        "plate_to_scale": {}
        if term.scale is None
        else {"+".join(f.name for f in term.plates): term.scale},
        "cond_indep_stack": list(term.plates),
        effects.PRIOR_FACTOR: False,
        effects.SUM_PARTS: (factors, len(factors) < len(term.observed)),
    }
    apply_stack(
        {
            k: v
            for k, v in msg.items()
            if k not in (effects.IS_HIDDEN, "stop", "_control_flow_done")
        }
    )


def _by_plate(site: effects.Message, term: Sum) -> Array:
    """The value of an observed site, the plates of the sum first and all else as event dimensions."""
    fn = site["fn"]
    batch, event = tuple(fn.batch_shape), tuple(fn.event_shape)
    value = (
        jnp.broadcast_to(site["value"], batch + event)
        if jnp.size(site["value"])
        else site["value"]
    )
    dims = sorted(frame.dim for frame in term.plates)
    rest = [d for d in range(-len(batch), 0) if d not in dims]
    value = jnp.moveaxis(
        value, [len(batch) + d for d in (*dims, *rest)], range(len(batch))
    )
    sizes = [batch[d] for d in rest if batch[d] != 1]
    return jnp.reshape(
        value, (*jnp.shape(term.log_prob), *sizes, *jnp.shape(value)[len(batch) :])
    )
