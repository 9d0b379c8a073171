"""SAM, Swin and torchvision's ViT with encodings: against explicit attention, exact restoring, other sizes."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import timm
import torch
import torchvision

import vispe
from tests.cases import cases
from tests.hosts.helpers import cotangent, shake
from tests.hosts.windows.common import MODELS, build, by_hand, image, inner, run
from tests.products import partly
from vispe.errors import InputError, UnsupportedCombination, UnsupportedHost
from vispe.hosts.windows.model_table import attentions


def close(a, b, tolerance=1e-6):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, b.detach().abs().max().item()))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_slopes_and_their_gradients_equal_dense_attention(name):
    ours, stock = build(name), build(name)
    vispe.convert(ours, "alibi2d(slopes=learned)")
    layers = [attn for _, _, attn in attentions(inner(ours))]
    generator = torch.Generator().manual_seed(3)
    slopes = [2 * torch.rand(len(a.pos_enc.slope), generator=generator).double() for a in layers]
    layer_slopes = [s.clone().requires_grad_() for s in slopes]
    with torch.no_grad():
        for attn, slope in zip(layers, slopes, strict=True):
            attn.pos_enc.slope.copy_(slope)
    for size in (None, MODELS[name][2], None):
        if size is not None and name == "hub_sam":
            stock.vision_encoder.patch_embed.image_size = size  # it refuses all others
            stock.vision_encoder.pos_embed = None  # and its table fits no other
        elif size is not None and name == "hub_swin":
            stock.embeddings.position_embeddings = None  # its zeros would have to be resampled
        elif name == "hub_sam":
            stock.vision_encoder.patch_embed.image_size = (48, 48)
        by_hand(stock, layer_slopes)
        x = [image(name, size).requires_grad_() for _ in range(2)]
        actual, expected = run(ours, x[0]), run(stock, x[1])
        close(actual, expected)
        for attn, slope in zip(layers, layer_slopes, strict=True):
            attn.pos_enc.slope.grad = slope.grad = None
        actual.backward(cotangent(actual))
        expected.backward(cotangent(expected))
        close(x[0].grad, x[1].grad)
        for attn, slope in zip(layers, layer_slopes, strict=True):
            close(attn.pos_enc.slope.grad, slope.grad)


@partly(3)
@cases("name", MODELS)
def test_conversion_and_restoring_are_bit_exact(name):
    model, x = build(name), image(name)
    stock = copy.deepcopy(model)
    types, names, before = [type(m) for m in model.modules()], list(model.state_dict()), run(model, x)
    vispe.convert(model, "none+learn+rope" if name == "hub_sam3" else "none+learn")
    close(run(model, x), before, 1e-12)
    vispe.convert(model, "alibi2d(slopes=learned)+irpe(mode=bias)")
    after = run(model, x)
    assert (after - before).abs().max() > 1e-3
    assert not any("rel_pos" in n or "relative_position_bias" in n or "cpb" in n for n in model.state_dict())
    text = vispe.describe(model)
    assert "absolute table: removed" in text
    assert "(4, 4)" in text
    model.load_state_dict(stock.state_dict())  # strictly, though it has tables
    assert torch.equal(run(model, x), after)
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(duplicate, x), after)
        vispe.restore(duplicate)
        assert torch.equal(run(duplicate, x), before)
    vispe.restore(model)
    assert [type(m) for m in model.modules()] == types
    assert list(model.state_dict()) == names
    assert torch.equal(run(model, x), before)
    with pytest.raises(UnsupportedHost, match="must be a converted one"):
        vispe.restore(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["rpb", "rpb_cpb", "lookhere", "rope_axial", "decomposed", "alibi2d+rope_mixed"]
)
@pytest.mark.parametrize("name", MODELS)
def test_other_encodings_are_trained_in_windows(name, spec):
    model = build(name).train()
    vispe.convert(model, spec)
    run(model, image(name)).square().sum().backward()
    for path, p in model.named_parameters():
        if "pos_enc" in path:
            assert p.grad is not None, path
            assert p.grad.isfinite().all(), path


@cases("name", ["timm_swin", "torchvision_swin"])
def test_the_table_of_swin_equals_its_encoding(name):
    model, x = build(name), image(name)
    before = run(model, x)
    tables = [attn.relative_position_bias_table.detach() for _, _, attn in attentions(model)]
    vispe.convert(model, "rpb")
    with torch.no_grad():
        for (_, _, attn), table in zip(attentions(model), tables, strict=True):
            attn.pos_enc.relative_position_bias_table.copy_(table)
    close(run(model, x), before)


@cases("name", ["timm_sam", "hub_sam"])
def test_the_tables_of_sam_equal_its_encoding_at_any_size(name):
    model, stock = build(name), build(name)
    vispe.convert(model, "decomposed")
    model.load_state_dict(stock.state_dict())
    with torch.no_grad():
        for path, p in stock.named_parameters():
            if "rel_pos" in path:
                at, _, entry = path.rpartition(".")
                assert torch.equal(model.get_parameter(f"{at}.pos_enc.{entry}"), p), (
                    "a stock checkpoint brings them"
                )
        inner(stock).pos_embed.zero_()
        close(run(model, image(name)), run(stock, image(name)))
        if name == "timm_sam":
            wide = image(name, (40, 72))
            close(run(model, wide), run(stock, wide))


SAME_NAMES = [
    ("timm_swin", "learn+rpb"),
    ("timm_swin_v2", "learn+rpb_cpb"),
    ("timm_sam", "learn+decomposed"),
    ("hub_vitdet", "learn+decomposed"),
    ("hub_sam", "learn+decomposed"),
    ("torchvision_swin", "rpb"),
    ("torchvision_swin", "learn+rpb"),
    ("torchvision_swin_v2", "rpb_cpb"),
    ("torchvision_swin_v2", "learn+rpb_cpb"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spec"), SAME_NAMES)
def test_tables_of_the_model_and_of_the_encoding_with_one_name_are_loaded_separately(name, spec):
    model, x = shake(vispe.convert(build(name), spec), seed=1), image(name)
    other, stock = shake(vispe.convert(build(name), spec), seed=2), shake(build(name), seed=3)
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(other, x), run(model, x))
    other.load_state_dict(stock.state_dict())
    if "learn" in spec:  # the tables of the checkpoint are those of the model
        for key, value in model.state_dict().items():
            assert torch.equal(
                other.state_dict()[key], value if "pos_enc" in key else stock.state_dict()[key]
            )


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
@cases("name", ["hub_sam", "hub_sam3", "hub_vitdet", "timm_sam", "torchvision_swin"])
def test_a_jit_trace_rejects_another_grid_with_equal_token_count(name):
    """Positions of the layers are those of the traced grid; tracing supports torchvision's model."""
    model, x = vispe.convert(build(name), "alibi2d"), image(name)
    graph = torch.jit.trace(model, x, strict=False, check_trace=False)
    actual = graph(x.flip(0))
    close(actual if isinstance(actual, torch.Tensor) else actual["last_hidden_state"], run(model, x.flip(0)))
    for size in ((32, 72), (72, 32)) if name != "torchvision_swin" else ():
        with pytest.raises(RuntimeError, match="size of the tensor"):
            graph(image(name, size))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's exporter
