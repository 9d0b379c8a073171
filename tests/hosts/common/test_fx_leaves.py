"""Tracing of converted models by torch.fx and torch.jit."""

import pickle

import pytest
import timm
import torch
from timm.layers import get_notrace_functions, set_fused_attn
from timm.models import Eva, NaFlexVit, create_feature_extractor
from timm.models.vision_transformer import DiffParallelScalingBlock
from timm.utils import AttentionExtract

import vispe
from tests.hosts.helpers import (
    VisionTransformerDistilled,
    close,
    dense,
    grads,
    head_masks,
    image,
    oracle,
    set_fused,
    shake,
    tiny,
)
from tests.hosts.packed import naflex, pack
from vispe.errors import ShapeError
from vispe.hosts.common import fx_leaves

SAMPLERS = vispe.list_encodings(kind="positions")
SPECS = [
    *vispe.list_encodings(ndim=2, exclude=SAMPLERS),
    "rfs+rope_axial",
    "alibi2d(slopes=learned)+fourier",
    "learn+irpe",
]
# one of each way into a model: added, as bias fixed, of content and whole, rotated, calibrated, several softmaxes,
# mixed
EACH = ["sincos2d", "alibi2d", "irpe", "tapa", "rope_axial", "psc", "gpsa", "peg"]
HALVES, QUARTERS = (
    [{spec: [pytest.mark.slow] * (spec not in EACH[k::n]) for spec in SPECS} for k in range(n)]
    for n in (2, 4)
)
FIXED_SIZE, FREE_SIZE = (
    [pytest.param(spec, free, marks=slow, id=f"{name}-{spec}") for spec, slow in half.items()]
    for half, free, name in ((HALVES[0], False, "fixed"), (HALVES[1], True, "dynamic"))
)
EVA = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}


def eva(**options) -> Eva:
    torch.manual_seed(0)
    return shake(Eva(**{**EVA, "use_rot_pos_emb": True, **options})).eval()


def deep(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return gradients under the names that parameters have in a graph."""
    return grads(model, model(image()), drop="nothing")


@pytest.mark.parametrize(("spec", "dynamic"), [*FIXED_SIZE, *FREE_SIZE])
def test_a_symbolic_trace_equals_the_model_and_has_free_sizes(spec, dynamic):
    model = vispe.convert(tiny(dynamic_img_size=dynamic), spec)
    graph = torch.fx.symbolic_trace(model)
    for size in ((2, 3, 24, 40), *(((1, 3, 40, 16), (3, 3, 16, 64)) if dynamic else ())):
        assert torch.equal(graph(image(*size)), model(image(*size)))
    close(deep(graph), deep(model))
    reloaded = pickle.loads(pickle.dumps(graph))
    assert torch.equal(reloaded(image()), model(image()))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["alibi2d", "rope_mixed", "rpb", "peg", "sincos2d"])
@pytest.mark.parametrize(
    "options", [{}, {"rotated": True}, {"distilled": True}, {"attn_layer": "diff"}], ids=str
)
def test_feature_extractors_of_timm_return_the_outputs_of_the_modules(options, spec):
    if options.pop("rotated", False):
        model = eva()
    else:
        model = tiny(*[VisionTransformerDistilled] * options.pop("distilled", False), **options)
    vispe.convert(model, spec)
    names = ["blocks.0", "blocks.1.attn.proj", "norm"]
    extractor = create_feature_extractor(model, names)
    expected = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda m, i, out, name=name: expected.update({name: out})
        )
    model(image())
    actual = extractor(image())
    for name in names:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["alibi2d", "rope_mixed", "seqpe", "fourier"])
def test_a_graph_of_naflex_takes_images_and_packed_patches(spec):
    model = vispe.convert(naflex(), spec)
    graph = create_feature_extractor(model, {"head": "out"})
    assert torch.equal(graph(image())["out"], model(image()))
    batch = pack([(3, 5), (2, 4)])
    names = {"patches": "x", "patch_coord": "patch_coord", "patch_valid": "patch_valid"}
    actual = graph(**{names[name]: value for name, value in batch.items()})["out"]
    close(actual, model(batch))


def test_a_graph_takes_masks_at_run_time():
    model = vispe.convert(tiny(), "alibi2d")
    graph = torch.fx.symbolic_trace(model)
    mask = torch.ones(16, 16).tril().bool()
    assert torch.equal(graph(image(), attn_mask=mask), model(image(), attn_mask=mask))
    assert torch.equal(graph(image(), is_causal=True), model(image(), is_causal=True))
    close(graph(image(), is_causal=True), model(image(), attn_mask=mask))


def test_a_graph_rejects_images_of_another_grid():
    model = vispe.convert(tiny(), "alibi2d")
    model.patch_embed.strict_img_size = False
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(graph(image()), model(image()))
    with pytest.raises(ShapeError, match=r"the grid \(3, 5\)"):
        graph(image(1, 3, 40, 24))


def test_features_only_by_fx():
    feature_options = {"img_size": 64, "features_only": True, "out_indices": (1, 2)}
    for options in ({}, {"feature_cls": "fx"}):
        torch.manual_seed(0)
        model = timm.create_model("test_vit", pos_embed="alibi2d", **feature_options, **options).eval()
        actual = model(image(2, 3, 64, 64))
        if not options:
            expected = actual
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours[:, 1:].transpose(1, 2).unflatten(2, (4, 4)), theirs)


def test_every_node_is_registered_with_timm():
    assert set(fx_leaves.NODES) <= set(get_notrace_functions())


MAPS = {
    "vit": (tiny, {}, "blocks.{}.attn.attn_drop"),
    "dynamic": (tiny, {"dynamic_img_size": True}, "blocks.{}.attn.attn_drop"),
    "eva": (eva, {}, "blocks.{}.attn.attn_drop"),
    "eva_rope": (eva, {"attn_type": "rope"}, "blocks.{}.attn.attn_drop"),
    "naflex": (naflex, {}, "blocks.{}.attn.attn_drop"),
}


def exact_maps(model, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the attention of every layer in float64, from recorded queries, keys, bias and rotation."""
    from vispe.backbones.attention_recorder import record_attention

    actual = []

    def append_map(recorded) -> None:
        call = recorded.call
        q, k, _ = call.transformed()
        logits = (q.double() * q.shape[-1] ** -0.5) @ k.double().transpose(-1, -2)
        bias = None if call.bias is None else call.bias.dense(q=call.q, k=call.k, scale=call.factor)
        actual.append((logits if bias is None else logits + bias.double()).softmax(-1))

    record_attention(model, x, append_map)
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["alibi2d", "rope_mixed", "irpe", "rpb", "alibi2d(slopes=learned)+sincos2d"])
@pytest.mark.parametrize("host", MAPS)
def test_attention_maps_of_timm_equal_float64(host, spec):
    make, options, name = MAPS[host]
    model = vispe.convert(make(**options), spec)
    set_fused(model, True)
    expected = exact_maps(model, image())
    set_fused(model, False)
    hooked = AttentionExtract(model, method="hook")(image())
    assert list(hooked) == [name.format(i) for i in range(2)]
    graphed = AttentionExtract(model, method="fx")(image())
    assert list(graphed) == [f"blocks.{i}.attn.softmax" for i in range(2)]
    for maps in (hooked, graphed):
        for actual, exact in zip(maps.values(), expected, strict=True):
            close(actual.double(), exact.expand_as(actual), tol=1e-6)


