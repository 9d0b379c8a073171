"""Run vispe commands in child processes that are killed one after another, until one of them finishes.

    python -m tests.segment.kills '[[[3, 17], ["segment", ...]], ...]'

Each command has a list of event numbers: the first child is killed at its third event, the second at its seventeenth,
and the next one runs to the end. Events are changes on disk: fsync, rename, link and removal of files and folders.
Prints the exit code of the last child of each command.
"""

import json
import os
import signal
import sys

import sklearn.ensemble  # noqa: F401 - imported once for all children
import torch  # noqa: F401

import vispe.segment.pipeline
import vispe.segment.run.zero_shot  # noqa: F401
from vispe.cli.main import main


def child(argv, event):
    """Run the command in this process and kill it at this event; None runs it to the end."""
    count = [0]

    def with_kill(function):
        def inner(*args, **options):
            count[0] += 1
            if count[0] == event:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return inner

    for name in ("fsync", "replace", "link", "unlink", "rmdir", "mkdir"):
        setattr(os, name, with_kill(getattr(os, name)))
    os._exit(main(argv))


def run(argv, events):
    """Run a command until one child finishes, and return its exit code."""
    code = None
    for event in [*events, None]:
        number = os.fork()
        if number == 0:
            child(argv, event)
        code = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        if code != -signal.SIGKILL:
            break
    return code


if __name__ == "__main__":
    sys.stdout.write(json.dumps([run(argv, events) for events, argv in json.loads(sys.argv[1])]))
