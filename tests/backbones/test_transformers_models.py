"""Models of transformers are read as those of timm are: features, attention, random twins."""

import pytest
import timm
import torch

from tests.cases import cases
from vispe.backbones.attention_recorder import attention_layers, attention_map, record_attention
from vispe.backbones.local.transformers_model import TransformersModel
from vispe.backbones.model_access import reinitialized_copy
from vispe.backbones.vision_model import VisionModel
from vispe.errors import InputError, UnsupportedHost
from vispe.evaluate.evaluated import load_evaluated_model
from vispe.evaluate.measure.audited_model import as_audited_model

transformers = pytest.importorskip("transformers")
KINDS = {"ViT": "ViTModel", "Dinov2": "Dinov2Model", "CLIPVision": "CLIPVisionModel"}
KINDS |= {"SiglipVision": "SiglipVisionModel"}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def build(kind, attention="sdpa"):
    config = getattr(transformers, f"{kind}Config")(**SIZES, image_size=32, patch_size=8)
    torch.manual_seed(0)
    return getattr(transformers, KINDS[kind])._from_config(config, attn_implementation=attention).eval()


@cases("kind", KINDS)
def test_maps_are_the_last_hidden_state_behind_the_prefix(kind):
    net, images = build(kind), torch.rand(2, 3, 32, 32)
    f = VisionModel(TransformersModel(net).eval())
    last = net(images).last_hidden_state[:, -16:]
    assert torch.equal(f(images), last.transpose(1, 2).unflatten(2, (4, 4)))
    assert (f.patch_size, f.size, f.depth, f.channels, f.exact) == (8, 32, 2, 32, False)
    assert f(torch.rand(1, 3, 48, 32)).shape == (1, 32, 6, 4)
    assert len(f.layers(images)) == 2


@cases("attention", ["eager", "sdpa"])
@cases("kind", KINDS)
def test_recorded_attention_equals_that_of_the_model(kind, attention):
    net, images, calls = build(kind, attention), torch.rand(1, 3, 32, 32), []
    before, get_interface = net(images).last_hidden_state, transformers.AttentionInterface.get_interface
    outputs = []
    handle = net.register_forward_hook(lambda m, a, out: outputs.append(out.last_hidden_state))
    record_attention(net, images, calls.append)
    handle.remove()
    assert torch.equal(outputs[0], before)
    assert transformers.AttentionInterface.get_interface is get_interface
    assert not any(m._forward_pre_hooks for m in net.modules())
    net.set_attn_implementation("eager")
    attentions = net(images, output_attentions=True).attentions
    assert [s.path for s in calls] == [path for path, _ in attention_layers(net)]
    for one, weights in zip(calls, attentions, strict=True):
        torch.testing.assert_close(attention_map(one.call)[1], weights, atol=1e-6, rtol=1e-5)
        assert one.grid.shape == (4, 4)
        assert one.grid.tokens == one.x.shape[1]


def test_grids_of_images_that_are_cropped_or_padded_to_complete_patches():
    shape = {**SIZES, "image_size": 32, "patch_size": 8, "num_register_tokens": 4}
    cropped = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**shape)).eval()
    padded = timm.models.VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=1,
        num_heads=2,
        dynamic_img_size=True,
        dynamic_img_pad=True,
    ).eval()
    for model, rows, prefix in ((cropped, 4, 5), (padded, 5, 1)):
        grids = []
        record_attention(model, torch.rand(1, 3, 36, 32), lambda layer, grids=grids: grids.append(layer.grid))
        assert {(grid.shape, grid.prefix) for grid in grids} == {((rows, 4), prefix)}


