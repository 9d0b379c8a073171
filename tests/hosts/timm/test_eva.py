"""timm's Eva: absolute table and rope are removed, stored and restored; a bias equals a dense mask of timm."""

import copy
import io
import pickle

import pytest
import timm
import torch
from timm.models import Eva
from timm.optim import param_groups_layer_decay

import vispe
from tests.cases import cases
from tests.hosts.helpers import SHAPE, close, cotangent, dense, grads, image, set_fused, shake, slopes_of
from tests.products import partly
from vispe.errors import UnknownEncoding, UnsupportedCombination, UnsupportedHost
from vispe.hosts.timm import patch_constructors
from vispe.hosts.timm.eva import ConvertedEva

ROPE = {"use_rot_pos_emb": True}
FORMS = {
    "eva02": {**ROPE, "swiglu_mlp": True, "scale_mlp": True, "qkv_fused": False, "ref_feat_shape": (4, 4)},
    "fused qkv": {**ROPE, "qkv_bias": True},
    "no rope": {},
    "rope only": {**ROPE, "use_abs_pos_emb": False, "class_token": False, "global_pool": "avg"},
    "dinov3": {**ROPE, "rope_type": "dinov3", "use_abs_pos_emb": False, "num_reg_tokens": 3, "init_values": 0.5,
               "rope_rotate_half": True, "no_embed_class": True},
    "mixed": {**ROPE, "rope_type": "mixed", "attn_type": "rope"},
    "registers": {**ROPE, "num_reg_tokens": 2},
    "registers without entry": {**ROPE, "num_reg_tokens": 2, "no_embed_class": True},
    "post-norm": {**ROPE, "use_post_norm": True},
    "separate bias": ROPE,
    "inner norm": {**ROPE, "scale_attn_inner": True},
    "gated, qk norm": {**ROPE, "gated_attn": True, "qk_norm": True, "attn_type": "rope"},
    "grouped heads": {**ROPE, "num_kv_heads": 2, "attn_type": "rope", "qkv_fused": False},
    "dynamic": {**ROPE, "dynamic_img_size": True},
    "attention pooling": {**ROPE, "global_pool": "map", "use_pre_transformer_norm": True},
}  # fmt: skip
WITH_ROPE = [name for name, options in FORMS.items() if options]


def build(name: str, **options) -> Eva:
    options = {
        k: v
        for k, v in {**FORMS[name], **options}.items()
        if k in Eva.__init__.__wrapped__.__code__.co_varnames
    }
    torch.manual_seed(0)
    model = shake(Eva(**{**SHAPE, **options})).eval()
    for block in model.blocks if name == "separate bias" else ():
        block.attn.qkv_bias_separate = True
        block.attn.qkv.register_forward_hook(scaled)
    return model


def scaled(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    """Return a hook that changes a projection before its separate bias is added."""
    return 0.7 * output


def without_positions(model: Eva) -> Eva:
    """Return a copy without positions: a zero table and no rope."""
    model = copy.deepcopy(model)
    if model.pos_embed is not None:
        model.pos_embed.data.zero_()
    model.rope = None
    return model


def through(model: Eva, x: torch.Tensor, masks, rope=False, keep=None) -> torch.Tensor:
    """Return tokens after the blocks of timm under dense masks, optionally with the rope of timm."""
    x, rotations = model._pos_embed(model.patch_embed(x))
    x = x if keep is None else x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))
    x = model.norm_pre(x)
    for i, block in enumerate(model.blocks):
        rotation = None if rotations is None or not rope else rotations[i] if model.rope_mixed else rotations
        x = block(x, rope=rotation, attn_mask=None if masks is None else masks[i])
    return model.norm(x)


def masks_of(distance: torch.Tensor, slopes=None) -> list[torch.Tensor]:
    slopes = torch.ones(2, 4) if slopes is None else slopes
    return [(-slope[:, None, None] * distance)[None] for slope in slopes]


