"""Every bias through the fused kernels in every dtype: agreement with float64, or a refusal (`test_interpreter`).

The interpreter cuts to bfloat16 and multiplies it in float32, so its numbers say little of a GPU: for bfloat16 this
shows that the kernels run and return it, within twice the limits.
"""

import pytest
import torch

from tests.attention.bias_matrix import (
    EXACT,
    METRICS,
    NORMS,
    agrees_or_refuses,
    derived_agrees_or_refuses,
    distance,
)
from tests.attention.cases import CASES
from vispe import Grid
from vispe.attention.backends.triton.grid import operands
from vispe.attention.bias.strip.layout import Layout

pytestmark = pytest.mark.usefixtures("poisoned")
LIMITS = EXACT | {torch.bfloat16: (8e-3, 2.4e-2)}
GRID = Grid((3, 4), 1)
SERVED = [
    name
    for name in CASES
    if name.startswith(("none", "distance", "squared", "table", "profile", "radial", "offset"))
]
ENCODINGS = {
    "alibi", "alibi_graph", "bam.offset", "fire", "kerple.power", "sandwich", "t5(std=1)",
    "alibi2d", "alibi2d(slopes=learned,metric=squared,wrap=false)", "alibi3d", "gaussian2d", "grape_alibi",
    "cable", "fox", "fox(shared=false)",
    "lookhere", "pape", "pape.ri", "grape_path", "irpe", "irpe(mode=bias)", "irpe(on=kv)", "rpb.swin", "rpb.beit",
    "rpb_cpb", "seqpe(mode=attn_scalar)",
}  # fmt: skip
TABLES = ENCODINGS - {
    "cable",
    "fox",
    "fox(shared=false)",
    "grape_alibi",
    "grape_path",
    "irpe",
    "irpe(on=kv)",
    "pape",
    "pape.ri",
    "seqpe(mode=attn_scalar)",
}


@pytest.fixture
def strips(monkeypatch):
    """Small grids, which would take rows, take strips."""
    monkeypatch.setattr(operands, "layout_of", lambda shape, prefix: Layout(shape, prefix, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_each_bias_agrees_or_is_refused(request, name, dtype):
    if dtype == torch.float16:
        request.getfixturevalue("strips")
    pos = GRID.positions()
    refusal = agrees_or_refuses(CASES[name](pos, 1), "triton", dtype, pos, b=1, limits=LIMITS)
    assert refusal is None or name not in SERVED


@pytest.mark.parametrize("name", ["distance learned", "table shared, prefix per head"])
def test_bfloat16_runs(name):
    pos = GRID.positions()
    case = CASES[name](pos, 1)
    assert agrees_or_refuses(case, "triton", torch.bfloat16, pos, b=1, limits=LIMITS) is None


@pytest.mark.parametrize("number", range(6))
def test_every_metric_and_norm(strips, number):
    pos = Grid((3, 4), 1, spacing=(0.5, 2.0)).positions()
    case = distance(pos, METRICS[number % 4], number % 3 == 0, NORMS[number % 3], learned=True)
    assert agrees_or_refuses(case, "triton", torch.float32, pos, b=1, limits=LIMITS) is None


@pytest.mark.parametrize("spec", sorted(ENCODINGS))
def test_biases_derived_by_encodings(spec):
    refusals = derived_agrees_or_refuses(spec, ["triton"], {"triton": LIMITS})
    assert not refusals or spec not in TABLES
