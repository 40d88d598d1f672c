"""Bounds on a posterior, coordinate by coordinate, and the projection on them or on a ball."""

import math
from typing import NamedTuple, TypeVar

import jax.numpy as jnp

from numpyro_tempered.core import ArrayLike, check_number, check_numbers
from numpyro_tempered.gaussian.families.base import Q, family_of
from numpyro_tempered.online import ball as balls
from numpyro_tempered.online.ball import Ball


class Box(NamedTuple):
    """Bounds on a posterior, each a scalar or shape ``(d,)``; infinite ones do not bind.

    Attributes:
        loc: Largest absolute value of the means.
        scale: Largest standard deviation.
    """

    loc: ArrayLike = math.inf
    scale: ArrayLike = math.inf


R = TypeVar("R", Box | None, Box | Ball | None)


def check_box(box: R, *, in_ball: bool = False) -> R:
    """The box or ball, validated.

    Args:
        box: The bounds, or None.
        in_ball: Whether the rule works in a ball.

    Raises:
        ValueError: If a bound is not positive.
        TypeError: If it is a ball and the rule works in boxes alone.
    """
    if isinstance(box, Ball):
        if not in_ball:
            raise TypeError(
                "a Ball is for oga, oga_el, sva and svb: of other rules the minimiser in a ball is not known in "
                "closed form. Take a Box."
            )
        hint = "A Ball has two radii; bounds for each coordinate are a Box's."
        radii = box._asdict().items()
        return Ball(
            *(
                float(check_number(radius, f"box.{key}", "(0, inf]", hint=hint))
                for key, radius in radii
            )
        )
    for name, bound in {} if box is None else box._asdict().items():
        check_numbers(bound, f"box.{name}", "(0, inf]")
    return box


def project(q: Q, box: Box | Ball | None) -> Q:
    """The nearest point of the box, coordinate by coordinate, or of the ball, in Euclidean norms.

    Raises:
        TypeError: If ``q`` has a covariance and they are a box: the projection would be a quadratic program.
    """
    if box is None:
        return q
    if isinstance(box, Ball):
        return balls.project(q, box)
    family = family_of(q)
    if not family.diagonal_only:
        raise TypeError(
            f"a box is for MeanField, whose coordinates it bounds one by one; on {family.name} the "
            "projection is a quadratic program. Leave the box out."
        )
    loc, scale = (jnp.asarray(bound, q.loc.dtype) for bound in box)
    for name, limit in (("loc", loc), ("scale", scale)):
        if limit.shape not in ((), q.loc.shape):
            raise ValueError(
                f"box.{name} must have shape () or {q.loc.shape}, got {limit.shape}."
            )
    return family.with_root(
        jnp.clip(q.loc, -loc, loc), jnp.minimum(family.root(q), scale)
    )
