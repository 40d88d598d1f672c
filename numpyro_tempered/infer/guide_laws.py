"""One row for each class of guide: its Gaussian, the way back to its parameters, and what it is besides."""

import contextlib
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.infer.autoguide import (
    AutoContinuous,
    AutoDiagonalNormal,
    AutoGuide,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

from numpyro_tempered.core import Array, Params, PyTree, doubles, is_traced
from numpyro_tempered.gaussian.families import FullRank, GaussianMixture, MeanField
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.gaussian.families.gaussian_mixture import triangular
from numpyro_tempered.handlers.likelihood import Layout
from numpyro_tempered.handlers.numpyro_private import unpacker
from numpyro_tempered.infer.guides.gaussian_mixture import AutoGaussianMixture
from numpyro_tempered.infer.guides.online import (
    AutoOnlineDiagonalNormal,
    AutoOnlineMultivariateNormal,
    StartsAtPrior,
)
from numpyro_tempered.infer.guides.spike_slab import AutoSpikeAndSlab
from numpyro_tempered.infer.guides.student_t import (
    AutoDiagonalStudentT,
    AutoMultivariateStudentT,
)
from numpyro_tempered.infer.moments import LocationScale


class Reading(NamedTuple):
    """The Gaussian of a guide's parameters.

    Attributes:
        q: In flat unconstrained coordinates; of a Student's t the Gaussian of its location and scale, of a
            mixture a :class:`GaussianMixture`.
        layout: Names and shapes of the latents there, in order.
        unpack: From a flat vector to values by site.
        to_params: From such a ``q`` to the guide's parameters, but for degrees of freedom.
    """

    q: PyTree
    layout: Layout
    unpack: Callable[[Array], Params]
    to_params: Callable[[PyTree], Params]


class GuideLaw(NamedTuple):
    """What is known of the guides of a class.

    Attributes:
        form: ``"flat"`` where one vector holds all latents, ``"sites"`` where each site has a factor; None of
            other guides.
        has_covariance: Whether coordinates depend on each other; None where the class does not decide it.
        read: ``(guide, params) -> Reading`` of a guide that is set up; None where parameters are not those of a
            Gaussian, a Student's t or a mixture.
        is_heavy: Whether it is a Student's t.
        is_laplace: Whether it is fitted as a point, around which it has a Gaussian.
        is_mixture: Whether it is a mixture of Gaussians.
        has_gates: Whether its factors are spikes and slabs.
    """

    form: Literal["flat", "sites"] | None = None
    has_covariance: bool | None = None
    read: Callable[[AutoGuide, Params], Reading] | None = None
    is_heavy: bool = False
    is_laplace: bool = False
    is_mixture: bool = False
    has_gates: bool = False

    @property
    def is_gaussian(self) -> bool:
        """Whether parameters and one Gaussian determine each other."""
        return self.read is not None and not (self.is_heavy or self.is_mixture)


def law_of(guide: object) -> GuideLaw:
    """Return what is known of a guide: the row of the first of its classes that has one."""
    if type(guide) is AutoNormal:
        return _NORMAL
    return next(_LAWS[kind] for kind in type(guide).__mro__ if kind in _LAWS)


def is_auto(guide: object) -> TypeGuard[AutoGuide]:
    """Return whether a guide has the methods of NumPyro's automatic guides."""
    return isinstance(guide, AutoGuide)


def has_gates(guide: object) -> TypeGuard[AutoSpikeAndSlab]:
    """Return whether the factors of a guide are spikes and slabs."""
    return law_of(guide).has_gates


def flat_layout(guide: AutoContinuous) -> Layout:
    """Return names and shapes of the latents in the flat vector of a guide, in order."""
    return Layout.of_parts(unpacker(guide), guide.latent_dim)


def order_of(layout: Layout, names: Iterable[str] | None = None) -> np.ndarray:
    """Return where a flat vector has the coordinates of sites, one after the other; by name if None are given."""
    shapes = dict(layout.sites)
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    places = dict(zip(shapes, np.split(np.arange(ends[-1]), ends[:-1]), strict=True))
    return np.concatenate([places[name] for name in names or sorted(shapes)])


def posterior_of(guide: AutoGuide, params: Params) -> dist.Distribution | None:
    """Return the distribution of a guide's flat coordinates, with its draws and log density; None if unknown."""
    law = law_of(guide)
    if law.form == "flat":
        with contextlib.suppress(NotImplementedError):
            return guide.get_posterior(params)
    elif law is _NORMAL:
        return dist.Normal(*_read_sites(guide, params).q).to_event(1)
    return None


def gaussian_of(guide: AutoGuide, params: Params) -> tuple[Gaussian, Layout] | None:
    """Return the Gaussian with the mean and covariance of a guide, or only its variances; None if unknown."""
    law = law_of(guide)
    if law.form == "sites" and not law.has_gates:
        return _read_sites(guide, params)[:2]
    with contextlib.suppress(NotImplementedError, AttributeError):
        if (q := posterior_of(guide, params)) is None:
            return None
        layout = flat_layout(guide)
        if isinstance(q, dist.MultivariateNormal):
            return FullRank(q.loc, q.scale_tril), layout
        if isinstance(q, dist.MultivariateStudentT):
            return FullRank(q.loc, q.scale_tril * jnp.sqrt(q.df / (q.df - 2.0))), layout
        moments = MeanField(q.mean, jnp.sqrt(q.variance))
        if np.all(np.isfinite(moments)):
            return moments, layout
    return None


def location_scale_of(guide: AutoGuide, params: Params) -> LocationScale | None:
    """Return the Gaussian or Student's t of a guide, its sites in the order of their names; None of others.

    Raises:
        ValueError: If a Student's t has no variance.
    """
    q: PyTree
    df = None
    if law_of(guide) is _NORMAL:
        q, layout, *_ = _read_sites(guide, params)
        mean, cov = q.loc, np.diag(np.square(doubles(q.scale)))
    else:
        q = posterior_of(guide, params)
        base = q.base_dist if isinstance(q, dist.Independent) else q
        if isinstance(base, dist.Normal):
            mean, cov = q.mean, np.diag(np.asarray(q.variance))
        elif isinstance(q, dist.MultivariateNormal):
            # In double precision, in which small eigenvalues survive the product.
            root = doubles(q.scale_tril)
            mean, cov = q.mean, root @ root.T
        elif isinstance(q, dist.LowRankMultivariateNormal):
            factor = doubles(q.cov_factor)
            diagonal = np.diag(doubles(q.cov_diag))
            mean, cov = q.mean, factor @ factor.T + diagonal
        elif isinstance(q, dist.StudentT | dist.MultivariateStudentT):
            mean, cov, df = _of_student_t(q)
        else:
            return None
        layout = flat_layout(guide)
    order = order_of(layout)
    return LocationScale(
        doubles(mean)[order],
        doubles(cov)[np.ix_(order, order)],
        None if df is None else df[order],
        isinstance(q, dist.MultivariateStudentT),
    )


def mixture_of(guide: object, params: Params) -> GaussianMixture | None:
    """Return the mixture of a guide, its sites in the order of their names; None of other guides."""
    if not law_of(guide).is_mixture:
        return None
    q, layout, *_ = _read_own(guide, params)
    order = order_of(layout)
    return triangular(q._replace(loc=q.loc[:, order], root=q.root[:, order]))


def _of_student_t(
    q: dist.StudentT | dist.MultivariateStudentT,
) -> tuple[Array, np.ndarray, np.ndarray]:
    """Return mean, covariance and degrees of freedom of the coordinates.

    Raises:
        ValueError: If a coordinate has no variance.
    """
    loc = jnp.broadcast_to(q.loc, q.shape())
    df = np.array(np.broadcast_to(doubles(q.df), loc.shape))
    if df.min() <= 2.0:
        raise ValueError(
            f"the guide is a Student's t of {df.min():.3g} degrees of freedom, which has no variance, and errors "
            "are in standard deviations: take more than 2."
        )
    if isinstance(q, dist.MultivariateStudentT):
        tril = doubles(q.scale_tril)
        return loc, tril @ tril.T * (df[0] / (df[0] - 2.0)), df
    variance = np.square(doubles(q.scale)) * df / (df - 2.0)
    return loc, np.diag(variance), df


def _read_sites(guide: AutoNormal, params: Params) -> Reading:
    """Read two parameters for each site."""
    loc, scale = (f"_{guide.prefix}_{field}" for field in MeanField._fields)
    sites = [name.removesuffix(loc) for name in params if name.endswith(loc)]
    # A param of the model may end so too.
    parts = [
        {site: params[site + end] for site in sites if site + scale in params}
        for end in (loc, scale)
    ]
    layout = Layout.of(parts[0])
    # On the host each operation would not be a program.
    xp = jnp if is_traced(parts) else np
    flat = [xp.concatenate([*map(xp.ravel, part.values())]) for part in parts]

    def to_params(q: MeanField) -> Params:
        return {
            site + end: value
            for end, leaf in zip((loc, scale), q, strict=True)
            for site, value in layout.split(leaf).items()
        }

    q = MeanField(*jax.device_put(flat))
    return Reading(q, layout, layout.split, to_params)


def _flat_reading(
    guide: AutoGuide, q: PyTree, to_params: Callable[[PyTree], Params]
) -> Reading:
    """Return a reading of a guide over one flat vector."""
    return Reading(q, flat_layout(guide), unpacker(guide), to_params)


def _read_vector(
    family: Callable[..., Gaussian], scale: str, guide: AutoGuide, params: Params
) -> Reading:
    """Read a location, and a scale by the name of its parameter and of the field of the family."""
    loc, root = f"{guide.prefix}_loc", f"{guide.prefix}_{scale}"
    q = family(params[loc], params[root])
    return _flat_reading(guide, q, lambda q: {loc: q.loc, root: getattr(q, scale)})


def _read_own(guide: AutoGuide, params: Params) -> Reading:
    """Read by the guide's own methods."""
    return _flat_reading(guide, guide.from_params(params), guide.to_params)


_read_diagonal = partial(_read_vector, MeanField, "scale")
_read_full = partial(_read_vector, FullRank, "scale_tril")
# Of no subclass, whose factors may be others.
_NORMAL = GuideLaw("sites", False, _read_sites)
_LAWS: dict[type, GuideLaw] = {
    object: GuideLaw(),
    AutoNormal: GuideLaw("sites", False),
    AutoSpikeAndSlab: GuideLaw("sites", False, has_gates=True),
    AutoContinuous: GuideLaw("flat"),
    AutoDiagonalNormal: GuideLaw("flat", False, _read_diagonal),
    AutoMultivariateNormal: GuideLaw("flat", True, _read_full),
    AutoLowRankMultivariateNormal: GuideLaw("flat", True),
    AutoLaplaceApproximation: GuideLaw("flat", True, is_laplace=True),
    StartsAtPrior: GuideLaw("flat", None, _read_own),
    AutoOnlineDiagonalNormal: GuideLaw("flat", False, _read_own),
    AutoOnlineMultivariateNormal: GuideLaw("flat", True, _read_own),
    AutoDiagonalStudentT: GuideLaw("flat", False, _read_diagonal, is_heavy=True),
    AutoMultivariateStudentT: GuideLaw("flat", True, _read_full, is_heavy=True),
    AutoGaussianMixture: GuideLaw("flat", None, _read_own, is_mixture=True),
}
