"""Answers of CLIP models and of chat models, and a chat model that cannot see the order of images."""

from types import SimpleNamespace

import open_clip
import pytest
import torch

import vispe
from tests.hosts.transformers.processors import CHAT, llava_processor
from tests.hosts.transformers.reference import copy_of
from tests.hosts.transformers.tiny import END, IMAGE, PATCH, START
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, UnsupportedHost
from vispe.evaluate.behaviour.answer_order import OrderSensitivity
from vispe.evaluate.evaluated import load_evaluated_model
from vispe.evaluate.measure.answers import ChatAnswers, ClipAnswers, _image
from vispe.evaluate.measure.audited_model import AuditedModel, as_audited_model
from vispe.evaluate.measure.base import Accumulator
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns


def clip():
    torch.manual_seed(0)
    vision = {"image_size": 32, "layers": 1, "width": 32, "patch_size": 8, "head_width": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    model = open_clip.CLIP(16, vision, text).eval()
    model.visual.image_mean, model.visual.image_std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    return model


def test_a_clip_model_compares_sentences():
    model, tokenizer = clip(), open_clip.get_tokenizer("ViT-B-32")
    sample = torch.rand(3, 32, 32)
    actual = ClipAnswers(model, tokenizer)([sample], "It is", ("red", "blue"))
    with torch.no_grad():
        mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
        image = (sample - mean[:, None, None]) / std[:, None, None]
        texts = tokenizer(["It is red", "It is blue"])
        expected = model.get_logits(image[None], texts)[0][0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    # another size is brought to that of the model
    assert ClipAnswers(model, tokenizer)([torch.rand(3, 50, 40)], "It is", ("a", "b", "c")).shape == (3,)


def test_a_clip_model_sees_one_image():
    answers = ClipAnswers(clip(), open_clip.get_tokenizer("ViT-B-32"))
    with pytest.raises(OptionError, match=r"must be a single image, got 2. Omit measures"):
        answers([torch.rand(3, 32, 32)] * 2, "It is", ("red", "blue"))
    with pytest.raises(UnsupportedHost, match="has no image and text towers"):
        ClipAnswers(torch.nn.Linear(2, 2), str)
    model = clip()
    model.visual.image_mean = None
    with pytest.raises(UnsupportedHost, match="has no image_mean and image_std"):
        ClipAnswers(model, str)


class Processor:
    """As processors of transformers are: a template, a tokenizer, and images to patches."""

    chat_template = "a template"

    def __init__(self, grid=(4, 6)):
        self.grid = grid
        self.tokenizer = lambda text, add_special_tokens: {"input_ids": [3 + len(w) for w in text.split()]}

    def apply_chat_template(self, messages, add_generation_prompt):
        assert add_generation_prompt
        assert [m["role"] for m in messages] == ["user"]
        return " ".join("<image>" if c["type"] == "image" else c["text"] for c in messages[0]["content"])

    def __call__(self, text, images, return_tensors):
        h, w = self.grid
        ids, pixels = [], []
        for word in text[0].split():
            many = [START, *[IMAGE] * (h * w // 4), END] if word == "<image>" else [3 + len(word)]
            ids += many
        for image in images[0]:
            colour = torch.tensor(image.convert("RGB").resize((1, 1)).getpixel((0, 0))).sum()
            generator = torch.Generator().manual_seed(int(colour))
            pixels.append(torch.randn(h * w, 3 * 2 * PATCH**2, generator=generator))
        ids = torch.tensor([ids])
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == IMAGE).long(),
            "pixel_values": torch.cat(pixels),
            "image_grid_thw": torch.tensor([[1, h, w]] * len(images[0])),
        }


def test_a_chat_model_returns_probabilities_of_answers():
    model, processor = copy_of("qwen2_vl"), Processor()
    samples = [torch.rand(3, 20, 20) for _ in range(2)]
    answers = ("left", "quite certainly right")
    actual = ChatAnswers(model, processor)(samples, "where is it", answers)
    for answer, value in zip(answers, actual, strict=True):
        inputs = processor(
            ["<image> <image> where is it"],
            [[_image(p) for p in samples]],
            "pt",
        )
        total = 0.0
        for token in processor.tokenizer(answer, add_special_tokens=False)[
            "input_ids"
        ]:  # one after the other
            with torch.no_grad():
                total += model(**inputs).logits[0, -1].double().log_softmax(-1)[token].item()
            one = torch.tensor([[token]])
            inputs["input_ids"] = torch.cat([inputs["input_ids"], one], 1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
        assert value.item() == pytest.approx(total, abs=1e-4)


def test_a_chat_template_is_required():
    with pytest.raises(UnsupportedHost, match="no chat template"):
        ChatAnswers(copy_of("qwen2_vl"), SimpleNamespace(chat_template=None))


def order(model):
    """The spread of answers over orders of images."""
    audited = AuditedModel(lambda x: x, "a chat model", answers=ChatAnswers(model.double(), Processor()))
    acc, measure = Accumulator(), OrderSensitivity()
    acc.begin(0)
    measure.rerun(acc, PerturbedRuns(audited, None, 0))
    return measure.summarize(acc, audited)


@pytest.mark.slow
def test_images_side_by_side_have_no_order():
    one = order(vispe.convert(copy_of("qwen2_vl"), "mrope", parallel="pine"))
    assert one.details["sd_over_orders"] < 1e-4
    assert one.details["answers_that_change"] == 0
    usual = order(vispe.convert(copy_of("qwen2_vl"), "mrope"))
    assert usual.details["sd_over_orders"] > 1e-3


def test_a_changed_copy_has_no_answers():
    import timm

    tower = timm.create_model("test_vit").eval()
    audited = AuditedModel(VisionModel(tower), "tower", answers=lambda p, q, a: torch.zeros(len(a)))
    assert "answers" in audited.can
    for changed in (audited.reinitialized(), audited.without()):
        assert "answers" not in changed.can
        assert changed.why["answers"] == "answers are not available for a modified copy of the image tower"


ANSWERS = ("left", "right")


def test_an_open_clip_model_by_name_answers(monkeypatch):
    vision = {"image_size": 32, "layers": 1, "width": 32, "patch_size": 8, "head_width": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    known = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "small", known)
    subject = load_evaluated_model("open_clip:small", weights="random", pos_embed="alibi2d", device="cpu")
    audited, sample = as_audited_model(subject), torch.rand(3, 32, 32)
    assert "answers" in audited.can
    # the tower that is measured is that of the model that answers
    assert subject.whole.visual is audited.model
    expected = ClipAnswers(subject.whole, open_clip.get_tokenizer("ViT-B-32"))
    assert torch.equal(
        audited.answers([sample], "Where is it?", ANSWERS), expected([sample], "Where is it?", ANSWERS)
    )


def test_a_tokenizer_out_of_reach_is_a_reason(monkeypatch):
    vision = {"image_size": 32, "layers": 1, "width": 32, "patch_size": 8, "head_width": 16}
    known = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": {"width": 32, "heads": 2, "layers": 1}}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "small", known)

    def unreachable(name):
        raise OSError(f"We could not connect\nto fetch {name}")

    monkeypatch.setattr(open_clip, "get_tokenizer", unreachable)
    audited = as_audited_model(load_evaluated_model("open_clip:small", weights="random", device="cpu"))
    assert "answers" not in audited.can
    assert (
        audited.why["answers"]
        == "the tokenizer of small cannot be loaded: We could not connect to fetch small"
    )


def test_a_chat_model_in_a_folder_answers(tmp_path):
    model, processor = copy_of("llava"), llava_processor()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    audited = as_audited_model(load_evaluated_model(f"hf:{tmp_path}", device="cpu"))
    assert "answers" not in audited.can
    assert "LlavaProcessor has no chat template" in audited.why["answers"]
    processor.chat_template = CHAT
    processor.save_pretrained(tmp_path)
    audited = as_audited_model(load_evaluated_model(f"hf:{tmp_path}", device="cpu"))
    assert {"answers", "maps"} <= audited.can
    samples = [torch.rand(3, 12, 12) for _ in range(2)]
    logits = audited.answers(samples, "w5 w6", ("w7", "w8 w9"))
    torch.testing.assert_close(logits, ChatAnswers(model, processor)(samples, "w5 w6", ("w7", "w8 w9")))
    assert logits[0] != logits[1]


def test_a_model_without_answers_reports_a_reason(tmp_path):
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(
        tmp_path
    )
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}')
    audited = as_audited_model(load_evaluated_model(f"hf:{tmp_path}", device="cpu"))
    assert audited.why["answers"] == "ViTModel has no language model head"
