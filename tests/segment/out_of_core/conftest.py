"""Small blocks, so that small images have many of them."""

import pytest

from vispe.segment.out_of_core import memory_plan


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks and chunks of 64 pixels, so that small images have many."""
    monkeypatch.setattr(memory_plan, "_SIDES", (64,))
