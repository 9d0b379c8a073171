"""Blocks called without the model: an error instead of attention without the encoding, and `positions_for`."""

import threading

import open_clip.transformer
import pytest
import timm
import torch
from timm.layers import Attention
from timm.layers.patch_dropout import PatchDropout
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from timm.models.vision_transformer import Block
from torch.utils.checkpoint import checkpoint
from transformers import Dinov2Config, Dinov2Model, ViTConfig, ViTModel

import vispe
from tests.cases import cases
from tests.hosts.helpers import close, grads, image, keep_of, shake, tiny
from tests.products import partly
from vispe.errors import InputError, OptionError, ShapeError, UnsupportedCombination, UnsupportedHost

IMAGE = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(3))
SPECS = ("alibi2d", "learn+alibi2d", "rope_mixed", "irpe", "rpb", "sincos2d+rope_axial")
HF = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "patch_size": 16,
}


def vit(spec, **options):
    torch.manual_seed(0)
    shape = {
        "img_size": (32, 48),
        "patch_size": 16,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "reg_tokens": 1,
    }
    return shake(timm.models.VisionTransformer(**shape | options, pos_embed=spec)).eval()


def _vit_loop(model, x):
    return model.norm(model.blocks(model.norm_pre(model._pos_embed(model.patch_embed(x)))))


def _dynamic(spec):
    return vit(spec, dynamic_img_size=True), _vit_loop


def _plain(spec):
    return vit(spec), _vit_loop