@cases("attention", ["eager", "sdpa"])
def test_a_language_model_is_one_causal_row(attention):
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=50)
    net = transformers.LlamaModel._from_config(config, attn_implementation=attention).eval()
    calls, ids = [], torch.arange(7)[None]
    record_attention(net, ids, calls.append)
    net.set_attn_implementation("eager")
    for one, weights in zip(calls, net(ids, output_attentions=True).attentions, strict=True):
        torch.testing.assert_close(attention_map(one.call)[1], weights, atol=1e-6, rtol=1e-5)
        assert (one.grid.shape, one.grid.prefix) == ((1, 7), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reinitialised_copy_does_not_depend_on_loaded_weights(kind, tmp_path):
    build(kind).save_pretrained(tmp_path)
    model = TransformersModel(getattr(transformers, KINDS[kind]).from_pretrained(tmp_path)).eval()
    reinitialized, same = reinitialized_copy(model, 1)
    assert same == ()
    assert not torch.equal(reinitialized(torch.zeros(1, 3, 32, 32)), model(torch.zeros(1, 3, 32, 32)))


def test_a_folder_is_a_subject_and_a_host(tmp_path):
    net = build("CLIPVision")
    net.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"needs preprocessor_config\.json"):
        load_evaluated_model(f"hf:{tmp_path}", device="cpu")
    colours = '{"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]}'
    (tmp_path / "preprocessor_config.json").write_text(colours)
    subject, images = load_evaluated_model(f"hf:{tmp_path}", device="cpu"), torch.rand(1, 3, 32, 32)
    host, calls = as_audited_model(subject), []
    assert torch.allclose(subject.mean.flatten(), torch.tensor([0.1, 0.2, 0.3]))
    assert torch.equal(host.maps(images), as_audited_model(net).maps(images))
    assert host.can == {"maps", "pooled", "attention"}
    without_encoding = host.without()
    without_encoding.watch(images, calls.append)
    assert not torch.equal(without_encoding.maps(images), host.maps(images))
    assert [s.grid.shape for s in calls] == [(4, 4)] * 2


TEXT = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50}
COLOURS = '{"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]}'


@pytest.mark.parametrize("inside", [False, True])
def test_a_vision_language_model_gives_its_tower(inside, tmp_path):
    tower = {"model_type": "clip_vision_model", **SIZES, "image_size": 32, "patch_size": 8}
    config = transformers.LlavaConfig(text_config=TEXT, vision_config=tower, image_token_id=49)
    net = transformers.LlavaForConditionalGeneration(config).eval()
    net.save_pretrained(tmp_path)
    # processors of text and images are saved in one file, or separately
    if inside:
        (tmp_path / "processor_config.json").write_text(f'{{"image_processor": {COLOURS}}}')
    else:
        (tmp_path / "preprocessor_config.json").write_text(COLOURS)
    subject, images, calls = (
        load_evaluated_model(f"hf:{tmp_path}", device="cpu"),
        torch.rand(1, 3, 32, 32),
        [],
    )
    host = as_audited_model(subject)
    features = net.model.vision_tower(images).last_hidden_state[:, 1:]
    torch.testing.assert_close(host.maps(images), features.mT.unflatten(2, (4, 4)).detach())
    assert torch.equal(as_audited_model(net).maps(images), host.maps(images))
    assert torch.allclose(subject.mean.flatten(), torch.tensor([0.1, 0.2, 0.3]))
    host.watch(images, calls.append)
    assert [s.grid.shape for s in calls] == [(4, 4)] * 2


def test_towers_without_a_convolution_for_patches_and_texts_are_refused(tmp_path):
    visual = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    text = {**TEXT, "model_type": "qwen2_vl_text", "rope_parameters": rope}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=visual)
    llama = transformers.LlamaConfig(**{k: v for k, v in TEXT.items() if k != "model_type"})
    nets = {
        "qwen": transformers.Qwen2VLForConditionalGeneration(config),
        "llama": transformers.LlamaModel(llama),
    }
    for name, net in nets.items():
        net.save_pretrained(tmp_path / name)
        (tmp_path / name / "preprocessor_config.json").write_text(COLOURS)
        with pytest.raises(
            UnsupportedHost, match=r"must have an image tower with blocks, one convolution"
        ) as error:
            load_evaluated_model(f"hf:{tmp_path / name}", device="cpu")
        assert str(error.value).count("\n") == 0


def test_a_folder_that_does_not_exist_is_named():
    with pytest.raises(InputError, match="the folder /no/such does not exist"):
        load_evaluated_model("hf:/no/such")
