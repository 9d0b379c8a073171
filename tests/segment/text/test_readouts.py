"""Readouts: equality with plain loops in float64 and with the tower itself, and their symmetries."""

import math

import numpy as np
import pytest
import torch
from timm.layers import resample_abs_pos_embed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

from tests.cases import cases
from tests.segment.text.common import TIMM, TOWERS, VISION, stock, with_trunk, write_folder
from vispe.errors import OptionError, UnknownName, UnsupportedCombination, UnsupportedHost
from vispe.segment.text.readouts import READOUTS, Readout, parse_readout
from vispe.segment.text.towers import prepare, read_tower

KINDS = {**TOWERS, "timm": {**TIMM, "image_size": 160}}


def tower_of(model, readout, pos_embed=None):
    readout = parse_readout(readout) if isinstance(readout, str) else readout
    prepare(model, pos_embed, readout)
    return read_tower(model, readout)


def images(*size, seed=0):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed))


def block_modules(block):
    """Return norms, MLP and layer scales of a block of open_clip or timm."""
    if hasattr(block, "ln_1"):
        return block.ln_1, block.ln_2, block.mlp, block.ls_1, block.ls_2
    return block.norm1, block.norm2, block.mlp, block.ls1, block.ls2


def head_parts(attn, y):
    """Return queries, keys and values (heads, n, d_h) of tokens (n, d)."""
    if hasattr(attn, "qkv"):
        qkv, heads = attn.qkv(y), attn.num_heads
    else:
        qkv, heads = torch.nn.functional.linear(y, attn.in_proj_weight, attn.in_proj_bias), attn.num_heads
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in qkv.chunk(3, -1))
    return getattr(attn, "ln_q", lambda t: t)(q), getattr(attn, "ln_k", lambda t: t)(k), v


def last_block(block, x, readout, grid, bias=None):
    """Compute tokens (n, d) float64 after the last block with a readout, by loops over heads, queries and keys."""
    norm1, norm2, mlp, scale1, scale2 = block_modules(block)
    q, k, v = head_parts(block.attn, norm1(x))
    sides, (heads, n, width) = {"q": q, "k": k}, v.shape
    prefix = n - grid[0] * grid[1]
    positions = [None] * prefix + [divmod(i, grid[1]) for i in range(grid[0] * grid[1])]
    out = torch.zeros_like(v)
    gauss = torch.zeros(n, n, dtype=v.dtype)
    for i in range(prefix, n if readout.sigma is not None else 0):
        for j in range(prefix, n):
            squared_distance = sum((s - t) ** 2 for s, t in zip(positions[i], positions[j], strict=True))
            gauss[i, j] = math.exp(-squared_distance / (2 * readout.sigma**2))
    for h in range(heads):
        for i in range(n):
            if not readout.pairs:
                out[h, i] = v[h, i]
            for a, b in readout.pairs:
                logits = sides[b][h] @ sides[a][h, i] * width**-0.5 + gauss[i]
                weights = (logits + (0 if bias is None else bias[h, i])).exp()
                out[h, i] += weights @ v[h] / weights.sum()
    attn = block.attn
    if getattr(attn, "head_scale", None) is not None:
        out = out * attn.head_scale
    concatenated = out.transpose(0, 1).flatten(1)
    concatenated = (
        attn.proj(concatenated)
        if hasattr(attn, "proj")
        else attn.out_proj(attn.ln_inner(concatenated) if hasattr(attn, "ln_inner") else concatenated)
    )
    y = scale1(getattr(block, "ln_attn", lambda t: t)(concatenated))
    y = x + y if readout.residual else y
    return y + scale2(mlp(norm2(y))) if readout.mlp else y


def expected(model, image, readout):
    """Compute embeddings (rows, columns, e) float64 of one image with the stock model."""
    visual = model.visual.double()
    if hasattr(visual, "trunk"):
        trunk = visual.trunk
        x = trunk.norm_pre(trunk.patch_drop(trunk._pos_embed(trunk.patch_embed(image[None].double()))))
        blocks, grid = trunk.blocks, trunk.patch_embed.grid_size
    else:
        x, blocks, grid = visual._embeds(image[None].double()), visual.transformer.resblocks, visual.grid_size
    for block in blocks[:-1]:
        x = block(x)
    y = last_block(blocks[-1], x[0], readout, grid)[-grid[0] * grid[1] :]
    y = visual.head(visual.trunk.norm(y)) if hasattr(visual, "trunk") else visual.ln_post(y) @ visual.proj
    return y.unflatten(0, tuple(grid))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [*READOUTS, "naclip(sigma=0.7,residual=true)", "sclip(mlp=false)"])
def test_readouts_equal_plain_loops(tmp_path, kind, text):
    vision = {**KINDS[kind], "image_size": 64} if kind == "timm" else KINDS[kind]
    folder = write_folder(tmp_path, vision)
    if kind == "timm":  # of 4 x 3 patches, so that loops are short
        model, reference = (with_trunk(tmp_path, small_vit(class_token=True)) for _ in range(2))
    else:
        model, reference = stock(folder), stock(folder)
    readout = parse_readout(text)
    image = images(48, 64) if kind == "timm" else images(24, 40)
    actual = tower_of(model, readout)(image)
    assert actual.shape[0] == 2
    target = expected(reference, image[1], readout)
    np.testing.assert_allclose(
        actual[1].numpy(), target.numpy(), rtol=0, atol=3e-5 * float(target.abs().max())
    )


