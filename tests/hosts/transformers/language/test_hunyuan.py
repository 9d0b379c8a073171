"""HunyuanVL with its own scheme and others: batches with padding, decoding, layouts, and rejected inputs."""

import copy
import functools
import warnings

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.more import PATCH, text_part, vision_part
from tests.hosts.transformers.tiny import IMAGE, PAD, WORDS, needs, transformers
from tests.products import partly
from vispe.errors import InputError, UnsupportedCombination, UnsupportedHost
from vispe.hosts.transformers.serving import serve_positions
from vispe.multimodal import Stream, create_scheme, newline_images

if not hasattr(transformers, "HunYuanVLConfig"):
    pytest.skip("this transformers has no HunYuan-VL", allow_module_level=True)

OWN = "xdrope(layout=elementwise,image_index=batch)"
FOUR, THREE = (5, 4, 4, 3), (6, 5, 5)
SIZES = {"small": (4, 4), "wide": (4, 10), "tall": (8, 4)}


@functools.cache
def stock(sections=FOUR, alpha=None):
    """Return a random model, shared by all tests and never modified."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": list(sections or ()) or None}
    if alpha is not None:
        rope |= {"rope_type": "dynamic", "factor": 1.0, "alpha": alpha}
    config = transformers.HunYuanVLConfig(
        text_config=text_part("hunyuan_vl") | {"rope_parameters": rope},
        vision_config=vision_part("hunyuan_vl"),
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    model = transformers.HunYuanVLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.15 * torch.randn_like(weight))
        model.lm_head.weight[WORDS:] = 0
        model.lm_head.weight[PAD] = 0
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
    return model


def converted(spec=OWN, sections=FOUR, alpha=None, **options):
    model = copy.deepcopy(stock(sections, alpha))
    model.model.rope_deltas = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # schemes that change text warn
        return vispe.convert(model, spec, **options)


def batch(*rows, padding="left", seed=0):
    """Return inputs; each row has numbers of words and names of images."""
    generator = torch.Generator().manual_seed(seed)
    tokens, grids = [], []
    for row in rows:
        ids = []
        for item in row:
            if isinstance(item, int):
                ids += torch.randint(1, WORDS, (item,), generator=generator).tolist()
                continue
            h, w = SIZES[item]
            grids.append([1, h, w])
            ids += [IMAGE] * ((h // 2) * (w // 2 + 1) + 2)
        tokens.append(ids)
    longest = max(map(len, tokens))
    ids, mask = torch.full((len(rows), longest), PAD), torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(tokens):
        where = slice(longest - len(row), longest) if padding == "left" else slice(0, len(row))
        ids[number, where], mask[number, where] = torch.tensor(row), 1
    inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE).long()}
    if grids:
        patches = sum(h * w for _, h, w in grids)
        inputs["pixel_values"] = torch.randn(patches, 3 * PATCH**2, generator=generator)
        inputs["image_grid_thw"] = torch.tensor(grids)
    return inputs


BATCHES = {
    "text": [[5], [5]],
    "one image": [[3, "wide", 4]],
    "several images": [[2, "small", 1, "wide", 3, "tall", 2]],
    "mixed": [[7], [3, "small", 4, "tall", 1], [1, "wide", 2], ["small", 1]],
    "an image at the end": [[4, "small"], [1, "tall"]],
    "more images than tokens": [[1, "small", 1, "small", 1, "small"] * 6, [2, "small", 1]],
}


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


@cases("padding", ["left", "right"])
@cases("rows", BATCHES)
def test_logits_of_its_own_scheme_equal_stock(rows, padding):
    inputs = batch(*BATCHES[rows], padding=padding)
    mask = inputs["attention_mask"].bool()
    expected = logits(copy.deepcopy(stock()), inputs)
    assert torch.equal(logits(converted(), inputs)[mask], expected[mask])


@pytest.mark.slow
@pytest.mark.parametrize("rows", BATCHES)
def test_generation_with_its_own_scheme_equals_stock(rows):
    inputs = batch(*BATCHES[rows])
    settings = {
        "max_new_tokens": 5,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    actual, expected = (m.generate(**inputs, **settings) for m in (converted(), copy.deepcopy(stock())))
    assert torch.equal(actual.sequences, expected.sequences)
    for ours, theirs in zip(actual.logits, expected.logits, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "alpha"), [(THREE, None), (THREE, 50.0), (FOUR, 50.0), ((2, 0, 6, 8), None)]
)
def test_sections_and_stretched_frequencies(sections, alpha):
    if alpha:
        needs("5.20", "frequencies stretched by alpha have the rope_type dynamic")
    inputs = batch(*BATCHES["mixed"])
    mask = inputs["attention_mask"].bool()
    expected = logits(copy.deepcopy(stock(sections, alpha)), inputs)
    model = converted(OWN, sections, alpha)
    assert model.model.vispe_scheme.sections == sections
    assert torch.equal(logits(model, inputs)[mask], expected[mask])
    tokens = (
        m.generate(**inputs, max_new_tokens=4, do_sample=False) for m in (model, stock(sections, alpha))
    )
    assert torch.equal(*tokens)


@partly(1)
@cases("spec", [OWN, "xdrope", "vrope"])
def test_saved_and_loaded(spec, tmp_path):
    inputs, model = batch(*BATCHES["mixed"]), converted(spec)
    expected = logits(model, inputs)
    with pytest.warns(UserWarning, match="is saved with the position scheme"):
        model.save_pretrained(tmp_path)
    loaded = vispe.from_pretrained(transformers.HunYuanVLForConditionalGeneration, tmp_path).eval()
    assert loaded.model.vispe_scheme == model.model.vispe_scheme
    assert torch.equal(logits(loaded, inputs), expected)


@cases("spec", [OWN, "xdrope", "xdrope(image_index=batch)", "mrope_i"])
def test_decoding_with_a_cache_equals_the_full_pass(spec):
    inputs, model = batch(*BATCHES["mixed"]), converted(spec)
    tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    more = tokens.shape[1] - inputs["input_ids"].shape[1] - 1
    longer = inputs | {"input_ids": tokens[:, :-1]}
    for name, fill in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        longer[name] = torch.cat([inputs[name], torch.full((len(tokens), more), fill)], 1)
    assert torch.equal(logits(model, longer)[:, -more - 1 :].argmax(-1), tokens[:, -more - 1 :])


def test_layouts_differ_in_images_only():
    text, image = batch([9]), batch([2, "wide", 3])
    assert torch.equal(logits(converted("xdrope"), text), logits(converted(), text))
    before = logits(converted("xdrope"), image), logits(converted(), image)
    assert torch.equal(before[0][:, :3], before[1][:, :3])  # two words and the first token of the image
    assert not torch.allclose(*before, atol=1e-3)


def test_paired_sections_equal_the_rotation_of_the_coordinates():
    inputs, model, recorded = batch([2, "wide", 3], [1, "small"]), converted("xdrope"), []
    layer = model.model.language_model.layers[-1]
    layer.register_forward_pre_hook(
        lambda _, __, kw: recorded.append(kw["position_embeddings"]), with_kwargs=True
    )
    layer.self_attn.register_forward_pre_hook(
        lambda _, __, kw: recorded.append(kw["position_embeddings"]), with_kwargs=True
    )
    logits(model, inputs)
    types, images = newline_images(
        inputs["mm_token_type_ids"], inputs["image_grid_thw"], mask=inputs["attention_mask"]
    )
    ids = (
        create_scheme("xdrope").coordinates(Stream.from_ids(types, images, mask=inputs["attention_mask"])).ids
    )
    axes = [axis for axis, section in enumerate(FOUR) for _ in range(section)]
    angle = torch.stack([ids[axis] * 100.0 ** (-pair / 16) for pair, axis in enumerate(axes)], -1).tile(2)
    for actual, expected in zip(recorded[-1], (angle.cos(), angle.sin()), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)


def test_samples_of_a_batch_are_independent_by_default():
    rows = [[2, "small", 3], [1, "wide", 4]]
    for spec, equal in (("xdrope", True), (OWN, False)):
        model, both = converted(spec), batch(*rows)
        second = {n: v[1:] for n, v in both.items() if n != "pixel_values"}
        second["pixel_values"] = both["pixel_values"][16:]
        valid = second["attention_mask"][0].bool()
        pair = logits(model, both)[1, valid], logits(model, second)[0, valid]
        assert torch.allclose(*pair, atol=1e-5) == equal


def test_ids_of_stock_are_accepted_by_its_scheme_only():
    inputs = batch(*BATCHES["mixed"])
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
    ids, _ = stock().model.get_rope_index(**{name: inputs[name] for name in names})
    mask = inputs["attention_mask"].bool()
    expected = logits(copy.deepcopy(stock()), inputs)
    model = converted()
    assert torch.equal(logits(model, inputs | {"position_ids": ids})[mask], expected[mask])
    ours, delta = model.model.get_rope_index(**{name: inputs[name] for name in names})
    assert ours.dtype == ids.dtype
    assert torch.equal(ours, ids)
    assert not delta.any()
    for spec in ("vrope", "mrope_i", "xdrope"):
        with pytest.raises(InputError, match="got those of the stock model"):
            converted(spec)(**inputs, position_ids=ids)


def test_adjacent_images():
    """Stock rejects images without a token between them, which its processor does not write."""
    inputs = batch([2, "small", "wide", 3])
    with pytest.raises(ValueError, match="span length does not match"):
        logits(copy.deepcopy(stock()), inputs)
    assert logits(converted("xdrope"), inputs).isfinite().all()


def test_unsupported_inputs():
    for options in ({"late_rotation": True}, {"parallel": "pine"}, {"self_extend": (2, 8)}):
        with pytest.raises(UnsupportedHost, match="normalised before their rotation, got HunYuanVLTextModel"):
            converted("mrope_i", **options)
    with pytest.raises(UnsupportedHost, match="got mrope_section=None in HunYuanVLRotaryEmbedding"):
        converted("vrope", sections=None)
    with pytest.raises(UnsupportedHost, match="got hunyuan_vl, whose positions they compute themselves"):
        serve_positions(converted())
    inputs = batch([2, "small", 3])
    inputs["input_ids"][0, 4] = 7
    with pytest.raises(InputError, match=r"Sample 0, token 2 .*: 2 adjacent image placeholders"):
        logits(converted(), inputs)


def test_an_axis_for_each_channel_is_refused_by_other_layouts():
    from tests.hosts.transformers.more import stock as other
    from tests.hosts.transformers.tiny import make

    with pytest.raises(UnsupportedHost, match="has an axis for each channel, which needs heads"):
        vispe.convert(copy.deepcopy(other("glm4v")), "xdrope(layout=elementwise)")
    with pytest.raises(UnsupportedCombination, match="late_rotation needs an axis for each pair"):
        vispe.convert(make("qwen2_vl"), "xdrope(layout=elementwise)", late_rotation=True)


def test_described_by_the_names_of_the_axes():
    assert "axis of each pair of channels, from the highest frequency: sequence" in vispe.describe(
        converted("xdrope")
    )
    assert vispe.describe(converted(OWN)).count("column") == 8
    assert "axis of each channel: sequence" in vispe.describe(converted(OWN))
