"""Requests one after another in a worker thread, with the progress in the panel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from napari.qt.threading import create_worker
from qtpy.QtCore import QTimer

from vispe.errors import VispeError
from vispe.segment.napari.panel import Panel
from vispe.segment.napari.requests import Answer, WorkItem
from vispe.segment.napari.session import Session

Work = tuple[WorkItem, Callable[[Answer], None]]
"""A request, and the function that shows each of its answers."""


class WorkQueue:
    """Runs one request at a time; meanwhile the latest other request waits.

    Args:
        session: processes the requests.
        panel: shows progress and errors.

    Attributes:
        progress: finished fraction of the current request.
    """

    def __init__(self, session: Session, panel: Panel) -> None:
        self._session, self._panel = session, panel
        self._worker: Any = None
        self._next: Callable[[], None] | None = None
        self.progress = 0.0
        session.is_superseded = lambda: self._next is not None
        self._clock = QTimer(panel, interval=100)
        self._clock.timeout.connect(lambda: panel.progress(self.progress))

    @property
    def busy(self) -> bool:
        """Whether work is in progress."""
        return self._worker is not None

    def start(self, collect: Callable[[], Work | None], quiet: bool = False) -> None:
        """Start a request in a thread, or let it wait.

        Args:
            collect: returns the request when it can start; None if there is no work.
            quiet: a live update, which does not replace a waiting request.
        """
        if self.busy:
            if not quiet or self._next is None:
                self._next = lambda: self.start(collect, quiet)
            return
        try:
            work = collect()
        except VispeError as error:
            self._panel.show_message(str(error), error=True)
            return
        if work is None:
            return
        request, show = work
        self.progress = 0.0
        self._panel.set_busy(True)
        self._clock.start()
        self._worker = create_worker(self._session.answers, request, self._step, _start_thread=False)
        self._worker.yielded.connect(show)
        self._worker.finished.connect(self._done)
        self._worker.start()

    def _done(self) -> None:
        self._worker = None
        self._clock.stop()
        self._panel.set_busy(False)
        pending, self._next = self._next, None
        if pending is not None:
            pending()

    def _step(self, fraction: float) -> None:
        """Increase the displayed progress; called in the worker thread."""
        self.progress += fraction
