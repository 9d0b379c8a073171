import threading
import time

import numpy as np
import pytest
import torch

from tests.cases import cases
from vispe.segment.features.threads import in_order


@cases("threads", [1, 2, 5])
def test_results_come_in_order_whatever_takes_longer(threads):
    def work(number):
        time.sleep(0.02 if number % 3 == 0 else 0)
        return number * number

    assert list(in_order(work, 11, threads)) == [n * n for n in range(11)]
    assert list(in_order(work, 0, threads)) == []


@cases("threads", [1, 3])
def test_torch_uses_one_thread_inside_and_as_many_as_before_afterwards(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert list(in_order(lambda _: torch.get_num_threads(), 6, threads)) == [1] * 6
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_no_more_results_wait_than_there_are_threads():
    begun = []
    results = in_order(lambda number: begun.append(number), 20, 2)
    next(results)
    time.sleep(0.05)
    assert len(begun) == 3
    results.close()
    assert len(begun) == 3


def test_an_error_ends_the_work_and_comes_out():
    before, begun = torch.get_num_threads(), []

    def work(number):
        begun.append(number)
        if number == 2:
            raise MemoryError("no more")
        return number

    with pytest.raises(MemoryError, match="no more"):
        list(in_order(work, 100, 2))
    assert len(begun) < 8
    assert torch.get_num_threads() == before


def test_pieces_really_run_side_by_side():
    barrier = threading.Barrier(2, timeout=20)  # breaks unless two pieces are at work together
    assert sorted(in_order(lambda _: barrier.wait(), 2, 2)) == [0, 1]


def test_training_starts_no_threads_that_wait_for_each_other(monkeypatch):
    """Outside of pools, every part of training that computes keeps torch to one thread for each operation."""
    from vispe.segment.classify import classifier_fit
    from vispe.segment.features import micro_features, sample_grid
    from vispe.segment.features.feature_config import FeatureConfig
    from vispe.segment.features.pixel_features import Features

    calls = []

    def recorded(module, name):
        plain = getattr(module, name)

        def work(*passed, **named):
            calls.append((name, torch.get_num_threads()))
            return plain(*passed, **named)

        monkeypatch.setattr(module, name, work)

    recorded(micro_features, "load_micro")
    recorded(classifier_fit, "calibrate")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        features = Features(FeatureConfig("both", model="vispe_micro", sigmas=(1.0,)), device="cpu")
        page = np.random.default_rng(0).random((96, 96, 1), np.float32)
        prepared = features.prepare(page, np.ones((96, 96), bool))
        plain = prepared.sampled
        monkeypatch.setattr(
            prepared,
            "sampled",
            lambda number: calls.append(("sampled", torch.get_num_threads())) or plain(number),
        )
        assert sample_grid.sample(prepared, np.ones((96, 96), bool)) is not None
        classes, of = np.repeat([1, 2], 20), np.arange(40) // 5
        classifier_fit.learn("logistic", ["a", "b"], page[0, :40].repeat(3, 1), classes, of, 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert {name for name, _ in calls} == {"load_micro", "sampled", "calibrate"}
    assert {threads for _, threads in calls} == {1}
