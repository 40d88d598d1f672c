"""What tests of selections share: families that differ in their prior alone, so that one program serves all."""

import jax
import numpy as np

import numpyro_tempered as nt

KEY = jax.random.key(0)
NOISES = {"narrow": 0.5, "unit": 1.0, "wide": 2.0}
FAMILIES = {
    name: nt.mixtures.components.known_variance(1, prior_scale=5.0, scale=noise)
    for name, noise in NOISES.items()
}
OPTIONS = {"num_restarts": 4, "num_draws": 40, "baselines": False}


def three_clusters():
    """150 rows in one column."""
    rng = np.random.default_rng(11)
    return (np.repeat([-4.0, 0.0, 4.0], 50) + rng.normal(size=150))[:, None]


def select(x, component, **options):
    """A selection with few restarts and draws."""
    return nt.mixtures.select_num_components(KEY, x, component, **(OPTIONS | options))


def same_fits(ours, theirs):
    """Two fits are the same to the last bit."""
    assert (ours.bound, ours.objective, ours.kl) == (
        theirs.bound,
        theirs.objective,
        theirs.kl,
    )
    for a, b in zip(
        jax.tree.leaves(ours.factors), jax.tree.leaves(theirs.factors), strict=True
    ):
        np.testing.assert_array_equal(a, b)
