"""The names of JAX that this package needs and that JAX does not document: a new release may drop them.

A test names the one that is missing.
"""

# What an output of a traced program depends on: no documented function tells.
from jax.interpreters.partial_eval import dce_jaxpr

__all__ = ["dce_jaxpr"]
