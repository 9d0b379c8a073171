import threading
import time

import numpy as np
import pytest
import torch

from tests.cases import cases
from vispe.segment.features.threads import in_order


@cases("threads", [1, 2, 5])
def test_results_are_in_order_for_unequal_durations(threads):
    def work(number):
        time.sleep(0.02 if number % 3 == 0 else 0)
        return number * number

    assert list(in_order(work, 11, threads)) == [n * n for n in range(11)]
    assert list(in_order(work, 0, threads)) == []


@cases("threads", [1, 3])
def test_torch_uses_one_thread_in_workers_and_is_restored(threads):
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert list(in_order(lambda _: torch.get_num_threads(), 6, threads)) == [1] * 6
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)


def test_number_of_pending_results_is_limited_by_threads():
    started = []
    results = in_order(lambda number: started.append(number), 20, 2)
    next(results)
    time.sleep(0.05)
    assert len(started) == 3
    results.close()
    assert len(started) == 3


def test_exceptions_stop_the_workers_and_propagate():
    num_threads, started = torch.get_num_threads(), []

    def work(number):
        started.append(number)
        if number == 2:
            raise MemoryError("no more")
        return number

    with pytest.raises(MemoryError, match="no more"):
        list(in_order(work, 100, 2))
    assert len(started) < 8
    assert torch.get_num_threads() == num_threads


def test_items_run_concurrently():
    barrier = threading.Barrier(2, timeout=20)  # breaks unless two items run concurrently
    assert sorted(in_order(lambda _: barrier.wait(), 2, 2)) == [0, 1]


def test_training_uses_one_torch_thread_per_operation(monkeypatch):
    """Outside of thread pools, all computations of training limit torch to one thread per operation."""
    from vispe.segment.classify import classifier_fit
    from vispe.segment.features import micro_features, sample_grid
    from vispe.segment.features.feature_config import FeatureConfig
    from vispe.segment.features.pixel_features import Features

    calls = []

    def record(module, name):
        original = getattr(module, name)

        def work(*args, **kwargs):
            calls.append((name, torch.get_num_threads()))
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, work)

    record(micro_features, "load_micro")
    record(classifier_fit, "calibrate")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        features = Features(FeatureConfig("both", model="vispe_micro", sigmas=(1.0,)), device="cpu")
        page = np.random.default_rng(0).random((96, 96, 1), np.float32)
        prepared = features.prepare(page, np.ones((96, 96), bool))
        original = prepared.sampled
        monkeypatch.setattr(
            prepared,
            "sampled",
            lambda number: calls.append(("sampled", torch.get_num_threads())) or original(number),
        )
        assert sample_grid.sample(prepared, np.ones((96, 96), bool)) is not None
        classes, scribble_ids = np.repeat([1, 2], 20), np.arange(40) // 5
        classifier_fit.learn("logistic", ["a", "b"], page[0, :40].repeat(3, 1), classes, scribble_ids, 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)
    assert {name for name, _ in calls} == {"load_micro", "sampled", "calibrate"}
    assert {threads for _, threads in calls} == {1}
