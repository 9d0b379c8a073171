"""Biases for tokens at other positions than those of their grid: every backend, eager and compiled."""

import pytest
import torch

from tests.attention.cases import tensors
from tests.attention.moved import ENCODED, MOVES, VOCABULARY, compare_moved
from tests.cases import cases
from tests.encodings.test_conformance import NAMES, build, positions, shapes, tokens
from tests.products import partly
from vispe.attention.backends import blocked
from vispe.encodings.metadata import encoding_info
from vispe.encodings.multi_softmax import calls_of

pytestmark = pytest.mark.usefixtures("poisoned")
# where tokens of a scan are makes no difference to it; it refuses to omit some
SCANS = ("selective_rope.scan", "carope.scan")
ROTARY = [name for name in NAMES if "rotary" in encoding_info(name).kinds and name not in SCANS]


@pytest.fixture(autouse=True)
def _strips(monkeypatch):
    """Blocks of strips serve short inputs too."""
    monkeypatch.setattr(blocked, "MIN_QUERIES", 0)
    monkeypatch.setattr(blocked, "SHORTEST_ROW", 1)


@partly(2)
@cases("backend", ["sdpa", "lowrank"])
@cases("move", MOVES)
@cases("name", [*VOCABULARY, *ENCODED])
def test_moved_tokens(name, move, backend):
    supported = compare_moved(name, move, backend)
    assert supported or backend == "lowrank" or name in ENCODED


@pytest.mark.slow
@pytest.mark.parametrize("move", ["spaced", "replaced", "gathered"])
@pytest.mark.parametrize("name", [*VOCABULARY, *ENCODED])
def test_moved_tokens_compiled(name, move):
    assert compare_moved(name, move, "sdpa", "eager") or name in ENCODED
    compare_moved(name, move, "lowrank", "eager")


@cases("move", ["replaced", "spaced", "without a position"])
@cases("spec", ROTARY)
def test_rotations_of_moved_tokens(spec, move):
    encoding = build(spec).eval()
    pos = MOVES[move](positions(encoding, shapes(encoding)[0]))
    one_by_one = pos.replace(index=torch.arange(pos.tokens)[None] - pos.grid.prefix)
    q, k, v = tensors(2, pos.tokens)
    x = tokens(pos).expand(2, -1, -1)
    with torch.no_grad():  # some are stored only then
        both = (calls_of(q, k, v, encoding.parts(), p, 0, x) for p in (one_by_one, pos))
        for (_, expected), (_, actual) in zip(*both, strict=True):
            for mine, other in zip(
                actual.transform.inputs(q, k, v), expected.transform.inputs(q, k, v), strict=True
            ):
                torch.testing.assert_close(mine, other)
