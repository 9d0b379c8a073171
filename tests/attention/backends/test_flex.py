"""FlexAttention as a backend: results, refusals, and an error instead of an unfused computation.

Most cases are traced by torch and not made machine code of, which takes a minute each on CPU; one case is.
"""

from functools import partial

import pytest
import torch

from tests.attention import oracle
from vispe import Grid, attention, explain
from vispe.attention import DenseBias, DistanceBias, PairRotation, ProfileBias, SumBias, TableBias, ValueTerm
from vispe.attention.backends import flex
from vispe.attention.backends.triton import unsupported_reason
from vispe.attention.call import Call
from vispe.errors import BackendUnavailable

pytestmark = pytest.mark.slow

HEADS, WIDTH = 2, 16
GRID = Grid((3, 4), 1)
POS = GRID.positions()
FIXED = DistanceBias((0.1, 0.7), POS)


def tensors(n=GRID.tokens, width=WIDTH, dtype=torch.float32, batch=1, heads=HEADS):
    return [torch.randn(batch, heads, n, width).to(dtype) for _ in range(3)]


def table(grid, heads=HEADS):
    return torch.randn(heads, *(2 * n - 1 for n in grid.shape)) * 2


def relative(ours, theirs):
    return ((ours.double() - theirs).norm() / theirs.norm()).item()


@pytest.fixture
def traced(monkeypatch):
    """Torch traces what it would compile and runs it eagerly."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    flex._compiled.cache_clear()
    yield
    flex._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def gpu(monkeypatch):
    """Tensors report a GPU that runs kernels."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(flex, "device_unsupported_reason", lambda q: None)
    monkeypatch.setitem(unsupported_reason.__globals__, "device_unsupported_reason", lambda q: None)


def biases(grid):
    pos = grid.positions()
    values, edge, slopes, profile = table(grid), torch.randn(HEADS, 3), torch.rand(HEADS), table(grid, 1)
    matrix = oracle.table_matrix(values, grid, edge)
    shared = oracle.table_matrix(profile, grid)
    return {
        "table": (TableBias(values, pos, edge), matrix),
        "shared": (TableBias(profile, pos), shared),
        "distance": (
            DistanceBias((0.1, 0.7), pos),
            -torch.tensor([0.1, 0.7])[:, None, None]
            * oracle.distance_matrix(grid, "euclidean", False, "none"),
        ),
        "sum": (
            SumBias([TableBias(values, pos, edge), ProfileBias(slopes, profile, pos)]),
            matrix + slopes[:, None, None] * shared,
        ),
        "none": (None, torch.zeros(1, grid.tokens, grid.tokens)),
    }


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


def packed(ends, n):
    which = torch.bucketize(torch.arange(n), ends, right=True)
    return which[:, None] == which[None]


