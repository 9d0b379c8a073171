"""Parallel pieces of a page: each piece runs on one core, with less overhead than threading every operation."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

_T = TypeVar("_T")


def in_order(work: Callable[[int], _T], count: int, threads: int) -> Iterator[_T]:
    """Run `work(0)`, ..., `work(count - 1)` in threads and yield the results in this order.

    At most one result per thread waits to be consumed, so memory is bounded. Meanwhile torch uses one thread per
    operation: the numbers do not depend on the number of threads.

    Args:
        work: thread-safe, such as array operations.
        count: number of pieces.
        threads: upper bound of parallel calls; 1 runs them in the calling thread.
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
    """Limit torch to one thread per operation, in this thread and in those started within.

    Many small operations on several threads waste CPU time on a busy machine: OpenMP threads spin while they
    wait for a thread that has no core.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
