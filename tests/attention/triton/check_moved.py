"""Tokens that are not where their grid has them through the fused kernels, called and compiled."""

import pytest

from tests.attention.moved import ENCODED, MOVES, VOCABULARY, agrees_when_moved

pytestmark = pytest.mark.usefixtures("poisoned")
SERVED = ("distance ", "table", "profile", "alibi", "rpb", "sum")


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", [*VOCABULARY, *ENCODED])
def test_moved_tokens(name, move):
    served = agrees_when_moved(name, move, "triton")
    assert served or move == "replaced" or not name.startswith(SERVED)


# how positions are traced is tested with every move, without kernels, in test_moved_tokens
@pytest.mark.parametrize("move", ["replaced", "gathered and spaced"])
@pytest.mark.parametrize("name", [*VOCABULARY, *ENCODED])
def test_moved_tokens_compiled(name, move):
    served = agrees_when_moved(name, move, "triton", "eager")
    assert served or move == "replaced" or not name.startswith(SERVED)