def _eva(spec):
    torch.manual_seed(0)
    shape = {"img_size": (32, 48), "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = vispe.convert(Eva(**shape, num_classes=0, use_rot_pos_emb=True), spec)

    def loop(model, x):
        x, rope = model._pos_embed(model.patch_embed(x))
        for block in model.blocks:
            x = block(x, rope)
        return model.norm(x)

    return shake(model).eval(), loop


def _naflex(spec):
    torch.manual_seed(0)
    cfg = NaFlexVitCfg(patch_size=16, embed_dim=32, depth=2, num_heads=2, pos_embed_grid_size=(2, 3))
    model = shake(vispe.convert(NaFlexVit(cfg, num_classes=0), spec)).eval()

    def loop(model, x):
        x, _ = model.embeds(x)
        for block in model.blocks:
            x = block(x)
        return model.norm(x)

    return model, loop


def _tower(spec, **options):
    torch.manual_seed(0)
    shape = {"image_size": (32, 48), "patch_size": 16, "width": 32, "layers": 2, "heads": 2, "mlp_ratio": 2.0}
    tower = open_clip.transformer.VisionTransformer(**shape, output_dim=32, **options)
    return shake(vispe.convert(tower, spec)).eval(), lambda m, x: m.transformer(m._embeds(x))


def _custom_tower(spec):
    return _tower(spec, block_type="custom")


def _dinov2(spec):
    torch.manual_seed(0)
    model = vispe.convert(Dinov2Model(Dinov2Config(**HF, image_size=32)), spec)

    def loop(model, x):
        x = model.embeddings(x)
        for layer in model.encoder.layer:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return model.layernorm(x)

    return shake(model).eval(), loop


def _hf_vit(spec):
    torch.manual_seed(0)
    model = vispe.convert(ViTModel(ViTConfig(**HF, image_size=(32, 48)), add_pooling_layer=False), spec)

    def loop(model, x):
        x = model.embeddings(x)
        for layer in model.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return model.layernorm(x)

    return shake(model).eval(), loop


def features(model, x):
    if isinstance(model, open_clip.transformer.VisionTransformer):
        sample = {"output_fmt": "NLC", "output_extra_tokens": True}
        actual = model.forward_intermediates(x, indices=[-1], intermediates_only=True, **sample)
        return torch.cat([actual["image_intermediates_prefix"][0], actual["image_intermediates"][0]], 1)
    if hasattr(model, "forward_features"):
        out = model.forward_features(x)
        return out["patches"] if isinstance(out, dict) else out
    return model(x).last_hidden_state


def sized(host):
    """Return images and their grid; the table of Dinov2 is square."""
    return (IMAGE[..., :32], (2, 2)) if host is _dinov2 else (IMAGE, (2, 3))


HOSTS = (_plain, _dynamic, _eva, _naflex, _tower, _custom_tower, _dinov2, _hf_vit)


@partly(2)
@cases("spec", SPECS)
@cases("host", HOSTS, ids=lambda host: host.__name__[1:])
def test_blocks_raise_outside_positions_for_and_are_exact_inside(host, spec):
    additive = spec.startswith("sincos")
    if host in (_dinov2, _hf_vit) and additive:
        pytest.skip("transformers' towers take no additive encoding")
    model, loop = host(spec)
    x, grid = sized(host)
    with torch.no_grad():
        expected = features(model, x)
        with pytest.raises(InputError, match=r"positions_for|embedding alone"):
            loop(model, x)
        if host is _naflex and additive:
            return
        with vispe.positions_for(model, grid):
            close(loop(model, x), expected, 1e-6)
        with pytest.raises(InputError, match="positions_for"):
            loop(model, x)
        close(features(model, x), expected, 0)


@cases("host", HOSTS, ids=lambda host: host.__name__[1:])
def test_an_absolute_table_needs_no_positions(host):
    model, loop = host("learn")
    x, _ = sized(host)
    with torch.no_grad():
        close(loop(model, x), features(model, x), 1e-6)


@cases("spec", ["sincos2d", "learn+sincos2d", "fourier_learned", "border"])
@cases("host", [_plain, _dynamic, _eva, _tower], ids=lambda host: host.__name__[1:])
def test_additive_encodings_are_in_the_tokens(host, spec):
    if host is _eva and spec.startswith("learn+"):
        pytest.skip("this Eva has no table")
    model, loop = host(spec)
    with torch.no_grad():
        close(loop(model, IMAGE), features(model, IMAGE), 1e-6)


def test_encodings_that_read_the_image_raise():
    model = vit("loope")
    with pytest.raises(ShapeError, match="image"):
        model._pos_embed(model.patch_embed(IMAGE))


def test_samplers_and_custom_tokens():
    model = vit("jitter+sincos2d").train()
    with pytest.raises(UnsupportedCombination, match="jitter"):
        model._pos_embed(model.patch_embed(IMAGE))
    _vit_loop(model.eval(), IMAGE)


@cases("host", [_plain, _tower], ids=["timm", "open_clip"])
def test_mixing_between_blocks_is_not_lost(host):
    model, loop = host("peg")
    with pytest.raises(InputError, match="positions"):
        loop(model, IMAGE)
    with pytest.raises(UnsupportedCombination, match="peg mixes"):
        vispe.positions_for(model, (2, 3))


def test_peg_leaves_attention_to_the_host():
    stock, model = vit("learn"), vit("peg")
    block = model.blocks[0]
    x = torch.randn(2, 8, 32)
    block.load_state_dict(stock.blocks[0].state_dict())
    context = model._vispe_embed(IMAGE, None, False)[1]
    assert torch.equal(block(x, context), stock.blocks[0](x))


@cases("host", HOSTS, ids=lambda host: host.__name__[1:])
def test_restored_models_are_stock(host):
    model, loop = host("learn+alibi2d" if host is not _eva else "alibi2d")
    if host in (_plain, _dynamic):
        model = vispe.convert(vit("learn"), "alibi2d")
    vispe.restore(model)
    x, _ = sized(host)
    with torch.no_grad():
        close(loop(model, x), features(model, x), 1e-6)


@cases("spec", ["alibi2d", "rope_mixed", "irpe", "learn+rpb"])
def test_stored_patches_are_those_of_patch_dropout(spec):
    model = tiny(pos_embed=spec, reg_tokens=2)
    keep = keep_of(5, 2, 15, model.num_prefix_tokens, 0.4)
    model.patch_drop = PatchDropout(0.4, model.num_prefix_tokens).train()
    torch.manual_seed(5)
    expected = model.forward_features(image())
    x = model._pos_embed(model.patch_embed(image()))
    x = x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))
    index = keep[:, model.num_prefix_tokens :] - model.num_prefix_tokens
    with vispe.positions_for(model, (3, 5), index=index):
        close(model.norm(model.blocks(x)), expected, 1e-6)


