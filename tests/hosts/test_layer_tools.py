"""Tools that replace, wrap or initialise layers of a host leave the encodings unchanged."""

import copy

import pytest
import torch
from timm.models import Eva
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

import vispe
from tests.cases import cases
from tests.hosts.helpers import cotangent, image, shake, tiny
from tests.hosts.windows import common as windows
from vispe.errors import UnsupportedCombination

NAMES = [
    "cable", "carope", "dape", "deberta", "distance_bank", "dynamic", "fire", "fourier_learned", "fox", "gpsa",
    "legendre", "loope", "neuda", "pape", "peg", "positional_attention", "rpb_cpb", "selective_rope", "seqpe",
    "seqpe_input", "shaw", "spder", "tpe2d", "tra",
]  # fmt: skip
every = cases("spec", NAMES)


def make(spec):
    return shake(vispe.convert(tiny(depth=1, global_pool="avg"), spec), 3).eval()


def of_encodings(model):
    return {name: value.clone() for name, value in model.state_dict().items() if "pos_enc" in name}


def same(actual, expected):
    assert actual.keys() == expected.keys()
    assert expected
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@every
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@torch.no_grad()
def test_dynamic_quantisation_excludes_the_encoding(spec):
    model = make(spec)
    quantised = quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    same(of_encodings(quantised), of_encodings(model))
    assert "DynamicQuantizedLinear" in str(quantised)
    assert "DynamicQuantizedLinear" not in str(
        [m for n, m in quantised.named_modules() if n.endswith("pos_enc")]
    )
    actual, expected = quantised(image()), model(image())
    assert (actual - expected).norm() < 0.1 * expected.norm()


def quantised_by_torchao(model, config):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantised = copy.deepcopy(model)
    quantization.quantize_(quantised, getattr(quantization, config)())
    return quantised


TORCHAO = cases("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])


@pytest.mark.slow
@TORCHAO
@every
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@torch.no_grad()
def test_torchao_excludes_the_encoding(spec, config):
    model = make(spec)
    quantised = quantised_by_torchao(model, config)
    same(of_encodings(quantised), of_encodings(model))
    weights = {name: type(value) for name, value in quantised.state_dict().items()}
    assert "Int8Tensor" in {kind.__name__ for kind in weights.values()}
    assert {kind for name, kind in weights.items() if "pos_enc" in name} == {torch.Tensor}
    actual, expected = quantised(image()), model(image())
    assert (actual - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "spec", [s if s in ("seqpe", "fire") else pytest.param(s, marks=pytest.mark.slow) for s in NAMES]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_bitsandbytes_excludes_the_encoding(spec, bits, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    transformers = pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 48}
    config = transformers.SiglipVisionConfig(image_size=32, patch_size=8, **shape)
    try:
        model = vispe.convert(transformers.SiglipVisionModel(config), spec)
    except UnsupportedCombination as refused:  # encodings that act on tokens
        pytest.skip(str(refused))
    shake(model, 3).eval()
    model.save_pretrained(tmp_path)
    quantised = vispe.from_pretrained(
        transformers.SiglipVisionModel,
        tmp_path,
        quantization_config=transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True}),
        device_map="cpu",
        dtype=torch.float32,
    )
    same(of_encodings(quantised), of_encodings(model))
    assert f"Linear{bits}bit" in str(quantised)
    with torch.no_grad():
        actual, expected = (m(image(2, 3, 32, 32)).last_hidden_state for m in (quantised, model))
    assert (actual - expected).norm() < {8: 0.05, 4: 0.5}[bits] * expected.norm()


@TORCHAO
@cases("fused", [True, False])
@torch.no_grad()
def test_tied_projections_of_deberta_follow_torchao(fused, config):
    torch.manual_seed(0)
    layer = vispe.Attention(32, 4, "deberta(share_att_key=true)", fused_qkv=fused)
    layer.pos_enc.tie(layer)
    x, grid = torch.randn(2, 12, 32), vispe.Grid((3, 4))
    quantised = quantised_by_torchao(layer, config)
    quantised.pos_enc.tie(quantised)
    expected = layer(x, grid)
    assert 0 < (quantised(x, grid) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.slow
@cases("trained", [None, ["pos_enc"]])
@every
def test_adapters_on_all_linear_layers_train_and_merge(spec, trained):
    peft = pytest.importorskip("peft", reason="vispe[train] is not installed")
    config = peft.LoraConfig(
        target_modules="all-linear", r=2, init_lora_weights=False, modules_to_save=trained
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(make(spec), config).train()
    assert not [n for n, _ in model.named_parameters() if "pos_enc" in n and "lora_" in n]
    out = model(image())
    (out * cotangent(out)).sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)
    with torch.no_grad():
        expected = model.eval()(image())
        torch.testing.assert_close(model.merge_and_unload()(image()), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, old_weight_norm])
