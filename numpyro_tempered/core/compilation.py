"""Advice where a call takes long because it compiles."""

import jax

from numpyro_tempered.core.warn import warn_caller

# Seconds of compiling in one call that are worth a word.
LONG = 20.0


class CompilationWarning(UserWarning):
    """A call compiled for long what the next process will compile too, as it has no cache on disk.

    Example:
        >>> import warnings
        >>> import numpyro_tempered as nt
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", nt.warnings.CompilationWarning)
    """


class Clock:
    """Seconds that JAX has spent on compiling since it was first read.

    Attributes:
        has_advised: Whether this process was told of the cache.
    """

    def __init__(self) -> None:
        self.has_advised = False
        self._seconds, self._listens = 0.0, False

    def read(self) -> float:
        """The seconds so far. JAX has no public way to stop listening, so that it begins only here."""
        if not self._listens:
            self._listens = True
            jax.monitoring.register_event_duration_secs_listener(self._add)
        return self._seconds

    def _add(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            self._seconds += duration_secs


CLOCK = Clock()


def advise_cache(name: str, since: float) -> None:
    """A :class:`.CompilationWarning`, once a process, where a call has compiled for long and keeps nothing.

    Args:
        name: The function.
        since: ``CLOCK.read()`` at its beginning.
    """
    seconds = CLOCK.read() - since
    if (
        seconds <= LONG
        or CLOCK.has_advised
        or getattr(jax.config, "jax_compilation_cache_dir", None)
    ):
        return
    CLOCK.has_advised = True
    warn_caller(
        f"{name} spent {seconds:.0f} s on compiling, and the next process will again. To keep programs on disk: "
        "jax.config.update('jax_compilation_cache_dir', folder) and "
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0) before the first call; the "
        "documentation has a page on it, Start fast.",
        CompilationWarning,
    )
