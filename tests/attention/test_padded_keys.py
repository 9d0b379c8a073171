"""What padded keys and values hold is never read: NaN and infinity reach neither outputs nor gradients."""

import pytest

from tests.attention.padded_keys import NAMES, same_whatever_padding_holds
from tests.cases import cases, pairwise
from vispe.attention.backends import blocked


@pairwise
@cases("least", [0, 10**9], ids=["strips", "mask"])
@cases("junk", [float("nan"), float("inf"), float("-inf"), 1e30])
@cases("backend", ["reference", "sdpa"])
@cases("name", NAMES)
def test_called(name, backend, junk, least, monkeypatch):
    monkeypatch.setattr(blocked, "MIN_QUERIES", least)
    assert same_whatever_padding_holds(name, backend, junk, rotated=least == 0) >= 4


@cases("name", ["squared fixed", "lowrank"])
def test_columns(name):
    assert same_whatever_padding_holds(name, "lowrank", float("nan")) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("form", ["padding", "mask of keys"])
@pytest.mark.parametrize("name", ["table with prefix", "none"])
def test_compiled(name, form):
    assert same_whatever_padding_holds(name, "sdpa", float("nan"), True, "aot_eager", form) >= 4
