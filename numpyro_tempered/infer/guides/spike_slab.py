"""A mean-field guide whose factors are spikes and slabs where the priors are."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_uniform
from numpyro.primitives import Messenger, mutable

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Model,
    Params,
    Scalar,
    Shape,
    check_number,
)
from numpyro_tempered.handlers.effects import Message
from numpyro_tempered.handlers.likelihood import is_masked
from numpyro_tempered.infer.distributions import SpikeAndSlab


class AutoSpikeAndSlab(AutoNormal):
    r"""Mean-field guide for models with :class:`~numpyro_tempered.sparse.SpikeAndSlab` priors.

    A site with such a prior, perhaps expanded, ``to_event`` or in plates, gets independent factors
    φ N(m, σ²) + (1 - φ) δ_0; all others get Normals on the unconstrained scale, as in NumPyro's ``AutoNormal``.
    Parameters are ``{site}_{prefix}_probs``, ``_loc`` and ``_scale``.

    **Three objectives, one of them no bound.** Gates have no derivative, so SVI relaxes them:

    - the *relaxed objective*, what SVI minimises and :func:`numpyro_tempered.fit_svi` keeps in ``losses``. It
      may exceed the log evidence and must not be compared between models;
    - the *ELBO*, with exact gates, of :meth:`hard`. It is what ``fit_svi`` evaluates as ``elbo``, and the guide
      that it returns is that one;
    - the ELBO of :func:`numpyro_tempered.sparse.round_and_refit`, whose gates are 0 or 1. It is by far the
      greatest where a gate of .98 that drops breaks the fit, as in networks.

    With stock ``SVI`` the loss must be ``TraceMeanField_ELBO()``: others need the density of the relaxed draws
    and raise. ``fit_svi`` takes it by default. A temperature that is a schedule is counted by a
    ``numpyro.mutable`` site, ``{prefix}_step``, which NumPyro updates only for ``num_particles=1``; for more
    particles take a number.

    Args:
        model: NumPyro model, tempered or not: tempering does not change the prior.
        prefix: Prefix of the guide's parameters.
        temperature: Of the relaxed gates: a positive number, or a callable from the step, from 0, to one, such
            as ``optax.exponential_decay``; None for exact gates, which cannot be fitted. By default it falls
            from 1 by a factor e each 500 steps, to .1.
        init_loc_fn: Where the means start, as in NumPyro; of a SpikeAndSlab site that of its slab.
        init_scale: Standard deviations at the start.
        init_probs: Probabilities φ at the start, inside (0, 1).
        create_plates: As in NumPyro.

    Raises:
        ValueError: If ``init_probs`` or ``temperature`` is not as above; at set-up, if the model has no latent
            SpikeAndSlab site, or one that is masked or relaxed.

    References:
        CA-DNN; Bai20, section 4, for the relaxed gates.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(x, y):
        ...     prior = nt.sparse.SpikeAndSlab(0.25, 0.0, 2.0)
        ...     w = numpyro.sample("w", prior.expand([x.shape[1]]).to_event(1))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
        >>> x = jax.random.normal(jax.random.key(0), (50, 4))
        >>> guide, y = nt.guides.AutoSpikeAndSlab, 2.0 * x[:, 0]
        >>> fit = nt.fit_svi(jax.random.key(1), model, guide, x, y, num_steps=1000)
        >>> print(fit.params["w_auto_probs"].round(1), fit.guide.median(fit.params)["w"].round(1))
        [1. 0. 0. 0.] [2. 0. 0. 0.]
    """

    def __init__(
        self,
        model: Model,
        *,
        prefix: str = "auto",
        temperature: float | Callable[[Array], Scalar] | None = lambda step: (
            jnp.maximum(jnp.exp(-step / 500.0), 0.1)
        ),
        init_loc_fn: Callable = init_to_uniform,
        init_scale: float = 0.1,
        init_probs: float = 0.5,
        create_plates: Callable | None = None,
    ) -> None:
        if temperature is not None and not callable(temperature):
            check_number(
                temperature,
                "temperature",
                "(0, inf]",
                hint="A schedule or None will do too.",
            )
        self.temperature = temperature
        self._init_probs = check_number(
            init_probs, "init_probs", "(0, 1)", hint="Gates have a gradient there."
        )
        self._gates: Params = {}
        self._sparse: frozenset[str] = frozenset()
        super().__init__(
            model,
            prefix=prefix,
            init_loc_fn=init_loc_fn,
            init_scale=init_scale,
            create_plates=create_plates,
        )

    def hard(self) -> "AutoSpikeAndSlab":
        """The same guide with exact gates: its draws have exact zeros, and its ELBO is one.

        Parameters are shared. It is for evaluation: its derivative in the ``probs`` is NaN.
        """
        guide = copy.copy(self)
        guide.temperature = None
        return guide

    def with_gates(self, gates: Params) -> "AutoSpikeAndSlab":
        """This guide with exact gates of fixed probabilities, by site, in place of their parameters.

        With only probabilities of 0 and 1 there is nothing to relax, and the loss of SVI is the negative ELBO.
        """
        guide = self.hard()
        guide._gates = dict(gates)
        return guide

    @property
    def sparse_sites(self) -> tuple[str, ...]:
        """After set-up, names of the sites with a SpikeAndSlab prior, in the model's order."""
        return tuple(name for name in self._init_locs if name in self._sparse)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        model: Model = self.model
        slabs = _SlabsForSetUp(model)
        self.model: Any = slabs
        try:
            super()._setup_prototype(*args, **kwargs)
        finally:
            self.model = model
        if not slabs.sites:
            self.prototype_trace: Any = None
            raise ValueError(
                "the model has no latent site with a SpikeAndSlab prior: take AutoNormal."
            )
        self._sparse = frozenset(slabs.sites)
        # In the model's order, which potential_energy's dictionary does not keep.
        starts: Params = self._init_locs  # type: ignore[has-type]
        self._init_locs = {
            name: starts[name] for name in self.prototype_trace if name in starts
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Params:
        """Draw the latent sites."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        temperature = self._current_temperature()
        result = {}
        for name, init_loc in self._init_locs.items():
            site, event_dim = self.prototype_trace[name], self._event_dims[name]
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                fn = self._factor(
                    name, partial(self._param, name, init_loc), temperature
                ).to_event(event_dim)
                if not _is_real(site["fn"].support):
                    fn = dist.TransformedDistribution(fn, biject_to(site["fn"].support))
                result[name] = numpyro.sample(name, fn)
        return result

    def _param(self, name: str, init_loc: Array, field: str) -> Array:
        """A parameter of a site, declared."""
        start, constraint = {
            "loc": (init_loc, constraints.real),
            "scale": (
                jnp.full(jnp.shape(init_loc), self._init_scale),
                self.scale_constraint,
            ),
            "probs": (
                jnp.full(jnp.shape(init_loc), self._init_probs),
                constraints.unit_interval,
            ),
        }[field]
        event_dim = self._event_dims[name]
        return numpyro.param(
            f"{name}_{self.prefix}_{field}",
            start,
            constraint=constraint,
            event_dim=event_dim,
        )

    def _factor(
        self,
        name: str,
        param: Callable[[str], Array],
        temperature: Scalar | None = None,
    ) -> dist.Distribution:
        """A site's factor on the unconstrained scale, of parameters by field."""
        loc, scale = param("loc"), param("scale")
        if name not in self._sparse:
            return dist.Normal(loc, scale)
        probs = self._gates[name] if name in self._gates else param("probs")
        return SpikeAndSlab(probs, loc, scale, temperature=temperature)

    def _current_temperature(self) -> Scalar | None:
        if not callable(self.temperature):
            return self.temperature
        count = mutable(f"{self.prefix}_step", {"step": jnp.zeros(())})
        temperature = self.temperature(count["step"])
        count["step"] = count["step"] + 1.0
        return temperature

    def _factors(self, params: Params) -> dict[str, dist.Distribution]:
        """The factors on the unconstrained scale, with exact gates."""

        def factor(name: str) -> dist.Distribution:
            return self._factor(
                name, lambda field: params[f"{name}_{self.prefix}_{field}"]
            )

        return {name: factor(name) for name in self._init_locs}

    def sample_posterior(
        self,
        rng_key: Array,
        params: Params,
        *args: Any,
        sample_shape: Shape = (),
        **kwargs: Any,
    ) -> Params:
        """Draws with exact gates, whatever the temperature, of shape ``sample_shape`` plus the site's."""
        factors = self._factors(params)
        keys = jax.random.split(rng_key, len(factors))
        pairs = zip(keys, factors.items(), strict=True)
        return self._constrain(
            {name: q.sample(key, sample_shape) for key, (name, q) in pairs}
        )

    def median(self, params: Params) -> Params:
        """Medians, with exact gates: 0 where φ is below a half, and for slabs around 0 above it too."""
        return self.quantiles(params, 0.5)

    def quantiles(self, params: Params, quantiles: ArrayLike) -> Params:
        """Quantiles, with exact gates, along a leading axis."""
        levels = jnp.asarray(quantiles)

        def quantile(q: dist.Distribution) -> Array:
            return q.icdf(jnp.reshape(levels, levels.shape + (1,) * len(q.batch_shape)))

        return self._constrain(
            {name: quantile(q) for name, q in self._factors(params).items()}
        )


class _SlabsForSetUp(Messenger):
    """Shows the slab of each SpikeAndSlab prior, which set-up can find a start on, and keeps the sites' names."""

    def __init__(self, fn: Model) -> None:
        self.sites: set[str] = set()
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        slab = _slab(msg["name"], msg["fn"])
        if slab is not None:
            self.sites.add(msg["name"])
            msg["fn"] = slab


def _slab(name: str, fn: dist.Distribution) -> dist.Distribution | None:
    """The slab of a SpikeAndSlab under any ``expand`` and ``to_event``; None of another distribution."""
    base = fn
    while hasattr(base, "base_dist"):
        base = base.base_dist
    if not isinstance(base, SpikeAndSlab):
        return None
    if is_masked(fn):
        raise ValueError(
            f"the SpikeAndSlab prior of site {name!r} is masked: AutoSpikeAndSlab holds no such site."
        )
    if base.temperature is not None:
        raise ValueError(
            f"the SpikeAndSlab prior of site {name!r} has a temperature: a prior has exact gates. Leave it out."
        )
    return base.slab.expand(fn.batch_shape + fn.event_shape).to_event(fn.event_dim)


def _is_real(support: constraints.Constraint) -> bool:
    base = (
        support.base_constraint
        if isinstance(support, constraints.independent)
        else support
    )
    return base is constraints.real
