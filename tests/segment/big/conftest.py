"""Small blocks, so that small images have many of them."""

import pytest

from vispe.segment import predict
from vispe.segment.big import plan
from vispe.segment.smooth import smooth


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks and chunks of 64 pixels, so that small images have many."""
    monkeypatch.setattr(plan, "_SIDES", (64,))


@pytest.fixture(autouse=True)
def _one_way_to_smooth(monkeypatch):
    monkeypatch.setattr(predict, "_smooth", smooth, raising=False)
