"""Tokens that are not where their grid has them through the fused kernels, called and compiled."""

import pytest

from tests.attention.moved import ENCODED, MOVES, VOCABULARY, agrees_when_moved

pytestmark = pytest.mark.usefixtures("poisoned")
SERVED = ("distance ", "table", "profile", "alibi", "rpb", "sum")


@pytest.mark.parametrize("compiler", [None, "eager"], ids=["called", "compiled"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", [*VOCABULARY, *ENCODED])
def test_moved_tokens(name, move, compiler):
    served = agrees_when_moved(name, move, "triton", compiler)
    assert served or move == "replaced" or not name.startswith(SERVED)
