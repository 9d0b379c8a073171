"""Blocks on a dask.distributed cluster: each task computes one block and writes it to the shared store itself."""

import socket
from collections.abc import Callable, Iterator, Sequence

from vispe.errors import InputError

_PATIENCE = 20  # seconds to wait for the scheduler


def run_on_cluster(
    address: str,
    work: Callable[[str, int, tuple[int, int, int, int]], None],
    job: str,
    tasks: Sequence[tuple[int, tuple[int, int, int, int]]],
) -> Iterator[None]:
    """Compute blocks on the workers of a scheduler, in any order; yields after each.

    The block of a worker that dies goes to another one. The workers need vispe and the same paths.

    Args:
        address: of the scheduler, such as 'tcp://10.0.0.5:8786'.
        work: what computes and writes a block, given `job`, its page and its ends.
        job: what to compute, from `Job.dumps`.
        tasks: page and ends (top, bottom, left, right) of each block.

    Raises:
        InputError: no scheduler there, or no workers; a block that workers die of.
    """
    from distributed import Client, as_completed
    from distributed.scheduler import KilledWorker

    try:
        client = Client(address, timeout=_PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError, socket.gaierror) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"scheduler={address} cannot be reached ({reason}); start one with `dask scheduler` and give its address, "
            "such as tcp://host:8786."
        ) from error
    with client:
        if not client.scheduler_info()["workers"]:
            raise InputError(f"scheduler={address} has no workers; start some with `dask worker {address}`.")
        futures = [client.submit(work, job, page, ends, pure=False) for page, ends in tasks]
        try:
            for future in as_completed(futures, loop=client.loop):
                future.result()
                yield
        except KilledWorker as error:
            raise InputError(
                f"a block was given up after the workers died {error.allowed_failures + 1} times over it, probably for "
                "lack of memory; give less with --memory and run the same command again."
            ) from error
        finally:
            client.cancel([future for future in futures if not future.done()])
