"""Test-time registers: against the steps of the method by hand, on a model with a planted register neuron."""

import pytest
import timm
import torch

import vispe
from vispe.backbones.load_model import load_debiased
from vispe.backbones.local.debiased_folder import save_debiased
from vispe.backbones.local.registers import find_register_neurons, register_intermediates
from vispe.backbones.vision_model import VisionModel
from vispe.errors import InputError, OptionError, UnsupportedHost

PLANTED = (1, 5)


@pytest.fixture(scope="module")
def model():
    """A ViT in which hidden unit 5 of block 1 is active on bright patches, and gives them a large norm."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        net = timm.create_model("test_vit", img_size=64, num_classes=0, depth=3, dynamic_img_size=True).eval()
        # only channel 0 depends on the brightness of a patch
        net.patch_embed.proj.weight -= net.patch_embed.proj.weight.mean((1, 2, 3), keepdim=True)
        net.patch_embed.proj.weight[0] = 0.001
        # it reads channel 0 after the norm, which is large for bright patches only
        mlp = net.blocks[1].mlp
        mlp.fc1.weight[5], mlp.fc1.bias[5] = 0, -12
        mlp.fc1.weight[5, 0] = 4
        mlp.fc2.weight[:, 5] = 10 * torch.randn(64)
    return net


def images(count=2, bright=True):
    x = 0.3 * torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    if bright:
        x[:, :, 16:32, 32:48] += 3
    return x


def test_the_planted_neuron_is_first(model):
    assert find_register_neurons(model, images(), 3)[0] == PLANTED
    with pytest.raises(InputError, match="no patch has a norm of 3 times the median"):
        find_register_neurons(model, images(bright=False), 3)
    with pytest.raises(InputError, match="images are missing"):
        find_register_neurons(model, [], 3)


@torch.no_grad()
def test_maps_are_those_of_the_method_by_hand(model):
    x = images()
    tokens = model.norm_pre(model._pos_embed(model.patch_embed(x)))
    tokens = torch.cat([tokens, torch.zeros_like(tokens[:, :1])], 1)
    for number, block in enumerate(model.blocks):
        tokens = tokens + block.ls1(block.attn(block.norm1(tokens)))
        hidden = block.mlp.norm(block.mlp.act(block.mlp.fc1(block.norm2(tokens))))
        if number == PLANTED[0]:
            hidden[:, -1, 5] = hidden[:, :-1, 5].amax(1)
            hidden[:, :-1, 5] = 0
        tokens = tokens + block.ls2(block.mlp.fc2(hidden))
    expected = model.norm(tokens)[:, 1:-1].mT.unflatten(2, (4, 4))
    for prefix in (False, True):
        result = register_intermediates(model, x, [0, 2], [PLANTED], norm=True, prefix=prefix)[1]
        maps, token = result if prefix else (result, None)
        torch.testing.assert_close(maps, expected)
        if prefix:
            torch.testing.assert_close(token[:, 0], model.norm(tokens)[:, 0])


@torch.no_grad()
def test_the_outlier_becomes_an_ordinary_patch_and_folders_give_the_same_bits(model, tmp_path):
    def ratio(maps):
        norms = maps[0].norm(dim=0).flatten()
        return float(norms.max() / norms.median())

    x, layer = images(1), {"norm": False}
    plain = VisionModel(model, **layer)
    features = vispe.debias(model, "registers", images(3), neurons=1)
    assert features.model.debiasing.registers == (PLANTED,)
    assert ratio(plain.layers(x)[1]) > 3
    assert ratio(features.layers(x)[1]) < 2
    both = vispe.debias(model, "registers+poses", images(3), neurons=2)
    weights = tmp_path / "weights.pth"
    torch.save(model.state_dict(), weights)
    torch.testing.assert_close(both(x.flip(-1)).flip(-1), both(x), atol=1e-4, rtol=1e-4)
    arguments = {"name": "test_vit", "pos_embed": None, "weights": "random", "img_size": None, "seed": 0}
    save_debiased(tmp_path / "out", both.model.debiasing, arguments)
    loaded = load_debiased(tmp_path / "out").model
    assert loaded.debiasing.fingerprint() == both.model.debiasing.fingerprint()
    assert len(loaded.debiasing.registers) == 2


def test_other_models_and_missing_images(model):
    with pytest.raises(OptionError, match="images must be passed for registers"):
        vispe.debias(model, "registers")
    with pytest.raises(UnsupportedHost, match="registers needs the final features of a vision model"):
        vispe.debias(torch.nn.AvgPool2d(4), "registers", images())
    converted = timm.create_model("test_vit", img_size=64, pos_embed="alibi2d", dynamic_img_size=True).eval()
    with pytest.raises(UnsupportedHost, match="needs a VisionTransformer of timm with its own encoding"):
        vispe.debias(converted, "registers", images())
