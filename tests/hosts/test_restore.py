"""Restoring, repeated conversion, and rejections that leave the model unchanged."""

import copy
import pickle

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models import NaFlexVit, VisionTransformer
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock, ParallelThingsBlock

import vispe
from tests.cases import cases
from tests.hosts.helpers import SHAPE, VisionTransformerDistilled, image, tiny
from tests.hosts.packed import naflex
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost
from vispe.hosts.timm.attention import SWAPS

FORMS = [
    {},
    {"block_fn": ParallelThingsBlock},
    {"block_fn": ParallelScalingBlock},
    {"attn_layer": "diff"},
    {"block_fn": DiffParallelScalingBlock},
    {"cls": VisionTransformerDistilled},
    {"pos_embed": "none"},
]
SPECS = ["alibi2d", "alibi2d(slopes=learned)", "sincos2d", "learned", "none", "learn+alibi2d(slopes=learned)"]


def snapshot(model) -> tuple:
    """Return everything that a user can observe of a model."""
    classes = [(n, type(m)) for n, m in model.named_modules()]
    attributes = [
        (n, sorted(vars(m)), sorted(m._modules), sorted(m._parameters)) for n, m in model.named_modules()
    ]
    return (
        classes,
        attributes,
        [(n, id(p), p.clone()) for n, p in model.named_parameters()],
        model(image()).clone(),
    )


def same(a: tuple, b: tuple, ids: bool = True) -> None:
    assert a[0] == b[0]
    assert a[1] == b[1]
    assert [n for n, *_ in a[2]] == [n for n, *_ in b[2]]
    for (name, i, p), (_, j, q) in zip(a[2], b[2], strict=True):
        assert torch.equal(p, q), name
        assert not ids or i == j
    assert torch.equal(a[3], b[3])


@cases("spec", SPECS)
@cases("form", FORMS, ids=lambda f: "-".join(getattr(v, "__name__", v) for v in f.values()) or "plain")
def test_restore_is_bit_exact(form, spec):
    model = tiny(**form)
    model._model_args = {"num_classes": 5}
    if form.get("pos_embed") == "none" and "learn+" in spec:
        with pytest.raises(UnsupportedCombination, match="no absolute table to keep"):
            vispe.convert(model, spec)
        return
    before = snapshot(model)
    state = list(model.state_dict())
    vispe.convert(model, spec)
    model(image())
    if "none" not in (spec, form.get("pos_embed")):
        assert not torch.equal(model(image()), before[3])
    vispe.restore(model)
    same(snapshot(model), before)
    assert list(model.state_dict()) == state or set(model.state_dict()) == set(state)
    assert model._model_args == {"num_classes": 5}


def test_repeated_conversions_equal_one_conversion():
    model = tiny()
    stock = snapshot(model)
    for spec in [*SPECS, *reversed(SPECS)]:
        vispe.convert(model, spec)
        once = vispe.convert(tiny(), spec)
        once.load_state_dict(model.state_dict())
        assert torch.equal(model(image()), once(image())), spec
        assert model._model_args["pos_embed"] == once._model_args["pos_embed"]
        assert type(model) is type(once)
    vispe.convert(model, "alibi2d", wrap=False)
    assert model.vispe.spec == [{"name": "alibi2d", "wrap": False}]
    same(snapshot(vispe.restore(model)), stock)


def test_trained_weights_remain_and_the_table_is_restored():
    model = vispe.convert(tiny(), "alibi2d")
    with torch.no_grad():
        model.cls_token.add_(1)
    vispe.restore(model)
    stock = tiny()
    assert torch.equal(model.cls_token, stock.cls_token + 1)
    assert torch.equal(model.pos_embed, stock.pos_embed)


