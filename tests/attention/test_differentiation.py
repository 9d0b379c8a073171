"""torch.func transforms, forward mode and double backward: right by default, else one sentence."""

import pytest
import torch

from tests.attention.differentiation import FAMILIES, FORWARD, POS, REVERSE, inputs, twice
from tests.cases import cases
from vispe import attention, explain
from vispe.attention import DistanceBias, TableBias, use_backend
from vispe.attention.backends import flex, triton
from vispe.attention.call import Call
from vispe.errors import BackendUnavailable

# torch computes SDPA for one sample after the other under vmap, and warns about it
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
ALL = FORWARD | REVERSE


def _of(family, argument, backend, seed=0):
    """Return a function of the queries or of the parameter of a family, and its input."""
    torch.manual_seed(seed)
    parameter, arguments = FAMILIES[family]
    q, k, v = inputs(torch.float64)
    parameter = parameter.double()
    if argument == "queries":
        return lambda x: attention(x, k, v, backend=backend, **arguments(parameter)), q
    return lambda p: attention(q, k, v, backend=backend, **arguments(p)), parameter


@cases("family", FAMILIES)
@cases("name", FORWARD | REVERSE)
def test_auto_is_correct(name, family):
    for argument in ("queries", "parameter"):
        function, x = _of(family, argument, "auto")
        function(x), function(x)  # masks of learned biases are cached from the second call on
        expected, exact = _of(family, argument, "reference")
        result = ALL[name](function, x)
        torch.testing.assert_close(result, ALL[name](expected, exact), rtol=1e-9, atol=1e-9)
        if name in ("forward_ad", "jvp"):
            step = 1e-6 * x.sin()
            numeric = (expected(x + step) - expected(x - step)) / 2e-6
            torch.testing.assert_close(result, numeric, rtol=1e-5, atol=1e-6)


@cases("family", [name for name in FAMILIES if "rotation" not in name])
def test_double_backward_of_biases(family):
    function, x = _of(family, "parameter", "auto")
    expected, exact = _of(family, "parameter", "reference")
    torch.testing.assert_close(twice(function, x), twice(expected, exact), rtol=1e-9, atol=1e-9)


@cases("name", FORWARD)
@cases("bias", [None, DistanceBias((0.5, 0.1), POS, metric="squared")], ids=["none", "squared"])
@cases("backend", ["sdpa", "lowrank"])
def test_sdpa_has_no_forward_mode(backend, bias, name):
    q, k, v = inputs()
    if backend == "lowrank" and bias is None:
        return
    with pytest.raises(
        BackendUnavailable, match=r"does not support this call: .* forward-mode derivative\. Use"
    ):
        FORWARD[name](lambda x: attention(x, k, v, bias=bias, backend=backend), q)
    with (
        use_backend(backend),
        pytest.raises(BackendUnavailable, match=r"forward-mode derivative\. Select 'auto'"),
    ):
        FORWARD[name](lambda x: attention(x, k, v, bias=bias), q)
    recorded = []
    FORWARD[name](
        lambda x: (recorded.append(explain(x, k, v, bias=bias)), attention(x, k, v, bias=bias))[1], q
    )
    assert {(s.backend, s.reason) for s in recorded} == {
        ("reference", "the kernels of SDPA have no forward-mode derivative")
    }


@cases("family", [f for f in FAMILIES if f != "rotation"])
@cases("name", FORWARD | REVERSE)
def test_fused_kernels_refuse(name, family, monkeypatch):
    monkeypatch.setattr(triton, "device_unsupported_reason", lambda q: None)
    q, k, v = inputs()
    parameter, arguments = FAMILIES[family]
    reasons = []

    def function(x):
        call = Call(x, k, v, **arguments(parameter))
        reasons.extend([triton.unsupported_reason(call), flex.unsupported_reason(call)])
        return attention(x, k, v, backend="reference")

    function(q)
    assert reasons[0] is None
    reasons.clear()
    (FORWARD | REVERSE)[name](function, q)
    expected = "no forward-mode derivative" if name in FORWARD else "torch.func transforms"
    # vjp evaluates the function outside of the transform as well
    assert any(expected in (reason or "") for reason in reasons)
    assert all(expected in (reason or "") for reason in reasons) or name == "vjp"


@cases("transform", [torch.func.grad, torch.func.hessian], ids=["grad", "hessian"])
def test_calls_after_a_transform(transform):
    """No tensor of a transform remains in the caches of positions."""
    q, k, v = inputs()
    pos = POS.grid.positions()
    for bias in (DistanceBias((0.5, 0.1), pos), TableBias(torch.randn(2, 3, 5), pos)):
        expected = attention(q, k, v, bias=bias, backend="reference")
        transform(lambda s, bias=bias: attention(q * s, k, v, bias=bias).square().sum())(torch.ones(()))
        for _ in range(3):
            torch.testing.assert_close(attention(q, k, v, bias=bias), expected)
    wrapped = [t for t in pos.memo.values() if isinstance(t, torch.Tensor)]
    assert not any(map(torch._C._functorch.is_gradtrackingtensor, wrapped))
