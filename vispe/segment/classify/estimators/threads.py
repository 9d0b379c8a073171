"""Early imports of scikit-learn, and the number of threads for a fit."""

from contextlib import AbstractContextManager, suppress
from functools import cache
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController


_MODULES = {"logistic": "sklearn.linear_model"} | dict.fromkeys(
    ("ensemble", "forest", "boosting"), "sklearn.ensemble"
)
_FEW = 20_000  # labelled pixels below which one thread is faster


def import_early(kind: str) -> Thread:
    """Import the dependencies of `PixelClassifier(kind)` in a thread: over a second, hidden behind image reading.

    Errors are ignored here, because `PixelClassifier` reports a missing or broken scikit-learn.
    """

    def load() -> None:
        with suppress(Exception):
            import_module(_MODULES[kind])

    thread = Thread(target=load)
    thread.start()
    return thread


def limit_threads(kind: str, count: int) -> AbstractContextManager[Any]:
    """Limit few pixels to one thread, where synchronisation takes longer than the work."""
    return _thread_pools(kind).limit(limits=1 if count < _FEW else None)


@cache
def _thread_pools(kind: str) -> "ThreadpoolController":
    """Return the thread pools of all libraries that are loaded; finding them takes as long as a small fit."""
    from threadpoolctl import ThreadpoolController

    # which loads libraries
    import_module(_MODULES[kind])
    return ThreadpoolController()