def small_vit(**options):
    torch.manual_seed(1)
    return VisionTransformer(
        img_size=(48, 64), patch_size=16, embed_dim=64, depth=2, num_heads=4, num_classes=0, init_values=0.1, **options
    )  # fmt: skip


@cases("kind", KINDS)
def test_vanilla_readout_equals_the_tower(tmp_path, kind):
    folder = write_folder(tmp_path, KINDS[kind])
    model, reference = stock(folder), stock(folder).visual
    image = images(*((160, 160) if kind == "timm" else (24, 40)))
    actual = tower_of(model, "vanilla")(image)
    target = reference.forward_intermediates(image, 1, normalize_intermediates=True, intermediates_only=True)
    target = target["image_intermediates"][-1].permute(0, 2, 3, 1)
    target = reference.head(target) if kind == "timm" else target @ reference.proj
    torch.testing.assert_close(actual, target, rtol=0, atol=1e-5)


@cases("pool", ["token", "avg"])
@cases("projected", [True, False])
def test_eva_keeps_its_rotary_encoding_at_any_grid(tmp_path, pool, projected):
    def build(size):
        torch.manual_seed(1)
        options = {
            "use_rot_pos_emb": True,
            "use_abs_pos_emb": False,
            "ref_feat_shape": (3, 4),
            "init_values": 0.1,
        }
        trunk = Eva(
            img_size=size, patch_size=16, embed_dim=64, depth=2, num_heads=2, global_pool=pool,
            num_classes=0 if projected else 16, **options,
        )  # fmt: skip
        model = with_trunk(tmp_path, trunk)
        if not projected:
            model.visual.head = torch.nn.Sequential()
        return model

    tower = tower_of(build((48, 64)), "vanilla")
    for size in ((48, 64), (80, 48), (48, 64)):
        visual = build(size).visual
        target = visual.forward_intermediates(
            images(*size), 1, normalize_intermediates=True, intermediates_only=True
        )
        target = visual.trunk.fc_norm(target["image_intermediates"][-1].permute(0, 2, 3, 1))
        torch.testing.assert_close(
            tower(images(*size)), visual.head(visual.trunk.head(target)), rtol=0, atol=1e-5
        )


@cases("readout", READOUTS)
def test_absolute_position_embeddings_are_interpolated(tmp_path, readout):
    tower = tower_of(stock(write_folder(tmp_path / "a", VISION)), readout)
    reference = stock(write_folder(tmp_path / "b", {**VISION, "image_size": [56, 32]}))
    state = stock(tmp_path / "a").state_dict()
    table = state["visual.positional_embedding"][None]
    table = resample_abs_pos_embed(table, new_size=[7, 4], old_size=[3, 5], num_prefix_tokens=1)
    reference.load_state_dict({**state, "visual.positional_embedding": table[0]})
    torch.testing.assert_close(
        tower(images(56, 32)), tower_of(reference, readout)(images(56, 32)), rtol=0, atol=1e-5
    )


@cases("text", [*READOUTS, "naclip(sigma=2)"])
def test_readouts_keep_the_position_bias_of_the_tower(tmp_path, text):
    vision = {**VISION, "image_size": [24, 40]}
    model, reference = stock(write_folder(tmp_path, vision)), stock(tmp_path).visual.double()
    readout = parse_readout(text)
    actual = tower_of(model, readout, "alibi2d.local(slopes=geometric)")(images(24, 40))[0]
    reference.positional_embedding.zero_()
    positions = [divmod(i, 5) for i in range(15)]
    bias = torch.zeros(4, 16, 16, dtype=torch.float64)
    for h in range(4):
        for i, p in enumerate(positions):
            for j, q in enumerate(positions):
                bias[h, i + 1, j + 1] = -(2.0 ** (-2 * (h + 1))) * math.dist(p, q)
    x = reference._embeds(images(24, 40)[:1].double())
    for block in reference.transformer.resblocks[:-1]:
        x = block(x, attn_mask=bias)
    target = last_block(reference.transformer.resblocks[-1], x[0], readout, (3, 5), bias)[1:]
    target = (reference.ln_post(target) @ reference.proj).unflatten(0, (3, 5))
    np.testing.assert_allclose(actual.numpy(), target.numpy(), rtol=0, atol=3e-5 * float(target.abs().max()))


def test_wide_gaussians_have_no_effect_without_a_class_token(tmp_path):
    kk = Readout("kk", ("kk",), False, False)
    models = [
        with_trunk(tmp_path, small_vit(class_token=False, global_pool="avg", fc_norm=True)) for _ in range(3)
    ]
    plain, wide, narrow = (
        tower_of(m, r)(images(64, 80))
        for m, r in zip(models, (kk, "naclip(sigma=1e6)", "naclip"), strict=True)
    )
    torch.testing.assert_close(wide, plain, rtol=0, atol=1e-5)
    assert (narrow - plain).abs().max() > 1e-3


