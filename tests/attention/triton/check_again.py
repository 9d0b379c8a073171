"""Repeated calls of the fused kernels, which skip validation and reuse strips. `test_interpreter` runs this."""

import copy
from contextlib import nullcontext

import pytest
import torch

from vispe import Grid, attention, create_encoding
from vispe.attention import DistanceBias, SumBias, TableBias
from vispe.attention.backends import triton
from vispe.attention.bias.cache import strips
from vispe.errors import ShapeError

GRID, HEADS, HEAD_DIM = Grid((3, 5), 1), 2, 16


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Tensors report a GPU, so that 'auto' selects the fused kernels."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda x: False))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda x: nullcontext())


@pytest.fixture
def validated(monkeypatch):
    """Calls that were validated: those that are not repetitions of earlier ones."""
    calls = []
    run = triton.run
    monkeypatch.setitem(
        attention.__globals__["BACKENDS"],
        "triton",
        (triton.unsupported_reason, lambda call: calls.append(call) or run(call)),
    )
    return calls


def inputs(dtype=torch.float32, batch=2, **options):
    return [torch.randn(batch, HEADS, GRID.tokens, HEAD_DIM, dtype=dtype, **options) for _ in range(3)]


def fixed(pos):
    return DistanceBias((0.5, 0.25), pos)


def check(qkv, bias, **options):
    actual = attention(*qkv, bias=bias, **options)
    expected = attention(*qkv, bias=bias, backend="reference", **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-2 if qkv[0].dtype != torch.float32 else 3e-6)
    return actual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeated_calls_equal_the_first(dtype, validated):
    pos = GRID.positions()
    qkv = inputs(dtype)
    with torch.no_grad():
        first = check(qkv, fixed(pos))
        assert len(validated) == 1
        assert torch.equal(check(qkv, fixed(pos)), first)
        # other strides
        swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
        assert torch.equal(check(swapped, fixed(pos)), first)
        channels = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in qkv]
        assert torch.equal(check(channels, fixed(pos)), first)
        assert len(validated) == 1
        # another scale, bias, number of samples
        check(qkv, fixed(pos), scale=0.5)
        check(qkv, DistanceBias((0.5, 0.125), pos))
        check(inputs(dtype, 1), fixed(pos))
        check(qkv, fixed(GRID.positions()))
        assert len(validated) == 5


def test_gradients_of_repeated_calls(validated):
    pos, qkv = GRID.positions(), inputs(requires_grad=True)
    expected = torch.autograd.grad(attention(*qkv, bias=fixed(pos), backend="reference").square().sum(), qkv)
    for _ in range(3):
        actual = torch.autograd.grad(attention(*qkv, bias=fixed(pos)).square().sum(), qkv)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(validated) == 1


def test_repeated_calls_are_still_validated_where_they_differ():
    pos, bias = GRID.positions(), fixed(GRID.positions())
    q, k, v = inputs()
    grouped = attention(q, k[:, :1], v[:, :1], bias=fixed(pos), enable_gqa=True)
    assert grouped.shape == q.shape
    with pytest.raises(ShapeError, match="enable_gqa=True"):
        attention(q, k[:, :1], v[:, :1], bias=fixed(pos))
    attention(q, k, v, bias=bias)
    with pytest.raises(ShapeError, match="one dtype"):
        attention(q, k.double(), v, bias=bias)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        for _ in range(2):
            assert attention(q, k, v, bias=bias).dtype == torch.bfloat16
    assert attention(q, k, v, bias=bias).dtype == torch.float32
    logits = bias.as_logits()
    torch.testing.assert_close(
        attention(q, k, v, bias=logits), attention(q, k, v, bias=logits, backend="reference")
    )
    # the kernels have no forward-mode derivative
    tangent = torch.randn_like(q)

    def jvp(**options):
        return torch.func.jvp(lambda q: attention(q, k, v, bias=bias, **options), (q,), (tangent,))[1]

    actual, expected = jvp(), jvp(backend="reference")
    torch.testing.assert_close(actual, expected)
    with torch.autograd.forward_ad.dual_level():
        out = attention(torch.autograd.forward_ad.make_dual(q, tangent), k, v, bias=bias)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(out).tangent, expected)


def cached_strips(pos):
    return [entry for entry in pos.memo["learned strips"].entries if entry.strip is not None]


LEARNED = [
    "rpb.swin",
    "rpb.beit",
    "irpe(mode=bias)",
    "rpb_cpb",
    "lookhere",
    "kerple",
    "fire",
    "bam",
    "alibi2d(slopes=learned)",
]


def random_encoding(spec):
    torch.manual_seed(3)
    encoding = create_encoding(spec, dim=HEADS * HEAD_DIM, num_heads=HEADS, grid=GRID.shape).eval()
    for p in encoding.parameters():
        torch.nn.init.normal_(p, 0.5, 0.3)
    return encoding


