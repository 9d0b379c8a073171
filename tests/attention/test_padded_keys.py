"""What padded keys and values hold is never read: NaN and infinity reach neither outputs nor gradients."""

import pytest

from tests.attention.padded_keys import NAMES, same_whatever_padding_holds
from vispe.attention.backends import blocked


@pytest.mark.parametrize("least", [0, 10**9], ids=["strips", "mask"])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_called(name, backend, junk, least, monkeypatch):
    monkeypatch.setattr(blocked, "MIN_QUERIES", least)
    assert same_whatever_padding_holds(name, backend, junk, rotated=least == 0) >= 4


@pytest.mark.parametrize("name", ["squared fixed", "lowrank"])
def test_columns(name):
    assert same_whatever_padding_holds(name, "lowrank", float("nan")) >= 4


@pytest.mark.parametrize("form", ["padding", "mask of keys"])
@pytest.mark.parametrize("name", ["table with prefix", "none"])
def test_compiled(name, form):
    assert same_whatever_padding_holds(name, "sdpa", float("nan"), True, "aot_eager", form) >= 4
