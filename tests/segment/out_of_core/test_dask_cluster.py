"""Blocks on a dask.distributed cluster with a killed worker."""

import os
import signal

import numpy as np
import pytest

from tests.segment.out_of_core.stores import scene, scribbled, write_store
from tests.segment.out_of_core.test_resume import contents
from vispe.errors import InputError
from vispe.segment import pipeline
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.out_of_core import memory_plan
from vispe.segment.run.reports.run_report import ProgressCallbacks

distributed = pytest.importorskip("distributed", reason="needs the extra vispe[big]")

FILTERS = FeatureConfig(sigmas=(1.0,), tile=64)


def test_unreachable_schedulers_raise(tmp_path, monkeypatch):
    monkeypatch.setattr("vispe.segment.out_of_core.dask_cluster._PATIENCE", 0.5)
    values, phase = scene(60, 70)
    store = write_store(tmp_path / "a.zarr", values.astype(np.uint8))
    labels = scribbled(tmp_path / "a.png", phase)
    with pytest.raises(
        InputError, match=r"scheduler=tcp://127\.0\.0\.1:9 is unreachable \(Timed out .*`dask scheduler`"
    ):
        pipeline.segment(
            [store], tmp_path / "out", labels=[labels], features=FILTERS, scheduler="tcp://127.0.0.1:9"
        )


@pytest.mark.slow
def test_results_are_identical_after_a_killed_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_plan, "_SIDES", (128,))
    values, phase = scene(600, 700)
    store = write_store(tmp_path / "a.zarr", values.astype(np.uint8), chunk=128)
    options = {
        "labels": [scribbled(tmp_path / "a.png", phase, 0.002)],
        "features": FILTERS,
    }
    pipeline.segment([store], tmp_path / "serial", **options)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:

        class Killer(ProgressCallbacks):
            """Kills one of the two processes when some blocks are done."""

            blocks = 0

            def step(self, share):
                self.blocks += share < 0.5
                if self.blocks == 6:
                    pids = [nanny.pid for nanny in cluster.workers.values()]
                    os.kill(pids[0], signal.SIGKILL)

        watch = Killer()
        report = pipeline.segment(
            [store], tmp_path / "dask", **options, scheduler=cluster.scheduler_address, watch=watch
        )
    assert watch.blocks > 6
    assert report.images[0]["block"] == 128
    assert contents(tmp_path / "dask") == contents(tmp_path / "serial")
