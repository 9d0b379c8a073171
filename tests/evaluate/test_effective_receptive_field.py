"""Pixels that the central feature depends on: convolutions with known fields, attention, borders, refusals."""

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, ShapeError, UnsupportedHost
from vispe.evaluate.effective_receptive_field import effective_receptive_field
from vispe.evaluate.plots.receptive_field import plot_receptive_field


def images(n=3, size=(24, 40), channels=3):
    return torch.randn(n, channels, *size, generator=torch.Generator().manual_seed(0))


def test_the_field_of_a_convolution_is_its_kernel():
    kernel = torch.tensor([[0.0, 1.0, 0.0], [2.0, 5.0, 2.0], [0.0, 1.0, 0.0]])

    def f(x):
        return F.conv2d(x, kernel.expand(1, 1, 3, 3), padding=1)

    field = effective_receptive_field(f, images(channels=1))
    expected = np.zeros((24, 40))
    expected[11:14, 19:22] = kernel / kernel.sum()
    np.testing.assert_allclose(field.influence, expected, atol=1e-7)
    assert field.center == (12, 20)
    assert field.reach.tolist() == [[1, 1]] * 3
    assert field.own == pytest.approx(5 / 11)
    # 5, 2, 2, 1, 1 of 11: four of them are 10/11 < 95 %
    assert field.area == pytest.approx(5 / 960)


@pytest.mark.parametrize("size", [(32, 48), (40, 40), (24, 8)])
def test_a_patch_embedding_sees_one_patch(size):
    embed = nn.Conv2d(3, 16, 8, stride=8)
    field = effective_receptive_field(embed, images(size=size))
    rows, columns = np.nonzero(field.influence)
    top, left = size[0] // 8 // 2 * 8, size[1] // 8 // 2 * 8
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (top, top + 7, left, left + 7)
    assert field.center == (top + 3.5, left + 3.5)
    assert field.own == pytest.approx(1.0)
    assert field.influence.sum() == pytest.approx(1.0)


def test_uniform_influence_has_the_uniform_reach():
    field = effective_receptive_field(lambda x: x.sum((2, 3), keepdim=True) + 0 * x, images())
    np.testing.assert_allclose(field.reach, np.repeat(field.uniform[None], 3, 0))
    assert field.area == pytest.approx(0.95, abs=2e-3)
    assert "uniform influence" in field.verdict


def test_a_bias_narrows_the_field():
    """With a steep slope, attention is limited to neighbours; without an encoding it is global."""
    reach = {}
    for spec in ("none", "alibi2d(normalize=none, slopes=constant, factor=8)"):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", img_size=144, depth=1, pos_embed=spec).eval()
        field = effective_receptive_field(VisionModel(model), images(size=(144, 144)))
        reach[spec] = field.reach[:, 1].mean()
    assert reach["alibi2d(normalize=none, slopes=constant, factor=8)"] < 0.5 * reach["none"]


def test_the_model_is_unchanged():
    model = timm.create_model("test_vit").eval()
    effective_receptive_field(VisionModel(model), images(size=(160, 160)))
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        effective_receptive_field(VisionModel(model), images(1, size=(160, 160)))


def test_table_and_json_agree():
    field = effective_receptive_field(nn.Conv2d(3, 4, 5, padding=2), images(6))
    values = field.to_dict()
    assert np.shape(values["influence"]) == (24, 40)
    assert [row[0] for row in field.table()[1:]] == list(field.rows())
    summary, uniform = field.rows()["own patch"]
    assert summary.mean == pytest.approx(np.mean(values["own"]))
    assert uniform == 1 / 960
    assert summary.interval is not None
    figure = plot_receptive_field(field, "conv $x$")
    assert len(figure.axes) == 3


def test_errors():
    conv = nn.Conv2d(3, 4, 3)
    with pytest.raises(ShapeError, match="no images"):
        effective_receptive_field(conv, [])
    with pytest.raises(ShapeError, match="of one size"):
        effective_receptive_field(conv, [torch.zeros(3, 8, 8), torch.zeros(3, 8, 9)])
    with pytest.raises(UnsupportedHost, match="must be differentiable"):
        effective_receptive_field(lambda x: conv(x).detach(), images())
    for factor, total in ((0.0, "0"), (float("nan"), "nan"), (1e39, "nan|inf")):
        with pytest.raises(UnsupportedHost, match=f"finite and not 0 everywhere, got a sum of ({total})"):
            effective_receptive_field(lambda x, factor=factor: conv(x) * factor, images())
    with pytest.raises(OptionError, match="seed"):
        effective_receptive_field(conv, images(), seed=-1)