def test_hooks_on_attention_weights_change_the_output():
    model = vispe.convert(tiny(), "alibi2d")
    set_fused(model, False)
    before = model(image())
    drop = model.blocks[0].attn.attn_drop
    handle = drop.register_forward_hook(lambda module, args, out: out.flip(-1))
    assert not torch.allclose(model(image()), before)
    handle.remove()
    assert torch.equal(model(image()), before)


@pytest.mark.parametrize(
    "make", [{"attn_layer": "diff"}, {"block_fn": DiffParallelScalingBlock}], ids=["diff", "side"]
)
def test_maps_of_differential_attention_have_the_order_of_timm(make):
    model = tiny(pos_embed="none", **make)
    set_fused(model, False)
    masks = head_masks(model, dense(3, 5, 1))
    recorded = {"stock": [], "ours": []}
    for module in model.modules():
        if hasattr(module, "attn_drop"):
            module.attn_drop.register_forward_hook(lambda m, i, out: recorded[now].append(out))
    now = "stock"
    expected = oracle(model, image(), masks)
    vispe.convert(model, "alibi2d(slopes=constant)")
    now = "ours"
    close(model.forward_features(image()), expected)
    for ours, stock in zip(recorded["ours"], recorded["stock"], strict=True):
        assert ours.shape == (2, 8, 16, 16)
        close(ours, stock, tol=1e-6)


def test_attention_dropout_follows_the_mode_of_the_layer():
    model = vispe.convert(tiny(attn_drop_rate=0.5), "alibi2d").train()
    set_fused(model, False)
    remaining = []
    for block in model.blocks:
        block.attn.attn_drop.register_forward_hook(lambda m, i, out: remaining.append((i[0], out)))
    model(image())
    for before, after in remaining:
        share = (after == 0).float().mean()
        assert 0.3 < share < 0.7
        close(after[after != 0], 2 * before[after != 0])


def test_disabling_fused_attention_exposes_maps():
    set_fused_attn(False)
    try:
        model = timm.create_model("test_vit", pos_embed="alibi2d", img_size=64).eval()
    finally:
        set_fused_attn(True)
    assert len(AttentionExtract(model, method="hook")(image(1, 3, 64, 64))) == len(model.blocks)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "spec"),
    [
        *(
            pytest.param(lambda: tiny(dynamic_img_size=True), spec, marks=slow, id=f"vit-{spec}")
            for spec, slow in QUARTERS[0].items()
        ),
        *(pytest.param(eva, spec, marks=slow, id=f"eva-{spec}") for spec, slow in QUARTERS[1].items()),
        *(pytest.param(naflex, spec, marks=slow, id=f"naflex-{spec}") for spec, slow in QUARTERS[2].items()),
    ],
)
def test_a_jit_trace_equals_the_model_and_rejects_other_sizes(make, spec):
    model = make()
    if spec == "peg" and isinstance(model, NaFlexVit):
        spec = "gta"  # peg is refused there
    vispe.convert(model, spec)
    graph = torch.jit.trace(model, image())
    close(graph(image(5, 3, 24, 40, seed=2)), model(image(5, 3, 24, 40, seed=2)))
    for other in ((1, 3, 40, 24), (1, 3, 48, 40)):
        with pytest.raises(RuntimeError, match="size of the tensor"):
            graph(image(*other))
