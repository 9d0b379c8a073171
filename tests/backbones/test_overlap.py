"""Vision transformers with overlapping patches: positions of tokens, and distances in attention."""

import copy
import math

import open_clip
import pytest
import timm
import torch

import vispe
from tests.cases import cases
from vispe.backbones.overlap import overlap
from vispe.backbones.timm import load_backbone
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, UnsupportedHost
from vispe.hosts.common.overlapping_patches import table_at

BIASED = "alibi2d.local(slopes=geometric)"


@cases("old", [(10, 10), (5, 7)])
@cases("new", [(10, 10), (4, 9), (13, 6)])
def test_the_table_is_that_of_timm_at_every_whole_patch_and_smooth_between(old, new):
    from timm.layers import resample_abs_pos_embed

    table = torch.randn(1, 1 + old[0] * old[1], 3, generator=torch.Generator().manual_seed(0))
    expected = resample_abs_pos_embed(table, new, old, 1)
    shape = tuple(2 * n - 1 for n in new)
    actual = table_at(table, old, shape, (0.5, 0.5), 1)
    assert torch.equal(actual[:, 0], table[:, 0])
    even = actual[:, 1:].unflatten(1, shape)[:, ::2, ::2].flatten(1, 2)
    torch.testing.assert_close(even, expected[:, 1:], atol=2e-6, rtol=1e-5)


def test_a_table_of_positions_is_sampled_at_each_token():
    # entries that encode their position, read where the kernel does not touch the border
    rows, columns = torch.meshgrid(torch.arange(10.0), torch.arange(12.0), indexing="ij")
    table = torch.stack([rows, columns], -1).flatten(0, 1)[None]
    actual = table_at(table, (10, 12), (28, 34), (1 / 3, 1 / 3), 0).unflatten(1, (28, 34))[0]
    expected = torch.stack(torch.meshgrid(torch.arange(28) / 3, torch.arange(34) / 3, indexing="ij"), -1)
    torch.testing.assert_close(actual[6:-6, 6:-6], expected[6:-6, 6:-6], atol=1e-5, rtol=0)


def test_attention_over_dense_tokens_measures_true_distances():
    """One block in float64, written down token by token."""
    torch.manual_seed(0)
    model = timm.create_model(
        "test_vit", num_classes=0, dynamic_img_size=True, depth=1, num_heads=2, pos_embed=BIASED
    ).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    overlap(model, 8)
    model.double()
    image = torch.rand(1, 3, 48, 64, dtype=torch.float64)
    with torch.no_grad():
        actual = VisionModel(model, norm=False)(image)[0].permute(1, 2, 0)
        block, projection = model.blocks[0], model.patch_embed.proj
        # patches are cut by hand, every 8 px
        cuts = [
            image[0, :, y : y + 16, x : x + 16].flatten() for y in range(0, 33, 8) for x in range(0, 49, 8)
        ]
        x = torch.stack(cuts) @ projection.weight.flatten(1).T + projection.bias
        x = torch.cat([model.cls_token[0], x])
        positions = [(y / 2, x / 2) for y in range(5) for x in range(7)]
        far = torch.zeros(36, 36, dtype=torch.float64)
        for i, a in enumerate(positions):
            for j, b in enumerate(positions):
                far[1 + i, 1 + j] = math.dist(a, b)
        slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)
        qkv = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, 2, 32)).permute(1, 2, 0, 3)
        q, k, v = qkv
        scores = q @ k.transpose(-1, -2) / math.sqrt(32) - slopes[:, None, None] * far
        y = block.attn.proj((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        x = x + block.ls1(y)
        x = x + block.ls2(block.mlp(block.norm2(x)))
    torch.testing.assert_close(actual, x[1:].unflatten(0, (5, 7)), atol=1e-6, rtol=1e-6)


def test_rotary_embeddings_of_a_model_itself_are_refused():
    eva = timm.create_model(
        "eva02_tiny_patch14_224", depth=1, num_classes=0, img_size=28, dynamic_img_size=True
    )
    with pytest.raises(UnsupportedHost, match="not supported with the rotary embedding"):
        overlap(eva.eval(), 7)
    assert eva.patch_embed.proj.stride == (14, 14)
    converted = load_backbone(
        "eva02_tiny_patch14_224", weights="random", any_size=True, pos_embed=BIASED,
        options={"depth": 1, "img_size": 28},
    )  # fmt: skip
    overlap(converted, 7)
    actual = VisionModel(converted)(torch.rand(1, 3, 42, 56))
    assert actual.shape[-2:] == (5, 7)


@cases("pos_embed", [BIASED, f"learn+{BIASED}"])
def test_towers_of_open_clip_look_at_overlapping_patches_once_they_are_converted(pos_embed):
    torch.manual_seed(0)
    vision = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8}
    clip = open_clip.CLIP(
        16, vision, {"context_length": 4, "vocab_size": 9, "width": 32, "heads": 2, "layers": 1}
    )
    clip.visual.image_mean = clip.visual.image_std = (0.5, 0.5, 0.5)
    with pytest.raises(OptionError, match="needs a model for images of any size"):
        VisionModel(copy.deepcopy(clip).eval(), stride=4)
    tower = vispe.convert(clip, pos_embed).visual.eval()
    for block in tower.transformer.resblocks:
        torch.nn.init.zeros_(block.attn.out_proj.weight)
    image = torch.rand(1, 3, 48, 40)
    plain = VisionModel(copy.deepcopy(tower))(image)
    fine = VisionModel(tower, stride=4)
    actual = fine(image)
    assert (fine.patch_size, actual.shape[-2:]) == (8, (11, 9))
    torch.testing.assert_close(actual[..., ::2, ::2], plain, atol=2e-5, rtol=1e-5)


def test_a_traced_graph_keeps_the_positions_of_overlapping_patches():
    model = load_backbone("test_vit", weights="random", any_size=True, pos_embed=f"learn+{BIASED}")
    overlap(model, 8)
    image = torch.rand(1, 3, 64, 64)
    graph = torch.fx.symbolic_trace(model)
    with torch.no_grad():
        torch.testing.assert_close(graph(image), model(image))
