"""Families defined by one table entry: bit-equal to stock with their own scheme, explicit rotation with another."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

import vispe
from tests.cases import cases
from tests.hosts.transformers.more import (
    CLASSES,
    GRIDS,
    KINDS,
    LACKING,
    NEWLINES,
    PACKED,
    SIDES,
    SIZED,
    SLIDING,
    class_of,
    copy_of,
    prompt,
    stock,
)
from tests.hosts.transformers.newer import TINY
from tests.hosts.transformers.tiny import CLASSES as FIRST
from tests.hosts.transformers.tiny import IMAGE, PAD, START, needs, transformers
from tests.products import partly
from vispe.errors import InputError, MissingExtra, UnsupportedHost
from vispe.hosts.transformers.language.families import FAMILIES, family_of, language_model_of
from vispe.hosts.transformers.language.rotary_detection import rotary_of
from vispe.hosts.transformers.version import CHUNKED_IMAGES
from vispe.multimodal import Stream, list_schemes

every = cases("family", CLASSES)
EARLY = (*SLIDING, *NEWLINES, *(family for family, tiny in TINY.items() if not tiny.late))
NOT_LATE = r"sliding window|normalises them after|latent attention|indexers select"


def converted(family, spec, **options):
    model = copy_of(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of schemes that are not text-exact
        return vispe.convert(model, spec, **options)


def own_of(family):
    config = stock(family).model.config
    return family_of(config).own(config)


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


def padded(inputs, count=3, side="left"):
    """Return the same prompt with padding."""
    types = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids")
    fills = {"input_ids": PAD, "attention_mask": 0} | dict.fromkeys(types, 0)
    padding = {
        n: torch.cat([inputs[n].new_full((1, count), fill), inputs[n]][:: 1 if side == "left" else -1], 1)
        for n, fill in fills.items()
        if n in inputs
    }
    return inputs | padding


def with_one_image(family):
    """Return the prompt up to its second image, for families whose inputs list images one after the other."""
    inputs = dict(prompt(family).inputs)
    ids, pixels = inputs["input_ids"], inputs.get("pixel_values")
    second = int((ids[0] == START).nonzero()[1, 0])
    for name, value in inputs.items():
        if name == "pixel_values_local":  # all are of the first image
            continue
        if value is not pixels and tuple(value.shape if torch.is_tensor(value) else ()) == tuple(ids.shape):
            inputs[name] = value[:, :second]
        elif value is pixels and "target_sizes" in inputs:
            inputs[name] = value[..., : value.shape[-1] // 2]
        elif value is pixels and "image_grid_thw" in inputs:
            inputs[name] = value[: int(inputs["image_grid_thw"][0].prod())]
        else:
            many = torch.is_tensor(value) and value.shape[:2] == (1, 2) and value.ndim > 1
            inputs[name] = value[:, :1] if many else value[:1]
    return inputs


def test_every_family_of_the_table_is_tested():
    same_class = {"glmga": "glm46v", "pp_chart2table": "got_ocr2"}  # another name for a class that is tested
    assert set(FAMILIES) == {*FIRST, *CLASSES, *same_class, *LACKING}
    for name, equivalent in same_class.items():
        assert (NAMES[name], FAMILIES[name]) == (NAMES[equivalent], FAMILIES[equivalent])


@every
def test_the_scheme_of_the_stock_model_is_exact(family):
    inputs = prompt(family).inputs
    model = converted(family, own_of(family))
    texts = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
    for sample in (inputs, texts):
        assert torch.equal(logits(model, sample), logits(stock(family), sample))


@partly(10)
@every
def test_the_scheme_of_the_stock_model_with_padding_and_in_generation(family):
    inputs = prompt(family).inputs
    model = converted(family, own_of(family))
    behind = padded(inputs)
    keys = (behind["attention_mask"].cumsum(1) - 1).clamp(min=0)
    keys = keys + FAMILIES[family].first
    ids = {} if family in GRIDS else {"position_ids": keys}  # without them the other families count padding
    actual, expected = logits(model, behind), logits(stock(family), behind | ids)
    torch.testing.assert_close(actual[:, 3:], expected[:, 3:], rtol=0, atol=0)
    ahead = padded(inputs, side="right")
    keys = ahead["attention_mask"].cumsum(1) - 1 + FAMILIES[family].first
    ids = {} if family in GRIDS else {"position_ids": keys}
    actual, expected = logits(model, ahead), logits(stock(family), ahead | ids)
    # positions of padding decide its experts, so rows of their products, whose rounding depends on the CPU, change
    experts = any("experts" in name for name, _ in stock(family).named_modules())
    atol = 1e-5 if experts else 0
    torch.testing.assert_close(actual[:, :-3], expected[:, :-3], rtol=0, atol=atol)
    tokens = (
        m.generate(**behind, max_new_tokens=4, do_sample=False) for m in (model, copy.deepcopy(stock(family)))
    )
    assert torch.equal(*tokens)


@cases("family", list(TINY))
def test_one_image(family):
    inputs = with_one_image(family)
    assert torch.equal(logits(converted(family, own_of(family)), inputs), logits(stock(family), inputs))


@pytest.mark.slow
# whose images are listed by row
@pytest.mark.parametrize("family", [f for f in TINY if f not in ("idefics2", "granite_docling")])
def test_a_batch_with_text_and_beams(family):
    inputs = dict(prompt(family).inputs)
    text = {"input_ids": [PAD, PAD, 5, 6, 7, 8], "attention_mask": [0, 0, 1, 1, 1, 1]}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            row = torch.zeros_like(inputs[name])
            row[0, -6:] = torch.tensor(text.get(name, [0] * 6))
            inputs[name] = torch.cat([row, inputs[name]])
    valid = inputs["attention_mask"].bool()
    keys = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0) + FAMILIES[family].first
    ids = {} if family in GRIDS else {"position_ids": keys}
    model, before = converted(family, own_of(family)), copy_of(family)
    assert torch.equal(logits(model, inputs)[valid], logits(before, inputs | ids)[valid])
    tokens = (m.generate(**inputs, max_new_tokens=3, num_beams=2, do_sample=False) for m in (model, before))
    assert torch.equal(*tokens)


FILMED = [f for f in GRIDS if f not in ("paddleocr_vl", *NEWLINES, *TINY)]


@cases("family", [*FILMED, *(f for f, tiny in TINY.items() if tiny.videos)])  # which read images alone
def test_positions_of_videos_equal_stock(family):
    inputs = prompt(family, video=True).inputs
    assert torch.equal(logits(converted(family, own_of(family)), inputs), logits(stock(family), inputs))


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f, tiny in TINY.items() if tiny.videos])
def test_videos_have_the_coordinates_of_their_blocks(family):
    sample, model = prompt(family, video=True), converted(family, "vrope")
    ids = model.model.vispe_scheme.coordinates(Stream.of([sample.segments])).ids
    by_hand = sample.inputs | {"position_ids": ids}
    torch.testing.assert_close(logits(model, by_hand), logits(model, sample.inputs), rtol=1e-5, atol=1e-5)


@partly(0.25)
@cases("family", [f for f in CLASSES if f not in KINDS])
@cases("spec", ["vrope", "mrope_i"])
def test_layers_receive_the_angles_of_the_coordinates(family, spec):
    sample, model = prompt(family), converted(family, spec)
    recorded = []
    layer = language_model_of(model.model).layers[-1]
    hook = layer.register_forward_pre_hook(
        lambda _, __, kw: recorded.append(kw["vispe_rotation"]), with_kwargs=True
    )
    changed = logits(model, sample.inputs)
    hook.remove()
    config = language_model_of(model.model).config
    rope, width = config.rope_parameters, getattr(config, "head_dim", None) or config.hidden_size // 2
    rotated = int(width * rope.get("partial_rotary_factor", 1.0))
    rates = rope["rope_theta"] ** (-torch.arange(0, rotated, 2).double() / rotated)
    learned = getattr(language_model_of(model.model).rotary_emb, "alpha", torch.zeros(1))
    rates = rates * learned.detach().double().exp()
    scheme = model.model.vispe_scheme
    ids = scheme.coordinates(Stream.of([sample.segments])).ids
    first = FAMILIES[family].first
    angle = torch.stack(
        [
            (ids[axis, 0] + first) * rate
            for axis, rate in zip(scheme.allocation(rotated // 2).tolist(), rates, strict=True)
        ],
        -1,
    )
    neighbours = family.startswith(("glm", "ernie", "aya", "cohere")) and family != "glm4v_moe"
    angle = angle.repeat_interleave(2, -1) if neighbours else torch.cat([angle, angle], -1)
    rotation = recorded[0][layer.vispe_kind] if isinstance(recorded[0], dict) else recorded[0]
    for actual, expected in zip(rotation, (angle.cos(), angle.sin()), strict=True):
        # frequencies of the models are float32
        atol = 1e-5 * max(1.0, float(angle.max()) / 90)
        torch.testing.assert_close(actual[0].double(), expected, rtol=0, atol=atol)
    same = own_of(family).name in (scheme.name, f"t{scheme.name}")  # tmrope differs in videos only
    assert same == torch.equal(changed, logits(stock(family), sample.inputs))
    by_hand = sample.inputs | {"position_ids": ids}
    torch.testing.assert_close(logits(model, by_hand), changed, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        f
        for f in CLASSES  # got_ocr2 mixes neighbours
        if f not in (*GRIDS, *SIZED, *PACKED, "got_ocr2", "gemma3n") and (f not in TINY or TINY[f].square)
    ],
)
def test_tokens_of_square_images_are_in_raster_order(family):
    sample, model, recorded = prompt(family).inputs, stock(family), []
    hook = (
        language_model_of(model.model)
        .layers[0]
        .register_forward_pre_hook(
            lambda _, args, kw: recorded.append(args[0] if args else kw["hidden_states"]), with_kwargs=True
        )
    )
    placeholders = sample["input_ids"][0] == IMAGE
    pixels, side = sample["pixel_values"], SIDES.get(family, 3)
    step, changed = pixels.shape[-1] // side, []
    logits(model, sample)
    for row in range(side):
        for column in range(side):
            other = pixels.clone()
            part = (
                (other[0, 0] if other.ndim == 5 else other[0]).unfold(-2, step, step).unfold(-2, step, step)
            )
            part[:, row, column] += 3 * torch.randn_like(part[:, row, column])
            logits(model, sample | {"pixel_values": other})
            moved = (recorded[-1] - recorded[0])[0].norm(dim=-1)[placeholders]
            changed.append(int(moved[: side**2].argmax()))  # of the first tile
    hook.remove()
    assert changed == list(range(side**2))


@partly(15)
@every
def test_generation_with_a_cache_equals_the_full_pass(family):
    if family == "mistral_large4":
        needs("5.24", "logits of the stock model change with the cache")
    inputs, model = prompt(family).inputs, converted(family, "vrope")
    tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    count = tokens.shape[1] - inputs["input_ids"].shape[1]
    longer = dict(inputs, input_ids=tokens[:, :-1])
    fills = {"attention_mask": 1, "mm_token_type_ids": 0, "moe_mm_token_type_ids": 0, "token_type_ids": 1}
    for name, fill in fills.items():
        if name in longer:
            longer[name] = torch.cat([longer[name], longer[name].new_full((1, count - 1), fill)], 1)
    assert torch.equal(logits(model, longer)[:, -count:].argmax(-1), tokens[:, -count:])


@cases("family", [f for f in ("exaone4_5", "hyperclovax_vision_v2") if f in CLASSES])
def test_padded_prompts_in_chunks_where_the_host_passes_no_position_ids(family):
    needs(CHUNKED_IMAGES, "images of prompts in chunks are refused")
    model, inputs = converted(family, "vrope"), padded(prompt(family).inputs)
    settings = {
        "max_new_tokens": 2,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    actual, expected = (model.generate(**inputs, **settings, prefill_chunk_size=n) for n in (5, None))
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-4)


@partly(10)
@every
def test_late_rotation_equals_early_rotation(family):
    if family in EARLY:
        with pytest.raises(UnsupportedHost, match=NOT_LATE):
            converted(family, "vrope", late_rotation=True)
        return
    inputs = prompt(family).inputs
    actual, expected = (
        logits(converted(family, "vrope", late_rotation=late), inputs) for late in (True, False)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", CLASSES)
@cases("scheme", list_schemes())
def test_every_family_supports_every_scheme(family, scheme):
    spec = "mhrope(sections=[0,0,1])" if scheme == "mhrope" else scheme  # the models have one key head
    if scheme == own_of(family).name == "xdrope":  # its default layout is that of the first checkpoints
        spec = own_of(family)
    if scheme == "mhrope" and family in EARLY:
        with pytest.raises(UnsupportedHost, match=NOT_LATE):
            converted(family, spec)
        return
    sample, model = prompt(family), converted(family, spec)
    actual, before = logits(model, sample.inputs), logits(stock(family), sample.inputs)
    assert actual.isfinite().all()
    other = ("vrope", "videorope", "hope_vlm", "circlerope", "mousi", "mmrope", "omnirope")
    assert not (scheme in other and torch.equal(actual, before))
    assert torch.equal(actual, before) or scheme != own_of(family).name


@partly(2)
@cases("family", [f for f in CLASSES if f not in TINY or TINY[f].saved])
def test_loaded_in_half_precision(family, tmp_path):
    """During loading, and thus conversion, the default dtype is that of the model."""
    kind = class_of(family)
    copy.deepcopy(stock(family)).save_pretrained(tmp_path)
    direct = vispe.convert(kind.from_pretrained(tmp_path, dtype=torch.bfloat16), own_of(family))
    with pytest.warns(UserWarning, match="is saved with the position scheme"):
        direct.save_pretrained(tmp_path / "own")
    loaded = vispe.from_pretrained(kind, tmp_path / "own", dtype=torch.bfloat16).eval()
    inputs = prompt(family).inputs
    sample = {
        n: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in inputs.items()
    }
    expected = logits(kind.from_pretrained(tmp_path, dtype=torch.bfloat16).eval(), sample)
    assert torch.equal(logits(loaded, sample), expected)


@partly(4)
@cases("family", [f for f in CLASSES if f not in TINY or TINY[f].saved])
def test_restored_and_saved(family, tmp_path):
    inputs, model = prompt(family).inputs, converted(family, "vrope")
    expected = logits(model, inputs)
    with pytest.warns(UserWarning, match="is saved with the position scheme vrope"):
        model.save_pretrained(tmp_path)
    reloaded = vispe.from_pretrained(class_of(family), tmp_path).eval()
    assert torch.equal(logits(reloaded, inputs), expected)
    vispe.restore(model)
    assert torch.equal(logits(model, inputs), logits(stock(family), inputs))


@cases(
    ("family", "sections", "options"),
    [
        ("glm4v_moe", [5, 3], {"sections": (5, 3, 0)}),
        ("qwen3_vl_moe", [4, 4, 8], {"sections": (4, 4, 8), "clip": True}),
    ],
)
def test_sections_that_fit_only_the_layer_itself(family, sections, options):
    """Configurations of transformers' tests: axes without rotation, or sections with more pairs than are rotated."""
    config = copy.deepcopy(stock(family).config)
    config.text_config.rope_parameters["mrope_section"] = sections
    torch.manual_seed(1)
    model = type(stock(family))(config).eval()
    inputs = prompt(family).inputs
    expected = logits(model, inputs)
    model.model.rope_deltas = None
    vispe.convert(model, own_of(family))
    assert options.items() <= model.model.vispe_scheme.options().items()
    assert torch.equal(logits(model, inputs), expected)


