"""Transforms of sections of the channels, against slices computed one by one."""

import pytest
import torch

import vispe
from tests.cases import cases
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.affine import Affine
from vispe.attention.transform.blocks import BlockTransform
from vispe.attention.transform.pairs import PairRotation
from vispe.attention.transform.sections import Sections
from vispe.errors import ShapeError


def rotation(values):
    angle = torch.randn(1, 1, 5, 2, dtype=torch.float64)
    return PairRotation(angle.cos(), angle.sin(), "half", values=values)


@cases("rest", [0, 3])
@cases("values", [False, True])
def test_each_section_has_its_own_transform(rest, values):
    blocks = BlockTransform(
        *(torch.randn(1, 1, 5, 1, 3, 3, dtype=torch.float64) for _ in range(4 if values else 2))
    )
    first, last = Affine(q_mul=torch.tensor(3.0), k_add=torch.tensor(1.0)), rotation(values)
    sections = Sections((2, first), (3, blocks), (1, Transform()), (4, last))
    assert sections.changes_values == values
    x = torch.randn(2, 3, 5, 10 + rest, dtype=torch.float64)
    for name in ("query", "key", "value", "output"):
        expected = [
            getattr(first, name)(x[..., :2]),
            getattr(blocks, name)(x[..., 2:5]),
            x[..., 5:6],
            getattr(last, name)(x[..., 6:10]),
            x[..., 10:],
        ]
        torch.testing.assert_close(getattr(sections, name)(x), torch.cat(expected, -1))
    q, k, v = x, x.flip(0), x.flip(1)
    weights = (sections.query(q) @ sections.key(k).mT * q.shape[-1] ** -0.5).softmax(-1)
    expected = sections.output(weights @ sections.value(v))
    torch.testing.assert_close(vispe.attention(q, k, v, transform=sections), expected)


def test_sections_wider_than_the_head():
    with pytest.raises(
        ShapeError, match=r"Sections covers 6 channels, but head_dim is 4\. Use fewer or smaller"
    ):
        Sections((4, Transform()), (2, Transform())).query(torch.zeros(1, 1, 2, 4))


def test_a_named_backend_reaches_the_sections():
    sections = Sections((4, Sections((4, rotation(False)))), (4, rotation(True))).with_backend("reference")
    (_, inner), (_, outer) = sections.sections
    assert [inner.sections[0][1].backend, outer.backend, outer.of_keys.backend] == ["reference"] * 3
