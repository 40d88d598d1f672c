"""Online rules as (init, update) pairs, and the drivers that run them over a stream."""

from numpyro_tempered.online.base import Box, Losses, OnlineState, Rule, svb_rate
from numpyro_tempered.online.ngvi import ngvi
from numpyro_tempered.online.oga import oga, oga_el
from numpyro_tempered.online.stream import run, update
from numpyro_tempered.online.sva import sva
from numpyro_tempered.online.svb import svb

__all__ = [
    "Box",
    "Losses",
    "OnlineState",
    "Rule",
    "ngvi",
    "oga",
    "oga_el",
    "run",
    "sva",
    "svb",
    "svb_rate",
    "update",
]
