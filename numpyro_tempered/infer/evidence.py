"""What a fit says of its optimum, and how it was obtained, for the attributes of its draws."""

from typing import NamedTuple

from numpyro_tempered.core import add_repr
from numpyro_tempered.gaussian.descent import Result
from numpyro_tempered.infer.settle import Convergence


@add_repr
class LinearResponse(NamedTuple):
    """How far :func:`linear_response` may be trusted.

    Attributes:
        converged: Whether the mean-field fit had, ``fit.converged``; None where nothing shows it.
        gap: Estimate of the nats by which the mean-field fit misses the optimum of its family, ½ gᵀ K⁻¹ g with g
            the gradient and K the Hessian of its free energy.
        smallest_eigenvalue: Of the Hessian in units of the fit's standard deviations, in which it has 1 and 2 for
            independent Gaussian latents; the nearer to 0, the more latents depend on each other.
        ratios: The standard deviations of linear response over those of the fit on the unconstrained scale, the
            smallest and the largest.
    """

    converged: bool | None
    gap: float
    smallest_eigenvalue: float
    ratios: tuple[float, float]


def attrs_of(
    evidence: Convergence | Result | LinearResponse | None,
) -> dict[str, object]:
    """The attributes of draws from a fit: its algorithm, and numbers of its evidence."""
    if isinstance(evidence, Result):
        return {
            "algorithm": "gaussian_vi",
            "stationarity": float(evidence.stationarity),
            "num_evaluations": int(evidence.num_evaluations),
        }
    if isinstance(evidence, LinearResponse):
        numbers = {
            name: getattr(evidence, name) for name in ("gap", "smallest_eigenvalue")
        }
        return {"algorithm": "linear_response", **numbers}
    numbers = {}
    if isinstance(evidence, Convergence):
        numbers = {
            name: float(getattr(evidence, name))
            for name in ("gap", "num_steps", "rejected")
        }
    return {"algorithm": "svi", **numbers}
