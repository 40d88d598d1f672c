"""What streams say of arguments and outcomes, on numbers alone."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tempered.online import StreamWarning
from numpyro_tempered.online.drivers import _any_finite
from numpyro_tempered.online.parts.partitioned import _warn
from numpyro_tempered.online.streams.findings import _common_outcome
from numpyro_tempered.online.streams.load import _other_arguments


def structure(tree="(*, *)", static=(None, 3)):
    return SimpleNamespace(
        tree=tree,
        is_array=[value is None for value in static],
        kinds=("f", "f"),
        static=static,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            structure("{'x': *}"),
            "the arguments are nested as {'x': *}, this update was exported for (*, *)",
        ),
        (
            structure(static=(None, 4)),
            "argument 1 is 4, this update was exported for 3.",
        ),
        (
            structure(static=("a", 3)),
            "argument 0 is 'a', this update was exported for an array.",
        ),
        (
            structure(static=(None, None)),
            "argument 1 is an array, this update was exported for 3.",
        ),
    ],
)
def test_an_export_names_the_argument_that_is_another(given, message):
    assert message in _other_arguments(given, structure())


def test_outcomes_whose_every_round_was_lost_are_named():
    lost = np.array([True, False, True, True, False])
    assert _common_outcome(np.array([1.0, 2.0, 1.0, 3.0, 3.0]), lost) == [
        "all those of outcome 1"
    ]
    assert _common_outcome(np.array([1.5, 2.0, 1.5, 3.0, 2.0]), lost) == [
        "all those of outcome 1.5, 3"
    ]
    # Some rounds of each were not lost; outcomes of several columns, and what is no number, are not looked at.
    assert _common_outcome(np.array([3.0, 3.0, 2.0, 3.0, 2.0]), lost) == []
    assert _common_outcome(np.ones((5, 2)), lost) == []
    assert _common_outcome(np.array(list("ababa")), lost) == []


def test_rows_that_are_off_are_not_looked_at():
    leaf = jnp.array([[jnp.nan, jnp.nan], [1.0, jnp.nan]])
    assert _any_finite(leaf, None)
    assert _any_finite(leaf, jnp.array([False, True]))
    assert not _any_finite(leaf, jnp.array([True, False]))


@pytest.mark.parametrize(
    ("elbo", "changes", "words"),
    [
        (
            [-5.0, -4.0, -4.5],
            {},
            ", and the ELBO fell: the last moved the posterior by 0.3 nats.*a smaller damping,",
        ),
        (
            [-5.0, -4.0, -4.0],
            {},
            " rounds did not converge: the last.*take more num_rounds,",
        ),
        ([-5.0, -4.5], {}, "^2 rounds did not converge: "),
        (
            [-5.0, -4.0, -4.0],
            {"halved": 1},
            "did not converge: .*take a smaller damping",
        ),
        (
            [-5.0, -4.0],
            {"rejected": 2},
            "; 2 changes were refused, since they leave no Gaussian",
        ),
    ],
)
def test_a_partitioned_run_says_how_it_ended(elbo, changes, words):
    state = SimpleNamespace(
        **{"halved": 0, "rejected": 0, "linear": jnp.zeros(2, jnp.float32)} | changes
    )
    ended = SimpleNamespace(
        converged=False,
        elbo=np.array(elbo),
        move=np.full(len(elbo), 0.3),
        state=state,
        skipped=np.array([0, 3]),
    )
    with pytest.warns(StreamWarning, match=words) as caught:
        _warn(ended, 1e-3)
    assert str(caught[0].message).endswith("; 3 rows are not finite and were left out.")
