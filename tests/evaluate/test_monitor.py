"""Measures in the forward passes of an evaluation: values of an audit, unchanged outputs, a share of the time."""

import open_clip
import pytest
import timm
import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    Dinov2Backbone,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    LlamaConfig,
    LlamaForCausalLM,
)  # fmt: skip

import vispe
from vispe.errors import InputError, OptionError, UnsupportedHost
from vispe.evaluate import monitor as module
from vispe.evaluate.audit.measures import choose
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.measure.audited_model import as_audited_model


def vit(spec=None, **options):
    torch.manual_seed(0)
    pos_embed_option = {} if spec is None else {"pos_embed": spec}
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=96, depth=2, num_classes=3, **pos_embed_option, **options
    ).eval()


def clip():
    vision = {"layers": 2, "width": 64, "head_width": 32, "patch_size": 16, "image_size": 96}
    text = {"layers": 1, "width": 32, "heads": 2, "vocab_size": 64, "context_length": 8}
    return open_clip.CLIP(32, vision, text).eval().visual


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def dinov2(kind=Dinov2Model, **options):
    return kind(Dinov2Config(**SIZES, image_size=96, patch_size=16, **options)).eval()


def clip_of_transformers():
    text = {**SIZES, "vocab_size": 20, "eos_token_id": 1, "bos_token_id": 0}
    vision = {**SIZES, "image_size": 96, "patch_size": 16}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()


def trunk():
    """An image tower of open_clip that is a model of timm."""
    vision = {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "", "timm_proj": "linear"}
    vision |= {"timm_model_pretrained": False, "image_size": 224}
    text = {"layers": 1, "width": 32, "heads": 2, "vocab_size": 64, "context_length": 8}
    return open_clip.CLIP(32, vision, text).eval().visual


MODELS = {
    "stock": vit,
    "rotation": lambda: vit("learn+rope_mixed"),
    "bias": lambda: vit("alibi2d"),
    "content": lambda: vit("irpe", global_pool="avg", class_token=False),
    "open_clip": clip,
    "transformers": dinov2,
    "head": lambda: dinov2(Dinov2ForImageClassification),
    "norm of one token": lambda: clip_of_transformers().vision_model,
}


@pytest.fixture
def every(monkeypatch):
    monkeypatch.setattr(module, "SHARE", float("inf"))


@pytest.mark.slow
@pytest.mark.usefixtures("every")
@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_an_audit(name):
    model = MODELS[name]()
    images = torch.randn(6, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    plain = [model(images[i : i + 2]) for i in (0, 2, 4)]
    with vispe.monitor(model, ["heads", "probe", "channels"]) as m:
        watched = [model(images[i : i + 2]) for i in (0, 2, 4)]
    for a, b in zip(plain, watched, strict=True):
        values = zip(a.values(), b.values(), strict=True) if isinstance(a, dict) else [(a, b)]
        assert all(torch.equal(x, y) for x, y in values)
    assert (m.passes, m.recorded) == (3, 3)
    expected = audit(
        as_audited_model(model), list(images[::2]), choose(["heads", "probe", "channels"]), controls=[]
    )
    for ours, theirs in zip(m.report().findings, expected.findings, strict=True):
        assert ours.name == theirs.name
        assert ours.value == pytest.approx(theirs.value, abs=1e-5)
        assert list(ours.outcome.per_image) == pytest.approx(list(theirs.outcome.per_image), abs=1e-5)
        assert list(ours.outcome.per_layer) == pytest.approx(list(theirs.outcome.per_layer), abs=1e-5)


@pytest.mark.usefixtures("every")
def test_backbones_are_measured_at_their_last_stage():
    backbone = dinov2(Dinov2Backbone, out_features=["stage1", "stage2"])
    network = dinov2()
    network.load_state_dict(backbone.state_dict())
    images, values = torch.randn(2, 3, 96, 96), []
    for model in (backbone, network):
        with vispe.monitor(model, ["probe", "spectrum"]) as m:
            model(images)
        values.append([finding.value for finding in m.report().findings])
    assert values[0] == values[1]
    early = vispe.monitor(dinov2(Dinov2Backbone, out_features=["stage1"]))
    assert "without the last stage, 'stage2'" in early.refused["spectrum"][1]


@pytest.mark.usefixtures("every")
def test_images_of_one_size_are_measured():
    model = vit(dynamic_img_size=True)
    with vispe.monitor(model, ["heads", "spectrum"]) as m:
        for size in (96, 64, 96):
            model(torch.randn(1, 3, 96, size))
    assert (m.passes, m.recorded, m.other_sizes) == (3, 2, 1)
    with pytest.warns(UserWarning, match=r"1 forward pass with images of another size than \(96, 96\)"):
        assert len(m.report().findings) == 2


@pytest.mark.usefixtures("every")
def test_texts_of_one_length_are_measured():
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=20)).eval()
    with vispe.monitor(model) as m:
        for shape in ((2, 9), (1, 9), (1, 7)):
            model(torch.randint(20, shape))
    assert (m.passes, m.recorded, m.other_sizes) == (3, 2, 1)
    with pytest.warns(UserWarning, match="1 forward pass"):
        assert m.report().findings


