"""HeadLinear against products written out per head."""

import pytest
import torch

from tests.cases import cases
from vispe.attention.transform.head_linear import HeadLinear
from vispe.errors import ShapeError


@cases("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_of_each_head(dtype):
    q, k = torch.randn(2, 3, 4, 4)
    x = torch.randn(2, 3, 5, 4).to(dtype)
    transform = HeadLinear(q, k)
    for matrices, actual in ((q, transform.query(x)), (k, transform.key(x))):
        assert actual.dtype == dtype
        expected = torch.stack([x[:, h].double() @ matrices[h].double().T for h in range(3)], 1)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    assert transform.value(x) is x
    assert HeadLinear(k=k).query(x) is x


def test_products_are_exact_under_autocast():
    q, x = torch.randn(3, 4, 4), torch.randn(1, 3, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        result = HeadLinear(q).query(x)
    assert torch.equal(result, HeadLinear(q).query(x))


def test_one_matrix_per_key_head_applies_to_its_group_of_query_heads():
    q, x = torch.randn(2, 4, 4), torch.randn(1, 6, 5, 4)
    result = HeadLinear(q).query(x)
    for head in range(6):
        torch.testing.assert_close(result[:, head], x[:, head] @ q[head // 3].T)


def test_errors():
    with pytest.raises(ShapeError, match=r"HeadLinear needs k of shape \(h, d_h, d_h\), got \(3, 4, 5\)\."):
        HeadLinear(k=torch.ones(3, 4, 5))
    transform = HeadLinear(torch.ones(3, 4, 4))
    for shape in ((1, 2, 5, 4), (1, 3, 5, 8)):
        with pytest.raises(ShapeError, match=rf"3 heads of 4 channels, got queries with {shape[1]} heads of"):
            transform.query(torch.ones(shape))