@partly(1)
@cases("fused", [True, False], ids=["fused", "unfused"])
@cases("name", FORMS)
def test_a_bias_replaces_table_and_rope_with_gradients(name, fused):
    stock = build(name)
    set_fused(stock, fused)
    ours = vispe.convert(copy.deepcopy(stock), "alibi2d")
    assert ours.pos_embed is None
    assert ours.rope is None
    plain, x = without_positions(stock), image()
    expected = plain.forward_head(through(plain, x, masks_of(dense(3, 5, stock.num_prefix_tokens))))
    actual = ours(x)
    close(actual, expected)
    close(grads(ours, actual), grads(plain, expected))
    assert (stock(x) - expected).abs().max() > 1e-3


@cases("name", FORMS)
def test_learned_slopes_and_their_gradient(name):
    stock = without_positions(build(name))
    ours = vispe.convert(copy.deepcopy(stock), "alibi2d(slopes=learned)")
    slopes = slopes_of(ours).detach().clone().requires_grad_()
    expected = through(stock, image(), masks_of(dense(3, 5, stock.num_prefix_tokens), slopes))
    actual = ours.forward_features(image())
    close(actual, expected)
    (expected * cotangent(expected)).sum().backward()
    got = torch.stack([g for n, g in grads(ours, actual).items() if n.endswith("slope")])
    close(got, slopes.grad)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_ROPE)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_rope_of_the_model_is_retained_on_request(name, checkpointing):
    stock = build(name)
    x, masks = image(), masks_of(dense(3, 5, stock.num_prefix_tokens))
    everything = "rope" if stock.pos_embed is None else "learn+rope"
    same = vispe.convert(copy.deepcopy(stock), everything)
    same.set_grad_checkpointing(checkpointing)
    assert torch.equal(same(x), stock(x))
    both = vispe.convert(copy.deepcopy(stock), f"{everything}+alibi2d")
    both.set_grad_checkpointing(checkpointing)
    expected = through(stock, x, masks, rope=True)
    actual = both.forward_features(x)
    close(actual, expected)
    close(grads(both, actual, "none"), grads(stock, expected, "none"))
    final, taken = both.forward_intermediates(x)
    close(final, expected)
    assert [t.shape for t in taken] == [(2, 32, 3, 5)] * 2
    without_table = vispe.convert(copy.deepcopy(stock), "alibi2d", keep_rope=True)
    expected_model = without_positions(stock)
    expected_model.rope = stock.rope
    close(without_table.forward_features(x), through(expected_model, x, masks, rope=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "spec", ["none", "alibi2d(slopes=learned)", "rope_axial", "sincos2d", "learned", "rope_axial+alibi2d"]
)
def test_restore_is_bit_exact_and_stock_weights_load_strictly(name, spec):
    stock = build(name)
    weights, x = copy.deepcopy(stock.state_dict()), image()
    ours = vispe.convert(copy.deepcopy(stock), spec)
    out = ours(x)
    assert out.shape == (2, 5)
    ours.load_state_dict(weights)
    ours.load_state_dict(ours.state_dict())
    assert torch.equal(ours(x), out)
    rebuilt = vispe.convert(ours, "alibi2d")
    assert vispe.restore(rebuilt) is ours
    assert type(ours) is Eva
    assert torch.equal(ours(x), stock(x))
    assert list(ours.state_dict()) == list(weights)
    state = ours.state_dict()
    assert all(torch.equal(state[k], weights[k]) for k in weights)


def test_rope_of_timm_and_rope_of_vispe_agree():
    stock = build("rope only", rope_type="cat")
    ours = vispe.convert(copy.deepcopy(stock), "rope_axial")
    none = vispe.convert(copy.deepcopy(stock), "none")
    assert (ours(image()) - none(image())).abs().max() > 1e-3


def test_keeping_a_missing_table_and_two_ropes_raise_before_any_change():
    model = build("no rope")
    with pytest.raises(UnsupportedCombination, match="no rotary embedding to keep"):
        vispe.convert(model, "rope+alibi2d")
    assert type(model) is Eva
    model = build("rope only")
    with pytest.raises(UnsupportedCombination, match="no absolute table to keep"):
        vispe.convert(model, "learn+alibi2d")
    with pytest.raises(UnsupportedCombination, match=r"rope \+ rope_axial: .* Omit 'rope'"):
        vispe.convert(model, "rope+rope_axial")
    assert type(model) is Eva
    assert model.rope is not None


@cases("size", [(40, 24), (48, 64), (8, 8)])
@cases("spec", ["alibi2d", "rope+alibi2d"])
def test_dynamic_sizes_and_set_input_size(spec, size):
    stock = build("dynamic")
    ours = vispe.convert(copy.deepcopy(stock), spec)
    fixed = vispe.convert(build("fused qkv"), spec)
    fixed.load_state_dict(ours.state_dict())
    fixed.set_input_size(size)
    plain = without_positions(stock)
    plain.rope = stock.rope if "rope" in spec else None
    x = image(2, 3, *size)
    expected = through(plain, x, masks_of(dense(size[0] // 8, size[1] // 8, 1)), rope=True)
    close(ours.forward_features(x), expected)
    close(fixed.forward_features(x), expected)
    assert torch.isfinite(vispe.restore(fixed)(x)).all()


def test_restoring_after_a_new_size_resamples_table_and_rope():
    model, stock = build("fused qkv"), build("fused qkv")
    vispe.convert(model, "alibi2d").set_input_size((48, 64))
    stock.set_input_size((48, 64))
    close(vispe.restore(model)(image(2, 3, 48, 64)), stock(image(2, 3, 48, 64)))


@cases("spec", ["alibi2d", "rope+alibi2d", "rope_axial"])
@cases("name", ["fused qkv", "mixed", "dinov3"])
def test_dropped_patches(name, spec):
    ours = vispe.convert(build(name, patch_drop_rate=0.4), spec).train()
    torch.manual_seed(3)
    keep = ours.patch_drop(torch.zeros(2, 15 + ours.num_prefix_tokens, 1))[1]
    torch.manual_seed(3)
    actual = ours.forward_features(image())
    p = ours.num_prefix_tokens
    tokens = torch.cat([torch.arange(p).expand(2, -1), keep + p], 1)
    assert actual.shape[1] == tokens.shape[1] < 15 + p
    complete = copy.deepcopy(ours).eval()
    if spec == "alibi2d":
        mask = masks_of(dense(3, 5, p))
        masks = [torch.stack([m[0][:, t][:, :, t] for t in tokens]) for m in mask]
        plain = without_positions(vispe.restore(complete)).eval()
        plain.patch_drop = None
        close(actual, through(plain, image(), masks, keep=tokens))


@cases("spec", ["alibi2d", "rope+alibi2d(slopes=learned)", "rope_axial"])
@cases("name", ["fused qkv", "mixed"])
def test_checkpointing_gives_the_same_gradients(name, spec):
    ours = vispe.convert(build(name), spec).train()
    expected = grads(ours, ours(image()), "none")
    ours.set_grad_checkpointing()
    actual = grads(ours, ours(image()), "none")
    assert set(actual) == set(expected) == {n for n, _ in ours.named_parameters()}
    close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["alibi2d", "rope+alibi2d", "none", "rope_axial", "learn+rope+alibi2d", {"name": "alibi2d"}]
)
@pytest.mark.parametrize("name", [
    "eva02_tiny_patch14_224", "vit_small_patch16_rope_ape_224", "vit_small_patch16_rope_mixed_ape_224"
])  # fmt: skip
def test_the_factory(name, spec):
    torch.manual_seed(0)
    sizes = {**SHAPE, "img_size": 32}
    ours = timm.create_model(name, pos_embed=spec, **sizes).eval()
    stock = timm.create_model(name, **sizes).eval()
    assert isinstance(ours, ConvertedEva)
    ours.load_state_dict(stock.state_dict())
    x = image(2, 3, 32, 32)
    assert torch.equal(ours(x), vispe.convert(stock, spec)(x)) or "axial" in str(spec)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(x), ours(x))
        assert type(other) is type(ours)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), ours(x))
    if hasattr(timm.models._builder, "update_model_args") or "_model_args" in vars(ours):
        saved = ours._model_args["pos_embed"]
        rebuilt = timm.create_model(name, pos_embed=saved, **sizes).eval()
        rebuilt.load_state_dict(ours.state_dict())
        assert torch.equal(rebuilt(x), ours(x))


