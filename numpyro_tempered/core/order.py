"""The operations of a program in an order that follows from what they compute."""

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def in_order(jaxpr: Jaxpr) -> Jaxpr:
    """The same program, with each operation where its result is first needed, and none that nothing needs.

    NumPyro computes parts of the ELBO in the order of a set of names, which differs from process to process; sums
    over rows that processes share must come in one order in all of them.
    """
    if jaxpr.effects:
        return jaxpr
    makers: dict[object, JaxprEqn] = {
        variable: equation for equation in jaxpr.eqns for variable in equation.outvars
    }
    order: list[JaxprEqn] = []
    begun: set[int] = set()
    # Each operation is met twice: before and after those that it depends on.
    stack = [
        (makers[atom], False)
        for atom in reversed(jaxpr.outvars)
        if _is_made(atom, makers)
    ]
    while stack:
        equation, is_ready = stack.pop()
        if is_ready:
            order.append(equation)
        elif id(equation) not in begun:
            begun.add(id(equation))
            stack.append((equation, True))
            stack += [
                (makers[atom], False)
                for atom in reversed(equation.invars)
                if _is_made(atom, makers)
            ]
    eqns = [
        each.replace(params={k: _inside(v) for k, v in each.params.items()})
        for each in order
    ]
    return jaxpr.replace(eqns=eqns)


def _is_made(atom: object, makers: dict) -> bool:
    # Literals have no hash.
    return not hasattr(atom, "val") and atom in makers


def _inside(value: object) -> object:
    """A parameter of an operation, with the programs in it in order."""
    if isinstance(value, ClosedJaxpr):
        return value.replace(jaxpr=in_order(value.jaxpr))
    if isinstance(value, Jaxpr):
        return in_order(value)
    # Not records.
    if type(value) is tuple:
        return tuple(map(_inside, value))
    return list(map(_inside, value)) if type(value) is list else value
