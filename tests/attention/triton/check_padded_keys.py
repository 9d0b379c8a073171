"""What padded keys and values hold is never read by the fused kernels (`test_interpreter`)."""

import pytest

from tests.attention.padded_keys import same_whatever_padding_holds

SERVED = ("none", "distance learned", "squared fixed", "table with prefix", "gated")


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", SERVED)
def test_called(name, junk, rotated):
    assert same_whatever_padding_holds(name, "triton", junk, rotated) >= 4
