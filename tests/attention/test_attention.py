"""Every bias on every backend, against an oracle in float64 that is written from the definitions."""

import pytest
import torch

from tests.attention.cases import BACKENDS, CASES, HEADS, compare, doubles, is_supported, tensors
from tests.cases import cases, pairwise
from vispe import Grid, attention
from vispe.errors import BackendUnavailable

pytestmark = pytest.mark.usefixtures("poisoned")


LAYOUTS = [((2, 3), 0, 1), ((3, 5), 1, 2), ((1, 4), 5, 3), ((4, 3), 1, 1), ((1, 1), 0, 2)]


@pairwise
@cases("layout", LAYOUTS, ids=str)
@cases("backend", BACKENDS)
@cases("name", CASES)
def test_every_bias_on_every_backend(name, backend, layout):
    shape, prefix, b = layout
    pos = Grid(shape, prefix=prefix).positions()
    case = CASES[name](pos, b)
    q, k, v = tensors(b, pos.tokens)
    if is_supported(case, backend):
        compare(case, backend, q, k, v)
    else:
        with pytest.raises(
            BackendUnavailable, match=r"backend='lowrank' does not support this call: .*\. Use backend='auto'"
        ):
            attention(q, k, v, bias=case.bias, backend=backend)


@cases("name", CASES)
def test_dense_equals_the_definition(name):
    pos = Grid((3, 4), prefix=2).positions()
    case = CASES[name](pos, 2)
    if case.bias is None:
        return
    q, k, _ = tensors(2, pos.tokens)
    expected = case.dense(doubles(case.params), q.double(), k.double(), 0.5)
    if case.bias.replaces_product:  # its oracle takes the product off, which is not part of the bias
        expected = expected + 0.5 * q.double() @ k.double().mT
    actual = case.bias.dense(q=q, k=k, scale=0.5)
    assert actual.ndim == 4
    assert actual.dtype == torch.float32
    torch.testing.assert_close(
        actual.double().expand(2, HEADS, -1, -1), expected.expand(2, HEADS, -1, -1), rtol=1e-5, atol=1e-5
    )
    assert (actual.shape[1] > 1) == case.bias.per_head
    for i in range(HEADS):
        part = case.bias.dense(q=q, k=k, scale=0.5, heads=slice(i, i + 1))
        torch.testing.assert_close(part, actual[:, i : i + 1] if actual.shape[1] > 1 else actual)
