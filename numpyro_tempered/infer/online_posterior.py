"""The posterior of a stream."""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from numpyro_tempered.core import (
    Array,
    DataSummary,
    Description,
    Evidence,
    Params,
    Shape,
    add_repr,
)
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.effects import handler_chain
from numpyro_tempered.handlers.robust import divergences
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.online_checks import stream_arguments
from numpyro_tempered.infer.online_state import OnlineVIState
from numpyro_tempered.infer.tempered_fit import TemperedFit
from numpyro_tempered.online import Losses
from numpyro_tempered.report.draws import name_of, plain_params


@add_repr
class StreamPosterior(NamedTuple):
    """The posterior of a stream, by :meth:`OnlineVI.posterior`: it has seen its data, and does not hold them.

    Attributes:
        online: The OnlineVI.
        state: Its state.
        losses: Those of each round, to be shown; None where they are not kept.
    """

    online: Any
    state: OnlineVIState
    losses: Losses | None = None

    @property
    def fit(self) -> TemperedFit:
        """The guide with its parameters, without data."""
        online, state = self.online, self.state
        online.require_set_up()
        return TemperedFit(
            model=online.model,
            guide=online.guide,
            params=online.get_params(state),
            alpha=math.nan,
            losses=np.empty(0),
            elbo=None,  # type: ignore[arg-type]
            observed={},
            args=(),
            kwargs={},
            rng_key=state.rng_key,
            columns=online.columns,
            source=self,
        )

    @property
    def rng_key(self) -> Array:
        """Key of the run."""
        return self.state.rng_key

    @property
    def alpha(self) -> float | dict[str, float]:
        """Power on the likelihood; by site where sites differ, NaN where its data alone tell, see ``on``."""
        layers = handler_chain(self.online.model)
        powers: list[Any] = [x.alpha for x in layers if isinstance(x, temper)]
        if len(powers) == 1 and isinstance(powers[0], Mapping):
            return dict(powers[0])
        is_known = not any(isinstance(p, Mapping) or np.ndim(p) for p in powers)
        return math.prod(map(float, powers)) if is_known else math.nan

    @property
    def elbo(self) -> None:
        """None: a stream does not hold its data."""
        return None

    @property
    def converged(self) -> None:
        """None: a stream has no end."""
        return None

    @property
    def evidence(self) -> Evidence:
        """The number of rounds."""
        return Evidence(num_iter=int(self.state.count))

    @property
    def mean(self) -> Params:
        """As of :class:`.TemperedFit`."""
        return self.fit.mean

    @property
    def sd(self) -> Params:
        """As of :class:`.TemperedFit`."""
        return self.fit.sd

    def sample_posterior(self, rng_key: Array, sample_shape: Shape = ()) -> Params:
        """As of :class:`.TemperedFit`."""
        return self.fit.sample_posterior(rng_key, sample_shape)

    def draw(self, rng_key: Array, num_samples: int) -> Params:
        """Draws of the latents, ``(num_samples, ...)`` each."""
        return self.online.sample_posterior(rng_key, self.state, num_samples)

    def log_prob(self, values: Params) -> Array:
        """As of :class:`.TemperedFit`."""
        return self.fit.log_prob(values)

    def predict(
        self,
        rng_key: Array,
        *args: object,
        num_samples: int = 1000,
        new_groups: Collection[str] = (),
        **kwargs: object,
    ) -> Params:
        """As of :class:`.TemperedFit`."""
        return self.fit.predict(
            rng_key, *args, num_samples=num_samples, new_groups=new_groups, **kwargs
        )

    def on(
        self, *data: object, rng_key: Array | None = None, **kwargs: object
    ) -> TemperedFit:
        """The posterior with the data that it has seen.

        Args:
            *data: Arguments of the model.
            rng_key: Of what is drawn for it; by default that of the run.
            **kwargs: Keyword arguments of the model.

        Raises:
            ValueError: If data are missing, or the model observes nothing on them.
        """
        if not data and not kwargs:
            raise ValueError(
                "the posterior of a stream does not hold its data: pass them after it, "
                "as in check_fit(key, online.posterior(state), x, y)."
            )
        on, model = StreamPosterior.on, self.online.model
        columns = dict(self.online.columns)
        args, kwargs = stream_arguments(on, model, data, kwargs, columns)
        key = self.state.rng_key if rng_key is None else rng_key
        fit = self.fit._replace(args=args, kwargs=kwargs, rng_key=key)
        trace = fit.target.trace
        if not likelihood.likelihood_sites(trace):
            raise ValueError(
                "the model has no observed site on these data: pass those of the run."
            )
        return fit._replace(
            alpha=likelihood.common_alpha(trace),
            observed=likelihood.observed_values(trace),
            divergences=divergences(trace) or None,
            columns=columns,
        )

    def summarise_data(self) -> DataSummary:
        """Nothing: the data have gone by."""
        return DataSummary()

    def describe(self) -> Description:
        """Totals of the run, the parameters of its guide, and its rule."""
        params = plain_params(self.online.get_params(self.state))
        return Description(
            {"variational": {**params, **self.state.totals(self.losses)}},
            {
                "algorithm": "online",
                "rule": self.online.rule.name,
                "guide": name_of(self.online.guide),
            },
        )
