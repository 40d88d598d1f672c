"""Online rules as (init, update) pairs, and the drivers that run them over a stream."""

from numpyro_tempered.online.base import Box, Losses, OnlineState, Rule, svb_rate
from numpyro_tempered.online.chunked import iterate_chunks, run_chunks
from numpyro_tempered.online.experts.aggregate import aggregate
from numpyro_tempered.online.experts.state import (
    Components,
    Mixture,
    members,
    predictive_mixture,
    regret,
    regret_bound,
    weights,
)
from numpyro_tempered.online.experts.sweep import Sweep, sweep
from numpyro_tempered.online.experts.windows import aggregate_windows
from numpyro_tempered.online.rates import (
    diameter,
    doubling,
    ewa_rate,
    lipschitz,
    lipschitz_squared,
    oga_rate,
    strong_convexity,
    sva_rate,
    svb_constant,
    svb_strongly_convex_rate,
)
from numpyro_tempered.online.rules.ewa import ewa
from numpyro_tempered.online.rules.forgetting import Forgetting, power, random_walk, to_prior
from numpyro_tempered.online.rules.grid import ewa_grid
from numpyro_tempered.online.rules.ngvi import ngvi
from numpyro_tempered.online.rules.oga import oga, oga_el
from numpyro_tempered.online.rules.sva import sva
from numpyro_tempered.online.rules.svb import svb
from numpyro_tempered.online.stream import run, update
from numpyro_tempered.online.streams.average import average, averaged
from numpyro_tempered.online.streams.delayed import Pending, pending, recall, remember
from numpyro_tempered.online.streams.diagnose import Finding, StreamWarning, diagnose
from numpyro_tempered.online.streams.merge import merge
from numpyro_tempered.online.streams.padding import pad_batch
from numpyro_tempered.online.streams.save import restore, save
from numpyro_tempered.online.streams.standardise import Standardised, original_scale, standardised

__all__ = [
    "Box",
    "Components",
    "Finding",
    "Forgetting",
    "Losses",
    "Mixture",
    "OnlineState",
    "Pending",
    "Rule",
    "Standardised",
    "StreamWarning",
    "Sweep",
    "aggregate",
    "aggregate_windows",
    "average",
    "averaged",
    "diagnose",
    "diameter",
    "doubling",
    "ewa",
    "ewa_grid",
    "ewa_rate",
    "iterate_chunks",
    "lipschitz",
    "lipschitz_squared",
    "members",
    "merge",
    "ngvi",
    "oga",
    "oga_el",
    "oga_rate",
    "original_scale",
    "pad_batch",
    "pending",
    "power",
    "predictive_mixture",
    "random_walk",
    "recall",
    "regret",
    "regret_bound",
    "remember",
    "restore",
    "run",
    "run_chunks",
    "save",
    "standardised",
    "strong_convexity",
    "sva",
    "sva_rate",
    "svb",
    "svb_constant",
    "svb_rate",
    "svb_strongly_convex_rate",
    "sweep",
    "to_prior",
    "update",
    "weights",
]