@cases("family", ["glm4v", "qwen3_5"])
def test_custom_logits_need_full_rotation_in_halves(family):
    with pytest.raises(
        UnsupportedHost, match=r"parallel needs heads whose channels are all rotated .* 16 of 32 channels"
    ):
        converted(family, "mrope_i", parallel="pine")


@pytest.mark.filterwarnings("ignore:`pixel_values_images` is deprecated")
def test_images_by_the_other_name_of_video_llava():
    sample, model = prompt("video_llava"), converted("video_llava", "vrope")
    pixels = sample.inputs.pop("pixel_values", None)
    expected = logits(model, sample.inputs | {"pixel_values": pixels}) if pixels is not None else None
    actual = logits(model, {"pixel_values_images": pixels} | sample.inputs)
    assert expected is None or torch.equal(actual, expected)


def test_the_error_names_the_version_of_a_newer_family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "mistral3", replace(FAMILIES["mistral3"], since="99.0.0"))
    with pytest.raises(MissingExtra, match=r"scheme in mistral3 needs transformers 99\.0\.0 or later, got"):
        converted("mistral3", "vrope")


def test_tiles_are_rejected_if_the_inputs_define_them():
    with pytest.raises(InputError, match="tile_grids is not supported by idefics3"):
        converted("idefics3", "vrope")(**prompt("idefics3").inputs, tile_grids=torch.tensor([[1, 1]]))