@pytest.mark.parametrize("name", ["timm_sam", "timm_swin", "hub_sam", "hub_sam3", "hub_vitdet"])
def test_legacy_onnx_with_free_batch(name):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model, program = vispe.convert(build(name), "alibi2d").float(), io.BytesIO()
    x, free = image(name).float(), {"x": {0: "batch"}}
    torch.onnx.export(model, (x,), program, dynamo=False, input_names=["x"], dynamic_axes=free)
    session = runtime.InferenceSession(program.getvalue())
    more = torch.cat([x.flip(0), x[:1]])
    close(torch.from_numpy(session.run(None, {"x": more.numpy()})[0]), run(model, more), 1e-4)


@cases("name", ["torchvision_vit", "torchvision_swin", "hub_swin", "hub_sam", "hub_vitdet", "timm_sam"])
def test_detached_tables_remain_zero_in_a_model_that_gets_its_values_later(name):
    model, x = vispe.convert(build(name), "alibi2d"), image(name)
    expected, later = run(model, x), copy.deepcopy(model).to("meta")
    torch.use_deterministic_algorithms(True)  # memory without values is filled with NaN
    try:
        later.to_empty(device="cpu").load_state_dict(model.state_dict())
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(run(later, x), expected)
    with torch.device("meta"):
        assigned = vispe.convert(MODELS[name][0]().eval(), "alibi2d")
    assigned.load_state_dict(model.state_dict(), assign=True)  # float32 before
    assert torch.equal(run(assigned, x), expected)
    accelerate = pytest.importorskip("accelerate", reason="vispe[train] is not installed")
    with accelerate.init_empty_weights():
        dispatched = vispe.convert(MODELS[name][0]().eval(), "alibi2d")
    for key, value in model.state_dict().items():
        accelerate.utils.set_module_tensor_to_device(dispatched, key, "cpu", value, dtype=value.dtype)
    assert torch.equal(run(dispatched.to("cpu"), x), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, in timm's resampling
@cases("name", ["timm_swin", "timm_swin_v2"])
def test_the_table_of_swin_is_restored_for_another_input_size(name):
    model, stock = build(name), build(name)
    vispe.convert(model, "alibi2d")
    for m in (model, stock):
        m.set_input_size(img_size=(48, 80), window_size=(3, 5))
    x = image(name, (48, 80))
    assert run(model, x).isfinite().all()
    assert "(3, 5)" in vispe.describe(model)
    vispe.restore(model)
    close(run(model, x), run(stock, x), 1e-12)


def test_attention_of_torchvision_supports_all_arguments_of_torch():
    stock, x = build("torchvision_vit"), torch.randn(2, 17, 32).double()
    model = vispe.convert(copy.deepcopy(stock), "none")
    ours, theirs = (m.encoder.layers[0].self_attention for m in (model, stock))
    hidden = torch.rand(17, 17, generator=torch.Generator().manual_seed(1)) < 0.3
    hidden.fill_diagonal_(False)
    per_head = torch.randn(2 * ours.num_heads, 17, 17, generator=torch.Generator().manual_seed(2)).double()
    for options in ({"average_attn_weights": False}, {"attn_mask": hidden}, {"attn_mask": per_head}):
        for a, b in zip(ours(x, x, x, **options), theirs(x, x, x, **options), strict=True):
            close(a, b, 1e-12)
        close(
            ours(x, x, x, need_weights=False, **options)[0],
            theirs(x, x, x, need_weights=False, **options)[0],
            1e-12,
        )
    with pytest.raises(InputError, match="self-attention"):
        ours(x, x + 1, x + 1)
    with pytest.raises(InputError, match="key_padding_mask"):
        ours(x, x, x, key_padding_mask=torch.zeros(2, 17, dtype=torch.bool))
    with pytest.raises(InputError, match="causal"):
        ours(x, x, x, is_causal=True)


def test_the_training_grid_of_layers_is_preserved_on_conversion():
    model, other = (vispe.convert(build("timm_swin"), spec) for spec in ("liere", "alibi2d"))
    for m in (model, other):
        m.set_input_size(img_size=(48, 80), window_size=(3, 5))
    vispe.convert(other, "liere").load_state_dict(model.state_dict())
    x = image("timm_swin", (48, 80))
    assert torch.equal(run(other, x), run(model, x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timm_swin", "timm_sam", "torchvision_swin", "torchvision_vit"])
def test_compiled_and_exported_models_equal_eager(name):
    model, x = build(name).float(), image(name).float()
    vispe.convert(model, "alibi2d(slopes=learned)")
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=False)
        close(program.module()(x), model(x), 1e-5)
        torch.compiler.reset()
        close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x), 1e-5)


