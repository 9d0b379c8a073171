"""Tokens at other positions than those of their grid through the fused kernels, eager and compiled."""

import pytest

from tests.attention.moved import ENCODED, MOVES, VOCABULARY, compare_moved

pytestmark = pytest.mark.usefixtures("poisoned")
SUPPORTED = ("distance ", "table", "profile", "alibi", "rpb", "sum")


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", [*VOCABULARY, *ENCODED])
def test_moved_tokens(name, move):
    supported = compare_moved(name, move, "triton")
    assert supported or move == "replaced" or not name.startswith(SUPPORTED)


# how positions are traced is tested with every move, without kernels, in test_moved_tokens
@pytest.mark.parametrize("move", ["replaced", "gathered and spaced"])
@pytest.mark.parametrize("name", [*VOCABULARY, *ENCODED])
def test_moved_tokens_compiled(name, move):
    supported = compare_moved(name, move, "triton", "eager")
    assert supported or move == "replaced" or not name.startswith(SUPPORTED)