def test_one_index_for_all_samples_and_another_one_in_later_blocks():
    model = vit("alibi2d")
    x = model._pos_embed(model.patch_embed(IMAGE))
    first, second = torch.tensor([4, 0, 1, 5]), torch.tensor([[4, 1], [0, 5]])
    x = x[:, [0, 1, 6, 2, 3, 7]]
    with vispe.positions_for(model, (2, 3), index=first):
        y = model.blocks[0](x)
    y = torch.stack([y[0, [0, 1, 2, 4]], y[1, [0, 1, 3, 5]]])
    with vispe.positions_for(model, (2, 3), index=second):
        actual = model.blocks[1](y)
    for row, (a, b) in enumerate(second.tolist()):  # each sample by an explicit mask
        distance = torch.zeros(1, 1, 4, 4)
        full = model._vispe_embed(IMAGE, None, False)[1]
        bias = full.encodings[0].bias(full.positions, 1).mask(torch.float32)[:, :, 2:, 2:]
        distance = torch.zeros(1, 2, 4, 4)
        distance[:, :, 2:, 2:] = bias[:, :, [a, b]][:, :, :, [a, b]]
        block = vispe.restore(vispe.convert(vit("learn"), "none")).blocks[1]
        block.load_state_dict(model.blocks[1].state_dict())
        close(actual[row : row + 1], block(y[row : row + 1], attn_mask=distance), 1e-5)


@cases("spec", ["alibi2d", "rope_axial", "irpe"])
def test_prompts_are_prefix_tokens(spec):
    """Prompts have no position; a model with as many registers gives the same output."""
    model, more = vit(spec), vit(spec, reg_tokens=4)
    more.load_state_dict({**model.state_dict(), "reg_token": more.reg_token})
    prompts = more.reg_token.data[:, 1:]
    more.reg_token.data[:, :1] = model.reg_token.data
    x = model._pos_embed(model.patch_embed(IMAGE))
    x = torch.cat([x[:, :2], prompts.expand(2, -1, -1), x[:, 2:]], 1)
    with vispe.positions_for(model, (2, 3), prefix=5):
        close(model.norm(model.blocks(x)), more.forward_features(IMAGE), 1e-6)


@cases("inside", [True, False], ids=["backward inside", "backward outside"])
@cases("reentrant", [True, False])
@cases("spec", ["alibi2d(slopes=learned)", "rope_mixed"])
def test_checkpointed_blocks(spec, reentrant, inside):
    """A closed context cannot serve the backward pass; positions passed as an argument can."""
    model, other = vit(spec), torch.randn(2, 8, 32)
    x = model._pos_embed(model.patch_embed(IMAGE)).detach().requires_grad_()

    def run(explicit, checkpointed=True):
        positions = vispe.positions_for(model, (2, 3))
        with positions:
            y = x
            for block in model.blocks:
                extra = (positions,) if explicit else ()
                y = (
                    checkpoint(block, y, *extra, use_reentrant=reentrant)
                    if checkpointed
                    else block(y, *extra)
                )
            if inside:
                return grads(model, y)
        with vispe.positions_for(model, (3, 2)):  # as many tokens, another grid
            model.blocks(other)
            return grads(model, y)

    close(run(True), run(False, checkpointed=False), 1e-6)
    with pytest.raises(InputError, match=r"checkpoint\(block, x, positions\)"):
        run(False)


def test_explicit_positions_in_other_hosts():
    for host in (_tower, _custom_tower):
        model, _ = host("alibi2d")
        positions, x = vispe.positions_for(model, (2, 3)), model._embeds(IMAGE)
        for block in model.transformer.resblocks:
            x = checkpoint(block, x, attn_mask=positions, use_reentrant=False)
        close(x, features(model, IMAGE), 1e-6)
    model, _ = _eva("alibi2d")
    positions, (x, rope) = vispe.positions_for(model, (2, 3)), model._pos_embed(model.patch_embed(IMAGE))
    for block in model.blocks:
        x = checkpoint(block, x, rope, positions, use_reentrant=True)
    close(model.norm(x), features(model, IMAGE), 1e-6)
    model, _ = _hf_vit("alibi2d")
    positions, x = vispe.positions_for(model, (2, 3)), model.embeddings(IMAGE)
    for layer in model.layers:
        x = layer(x, vispe_context=positions)
        x = x[0] if isinstance(x, tuple) else x
    close(model.layernorm(x), features(model, IMAGE), 1e-6)


