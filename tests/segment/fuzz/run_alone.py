"""Reads files in a process of its own with little memory and time: `python run_alone.py FILE ...`, JSON lines out."""

import contextlib
import json
import resource
import signal
import sys
import time
from pathlib import Path

MEMORY = 6 << 30  # address space, of which the libraries take most
SECONDS = 20


class TooLong(BaseException):
    """Not an Exception, so that nothing but this program catches it."""


def stop(*_: object) -> None:
    """Interrupt what is running."""
    raise TooLong


def main() -> None:
    """Read the header and the pixels of each file, and print the outcome."""
    from vispe.errors import VispeError
    from vispe.images.formats.headers import stored_frame, stored_planes, stored_shape
    from vispe.images.read import read_image
    from vispe.train.data.image_reading import count_pages

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, stop)
    for path in sys.argv[1:]:
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        signal.alarm(SECONDS)
        with contextlib.ExitStack() as stack:
            stack.callback(signal.alarm, 0)
            try:
                for header in (stored_shape, stored_frame, stored_planes):
                    header(Path(path))
                with contextlib.suppress(VispeError):
                    count_pages(Path(path))
                outcome, text = "read", str(read_image(path).notes)
            except VispeError as error:
                outcome, text = "refused", str(error)
            except TooLong:
                outcome, text = "hang", ""
            except Exception as error:
                outcome, text = type(error).__name__, str(error)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = time.process_time() - start
        sys.stdout.write(json.dumps([path, outcome, text, (after - before) >> 10, seconds]) + "\n")


if __name__ == "__main__":
    main()
