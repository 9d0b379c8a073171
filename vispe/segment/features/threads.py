"""Pieces of a page in threads: each piece runs on one core, which wastes less than sharing out every operation."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

_T = TypeVar("_T")


def in_order(work: Callable[[int], _T], count: int, threads: int) -> Iterator[_T]:
    """Run `work(0)`, ..., `work(count - 1)` in threads and yield the results in this order.

    At most one result for each thread waits to be taken, so memory is bounded. While results are taken, torch
    uses one thread for each operation: the numbers do not depend on how many threads there are.

    Args:
        work: safe to run in several threads, such as array operations.
        count: number of pieces.
        threads: at most so many run at once; 1 runs them in the calling thread.
    """
    threads = min(threads, count)
    with one_thread_each():
        if threads <= 1:
            yield from map(work, range(count))
            return
        waiting: deque[Future[_T]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            try:
                for number in range(count):
                    waiting.append(pool.submit(work, number))
                    if len(waiting) > threads:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Let torch use one thread for each operation, in this thread and in those that are started now.

    Many small operations on several threads cost CPU time on a busy machine: OpenMP threads spin while they wait for
    one that has no core.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
