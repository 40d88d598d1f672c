"""What river asks of its estimators, where it is installed; its interface is that of single rows."""

from typing import TypeVar

C = TypeVar("C", bound=type)

try:
    from river import base
    from river.base.base import Base
except ImportError:
    base = None

    class Base:  # type: ignore[no-redef]
        """No river."""


class RiverEstimator(Base):
    """An estimator of river without its base class, whose tags scikit-learn takes for those of its own past."""

    @property
    def _supervised(self) -> bool:
        return True

    @property
    def _tags(self) -> set[str]:
        return set()

    def _unit_test_skips(self) -> set[str]:
        return set()


def register(kind: str, estimator: C) -> C:
    """Have river take an estimator for one of a kind, "Classifier" or "Regressor"."""
    if base is not None:
        getattr(base, kind).register(estimator)
    return estimator