def test_invalid_names_and_subclasses_in_the_factory():
    with pytest.raises(UnknownEncoding, match="Did you mean 'alibi2d'"):
        timm.create_model("eva02_tiny_patch14_224", pos_embed="alibi2")

    class Own(Eva):
        pass

    with pytest.raises(UnsupportedHost, match=r"Own: subclasses of .* Build it with no pos_embed"):
        Own(**SHAPE, pos_embed="alibi2d")
    patch_constructors.uninstall()
    try:
        with pytest.raises(TypeError, match="pos_embed"):
            Eva(**SHAPE, pos_embed="alibi2d")
    finally:
        patch_constructors.install()


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["alibi2d", "rope+alibi2d(slopes=learned)", "rope_axial"])
def test_compile_and_export(spec):
    ours = vispe.convert(build("fused qkv"), spec)
    x = image()
    expected = ours(x)
    torch._dynamo.reset()
    close(torch.compile(ours, fullgraph=True, backend="eager")(x), expected)
    close(torch.export.export(ours, (x,)).module()(x), expected)


def test_parameter_groups_weight_decay_and_description():
    ours = vispe.convert(build("mixed"), "learned+rope+alibi2d(slopes=learned)")
    assert {"pos_enc.weight", "blocks.0.attn.pos_enc.slope"} <= ours.no_weight_decay()
    groups = param_groups_layer_decay(
        ours, 0.05, layer_decay=0.5, no_weight_decay_list=ours.no_weight_decay()
    )
    assert sum(len(g["params"]) for g in groups) == len(list(ours.parameters()))
    text = vispe.describe(ours)
    assert "own rotary embedding: in use" in text
    assert "absolute table: removed" in text
    assert "removed" in vispe.describe(vispe.convert(build("rope only"), "alibi2d")).splitlines()[3]


