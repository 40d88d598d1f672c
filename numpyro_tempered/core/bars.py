"""Progress bars of calls that take long, by tqdm."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias

# Whether to show one; None where a call has taken some seconds.
ProgressBar: TypeAlias = bool | None
DELAY = 3.0
_CHOICE: ContextVar[ProgressBar] = ContextVar("_CHOICE", default=False)


@contextlib.contextmanager
def progress_bars(choice: ProgressBar) -> Iterator[None]:
    """What the loops within show: for calls that have many, in places that know nothing of the user's choice."""
    token = _CHOICE.set(choice)
    try:
        yield
    finally:
        _CHOICE.reset(token)


def progress(total: int, unit: str, choice: ProgressBar) -> Any:
    """A bar of tqdm. One that is not shown does nothing.

    Args:
        total: The most steps.
        unit: What is counted, in the plural.
        choice: Whether to show it; None where the call takes some seconds.
    """
    from tqdm.auto import tqdm  # takes a while to import

    class Bar(tqdm):
        def __exit__(self, kind: object, *details: object) -> None:
            # A fit that has converged is done, before the most steps that it may take.
            if kind is None:
                self.total = self.n
            super().__exit__(kind, *details)

    delay = DELAY if choice is None else 0.0
    return Bar(total=total, unit=f" {unit}", disable=choice is False, delay=delay)


def progress_within(total: int, unit: str) -> Any:
    """A bar as the call around it asks for by :func:`progress_bars`; none where it does not."""
    return progress(total, unit, _CHOICE.get())