@pytest.mark.parametrize("spec", ["learn+deberta", "seqpe", "rpb_cpb"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
@torch.no_grad()
def test_weight_norm_on_the_layers_of_the_host(spec, norm):
    model = make(spec)
    expected, encodings = model(image()), of_encodings(model)
    for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        norm(module)
    torch.testing.assert_close(model(image()), expected, rtol=1e-4, atol=1e-5)
    same(of_encodings(model), encodings)


@cases("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
@torch.no_grad()
def test_parametrizations_of_layers_of_an_encoding_have_effect(norm):
    model = make("fire")
    expected = model(image())
    for module in list(model.modules()):
        if type(module).__name__ == "PreciseLinear":
            norm(module)
    if norm is parametrizations.weight_norm:
        torch.testing.assert_close(model(image()), expected, rtol=1e-4, atol=1e-5)
    else:
        assert (model(image()) - expected).abs().max() > 1e-5


def assert_initialised(model):
    """Assert that every encoding has the values of its `reset_parameters`."""
    for encoding in [
        m for n, m in model.named_modules() if n.endswith("pos_enc") and isinstance(m, vispe.Encoding)
    ]:
        samples = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            encoding_copy = copy.deepcopy(encoding)
            encoding_copy.reset_parameters()
            samples.append(dict(encoding_copy.named_parameters()))
        for name, actual in encoding.named_parameters():
            first, second = (d[name] for d in samples)
            if torch.equal(first, second):
                assert torch.equal(actual, first), name
            elif actual.numel() > 60:
                assert 0.5 < actual.std() / first.std() < 2, name


@every
def test_init_weights_of_the_host_resets_encodings(spec):
    model = make(spec)
    model.init_weights()
    assert_initialised(model)


@cases("spec", ["seqpe", "deberta", "shaw", "fire"])
def test_init_weights_of_transformers_resets_encodings(spec):
    transformers = pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
    config = transformers.Dinov2Config(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        intermediate_size=32,
    )
    model = shake(vispe.convert(transformers.Dinov2Model(config), spec))
    model.apply(model._init_weights)
    assert_initialised(model)


@cases("fused", [True, False])
def test_tied_projections_of_deberta_follow_an_adapter(fused):
    peft = pytest.importorskip("peft", reason="vispe[train] is not installed")
    torch.manual_seed(0)
    layer = vispe.Attention(12, 3, "deberta(share_att_key=true)", fused_qkv=fused)
    layer.pos_enc.tie(layer)
    x, grid = torch.randn(2, 12, 12), vispe.Grid((3, 4))
    names = ["qkv"] if fused else ["q_proj", "k_proj"]
    config = peft.LoraConfig(target_modules=names, r=2, init_lora_weights=False)
    model = peft.get_peft_model(nn.ModuleDict({"attn": layer}), config).eval()
    with torch.no_grad():
        expected = layer(x, grid)
        model.merge_and_unload()
        torch.testing.assert_close(layer(x, grid), expected, rtol=1e-4, atol=1e-5)


# models that read the weight of the projection to queries, keys and values, to add biases of their own
@cases("name", ["eva", "timm_swin_v2", "torchvision_swin_v2"])
@cases("spec", ["alibi2d", "rope_axial"])
def test_an_adapter_of_a_projection_with_separate_biases_has_effect_before_merging(name, spec):
    peft = pytest.importorskip("peft", reason="vispe[vlm] is not installed")
    if name == "eva":
        torch.manual_seed(0)
        model = Eva((24, 40), 8, embed_dim=32, depth=1, num_heads=2, num_classes=5, qkv_fused=True).eval()
        x = image()
    else:
        model, x = windows.build(name), windows.image(name)
    model = shake(vispe.convert(model, spec), 3).eval()
    expected = model(x)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=r".*qkv", r=2)).eval()
    torch.testing.assert_close(tuned(x), expected, rtol=1e-5, atol=1e-5)
    for path, value in tuned.named_parameters():
        if "lora_B" in path:
            nn.init.normal_(value)
    adapted = tuned(x)
    assert (adapted - expected).abs().max() > 0.01
    adapted.sum().backward()
    assert all(p.grad.abs().sum() > 0 for path, p in tuned.named_parameters() if "lora_B" in path)
    torch.testing.assert_close(tuned.merge_and_unload()(x), adapted, rtol=1e-4, atol=1e-4)
