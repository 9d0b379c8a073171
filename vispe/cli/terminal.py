"""Output streams that tolerate a closed pipe (`vispe health | head`), and escaping of unprintable characters."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _IgnoringBrokenPipe:
    """Text stream that discards output after its reader was closed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._discard()

    def _discard(self) -> None:
        """Redirect the file descriptor to the null device, so that flushing the buffer at exit does not fail."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Continue the work, and write files, even if stdout or stderr is closed by its reader."""
    original = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (None if s is None else _IgnoringBrokenPipe(s) for s in original)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _IgnoringBrokenPipe):
                stream.flush()
        sys.stdout, sys.stderr = original


def one_line(text: str) -> str:
    r"""Escape unprintable characters, such as a line break in a file name.

    >>> print(one_line(chr(10)))
    \n
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
