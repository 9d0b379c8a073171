"""Units of MLPs: planted kinds are separated, hooks are removed, models without MLPs raise."""

import pytest
import timm
import torch

import vispe
from vispe.backbones.vision_model import VisionModel
from vispe.errors import UnsupportedHost
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns
from vispe.experimental.measures.mlp_units import MlpUnits, content, information


def test_information_of_known_tables():
    count = torch.full((16,), 10.0, dtype=torch.float64)
    one_cell = torch.zeros(16, dtype=torch.float64)
    one_cell[3] = 10
    p = 1 / 16
    entropy = -(p * torch.tensor(p).log2() + (1 - p) * torch.tensor(1 - p).log2())
    assert float(information(one_cell, count)) == pytest.approx(float(entropy), abs=1e-6)
    assert float(information(count / 2, count)) == pytest.approx(0, abs=1e-12)
    assert float(information(torch.zeros(16).double(), count)) == 0
    assert float(information(count, count)) == 0


def test_content_is_that_of_the_patch_and_of_its_left_neighbour():
    image = torch.randn(3, 8, 12, dtype=torch.float64)
    x = content(image, (2, 3)).unflatten(0, (2, 3))
    assert x.shape == (2, 3, 17)
    assert torch.allclose(x[1, 2, 1:4], image[:, 4:, 8:].mean((1, 2)))
    assert torch.allclose(x[1, 2, 9:], x[1, 1, 1:9])
    assert torch.allclose(x[0, 0, 9:], x[0, 0, 1:9])  # nothing is left of the first


class Planted(torch.nn.Module):
    """One block whose first four units encode the row, are dead, respond to brightness, and are noise."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Module()])
        self.blocks[0].mlp = torch.nn.Module()
        self.blocks[0].mlp.act = torch.nn.Identity()

    def forward(self, images):
        grey = torch.nn.functional.avg_pool2d(images, 8).mean(1)
        row = torch.linspace(-1, 1, grey.shape[1])[None, :, None].expand_as(grey)
        g = torch.Generator().manual_seed(int(images.sum() * 1000) % 2**31)
        noise = torch.randn(grey.shape, generator=g)
        units = torch.stack([row, -torch.ones_like(grey), grey, noise], -1).flatten(1, 2)
        self.blocks[0].mlp.act(units)
        return images.new_zeros(len(images), 4, *grey.shape[1:])


def accumulated(model, n=8):
    audited, acc = AuditedModel(model, "planted", patch_size=8), Accumulator()
    level = torch.randn(n, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    for k, one in enumerate(level.repeat_interleave(8, 2).repeat_interleave(8, 3)):
        acc.begin(k)
        MlpUnits().rerun(acc, PerturbedRuns(audited, one, k))
    return audited, acc


def test_planted_units_are_distinguished():
    model = Planted()
    audited, acc = accumulated(model)
    actual = MlpUnits().summarize(acc, audited)
    assert actual.value == 1 / 4
    assert actual.details["dead"] == [1 / 4]
    # a unit that is constant has nothing to explain
    assert actual.details["content_alone"] == [1 / 4]
    assert actual.control["shuffled places"] == 0
    assert not model.blocks[0].mlp.act._forward_hooks


def test_memory_does_not_grow_with_images():
    sizes = [sum(t.numel() for t in accumulated(Planted(), n)[1].sums.values()) for n in (2, 6)]
    assert sizes[0] == sizes[1]


def test_a_model_of_timm_and_errors():
    images = torch.randn(5, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    model = vispe.convert(timm.create_model("test_vit", img_size=64, depth=2), "none").eval()
    finding = audit(AuditedModel(VisionModel(model), "none"), images, (MlpUnits(),)).findings[0]
    assert finding.verdict == "no"
    assert len(finding.outcome.per_layer) == 2
    audited, acc = AuditedModel(lambda x: x, "identity", patch_size=1), Accumulator()
    acc.begin(0)
    MlpUnits().rerun(acc, PerturbedRuns(audited, images[0], 0))
    with pytest.raises(UnsupportedHost, match="no MLP"):
        MlpUnits().summarize(acc, audited)
