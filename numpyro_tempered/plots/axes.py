"""Axes to draw on."""

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import matplotlib.axes

Axes: TypeAlias = "matplotlib.axes.Axes"
TwoAxes: TypeAlias = "tuple[Axes, Axes] | np.ndarray"


def one_axes(ax: "Axes | None", height: float = 4.0) -> "Axes":
    """The axes, or those of a new figure."""
    import matplotlib.pyplot as plt

    return (
        plt.subplots(figsize=(6.4, height), layout="constrained")[1]
        if ax is None
        else ax
    )


def two_axes(axes: "TwoAxes | None", name: str) -> "tuple[Axes, Axes]":
    """Two axes, or those of a new figure.

    Raises:
        ValueError: If they are not two.
    """
    import matplotlib.pyplot as plt

    if axes is None:
        _, axes = plt.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained")
    flat = np.ravel(np.asarray(axes, dtype=object))
    if flat.size != 2:
        raise ValueError(f"{name} draws on two axes, got {flat.size}.")
    return flat[0], flat[1]