@pytest.mark.usefixtures("every")
def test_features_that_are_not_finite():
    model = vit()
    model.norm.weight.data[0] = float("nan")
    with (
        vispe.monitor(model, ["spectrum"]),
        pytest.raises(InputError, match="must be finite, got NaN or inf"),
    ):
        model(torch.randn(1, 3, 96, 96))


@pytest.mark.usefixtures("every")
def test_text_of_a_model_is_not_observed():
    model = clip_of_transformers()
    images, values = torch.randn(2, 3, 96, 96), []
    with vispe.monitor(model, ["heads"]) as m:
        model(input_ids=torch.tensor([[0, 5, 1], [0, 4, 1]]), pixel_values=images)
    values.append(m.report().findings[0].value)
    with vispe.monitor(model.vision_model, ["heads"]) as m:
        model.vision_model(images)
    assert values == [m.report().findings[0].value]


@pytest.mark.usefixtures("every")
def test_towers_of_open_clip_may_be_models_of_timm():
    model = trunk()
    with vispe.monitor(model, ["heads"]) as m:
        model(torch.randn(2, 3, 224, 224))
    assert m.recorded == 1
    assert m.norm is model.trunk.norm


def test_recorded_passes_take_a_share_of_the_time(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    model = vit()
    with vispe.monitor(model, ["heads"]) as m:
        for _ in range(60):
            model(torch.zeros(2, 3, 96, 96))
    assert m.passes == 60
    # the clock advances once per pass, and twice in a recorded one: at most a tenth of the time
    assert 5 <= m.recorded <= 8
    assert not any(module_._forward_pre_hooks or module_._forward_hooks for module_ in model.modules())


@pytest.mark.usefixtures("every")
def test_gradients_and_training_are_untouched():
    model = vit()
    images = torch.randn(2, 3, 96, 96)
    with vispe.monitor(model, ["heads"]) as m:
        model(images).sum().backward()
        model.train()
        model(images)
    assert (m.passes, m.recorded) == (1, 1)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.usefixtures("every")
def test_an_error_inside_a_pass_leaves_no_hooks():
    model = vit()
    with vispe.monitor(model, ["heads"]) as m:
        with pytest.raises(AssertionError, match="height"):
            model(torch.zeros(1, 3, 95, 96))
        model(torch.zeros(1, 3, 96, 96))
    assert m.recorded == 1
    assert len(m.report().findings) == 1


def test_all_measures_of_the_audit_have_a_row(monkeypatch):
    monkeypatch.setattr(module, "SHARE", float("inf"))
    model = vit()
    with vispe.monitor(model) as m:
        for _ in range(2):
            model(torch.randn(1, 3, 96, 96))
    report = m.report()
    names = {f.name for f in report.findings} | set(report.refused)
    assert names == {measure.name for measure in choose()}
    assert "runs the model on other images" in report.to_markdown()


def test_errors():
    model = vit()
    with pytest.raises(InputError, match="no forward pass of VisionTransformer"):
        vispe.monitor(model).report()
    with pytest.raises(OptionError, match="'turn': it runs the model on other images"):
        vispe.monitor(model, ["turn"])
    with pytest.raises(UnsupportedHost, match="supported attention layers"):
        vispe.monitor(timm.create_model("resnet10t"))
