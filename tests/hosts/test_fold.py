"""vispe.fold: a learned basis is merged into the projections of every host, and unsupported models are rejected."""

import copy

import pytest
import timm
import torch
from torch import nn

import vispe
from tests.cases import cases
from tests.hosts.helpers import shake
from tests.hosts.test_unused_parameters import HOSTS
from tests.hosts.windows import common as windows
from tests.products import partly
from vispe import create_encoding, list_encodings
from vispe.encodings.base import Biased, Rotary
from vispe.encodings.registry import encoding_class
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost, VispeError
from vispe.hosts.fold import GATED

SPEC = "rope_mixed(basis=head)"
X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3)).double()


def siglip(**options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.SiglipVisionConfig(**sizes, image_size=32, patch_size=8, **options)
    return transformers.SiglipVisionModel(config)


def eva_with_separate_projections():
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2}
    return timm.models.eva.Eva(**options, qkv_fused=False, use_rot_pos_emb=True)


BUILDERS = {
    **HOSTS,
    "siglip": siglip,
    "eva_separate": eva_with_separate_projections,
}


def moved(model):
    """Return the model in double precision, with parameters of its encodings changed from their initial values."""
    return shake(model).double().eval()


def output(model, x=X):
    out = model(x)
    return getattr(out, "last_hidden_state", out)


def tensors(out):
    out = [out] if isinstance(out, torch.Tensor) else out if isinstance(out, tuple) else list(out.values())
    return [value for value in out if isinstance(value, torch.Tensor)]


@cases("host", ["timm_sam", "hub_swin", "hub_vitdet", "hub_sam3"])
def test_outputs_of_windowed_models_are_unchanged(host):
    make, side = windows.MODELS[host][:2]
    model = moved(vispe.convert(make(), SPEC))
    x = torch.randn(1, 3, side, side).double()
    with torch.no_grad():
        before = tensors(model(x))
        for actual, expected in zip(tensors(vispe.fold(model)(x)), before, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@partly(1)
@cases("spec", [SPEC, "rope_axial(basis=head,basis_key=same)+alibi2d(slopes=learned)"])
@cases("host", BUILDERS)
def test_outputs_are_unchanged(host, spec):
    torch.manual_seed(0)
    model = moved(vispe.convert(BUILDERS[host](), spec))
    with torch.no_grad():
        before = output(model)
        assert vispe.fold(model) is model
        torch.testing.assert_close(output(model), before, rtol=1e-6, atol=1e-6)
    assert not [name for name, _ in model.named_parameters() if "head_basis" in name]
    assert "basis" not in str([part.vispe.spec for part in model.modules() if hasattr(part, "vispe")])
    with pytest.raises(OptionError, match=r"no encoding has a learned basis"):
        vispe.fold(model)
    vispe.restore(model)


def test_the_folded_model_equals_a_model_without_basis():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", pos_embed=SPEC, img_size=(64, 32))
    folded = vispe.fold(copy.deepcopy(moved(model)))
    fresh = timm.create_model("test_vit", pos_embed="rope_mixed", img_size=(64, 32)).double().eval()
    fresh.load_state_dict(folded.state_dict())
    x = torch.randn(1, 3, 64, 32).double()
    with torch.no_grad():
        torch.testing.assert_close(fresh(x), model(x), rtol=1e-6, atol=1e-6)


def test_attention_layers_of_custom_models():
    torch.manual_seed(0)
    for fused in (True, False):
        layers = nn.ModuleList(
            vispe.Attention(32, 4, "rope_axial(basis=head)", fused_qkv=fused, layer=i) for i in range(2)
        )
        moved(layers)
        x, grid = torch.randn(2, 13, 32).double(), vispe.Grid((3, 4), prefix=1)
        before = [layer(x, grid.positions()) for layer in layers]
        vispe.fold(layers)
        for layer, expected in zip(layers, before, strict=True):
            torch.testing.assert_close(layer(x, grid.positions()), expected, rtol=1e-6, atol=1e-6)
            assert layer.pos_enc.spec == {"name": "rope_axial"}


INSIDE = [n for n in list_encodings() if issubclass(encoding_class(n), Biased | Rotary)]


@cases("name", INSIDE)
def test_sums_fold_exactly_or_are_rejected(name):
    grid, terms = (3, 4), [{"name": "rope_axial", "basis": "head", "basis_key": "same"}, {"name": name}]
    try:
        encoding = create_encoding(terms, dim=32, num_heads=4, depth=1, grid=grid)
        layer = moved(vispe.Attention(32, 4, encoding))
        x, pos = torch.randn(2, 12, 32).double(), vispe.Grid(grid, reference=grid).positions()
        before = layer(x, pos)
    except VispeError:
        pytest.skip("the sum is not supported")
    if "content" in encoding_class(name).encodes and name not in GATED:
        with pytest.raises(UnsupportedCombination, match=f"{name}, which would read other queries and keys"):
            vispe.fold(layer)
        torch.testing.assert_close(layer(x, pos), before)
    else:
        torch.testing.assert_close(vispe.fold(layer)(x, pos), before, rtol=1e-6, atol=1e-6)


def test_dtype_mode_and_frozen_parameters_are_preserved():
    model = timm.create_model("test_vit", pos_embed=SPEC, img_size=64).bfloat16().train()
    model.blocks[1].attn.pos_enc.freqs.requires_grad_(False)
    vispe.fold(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(m.training for m in model.modules())
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["blocks.1.attn.pos_enc.freqs"]


def test_describe_shows_the_condition_of_each_head():
    model = timm.create_model("test_vit", pos_embed=SPEC, img_size=64)
    text = vispe.describe(model)
    assert "U rotates by up to 0.0 to 0.0 degrees per head" in text
    assert text.count("condition number of M per head 1.00 1.00") == 6
    with torch.no_grad():  # softplus(x) = 4 and 1
        model.blocks[2].attn.pos_enc.head_basis.sigma[1, 0] = torch.tensor(4.0).expm1().log()
        model.blocks[0].attn.pos_enc.head_basis.u[0, 0] = 0.5
    text = vispe.describe(model)
    assert "layer 2: condition number of M per head 1.00 4.00" in text
    assert "up to 0.0 to 28.6 degrees" in text
    assert "condition" not in vispe.describe(vispe.fold(model))


def refused(model, error, text):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=text):
        vispe.fold(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_layers_between_projection_and_basis_are_rejected():
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2}
    model = timm.models.VisionTransformer(**options, qk_norm=True)
    refused(
        vispe.convert(model, SPEC),
        UnsupportedCombination,
        r"blocks\.0\.attn normalises .* got q_norm, k_norm\.",
    )
    model = timm.models.VisionTransformer(**options)
    vispe.convert(model, SPEC)
    model.blocks[1].attn.qkv = nn.utils.parametrizations.weight_norm(model.blocks[1].attn.qkv)
    refused(model, UnsupportedHost, r"blocks\.1\.attn needs projections of class torch\.nn\.Linear")


def test_a_model_without_a_basis_is_rejected():
    with pytest.raises(
        OptionError, match=r"no encoding has a learned basis, got a VispeVisionTransformer\. "
    ):
        vispe.fold(timm.create_model("test_vit", pos_embed="rope_axial", img_size=64))
