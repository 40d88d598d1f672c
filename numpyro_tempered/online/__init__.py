"""Online rules as (init, update) pairs, and the drivers that run them over a stream."""

from numpyro_tempered.core import pad_batch, to_host
from numpyro_tempered.core.shared_rows import share_rows
from numpyro_tempered.core.tables import csv_chunks, frame_chunks, parquet_chunks
from numpyro_tempered.online.ball import Ball
from numpyro_tempered.online.base import Box, Losses, OnlineState, Rule, svb_rate
from numpyro_tempered.online.drivers import iterate_chunks, run, run_chunks, update
from numpyro_tempered.online.experts.aggregate import aggregate
from numpyro_tempered.online.experts.change import aggregate_windows, detect_changes
from numpyro_tempered.online.experts.grid import Grid, grid
from numpyro_tempered.online.experts.state import (
    Experts,
    WeightedPosteriors,
    expert_states,
    regret,
    regret_bound,
    weighted_posteriors,
    weights,
)
from numpyro_tempered.online.experts.sweep import run_grid
from numpyro_tempered.online.parts.partitioned import (
    Partitioned,
    PartitionedRun,
    partitioned,
    run_partitioned,
)
from numpyro_tempered.online.parts.state import Change, Factor, PartitionedState
from numpyro_tempered.online.predictions import (
    Prediction,
    class_probabilities,
    predict,
    sample_predictor,
)
from numpyro_tempered.online.rates import (
    doubling,
    ewa_rate,
    oga_rate,
    point_kl,
    sva_rate,
    svb_constant,
    svb_strongly_convex_rate,
)
from numpyro_tempered.online.rules.ewa import ewa, ewa_grid
from numpyro_tempered.online.rules.forgetting import (
    Forgetting,
    power,
    random_walk,
    to_prior,
)
from numpyro_tempered.online.rules.ngvi import ngvi
from numpyro_tempered.online.rules.oga import oga, oga_el
from numpyro_tempered.online.rules.rvga import rvga
from numpyro_tempered.online.rules.sva import sva
from numpyro_tempered.online.rules.svb import svb
from numpyro_tempered.online.service import Service
from numpyro_tempered.online.streams.average import average, with_average
from numpyro_tempered.online.streams.batches import global_batches
from numpyro_tempered.online.streams.clip import Clipping, clip
from numpyro_tempered.online.streams.delayed import (
    Pending,
    id_words,
    pending,
    recall,
    remember,
)
from numpyro_tempered.online.streams.diagnose import diagnose
from numpyro_tempered.online.streams.export import export_update
from numpyro_tempered.online.streams.findings import Finding, StreamWarning
from numpyro_tempered.online.streams.load import LoadedUpdate, load_update
from numpyro_tempered.online.streams.merge import merge
from numpyro_tempered.online.streams.robust import Weighing, robust
from numpyro_tempered.online.streams.save import from_bytes, restore, save, to_bytes
from numpyro_tempered.online.streams.skip import Skipping, skip
from numpyro_tempered.online.streams.standardise import (
    Standardisation,
    original_scale,
    standardise,
)

__all__ = [
    "Ball",
    "Box",
    "Change",
    "Clipping",
    "Experts",
    "Factor",
    "Finding",
    "Forgetting",
    "Grid",
    "LoadedUpdate",
    "Losses",
    "OnlineState",
    "Partitioned",
    "PartitionedRun",
    "PartitionedState",
    "Pending",
    "Prediction",
    "Rule",
    "Service",
    "Skipping",
    "Standardisation",
    "StreamWarning",
    "Weighing",
    "WeightedPosteriors",
    "aggregate",
    "aggregate_windows",
    "average",
    "class_probabilities",
    "clip",
    "csv_chunks",
    "detect_changes",
    "diagnose",
    "doubling",
    "ewa",
    "ewa_grid",
    "ewa_rate",
    "expert_states",
    "export_update",
    "frame_chunks",
    "from_bytes",
    "global_batches",
    "grid",
    "id_words",
    "iterate_chunks",
    "load_update",
    "merge",
    "ngvi",
    "oga",
    "oga_el",
    "oga_rate",
    "original_scale",
    "pad_batch",
    "parquet_chunks",
    "partitioned",
    "pending",
    "point_kl",
    "power",
    "predict",
    "random_walk",
    "recall",
    "regret",
    "regret_bound",
    "remember",
    "restore",
    "robust",
    "run",
    "run_chunks",
    "run_grid",
    "run_partitioned",
    "rvga",
    "sample_predictor",
    "save",
    "share_rows",
    "skip",
    "standardise",
    "sva",
    "sva_rate",
    "svb",
    "svb_constant",
    "svb_rate",
    "svb_strongly_convex_rate",
    "to_bytes",
    "to_host",
    "to_prior",
    "update",
    "weighted_posteriors",
    "weights",
    "with_average",
]
__dir__ = __all__.copy