@cases("readout", READOUTS)
@cases("spec", ["none", "alibi2d"])
def test_embeddings_are_d4_equivariant(tmp_path, readout, spec):
    model = stock(write_folder(tmp_path, {**VISION, "image_size": 40}))
    kernel = model.visual.conv1.weight
    kernel = sum(torch.rot90(t, k, (2, 3)) for t in (kernel, kernel.flip(3)) for k in range(4)) / 8
    model.visual.conv1.weight.copy_(kernel)
    tower, image = tower_of(model, readout, spec), images(40, 40)
    unrotated = tower(image)
    for k in range(4):
        for mirror in (False, True):
            rotated = torch.rot90(image, k, (2, 3))
            target = torch.rot90(unrotated, k, (1, 2))
            if mirror:
                rotated, target = rotated.flip(3), target.flip(2)
            torch.testing.assert_close(tower(rotated), target, rtol=0, atol=2e-5)


@cases(
    ("kind", "spec"),
    [
        *[("default", spec) for spec in ("rope_axial", "sincos2d", "irpe", "peg", "gaussian2d", "learned")],
        *[("timm", spec) for spec in ("learn+alibi2d", "gta")],
    ],
)
def test_readouts_support_other_position_encodings(tmp_path, kind, spec):
    def build():
        if kind == "timm":
            return with_trunk(tmp_path, small_vit())
        return stock(write_folder(tmp_path, VISION))

    model = build()
    torch.manual_seed(3)
    tower = tower_of(model, "naclip", spec)
    first, second = tower(images(48, 80)), tower(images(80, 32))
    assert first.shape[1:3] == (48 // tower.patch_size, 80 // tower.patch_size)
    assert second.shape[1:3] == (80 // tower.patch_size, 32 // tower.patch_size)
    assert first.isfinite().all()
    torch.testing.assert_close(tower(images(48, 80)), first, rtol=0, atol=0)
    vanilla = parse_readout("vanilla")
    model = build()
    torch.manual_seed(3)
    tower = tower_of(model, vanilla, spec)
    actual = tower.visual.forward_intermediates(
        images(48, 80), 1, normalize_intermediates=True, intermediates_only=True
    )
    target = actual["image_intermediates"][-1].permute(0, 2, 3, 1)
    target = tower.visual.head(target) if kind == "timm" else target @ tower.visual.proj
    torch.testing.assert_close(tower(images(48, 80)), target, rtol=0, atol=1e-5)


def test_maskclip_raises_for_encodings_that_add_to_values(tmp_path):
    tower = tower_of(stock(write_folder(tmp_path, VISION)), "maskclip", "irpe(on=v)")
    with pytest.raises(
        UnsupportedCombination, match="maskclip uses unweighted values, but irpe adds to them"
    ):
        tower(images(24, 40))


def test_readout_specs_are_parsed():
    assert parse_readout("naclip") == Readout("naclip", ("kk",), False, False, 5.0)
    assert parse_readout("naclip( sigma = 3, residual: true )") == Readout(
        "naclip", ("kk",), True, False, 3.0
    )
    assert parse_readout("sclip(mlp=false)").encoding == "gaussian2d(layers=[])"
    with pytest.raises(UnknownName, match=r"readout='naclipp' is not one of naclip, .*Did you mean 'naclip'"):
        parse_readout("naclipp")
    with pytest.raises(UnknownName, match=r"readout='naclip\+sclip' is not one of"):
        parse_readout("naclip+sclip")
    with pytest.raises(OptionError, match=r"sclip has no option 'sigma'\. Its options are residual, mlp"):
        parse_readout("sclip(sigma=3)")
    with pytest.raises(
        OptionError, match="sigma of readout naclip must be a positive number of patches, got 0"
    ):
        parse_readout("naclip(sigma=0)")
    with pytest.raises(OptionError, match="mlp of readout naclip must be true or false, got 1"):
        parse_readout("naclip(mlp=1)")


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"layers": [1, 1, 1, 1], "width": 16, "image_size": 64}, "ModifiedResNet"),
        ({**VISION, "attentional_pool": True}, "pools its patches by attention"),
        ({**TIMM, "timm_model_name": "test_resnet", "timm_pool": "avg"}, "unsupported model, got a ResNet"),
        ({**TIMM, "timm_proj": "mlp"}, "ends with Mlp, but zero-shot segmentation needs a linear projection"),
        ({**TIMM, "timm_proj": "none"}, "ends with no projection"),
        ({**TIMM, "timm_model_name": "test_vit3", "timm_pool": "map", "timm_proj": "none"}, "pools its patches by"),
    ],
)  # fmt: skip
def test_unsupported_towers_raise(tmp_path, vision, message):
    model = stock(write_folder(tmp_path, vision, embed=64))
    with pytest.raises(UnsupportedHost, match=message):
        tower_of(model, "naclip")
