"""Lines for a terminal, and what happens when the reader of stdout or stderr goes away, as in `vispe health | head`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Outlasting:
    """A text stream that goes on when nobody reads it any more: what is written then goes nowhere."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._let_go()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._let_go()

    def _let_go(self) -> None:
        """Point the file descriptor at nothing, so that what is still buffered does not fail at exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def outlasting_readers() -> Iterator[None]:
    """While open, work goes on and files are written even if nothing reads stdout and stderr."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (None if s is None else _Outlasting(s) for s in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Outlasting):
                stream.flush()
        sys.stdout, sys.stderr = before


def one_line(text: str) -> str:
    r"""Escape what is not printable, such as a line end in a file name, so that a terminal shows it.

    >>> print(one_line(chr(10)))
    \n
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