def test_features_only_and_a_user_mask():
    getter = timm.create_model("eva02_tiny_patch14_224", pos_embed="alibi2d", features_only=True, out_indices=(0, 1),
                               **{**SHAPE, "img_size": 32})  # fmt: skip
    assert [f.shape for f in getter(image(2, 3, 32, 32))] == [(2, 32, 4, 4)] * 2
    stock = build("fused qkv")
    ours, plain = vispe.convert(copy.deepcopy(stock), "alibi2d"), without_positions(stock)
    mask = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    close(
        ours.forward_features(image(), attn_mask=mask),
        through(plain, image(), [m + mask for m in masks_of(dense(3, 5, 1))]),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:rope_axial has temperature")  # some have sides of 64 patches
def test_every_registered_architecture_converts_and_runs():
    names = timm.list_models(module="eva")
    kinds = set()
    for name in names:
        with torch.device("meta"):
            depth = {} if "sapiens2" in name else {"depth": 1}  # those list the heads of each block
            model = timm.create_model(name, num_classes=0, **depth)
            model.blocks = model.blocks[:1]
            keys = list(model.state_dict())
            for spec in ("none", "alibi2d(slopes=learned)", "rope_axial", "learned"):
                vispe.convert(model, spec)
                assert isinstance(model, Eva)
            size = model.patch_embed.img_size
            if model.embed_dim not in kinds:
                kinds.add(model.embed_dim)
                assert (
                    model.forward_features(torch.empty(1, 3, *size, device="meta")).shape[2]
                    == model.embed_dim
                )
            vispe.restore(model)
            assert list(model.state_dict()) == keys
    assert len(names) > 50