def test_the_stored_table_follows_sizes_dtypes_and_copies():
    stock = tiny()
    model = vispe.convert(tiny(), "alibi2d")
    model.set_input_size((40, 24))
    model = pickle.loads(pickle.dumps(copy.deepcopy(model))).double()
    vispe.restore(model)
    assert model.pos_embed.dtype == torch.float64
    expected = resample_abs_pos_embed(stock.pos_embed, new_size=(5, 3), old_size=(3, 5), num_prefix_tokens=1)
    torch.testing.assert_close(model.pos_embed.detach(), expected.detach().double())
    assert model(image(2, 3, 40, 24).double()).shape == (2, 5)
    frozen = tiny()
    frozen.pos_embed.requires_grad_(False)
    vispe.convert(frozen, "alibi2d").set_input_size((48, 64))
    assert vispe.restore(frozen).pos_embed.requires_grad is False


def test_a_table_can_be_stored_and_restored():
    model = vispe.convert(tiny(), "alibi2d")
    vispe.convert(model, "alibi2d", keep_abs=True)
    expected = vispe.convert(tiny(), "alibi2d", keep_abs=True)
    assert torch.equal(model(image()), expected(image()))
    assert torch.equal(vispe.restore(model)(image()), tiny()(image()))


def test_models_built_without_a_table_cannot_be_restored():
    model = timm.create_model("vit_tiny_patch16_224", pos_embed="alibi2d", **SHAPE).eval()
    before = snapshot(model)
    with pytest.raises(UnsupportedCombination, match=r"no absolute table to restore: .* built without one"):
        vispe.restore(model)
    with pytest.raises(UnsupportedCombination, match="no absolute table to keep"):
        vispe.convert(model, "sincos2d", keep_abs=True)
    same(snapshot(model), before)
    with pytest.raises(UnsupportedHost, match="got VisionTransformer without an encoding"):
        vispe.restore(tiny())
    remaining = timm.create_model("vit_tiny_patch16_224", pos_embed="learn+alibi2d", **SHAPE).eval()
    assert type(vispe.restore(remaining)) is VisionTransformer
    assert remaining.pos_embed is not None


REFUSED = [
    ("nonsense", {}, "no encoding 'nonsense'"),
    ("alibi", {}, "1 axis"),
    ("alibi2d(slopes=huge)", {}, "slopes must be"),
    ("alibi2d+sincos2d", {"wrap": False}, "of a sum of encodings are ambiguous"),
    ("alibi2d", {"warp": False}, "no option 'warp'.*Did you mean 'wrap'"),
    ("alibi2d(layers=[9])", {}, "below depth=2"),
    ("learned(std=a)", {"grid": [0, 1]}, "grid needs a list of 2 integers"),
]


@cases("first", [None, "alibi2d(slopes=learned)", "learned"])
@cases(("spec", "options", "text"), REFUSED, ids=lambda v: str(v)[:20])
def test_a_rejected_conversion_leaves_the_model_unchanged(first, spec, options, text):
    model = tiny()
    if first:
        vispe.convert(model, first)
    before = snapshot(model)
    with pytest.raises((vispe.VispeError, OptionError), match=text):
        vispe.convert(model, spec, **options)
    same(snapshot(model), before)


def test_an_unsupported_block_leaves_the_others_unchanged():
    model = tiny(depth=3)
    model.blocks[2].attn = torch.nn.Identity()
    model.eval()
    before = [type(m) for m in model.modules()]
    with pytest.raises(UnsupportedHost, match=r"blocks.2.attn must be one of Attention, .* got Identity"):
        vispe.convert(model, "alibi2d")
    assert [type(m) for m in model.modules()] == before
    assert model.pos_embed is not None


def test_describe():
    model = tiny()
    assert vispe.describe(model) == (
        "VisionTransformer without an encoding of vispe; vispe.convert(model, 'alibi2d') adds one."
    )
    text = vispe.describe(vispe.convert(model, "alibi2d(slopes=learned)+learned"))
    for part in (
        "'alibi2d', 'slopes': 'learned'",
        "grid (3, 5)",
        "1 prefix token",
        "removed",
        "backend auto",
        "pos_enc: learned, 480 parameters",
        "2 attention layers with their own: alibi2d, 8 parameters",
    ):
        assert part in text, text
    assert vispe.describe(torch.nn.ModuleDict({"trunk": model})).startswith("trunk: VisionTransformer with")
    model.blocks[0].attn.fused_attn = False
    assert "reference (fused attention is off)" in vispe.describe(model)
    assert "in use" in vispe.describe(vispe.convert(model, "sincos2d", keep_abs=True))


