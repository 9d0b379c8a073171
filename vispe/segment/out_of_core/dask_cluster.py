"""Blocks on a dask.distributed cluster: each task computes one block and writes it to the shared store."""

import socket
from collections.abc import Callable, Iterator, Sequence

from vispe.errors import InputError, counted

_PATIENCE = 20  # connection timeout in seconds


def run_on_cluster(
    address: str,
    work: Callable[[str, int, tuple[int, int, int, int]], None],
    job: str,
    tasks: Sequence[tuple[int, tuple[int, int, int, int]]],
) -> Iterator[None]:
    """Compute blocks on the workers of a scheduler, in any order; yields after each.

    The block of a failed worker is reassigned to another one. The workers need vispe and the same paths.

    Args:
        address: address of the scheduler, such as 'tcp://10.0.0.5:8786'.
        work: computes and writes a block, called with `job`, its page and its bounds.
        job: the job, from `Job.dumps`.
        tasks: page and bounds (top, bottom, left, right) of each block.

    Raises:
        InputError: there is no scheduler or no worker, or a block kills workers repeatedly.
    """
    from distributed import Client, as_completed
    from distributed.scheduler import KilledWorker

    try:
        client = Client(address, timeout=_PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError, socket.gaierror) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"scheduler={address} is unreachable ({reason}). Start one with `dask scheduler` and pass its address, "
            "such as tcp://host:8786."
        ) from error
    with client:
        if not client.scheduler_info()["workers"]:
            raise InputError(f"scheduler={address} has no workers. Start some with `dask worker {address}`.")
        futures = [client.submit(work, job, page, bounds, pure=False) for page, bounds in tasks]
        try:
            for future in as_completed(futures, loop=client.loop):
                future.result()
                yield
        except KilledWorker as error:
            raise InputError(
                f"a block was abandoned after killing {counted(error.allowed_failures + 1, 'worker')}, probably out "
                "of memory. Reduce memory and run the same command again."
            ) from error
        finally:
            client.cancel([future for future in futures if not future.done()])
