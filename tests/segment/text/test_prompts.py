"""Prompts: classes, phrases, templates, background, and the text vectors computed from them."""

import numpy as np
import open_clip
import pytest
import torch

from tests.cases import cases
from tests.segment.text.common import VISION, VOCABULARY, stock, write_folder
from vispe.errors import InputError, OptionError
from vispe.segment.text.config import TextClassifier, TextConfig
from vispe.segment.text.features import encode
from vispe.segment.text.prompts import BACKGROUND, TEMPLATES, Prompts, prompts_or_none
from vispe.segment.text.weights import MODEL


def test_classes_are_named_by_their_first_phrase():
    actual = Prompts.read(["matrix", " pore / hole/ pore "])
    assert actual.names == ("matrix", "pore")
    assert actual.phrases == (("matrix",), ("pore", "hole"))
    assert actual.templates == TEMPLATES
    assert all(template.count("{}") == 1 for template in TEMPLATES)
    assert actual.sentences()[1][: len(TEMPLATES) + 1] == [
        *(t.replace("{}", "pore") for t in TEMPLATES),
        "hole",
    ]


def test_a_single_class_is_compared_with_a_background():
    actual = Prompts.read(["nuclei"])
    assert actual.names == ("nuclei", "background")
    assert actual.phrases[1] == tuple(BACKGROUND.split("/"))
    assert Prompts.read(["a", "b"]).names == ("a", "b")
    actual = Prompts.read(["a", "b"], background="empty resin/glass")
    assert actual.names == ("a", "b", "background")
    assert actual.phrases[2] == ("empty resin", "glass")


@cases(
    ("texts", "background", "message"),
    [
        ([], None, r"text needs 2 to 255 classes, got 0 \(none\)"),
        (["a"], "none", r"got 1 \(a\). Name the other classes in the image"),
        ([f"class {i}" for i in range(256)], None, "got 256"),
        (["a", "b/", "c"], None, "text='b/' has an empty phrase"),
        (["a", "b", "a/c"], None, "text names the class 'a' twice"),
        (["a", "background"], "glass", "text names the class 'background' twice"),
        (["a", "b"], "", "text='' has an empty phrase"),
    ],
)
def test_invalid_classes_raise(texts, background, message):
    with pytest.raises(OptionError, match=message):
        Prompts.read(texts, None, background)


def test_templates_are_read_from_a_list_or_a_file(tmp_path):
    file = tmp_path / "templates.txt"
    file.write_text("# for steels\n\na scanning electron micrograph of {}\n  a polished section of {}  \n")
    expected = ("a scanning electron micrograph of {}", "a polished section of {}")
    assert Prompts.read(["a", "b"], [str(file)]).templates == expected
    assert Prompts.read(["a", "b"], file).templates == expected
    assert Prompts.read(["a", "b"], expected).templates == expected
    assert Prompts.read(["a", "b"], ["{}"]).sentences() == [["a"], ["b"]]
    file.write_text("a micrograph\n")
    with pytest.raises(OptionError, match=r"the template 'a micrograph' must contain {} exactly once"):
        Prompts.read(["a", "b"], file)
    with pytest.raises(OptionError, match=r"the template '{} and {}' must contain {} exactly once"):
        Prompts.read(["a", "b"], ["{} and {}"])
    file.write_text("# nothing\n")
    with pytest.raises(OptionError, match="templates is empty"):
        Prompts.read(["a", "b"], file)
    with pytest.raises(
        InputError, match=r"templates='nowhere.txt' is neither a sentence with {} nor a readable text file"
    ):
        Prompts.read(["a", "b"], ["nowhere.txt"])
    file.write_bytes(b"\xff\xfe\xd8\x00")
    with pytest.raises(InputError, match="it is not UTF-8 text"):
        Prompts.read(["a", "b"], file)


def test_options_without_effect_raise():
    text_options = {"readout": None, "templates": None, "background": None}
    assert prompts_or_none(None, only=text_options, never={"classes": ["a"]}) is None
    assert prompts_or_none(["a", "b"], only=text_options, never={"classes": None}).names == ("a", "b")
    with pytest.raises(OptionError, match="readout='sclip' has no effect without text"):
        prompts_or_none(None, only={**text_options, "readout": "sclip"}, never={})
    with pytest.raises(OptionError, match=r"classes=\['a'\] has no effect on text"):
        prompts_or_none(["a", "b"], only=text_options, never={"classes": ["a"]})


def test_class_vectors_are_mean_sentence_embeddings(tmp_path):
    model = stock(write_folder(tmp_path, VISION, vocabulary=VOCABULARY))
    tokenizer = open_clip.get_tokenizer(f"local-dir:{tmp_path}")
    prompts = Prompts.read(["matrix", "pore/hole"], ["a micrograph of {}", "{}"])
    actual = encode(model, tokenizer, prompts)
    assert actual.kind == "text"
    assert actual.n_classes == 2
    assert actual.scale == pytest.approx(float(model.logit_scale.exp()))
    sentences = ["a micrograph of pore", "pore", "a micrograph of hole", "hole"]
    embeddings = [model.encode_text(tokenizer([text]))[0].double() for text in sentences]
    expected = torch.stack([v / v.norm() for v in embeddings]).mean(0)
    np.testing.assert_allclose(actual.vectors[1], (expected / expected.norm()).numpy(), atol=1e-6)
    with pytest.raises(
        OptionError,
        match=r"the prompt 'a micrograph of pore .*' has \d+ tokens, but the text tower supports 24",
    ):
        encode(model, tokenizer, Prompts.read(["a", " ".join(["pore"] * 22)], ["a micrograph of {}"]))  # fmt: skip


def test_probabilities_are_a_softmax_of_scaled_similarities():
    vectors = np.eye(3, 5, dtype=np.float32)
    classifier = TextClassifier(vectors, 50.0)
    similarities = np.random.default_rng(0).uniform(-1, 1, (3, 7)).astype(np.float32)
    weight = np.exp(50.0 * similarities.astype(np.float64))
    actual = classifier.planes(similarities)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, weight / weight.sum(0), atol=1e-5)
    reloaded = TextClassifier.from_tensors(classifier.tensors())
    np.testing.assert_array_equal(reloaded.planes(similarities), actual)
    assert np.isfinite(TextClassifier(vectors, 1e6).planes(similarities)).all()
    with pytest.raises(
        InputError, match=r"at least two text vectors of length 1, got \(3, 5\) of lengths 0 to 0"
    ):
        TextClassifier(np.zeros((3, 5)), 1.0)
    with pytest.raises(InputError, match="two text vectors"):
        TextClassifier(vectors[:1], 1.0)
    with pytest.raises(InputError, match="must be positive, got 0"):
        TextClassifier(vectors, 0.0)
    with pytest.raises(InputError, match=r"lacks text.scale"):
        TextClassifier.from_tensors({"text.vectors": vectors})


def test_settings_are_validated_on_construction():
    assert TextConfig().kind == "text"
    assert TextConfig().model == MODEL
    with pytest.raises(OptionError, match="tile needs an integer of 16 or more, got tile=8"):
        TextConfig(tile=8)
    with pytest.raises(OptionError, match="naclip has no option 'wide'"):
        TextConfig(readout="naclip(wide=3)")