def test_every_replacement_class_overrides_forward_only():
    for stock, ours in SWAPS.items():
        in_front = ours.__mro__[: ours.__mro__.index(stock)]
        names = {n for c in in_front for n in vars(c) if not n.startswith("__")}
        assert {n for n in names if hasattr(stock, n)} == {"forward"}
        assert names - {"forward"} <= {"fused_attn", "vispe_attend", "vispe_stock_takes_masks", "_abc_impl"}


@cases(
    ("name", "spec", "what"),
    [
        ("eva02_tiny_patch14_224", "rope+alibi2d", "absolute table"),
        ("eva02_tiny_patch14_224", "learn+alibi2d", "rotary embedding"),
        ("eva02_tiny_patch14_224", "alibi2d", "absolute table and rotary embedding"),
        ("vit_small_patch16_rope_224", "alibi2d", "rotary embedding"),
        ("deit_tiny_distilled_patch16_224", "alibi2d", "absolute table"),
    ],
)
def test_models_built_without_part_of_their_positions_cannot_be_restored(name, spec, what):
    model = timm.create_model(name, pos_embed=spec, **{**SHAPE, "img_size": 32}).eval()
    x, cls = image(2, 3, 32, 32), type(model)
    out = model(x)
    with pytest.raises(UnsupportedCombination, match=rf"no {what} to restore: .* built without one"):
        vispe.restore(model)
    assert type(model) is cls
    assert torch.equal(model(x), out)
    vispe.convert(model, "sincos2d")
    with pytest.raises(UnsupportedCombination, match=f"no {what}"):
        vispe.restore(model)


def test_models_built_with_all_their_positions_are_restored():
    model = timm.create_model(
        "eva02_tiny_patch14_224", pos_embed="learn+rope+alibi2d", **{**SHAPE, "img_size": 32}
    )
    stock = timm.create_model("eva02_tiny_patch14_224", **{**SHAPE, "img_size": 32}).eval()
    stock.load_state_dict(vispe.restore(model.eval()).state_dict())
    assert type(model) is type(stock)
    assert torch.equal(model(image(2, 3, 32, 32)), stock(image(2, 3, 32, 32)))
    remaining = vispe.convert(tiny(), "learn+alibi2d")
    assert torch.equal(vispe.restore(remaining)(image()), tiny()(image()))


@cases("depth", [1, 5])
def test_an_encoding_module_of_another_depth_is_rejected(depth):
    sample = vispe.create_encoding("peg(first=5)", dim=32, depth=depth)
    model = tiny(depth=3)
    with pytest.raises(
        UnsupportedCombination, match=rf"peg: this model needs 6 weights, got {2 * depth} \(proj\."
    ):
        vispe.convert(model, sample)
    assert type(model) is VisionTransformer


@cases("option", ["split=[2,1,1]", "spacing=[5,0.7,0.7]", "schedule=rescale,reference=[2,5,7]"])
def test_options_for_another_number_of_axes_are_rejected_before_any_change(option):
    model, naflex_model = tiny(), naflex()
    changed = option.split("=[")[0].rpartition(",")[2]
    before = snapshot(model)
    for host in (model, naflex_model):
        with pytest.raises(
            UnsupportedCombination,
            match=rf"rope_axial: {changed} must have one number per axis of the 2-axis grid of .* got \(.*\)",
        ):
            vispe.convert(host, f"rope_axial({option})")
    same(snapshot(model), before)
    assert type(naflex_model) is NaFlexVit