def test_biases(traced):
    for grid in (GRID, Grid((5, 1), 5), Grid((2, 3, 2))):
        for name, (bias, matrix) in biases(grid).items():
            q, k, v = tensors(grid.tokens, batch=2)
            out = attention(q, k, v, bias=bias, backend="flex", scale=0.3)
            expected = oracle.attend(q.double(), k.double(), v.double(), bias=matrix.double(), scale=0.3)
            assert relative(out, expected) < 2e-6, (grid, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_masks_and_rows_without_any_key(traced, dtype):
    n = GRID.tokens
    bias, matrix = biases(GRID)["table"]
    keep = torch.rand(2, n) < 0.4
    keep[0, 0], keep[1] = False, False
    ends = torch.tensor([0, 4, 9, n])
    tolerance = {torch.float32: 2e-6, torch.float16: 6e-4}[dtype]
    cases = (
        (2, {"is_causal": True}, causal(n)),
        (2, {"key_padding_mask": keep}, keep[:, None, None]),
        (2, {"key_padding_mask": keep, "is_causal": True}, keep[:, None, None] & causal(n)),
        (1, {"cu_seqlens": ends}, packed(ends, n)),
        (1, {"cu_seqlens": ends, "is_causal": True, "key_padding_mask": keep[:1]},
         packed(ends, n) & causal(n) & keep[:1, None, None]),
    )  # fmt: skip
    for batch, options, allowed in cases if dtype == torch.float32 else cases[-2:]:
        q, k, v = tensors(batch=batch, dtype=dtype)
        out = attention(q, k, v, bias=bias, backend="flex", **options)
        allowed = allowed.expand(batch, 1, n, n)
        expected = oracle.attend(q.double(), k.double(), v.double(), bias=matrix.double(), keep=allowed)
        assert out.dtype == dtype
        assert relative(out, expected) < tolerance
        assert (out[~allowed.any(-1).expand(-1, HEADS, -1)] == 0).all()


def test_softcap(traced):
    """It applies to the product of queries and keys, before the bias and the masks."""
    q, k, v = (t * 3 for t in tensors())
    padding = torch.ones(1, GRID.tokens, dtype=torch.bool)
    padding[0, 5:8] = False
    for bias in (None, FIXED):
        for softcap in (0.8, 3.0):
            arguments = {"bias": bias, "softcap": softcap, "key_padding_mask": padding}
            ours, theirs = (attention(q, k, v, backend=name, **arguments) for name in ("flex", "reference"))
            torch.testing.assert_close(ours, theirs)


def test_rotation_groups_and_autocast(traced):
    q = tensors(heads=4)[0]
    k, v = tensors(heads=2)[:2]
    angle = torch.randn(1, 1, GRID.tokens, 5)
    options = {
        "bias": DistanceBias((0.1, 0.2, 0.3, 0.4), POS), "enable_gqa": True,
        "transform": PairRotation(angle.cos(), angle.sin(), "half", values=True),
    }  # fmt: skip
    expected = attention(q, k, v, backend="reference", **options)
    assert relative(attention(q, k, v, backend="flex", **options), expected.double()) < 2e-6
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, backend="flex", **options)
    assert out.dtype == torch.bfloat16
    assert relative(out, expected.double()) < 1e-2


def test_inside_a_compiled_model(traced):
    fast = torch.compile(partial(attention, bias=FIXED, is_causal=True, backend="flex"), fullgraph=True)
    arguments = tensors()
    expected = attention(*arguments, bias=FIXED, is_causal=True, backend="reference")
    assert relative(fast(*arguments), expected.double()) < 2e-6


def test_grids_and_layers_share_compiled_programs(traced):
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    for layer, shape in enumerate(
        [(3, 4), (4, 5), (6, 2), (2, 9), (5, 5), (3, 7), (8, 3), (4, 4), (7, 3), (2, 2)]
    ):
        grid = Grid(shape, layer % 3)
        bias, matrix = biases(grid)["table"]
        q, k, v = tensors(grid.tokens)
        out = attention(q, k, v, bias=bias, backend="flex")
        assert relative(out, oracle.attend(q.double(), k.double(), v.double(), bias=matrix.double())) < 2e-6
    assert graphs["unique_graphs"] <= 2


# never unfused


def test_too_many_recompilations_are_an_error(traced):
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        attention(*tensors(5), backend="flex")
        with pytest.raises(BackendUnavailable, match="reached the recompilation limit for the structure"):
            attention(*tensors(7), backend="flex")


def test_failed_compilation_is_an_error(traced):
    with pytest.raises(BackendUnavailable, match="would materialise the n x m matrix"):
        flex._attend(*tensors(), None, None, None, None, None, 1.0)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(BackendUnavailable, match="would materialise the n x m matrix"),
    ):
        attention(*tensors(), bias=FIXED, backend="flex")


# what is refused, and what `auto` takes