def test_tiles_are_not_guessed_from_the_size_of_images():
    """36 tokens may be one square or four."""
    inputs = {n: v for n, v in prompt("aya_vision").inputs.items() if n != "pixel_values"}
    recorded = stock("aya_vision").model.get_image_features(prompt("aya_vision").inputs["pixel_values"])
    encoded = {"mm_encoder_outputs": {"image": recorded}}
    with pytest.raises(InputError, match="mm_encoder_outputs needs pixel_values"):
        converted("aya_vision", "vrope")(**inputs, **encoded)


def test_rounded_frequencies_are_recognised(monkeypatch):
    model = copy.deepcopy(stock("ernie4_5_vl_moe"))
    kind = type(language_model_of(model.model).rotary_emb)
    rotated = kind.forward
    expected = rotary_of(language_model_of(model.model))

    def rough(self, x, position_ids):
        return tuple(t.bfloat16().float() for t in rotated(self, x, position_ids))

    monkeypatch.setattr(kind, "forward", rough)
    assert rotary_of(language_model_of(model.model)) == expected
    assert not expected.is_ordered


def test_conversion_while_another_dtype_is_the_default():
    """As inside from_pretrained(dtype=...)."""
    model = copy.deepcopy(stock("mistral3"))
    torch.set_default_dtype(torch.float16)
    try:
        vispe.convert(model, "rope1d")
    finally:
        torch.set_default_dtype(torch.float32)
    inputs = prompt("mistral3").inputs
    assert torch.equal(logits(model, inputs), logits(stock("mistral3"), inputs))


