"""Plots that ArviZ does not have; importing them does not import matplotlib."""

from numpyro_tempered.plots.calibration import plot_calibration
from numpyro_tempered.plots.check import plot_check
from numpyro_tempered.plots.mixture import plot_mixture, plot_num_components_path
from numpyro_tempered.plots.regret import plot_regret
from numpyro_tempered.plots.selection import plot_alpha, plot_comparison, plot_path

__all__ = [
    "plot_alpha",
    "plot_calibration",
    "plot_check",
    "plot_comparison",
    "plot_mixture",
    "plot_num_components_path",
    "plot_path",
    "plot_regret",
]
__dir__ = __all__.copy
