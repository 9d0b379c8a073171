"""Reasons for unsupported position schemes: each is true for the model, and has a remedy."""

import pytest
import torch
from torch import nn

import vispe
from tests.hosts.transformers.tiny import IMAGE, SIDE, make, needs, transformers
from vispe.errors import UnsupportedHost
from vispe.hosts.transformers.language.families import FAMILIES
from vispe.hosts.transformers.language.families.base import CallTokens

NO_RULE = "no rule yet for its images.*Supported families"
AUDIO = "inputs are audio and no images"
ENCODER = "has an encoder and a decoder"
CROSS = "the input of cross-attention layers"
ROTARY = "need a rotary embedding"
SAMPLE = {
    "phi4_multimodal": "no rule yet for its images, which are crops",
    "fuyu": "do not contain the sizes of images",
    "minicpmv4_7": "on a canvas",
    "pi0": "its action expert attends to the keys",
    "kosmos-2": ROTARY,
    "kosmos-2.5": ROTARY,
    "llama4": "that returns cosines and sines",
    "qwen2_5_omni": r"Call vispe\.convert\(model\.thinker",
    "qwen2_audio": AUDIO,
    "glmasr": AUDIO,
    "mistral4": "inputs contain no images",
    "idefics": CROSS,
    "mllama": CROSS,
    "pix2struct": ENCODER,
    "blip-2": ROTARY,
}
OTHERS = {
    AUDIO: (
        "fun_asr_nano", "granite_speech", "granite_speech_plus", "kyutai_speech_to_text", "moss_transcribe_diarize",
        "nemo_speechlm", "omniasr", "qwen3_asr", "vibevoice_asr", "voxtral", "voxtral_realtime",
    ),
    ENCODER: ("florence2", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder"),
    CROSS: ("blip",),
    ROTARY: (
        "git", "glm5_next", "inkling2", "inkling2_loop", "inkling_mm_model", "instructblip", "instructblipvideo",
        "lfm3_vl", "nemotron_h_omni",
    ),
    "inputs contain no images": ("evolla",),
    NO_RULE: ("apertus1p5", "dots3_note"),
}  # fmt: skip
REST = {name: phrase for phrase, names in OTHERS.items() for name in names}


def classes():
    """Return the class of every type of image-text-to-text and multimodal models."""
    auto = transformers.models.auto.modeling_auto
    named = dict(getattr(auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}))
    named |= dict(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return {kind: cls if isinstance(cls, str) else cls[0] for kind, cls in named.items()}


def built(kind):
    """Return a model of a type from its default configuration, on the meta device, with few layers."""
    if kind not in classes():
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    try:
        config = transformers.AutoConfig.for_model(kind)
        for part in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
            for name in ("num_hidden_layers", "encoder_layers", "decoder_layers", "depth"):
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, 2)
            if getattr(part, "layer_types", None):
                part.layer_types = part.layer_types[:2]
        with torch.device("meta"):
            return getattr(transformers, classes()[kind])(config)
    except (AttributeError, KeyError, TypeError) as error:
        pytest.skip(f"{kind} cannot be built from a default configuration: {error}")


@pytest.mark.parametrize("kind", SAMPLE)
def test_reasons_are_true_for_the_model(kind):
    if kind == "qwen2_5_omni":
        needs("5.21", "the language model inside is not supported")
    with pytest.raises(UnsupportedHost, match=SAMPLE[kind]) as refused:
        vispe.convert(built(kind), "vrope")
    assert f"({kind}) does not support the position scheme vrope" in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", REST)
def test_reasons_for_all_other_types(kind):
    with pytest.raises(UnsupportedHost, match=REST[kind]):
        vispe.convert(built(kind), "vrope")


@pytest.mark.slow
def test_every_type_is_in_a_table():
    """A new type of transformers needs a reviewed message."""
    if transformers.__version__ < "5.24":
        pytest.skip("the table is that of 5.24")
    unbuilt = {
        "chameleon", "cohere_compass", "diffusion_gemma", "emu3", "qwen3_omni_moe",
    }  # fmt: skip
    assert set(classes()) - {*SAMPLE, *REST, *FAMILIES} <= unbuilt


def test_an_unknown_type():
    model = make("llava")
    model.config.model_type = model.model.config.model_type = "llava_from_tomorrow"
    unknown = r"image sizes of this model type are unknown to vispe \(its language model is `model\.language_model`\)"
    with pytest.raises(UnsupportedHost, match=rf"{unknown}\. Add the model type to vispe \(CONTRIBUTING\.md"):
        vispe.convert(model, "vrope")


def test_a_language_model_under_another_name():
    model = make("llava")
    model.model.decoder = model.model.language_model
    del model.model.language_model
    with pytest.raises(
        UnsupportedHost,
        match=r"must be the attribute `language_model` or `text_model`, got `model\.decoder`\. Use",
    ):
        vispe.convert(model, "vrope")


def test_squares_of_the_configured_size_need_no_name_of_the_vision_tower():
    model, ids = make("llava"), torch.tensor([[5] + [IMAGE] * SIDE**2 + [6]])
    model.config.model_type = model.model.config.model_type = "vipllava"  # its rule is SQUARES
    types = (ids == IMAGE).long()
    call = CallTokens(model.model, types, ids > 0, torch.zeros_like(ids), {})
    model.model.image_encoder = model.model.vision_tower
    del model.model.vision_tower
    assert FAMILIES["vipllava"].images.blocks(call).images.tolist() == [[1, SIDE, SIDE]]


def test_parts_of_a_vision_language_model():
    model = make("qwen3_vl")
    with pytest.raises(
        UnsupportedHost, match=r"inputs contain no images.*call vispe\.convert with the complete model"
    ):
        vispe.convert(model.model.language_model, "vrope")
    with pytest.raises(UnsupportedHost, match=r"vision model without a language model.*Use an encoding"):
        vispe.convert(model.model.visual, "vrope")


def test_a_vision_model_of_another_library():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    with pytest.raises(
        UnsupportedHost, match=r"VisionTransformer does not support the position scheme vrope.*encoding"
    ):
        vispe.convert(model, "vrope")


class Reward(nn.Module):
    """Custom head around a vision-language model."""

    def __init__(self, model):
        super().__init__()
        self.backbone = model


def test_a_module_around_the_model():
    with pytest.raises(
        UnsupportedHost, match=r"supports position schemes: vispe\.convert\(model\.backbone, \.\.\.\)"
    ):
        vispe.convert(Reward(make("llava")), "vrope")


def test_adapters_around_the_model():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(make("llava"), peft.LoraConfig(target_modules=["q_proj"]))
    for function in (vispe.convert, vispe.restore):
        with pytest.raises(UnsupportedHost, match=rf"vispe\.{function.__name__} .*model\.get_base_model\(\)"):
            function(adapted, *(["vrope"] if function is vispe.convert else []))
    vispe.convert(adapted.get_base_model(), "vrope")
    assert "vrope in 2 decoder layers" in vispe.describe(adapted)
    assert "vrope in 2 decoder layers" in vispe.describe(nn.DataParallel(adapted))
    vispe.restore(adapted.get_base_model())
    assert "its own position scheme" in vispe.describe(adapted)
