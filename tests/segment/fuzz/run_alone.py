"""Reader of image files with limits on memory and time: `python run_alone.py FILE ...` prints JSON lines."""

import contextlib
import json
import resource
import signal
import sys
import time
from pathlib import Path

MEMORY = 6 << 30  # address space; the libraries use most of it
SECONDS = 20


class TimeLimitExceeded(BaseException):
    """Exceeded time limit; not an Exception, so that only this program catches it."""


def stop(*_: object) -> None:
    """Raise TimeLimitExceeded when the alarm fires."""
    raise TimeLimitExceeded


def main() -> None:
    """Read the header and the pixels of each file, and print the outcome."""
    from vispe.errors import VispeError
    from vispe.images.formats.headers import stored_frame, stored_planes, stored_shape
    from vispe.images.read import read_image
    from vispe.train.data.image_reading import count_pages

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, stop)
    for path in sys.argv[1:]:
        memory_before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
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
            except TimeLimitExceeded:
                outcome, text = "hang", ""
            except Exception as error:
                outcome, text = type(error).__name__, str(error)
        memory_after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = time.process_time() - start
        sys.stdout.write(
            json.dumps([path, outcome, text, (memory_after - memory_before) >> 10, seconds]) + "\n"
        )


if __name__ == "__main__":
    main()