def test_masks_of_the_user_are_added():
    mask = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1)) > 0.3
    mask = mask | torch.eye(8, dtype=torch.bool)
    model = vit("alibi2d")
    x = model._pos_embed(model.patch_embed(IMAGE))
    with vispe.positions_for(model, (2, 3)):
        for block in model.blocks:
            x = block(x, attn_mask=mask)
    close(model.norm(x), model.forward_features(IMAGE, attn_mask=mask), 1e-6)
    results = []
    for host in (_tower, _custom_tower):  # True excludes in torch's MultiheadAttention
        tower, _ = host("alibi2d")
        tower.load_state_dict(_tower("alibi2d")[0].state_dict())
        recorded = mask[0, 0, :7, :7]
        with vispe.positions_for(tower, (2, 3)):
            results.append(
                tower.transformer(tower._embeds(IMAGE), torch.zeros(7, 7).masked_fill(~recorded, -torch.inf))
            )
            attention = tower.transformer.resblocks[0].attn
            if host is _tower:
                y = torch.randn(2, 7, 32)
                by_bool = attention(y, y, y, need_weights=False, attn_mask=~recorded)[0]
                per_head = torch.zeros(4, 7, 7).masked_fill(~recorded, -torch.inf)
                close(attention(y, y, y, need_weights=False, attn_mask=per_head)[0], by_bool, 1e-6)
    close(results[0], results[1], 1e-5)


def test_contexts_of_two_models_are_independent():
    one, two = vit("alibi2d"), vit("rope_mixed")
    a, b = (m._pos_embed(m.patch_embed(IMAGE)) for m in (one, two))
    with vispe.positions_for(one, (2, 3)), vispe.positions_for(two, (2, 3)):
        close(one.norm(one.blocks(a)), one.forward_features(IMAGE), 1e-6)
        close(two.norm(two.blocks(b)), two.forward_features(IMAGE), 1e-6)
    with vispe.positions_for(one, (2, 3)), pytest.raises(InputError):
        two.blocks(b)
    with vispe.positions_for(one, (3, 2)):
        with vispe.positions_for(one, (2, 3)):
            close(one.norm(one.blocks(a)), one.forward_features(IMAGE), 1e-6)
        assert not torch.equal(one.norm(one.blocks(a)), one.forward_features(IMAGE))


def test_positions_are_local_to_a_thread():
    model, errors = vit("alibi2d"), []

    def run():
        try:
            model.blocks(torch.randn(2, 8, 32))
        except InputError as error:
            errors.append(error)

    with vispe.positions_for(model, (2, 3)):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_wrong_arguments():
    model = vit("alibi2d")
    x = model._pos_embed(model.patch_embed(IMAGE))
    with vispe.positions_for(model, (2, 3)), pytest.raises(ShapeError, match="2 prefix tokens and 6 patches"):
        model.blocks(x[:, :-1])
    with pytest.raises(ShapeError, match="2 prefix tokens and 6 patches"):
        model.blocks[0](x[:, :-1], vispe.positions_for(model, (2, 3)))
    with pytest.raises(ShapeError, match="0 to 5"):
        vispe.positions_for(model, (2, 3), index=torch.tensor([0, 6]))
    with pytest.raises(ShapeError, match="int64"):
        vispe.positions_for(model, (2, 3), index=[0, 1])
    with pytest.raises(ShapeError, match="2-axis"):
        vispe.positions_for(model, (2, 3, 4))
    with pytest.raises(UnsupportedHost, match="Convert it first"):
        vispe.positions_for(vit("learn"), (2, 3))
    with pytest.raises(UnsupportedCombination, match="late_prefix"):
        vispe.positions_for(vit("gpsa(layers=[0], late_prefix=true)"), (2, 3))


