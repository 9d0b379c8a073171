"""Runs commands of vispe in child processes that are killed one after the other, until one of them ends by itself.

    python -m tests.segment.kills '[[[3, 17], ["segment", ...]], ...]'

For each command a list of moments: the first child is killed at its third event, the second at its seventeenth, the
next is left alone. Events are what leaves traces on a disk: files made sure, renamed, linked or removed. Prints the
exit code of the last child of each command.
"""

import json
import os
import signal
import sys

import sklearn.ensemble  # noqa: F401 - imported once, for all children
import torch  # noqa: F401

import vispe.segment.pipeline
import vispe.segment.run.zero_shot  # noqa: F401
from vispe.cli.main import main


def child(words, moment):
    """Run the command in this process and kill it at an event; None lets it end."""
    recorded = [0]

    def counted(function):
        def inner(*args, **options):
            recorded[0] += 1
            if recorded[0] == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return inner

    for name in ("fsync", "replace", "link", "unlink", "rmdir", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    os._exit(main(words))


def run(words, moments):
    """Run a command until it ends by itself, and return its exit code."""
    code = None
    for moment in [*moments, None]:
        number = os.fork()
        if number == 0:
            child(words, moment)
        code = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        if code != -signal.SIGKILL:
            break
    return code


if __name__ == "__main__":
    sys.stdout.write(json.dumps([run(words, moments) for moments, words in json.loads(sys.argv[1])]))
