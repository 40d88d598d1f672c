"""Columns joined to a factor of low rank and taken off it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tempered.core.precision import CompensatedSum
from numpyro_tempered.gaussian.families import (
    Gain,
    LowRank,
    Rows,
    family_of,
    rank_updates,
)

D, RANK = 6, 2
ADD, REMOVE = jax.jit(rank_updates.add_columns), jax.jit(rank_updates.remove_columns)


def outer(factor):
    return np.asarray(factor) @ np.asarray(factor).T


def updated(update, factor, columns):
    """U'U'ᵀ and the diagonal beside it."""
    total, diag = update(
        CompensatedSum.start(jnp.asarray(factor)), jnp.asarray(columns)
    )
    return outer(total.value), np.asarray(diag)


@pytest.mark.parametrize("num_columns", [1, 2, 7])
def test_added_columns_stay_as_directions_or_on_the_diagonal(x64, num_columns):
    rng = np.random.default_rng(num_columns)
    plane = np.linalg.qr(rng.normal(size=(D, RANK)))[0]
    # Strong data in a plane and weak ones beside it.
    root = 10 * plane @ rng.normal(size=(RANK, RANK))
    columns = 3 * plane @ rng.normal(size=(RANK, num_columns)) + 0.1 * rng.normal(
        size=(D, num_columns)
    )
    whole = outer(root) + outer(columns)
    ours, diag = updated(ADD, root, columns)
    rest = whole - ours
    np.testing.assert_allclose(diag, np.diag(rest), rtol=1e-8, atol=1e-10)
    assert np.linalg.eigvalsh(rest)[0] > -1e-10 * whole.max()
    # No factor of two columns leaves out less than the other eigenvalues.
    assert np.trace(rest) <= 1.001 * np.linalg.eigvalsh(whole)[:-RANK].sum()


@pytest.mark.parametrize("num_columns", [1, 2, 7])
def test_added_columns_of_the_rank_are_exact(x64, num_columns):
    rng = np.random.default_rng(num_columns)
    plane = rng.normal(size=(D, RANK))
    columns = plane @ rng.normal(size=(RANK, num_columns))
    # A factor in their span, one direction of it, and none yet.
    square = rng.normal(size=(RANK, RANK))
    for mix in (square, square * [1.0, 0.0], 0.0 * square):
        ours, diag = updated(ADD, plane @ mix, columns)
        np.testing.assert_allclose(
            ours, outer(plane @ mix) + outer(columns), rtol=1e-9, atol=1e-10
        )
        np.testing.assert_allclose(diag, 0.0, atol=1e-12)
    # Nothing added changes nothing.
    ours, diag = updated(ADD, plane, 0 * columns)
    np.testing.assert_allclose(ours, outer(plane), rtol=1e-10)
    np.testing.assert_allclose(diag, 0.0, atol=1e-12)


def test_as_many_directions_as_coordinates_leave_nothing_out(x64):
    rng = np.random.default_rng(0)
    root, column = rng.normal(size=(3, 3)), rng.normal(size=(3, 1))
    ours, diag = updated(ADD, root, column)
    np.testing.assert_allclose(ours, outer(root) + outer(column), rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(diag, 0.0, atol=1e-12)


def test_removed_columns_come_off_the_directions_or_the_diagonal(x64):
    rng = np.random.default_rng(4)
    root = rng.normal(size=(D, RANK))
    columns = root @ (0.5 * np.linalg.qr(rng.normal(size=(RANK, RANK)))[0])
    ours, diag = updated(REMOVE, root, columns)
    np.testing.assert_allclose(
        ours, outer(root) - outer(columns), rtol=1e-9, atol=1e-10
    )
    np.testing.assert_allclose(diag, 0.0, atol=1e-12)
    # Columns beside the span, and more than there is: the diagonal pays, of the right sum.
    for others in (columns + 0.3 * rng.normal(size=(D, RANK)), 3 * root):
        ours, diag = updated(REMOVE, root, others)
        np.testing.assert_allclose(
            np.diag(ours) - diag, np.diag(outer(root) - outer(others)), rtol=1e-9
        )
        assert np.all(diag >= 0)
        assert np.all(np.isfinite(ours))


def test_a_step_of_rows_of_either_sign_is_exact_within_the_span(x64):
    rng = np.random.default_rng(5)
    root = 2 * rng.normal(size=(D, RANK))
    q = LowRank(jnp.zeros(D), jnp.full(D, 2.0), jnp.asarray(root))
    rows, force = 0.2 * (root @ rng.normal(size=(RANK, 3))).T, np.ones(D)
    weights = np.array([0.3, -0.4, -0.1])

    @jax.jit
    def step(weights):
        grad_var = Rows(jnp.asarray(rows), weights)
        return family_of(q).natural_step(
            family_of(q).init(q), q, q, jnp.asarray(force), grad_var, Gain(0.5)
        )[0]

    ours, exact = step(weights), 2 * np.eye(D) + outer(root) + (rows.T * weights) @ rows
    precision = np.diag(ours.precision_diag) + outer(ours.precision_factor)
    np.testing.assert_allclose(precision, exact, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(
        ours.loc, -0.5 * np.linalg.solve(exact, force), rtol=1e-9
    )
    # A precision that would not be positive definite is NaN, which the drivers refuse.
    assert np.all(np.isnan(step(1e4 * weights).loc))