def test_models_whose_layers_store_their_grid():
    swin = timm.models.SwinTransformer(
        img_size=32, patch_size=4, window_size=4, embed_dim=16, depths=(1,), num_heads=(2,)
    )
    vispe.convert(swin, "alibi2d")
    with pytest.raises(UnsupportedHost, match="store their own grid"):
        vispe.positions_for(swin, (8, 8))


@torch.no_grad()
def test_compiled_blocks():
    model = vit("alibi2d")
    x, block = torch.randn(2, 8, 32), torch.compile(model.blocks[0], backend="eager")
    with vispe.positions_for(model, (2, 3)) as positions:
        expected = model.blocks[0](x)
        close(block(x), expected, 1e-5)  # the graph breaks, and the layer runs eagerly
    with vispe.positions_for(model, (3, 2)) as other:
        close(block(x), model.blocks[0](x), 1e-5)
    close(block(x, positions), expected, 1e-5)
    close(block(x, other), model.blocks[0](x, other), 1e-5)
    torch._dynamo.reset()
    compiled = torch.compile(model.blocks[0], backend="eager", fullgraph=True)
    close(compiled(x, positions), expected, 1e-5)
    close(compiled(x, other), model.blocks[0](x, other), 1e-5)
    with (
        positions,
        pytest.raises(torch._dynamo.exc.Unsupported, match="Pass the value"),
    ):
        compiled(x)


def test_a_loop_over_blocks_of_masked_autoencoders():
    """Libraries of masked image modelling assemble tokens and run ``vit.blocks`` themselves."""

    class Masked(torch.nn.Module):
        def __init__(self, vit):
            super().__init__()
            self.vit = vit

        def forward(self, x):
            x = self.vit.patch_embed(x)
            prefix = torch.cat([self.vit.cls_token, self.vit.reg_token], 1).expand(x.shape[0], -1, -1)
            x = torch.cat([prefix, x], 1) + self.vit.pos_embed
            return self.vit.norm(self.vit.blocks(self.vit.norm_pre(x)))

    for spec in ("learn+alibi2d", "learn+irpe"):
        model = Masked(vit(spec))
        with pytest.raises(InputError):
            model(IMAGE)
        with vispe.positions_for(model, (2, 3)):  # the model inside is found
            close(model(IMAGE), model.vit.forward_features(IMAGE), 1e-6)
    with pytest.raises(InputError):
        Masked(vit("learn+peg"))(IMAGE)


class MergedAttention(Attention):
    def forward(self, x, attn_mask=None, is_causal=False):
        return super().forward(x)


class MergedBlock(Block):
    def forward(self, x, attn_mask=None, is_causal=False):
        return super().forward(x)


@cases("spec", ["alibi2d", "rope_mixed", "learn+irpe", "peg"])
def test_replaced_classes_of_blocks_are_detected(spec):
    """Token merging libraries replace the classes of blocks and attention."""
    model = vit(spec)
    for module in model.modules():
        if isinstance(module, Block):
            module.__class__ = MergedBlock
        elif isinstance(module, Attention):
            module.__class__ = MergedAttention
    for call in (model, model.forward_features, model.forward_intermediates):
        with pytest.raises(UnsupportedHost, match=r"blocks\.0\.attn: its class was replaced"):
            call(IMAGE)
    sums = vit("sincos2d")
    expected = sums(IMAGE)
    for block in sums.blocks:
        block.attn.__class__ = MergedAttention
    close(sums(IMAGE), expected, 1e-6)


def test_features_and_pruning_still_work():
    model = vit("alibi2d(slopes=learned)")
    expected = model.forward_features(IMAGE)
    close(model.get_intermediate_layers(IMAGE, n=1, norm=True)[0], expected[:, 2:], 1e-6)
    model.set_grad_checkpointing()
    close(model.train().forward_features(IMAGE), expected, 1e-6)
    model.eval().prune_intermediate_layers([0])
    with vispe.positions_for(model, (2, 3)):
        close(_vit_loop(model, IMAGE), model.forward_features(IMAGE), 1e-6)


def test_options_are_still_checked():
    with pytest.raises(OptionError):
        vit("alibi2d").forward_intermediates(IMAGE, output_fmt="X")