TORCHVISION = [name for name in MODELS if name.startswith("torchvision")]
TRACED = [*((name, keep) for name in ("timm_swin", "timm_swin_v2", *TORCHVISION) for keep in (False, True))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keep_abs"), [*TRACED, ("timm_sam", False)])  # stock SAM has no trace
def test_a_graph_of_fx_equals_the_model(name, keep_abs):
    """At another size, windows of the last stage contain a full map and are not shifted."""
    model = vispe.convert(build(name), "alibi2d", keep_abs=keep_abs)
    graph = torch.fx.symbolic_trace(model)
    for size in (None, MODELS[name][2]):
        x = image(name, size)
        assert torch.equal(graph(x), model(x))


def test_checkpointing_gives_the_same_gradients():
    grads = []
    for checkpoint in (False, True):
        model = build("timm_swin").train()
        vispe.convert(model, "alibi2d(slopes=learned)")
        model.set_grad_checkpointing(checkpoint)
        torch.manual_seed(4)  # drop path
        out = run(model, image("timm_swin"))
        out.backward(cotangent(out))
        grads.append({n: p.grad for n, p in model.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    for n, grad in grads[0].items():
        close(grads[1][n], grad, 1e-12)


def test_sam_of_transformers_is_saved_and_loaded_and_returns_attention_weights(tmp_path):
    transformers = pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
    model, x = build("hub_sam").float(), image("hub_sam").float()
    vispe.convert(model, "alibi2d(slopes=learned)")
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(tmp_path)
    reloaded = vispe.from_pretrained(transformers.SamVisionModel, tmp_path).eval()
    assert reloaded.state_dict().keys() == model.state_dict().keys()
    close(run(reloaded, x), run(model, x), 1e-6)
    from tests.hosts.windows.common import _sam_of_transformers

    torch.manual_seed(0)
    eager = shake(_sam_of_transformers("eager")).eval()
    stock = eager(x, output_attentions=True).attentions
    vispe.convert(eager, "alibi2d(slopes=learned)")
    close(run(eager, x), run(model, x), 1e-5)
    weights = eager(x, output_attentions=True).attentions
    assert [w.shape for w in weights] == [w.shape for w in stock]
    close(weights[1].sum(-1), torch.ones(weights[1].shape[:-1]), 1e-5)


@cases("name", MODELS)
def test_unsupported_encodings_are_rejected_unchanged(name):
    model = build(name)
    types, before = [type(m) for m in model.modules()], run(model, image(name))
    for spec, why in {
        "sincos2d": "outside attention",
        "peg": "outside attention",
        "alibi": "1 axis",
    }.items():
        with pytest.raises(UnsupportedCombination, match=why):
            vispe.convert(model, spec)
    if name != "hub_sam3":
        with pytest.raises(UnsupportedCombination, match="no rotary embedding to keep"):
            vispe.convert(model, "alibi2d+rope")
    assert [type(m) for m in model.modules()] == types
    assert torch.equal(run(model, image(name)), before)


def test_a_rotation_in_sam_is_rejected():
    options = {"embed_dim": 32, "depth": 1, "num_heads": 2, "window_size": 4}
    model = timm.models.VisionTransformerSAM(48, 8, use_rope=True, **options)
    with pytest.raises(UnsupportedHost, match="use_rope=True"):
        vispe.convert(model, "alibi2d")


@cases("name", ["swin_tiny_patch4_window7_224", "samvit_base_patch16_224"])
def test_timm_builds_models_and_features_with_an_encoding(name):
    shape = {"swin_tiny_patch4_window7_224": {"depths": (1, 1, 1, 1), "embed_dim": 24}}
    options = shape.get(name, {"depth": 3, "embed_dim": 48, "num_heads": 2})
    torch.manual_seed(0)
    model = timm.create_model(name, pos_embed="alibi2d", **options).eval()
    assert model.vispe.spec == [{"name": "alibi2d"}]
    x = torch.randn(1, 3, 224, 224)
    expected = model.forward_intermediates(x, intermediates_only=True)
    actual = timm.create_model(name, pos_embed="alibi2d", features_only=True, **options).eval()
    getter = {"features_only": True, "feature_cls": "getter"}
    assert len(timm.create_model(name, pos_embed="alibi2d", **getter, **options)(x)) == len(actual(x))
    weights = {
        key: value
        for key, value in model.state_dict().items()
        if not key.startswith(("head", "norm", "neck"))
    }
    theirs = actual.state_dict()
    renamed = {
        k: weights[k if k in weights else k.replace("layers_", "layers.").removeprefix("model.")]
        for k in theirs
    }
    actual.load_state_dict(renamed)
    maps = actual(x)
    last = maps[-1].permute(0, 3, 1, 2) if maps[-1].shape[1:] != expected[-1].shape[1:] else maps[-1]
    close(last, expected[-1], 1e-5)


def test_the_decoder_of_a_complete_sam_is_unchanged(tmp_path):
    transformers = pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 8,
    }
    vision |= {
        "window_size": 4,
        "global_attn_indexes": [1],
        "output_channels": 16,
        "mlp_dim": 48,
        "num_pos_feats": 8,
    }
    decoder = {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    prompts = {"hidden_size": 16, "image_size": 64, "patch_size": 8}
    config = transformers.SamConfig(
        vision_config=vision,
        prompt_encoder_config=prompts,
        mask_decoder_config=decoder | {"iou_head_hidden_dim": 16},
    )
    torch.manual_seed(0)
    sam = shake(transformers.SamModel(config)).eval()
    sample = {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": torch.tensor([[[[10.0, 20.0]]]])}
    before = sam(**sample).pred_masks
    vispe.convert(sam, "alibi2d(slopes=learned)")
    after = sam(**sample).pred_masks
    assert (after - before).abs().max() > 1e-3
    with warnings.catch_warnings(action="ignore"):
        sam.save_pretrained(tmp_path)
    close(vispe.from_pretrained(transformers.SamModel, tmp_path).eval()(**sample).pred_masks, after, 1e-6)
    vispe.restore(sam)
    assert type(sam) is transformers.SamModel
    assert torch.equal(sam(**sample).pred_masks, before)


@cases("size", [64, 96, 112])
def test_the_stored_table_of_torchvision_swin_equals_stock(size):
    """Maps divisible by windows of 7 x 7, and padded maps; float64, as trained weights amplify rounding."""
    torch.manual_seed(0)
    stock = (
        shake(torchvision.models.SwinTransformer([4, 4], 24, [2] * 4, [3, 6, 12, 24], [7, 7])).eval().double()
    )
    ours = vispe.convert(copy.deepcopy(stock), "learn")
    with torch.no_grad():
        x = torch.randn(1, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        close(ours(x), stock(x), 1e-9)


@cases("name", ["timm_swin", "timm_swin_v2", "torchvision_swin", "torchvision_swin_v2", "hub_swin"])
@cases("spec", ["tra", "tra+learn", "cope", "cope(spacing=[2,1])"])
def test_encodings_that_count_keys_ignore_other_parts_of_a_shifted_window(name, spec):
    """After the shift, the last windows contain the last and the first rows of the map, which are not adjacent."""
    model = shake(vispe.convert(build(name), spec), 3)
    stages = (
        model.layers if "timm" in name else model.encoder.layers if "hub" in name else [model.features[1]]
    )
    block = (stages[0].blocks if hasattr(stages[0], "blocks") else stages[0])[1]

    def last_rows(first_rows):
        x = torch.randn(1, 16, 16, 16, generator=torch.Generator().manual_seed(4)).double()
        x[:, :2] = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(first_rows)).double()
        out = block(x.flatten(1, 2), (16, 16)) if "hub" in name else block(x)
        out = out[0].unflatten(1, (16, 16)) if isinstance(out, tuple) else out
        return out.reshape(1, 16, 16, 16)[:, 14:]

    assert torch.equal(last_rows(5), last_rows(6))