def test_placeholders_that_are_not_squares():
    inputs = prompt("idefics3").inputs
    with pytest.raises(InputError, match="must form equal squares, one per tile, got 14 placeholders"):
        converted("idefics3", "vrope")(
            **inputs | {n: inputs[n][:, :-7] for n in ("input_ids", "attention_mask")}
        )


REASONS = {
    "mllama": "the input of cross-attention layers",
    "florence2": "an encoder and a decoder",
    "blip-2": "position schemes need a rotary embedding .* got a OPTForCausalLM without",
    "fuyu": "its calls do not contain the sizes of images",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", REASONS)
def test_errors_name_missing_inputs(family):
    config = transformers.CONFIG_MAPPING[family]()
    for section in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
        for name in ("num_hidden_layers", "encoder_layers", "decoder_layers"):
            if isinstance(getattr(section, name, None), int):
                setattr(section, name, 2)
        if getattr(section, "layer_types", None):
            section.layer_types = section.layer_types[:2]
    with torch.device("meta"):
        model = getattr(transformers, NAMES[family])(config)
    with pytest.raises(UnsupportedHost, match=REASONS[family]) as refused:
        vispe.convert(model, "mrope_i")
    assert f"({family})" in str(refused.value)
    assert "llava_next" in str(refused.value)


def test_frequencies_in_custom_order():
    rotary = language_model_of(converted("ernie4_5_vl_moe", "mrope_i").model).vispe_text.rotary[""]
    assert not rotary.is_ordered
    assert rotary.interleaved
    assert sorted(rotary.order) == list(range(16))


def test_an_unsupported_rotation_is_rejected():
    model = copy.deepcopy(stock("glm4v"))
    rotary = language_model_of(model.model).rotary_emb
    rotated = rotary.forward
    rotary.forward = lambda x, position_ids: tuple(t.square() for t in rotated(x, position_ids))
    with pytest.raises(UnsupportedHost, match="not those of its frequencies"):
        vispe.convert(model, "mrope")


@pytest.mark.parametrize(
    "family",
    [
        f if f in ("gemma3", "glm4v", "mistral3", "smolvlm") else pytest.param(f, marks=pytest.mark.slow)
        for f in CLASSES
    ],
)
def test_the_inner_model_generates_equally_or_is_rejected(family):
    """A head of the stock class may encode images first and drop their sizes, or count positions itself."""
    sample, inner = prompt(family).inputs, copy.deepcopy(stock(family))
    vispe.convert(inner.model, "videorope")
    settings = {"max_new_tokens": 2, "do_sample": False}
    try:
        actual = inner.generate(**sample, **settings)
    except InputError as error:
        actual, tokens = None, str(error)
    if actual is None:
        assert "call vispe.convert with the complete model" in tokens
    else:
        assert torch.equal(actual, converted(family, "videorope").generate(**sample, **settings))


@torch.no_grad()
def test_padding_with_linear_attention_and_a_static_cache():
    """Padding is not a packed sample, also where `generate` passes a mask for each type of layers."""
    model = converted("qwen3_5", "vrope")
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [3, 4, 5, 6, 7, 8]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long(), "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(**inputs)
    actual = model.generate(**inputs, cache_implementation="static", disable_compile=True)
    assert torch.equal(actual, expected)