def test_a_resampled_table_is_reused(validated):
    encoding, qkv = create_encoding("rpb.swin", dim=HEADS * HEAD_DIM, num_heads=HEADS, grid=(5, 5)), inputs()
    pos = GRID.positions()
    with torch.no_grad():
        for _ in range(4):
            check(qkv, encoding.bias(pos, 0))
        encoding.relative_position_bias_table.add_(torch.randn_like(encoding.relative_position_bias_table))
        check(qkv, encoding.bias(pos, 0))
    assert len(validated) == 3


@pytest.mark.parametrize("spec", LEARNED)
def test_strips_of_learned_biases_are_reused(spec, validated):
    encoding, pos, qkv = random_encoding(spec), GRID.positions(), inputs()
    with torch.no_grad():
        outs = [check(qkv, encoding.bias(pos, 0)) for _ in range(5)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    # the second call computes the strip and is the last that is validated
    assert len(validated) == 2
    assert len(cached_strips(pos)) == 1


CHANGES = {
    "in place": lambda encoding, p: p.mul_(1.5),
    "view": lambda encoding, p: p.view(-1)[-1:].add_(0.5),
    "load": lambda encoding, p: encoding.load_state_dict(
        {name: x + 0.25 for name, x in encoding.state_dict().items()}
    ),
    "to": lambda encoding, p: encoding.to(torch.float64),
    "another tensor": lambda encoding, p: setattr(p, "data", p.detach() * 1.5),
    "optimizer": lambda encoding, p: (
        setattr(p, "grad", torch.ones_like(p)), torch.optim.SGD(encoding.parameters(), lr=0.3).step(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("spec", ["rpb.swin", "rpb.beit", "irpe(mode=bias)", "kerple"])
def test_changed_parameters_are_detected(spec, change):
    encoding, pos, qkv = random_encoding(spec), GRID.positions(), inputs()
    with torch.no_grad():
        for _ in range(4):
            before = check(qkv, encoding.bias(pos, 0))
        CHANGES[change](encoding, next(encoding.parameters()))
        for _ in range(4):
            after = check(qkv, encoding.bias(pos, 0))
    assert change == "to" or not torch.equal(before, after)


def test_changes_through_data_are_detected_after_a_backward_pass():
    """Like a training loop that updates a teacher through `.data`."""
    student, pos, qkv = random_encoding("rpb.swin"), GRID.positions(), inputs()
    teacher = copy.deepcopy(student).requires_grad_(False)
    for _ in range(4):
        for _ in range(3):
            check(qkv, teacher.bias(pos, 0))
        attention(*qkv, bias=student.bias(pos, 0)).sum().backward()
        for p in teacher.parameters():
            p.data.mul_(0.5)


def test_no_strip_is_cached_under_grad():
    encoding, pos, qkv = random_encoding("rpb.swin"), GRID.positions(), inputs()
    for _ in range(3):
        out = attention(*qkv, bias=encoding.bias(pos, 0))
        assert out.requires_grad
    assert "learned strips" not in pos.memo
    # nor while a CUDA graph is captured, which must compute it in each replay
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(3):
            attention(*qkv, bias=encoding.bias(pos, 0))
    assert "learned strips" not in pos.memo


def test_new_tensors_at_an_old_address_are_detected():
    pos, qkv = GRID.positions(), inputs()
    shape = [2 * n - 1 for n in GRID.shape]
    with torch.no_grad():
        for _ in range(30):
            table = torch.randn(HEADS, *shape)
            for _ in range(3):
                check(qkv, TableBias(table, pos))
            del table
    assert len(pos.memo["learned strips"].entries) < 25


def test_terms_and_layers_have_a_strip_each():
    pos, qkv = GRID.positions(), inputs()
    layers = [random_encoding("rpb.swin") for _ in range(3)]
    for i, layer in enumerate(layers):
        torch.nn.init.normal_(layer.relative_position_bias_table, i)
    with torch.inference_mode():
        for _ in range(3):
            for layer in layers:
                check(qkv, layer.bias(pos, 0))
                check(qkv, SumBias([layer.bias(pos, 0), fixed(pos)]))
    assert len(cached_strips(pos)) == 6
    assert not any(t.is_inference() for entry in cached_strips(pos) for t in entry.strip if t is not None)


def test_large_strips_are_not_cached(monkeypatch):
    monkeypatch.setattr(strips, "MAX_MASK_BYTES", 100)
    encoding, pos, qkv = random_encoding("rpb.swin"), GRID.positions(), inputs()
    with torch.no_grad():
        for _ in range(3):
            check(qkv, encoding.bias(pos, 0))
    assert not cached_strips(pos)