@pytest.mark.parametrize(
    ("arguments", "options", "reason"),
    [
        (tensors(width=8), {}, "head_dim >= 16, got 8"),
        (tensors(width=288), {}, "larger than 256"),
        (tensors(dtype=torch.float64), {}, "float64 is not"),
        ([t[:0] for t in tensors()], {}, "nothing to attend to"),
        ([t.clone().requires_grad_() for t in tensors()], {}, "no gradients on CPU"),
        (tensors(), {"bias": DistanceBias(torch.rand(2, requires_grad=True), POS)}, "no gradients on CPU"),
        (tensors(), {"bias": DenseBias(torch.zeros(1, 2, 13, 13), POS)}, "more than the offset"),
        (tensors(), {"attn_mask": torch.ones(13, 13, dtype=torch.bool)}, "n x m tensor"),
        (tensors(), {"dropout_p": 0.1}, "no dropout"),
        (
            tensors(),
            {"value_term": ValueTerm(torch.zeros(2, 3, 16), torch.zeros(13, 13, dtype=torch.int64))},
            "not materialised",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refusals(arguments, options, reason):
    assert reason in flex.unsupported_reason(Call(*arguments, **options))
    with pytest.raises(BackendUnavailable, match=reason):
        attention(*arguments, backend="flex", **options)


def test_auto_does_not_select_it_on_cpu():
    for options in ({}, {"is_causal": True}, {"cu_seqlens": torch.tensor([0, 4, 13])}):
        assert explain(*tensors(), bias=FIXED, **options).backend == "sdpa"


def test_auto_selects_it_on_gpu_where_triton_refuses(gpu):
    assert explain(*tensors(), bias=FIXED, is_causal=True).backend == "triton"
    arguments, fixed = tensors(14), DistanceBias((0.1, 0.7), Grid((3, 4), 2).positions())
    result = explain(*arguments, bias=fixed, is_causal=True)
    assert result.backend == "flex"
    assert "is_causal is fused with at most one prefix token" in result.reason
    assert explain(*tensors(), is_causal=True).backend == "sdpa"
    assert explain(*tensors(), bias=FIXED, attn_mask=torch.ones(13, 13)).backend == "sdpa"
    assert explain(*tensors(), bias=FIXED, softcap=2.0).backend == "flex"
    assert explain(*tensors(), softcap=2.0, sinks=torch.zeros(HEADS)).backend == "reference"
    for options in ({"return_lse": True}, {"sinks": torch.zeros(HEADS)}):
        assert explain(*tensors(), **options).backend == "triton"
        assert explain(*tensors(), bias=FIXED, **options).backend == "triton"
    graded = [t.requires_grad_() for t in arguments]
    assert explain(*graded, bias=fixed, is_causal=True).backend == "flex"


def test_gradients_of_a_table_need_an_explicit_backend(gpu):
    bias = DistanceBias(torch.rand(2, requires_grad=True), Grid((3, 4), 2).positions())
    assert explain(*tensors(14), bias=bias, is_causal=True).backend == "sdpa"
    assert explain(*tensors(14), bias=bias, is_causal=True, backend="flex").backend == "flex"
    assert "not deterministic in FlexAttention" in flex.unsupported_reason(
        Call(*tensors(14), bias, is_causal=True, deterministic=True)
    )
    with torch.no_grad():
        assert explain(*tensors(14), bias=bias, is_causal=True).backend == "flex"


@pytest.mark.slow  # a minute of a C++ compiler
def test_machine_code():
    with torch.no_grad():
        q, k, v = tensors(batch=2)
        bias, matrix = biases(GRID)["table"]
        keep = torch.rand(2, GRID.tokens) < 0.5
        keep[1] = False
        out = attention(q, k, v, bias=bias, is_causal=True, key_padding_mask=keep, backend="flex")
    allowed = keep[:, None, None] & causal(GRID.tokens)
    expected = oracle.attend(q.double(), k.double(), v.double(), bias=matrix.double(), keep=allowed)
    assert relative(out, expected) < 2e-6
