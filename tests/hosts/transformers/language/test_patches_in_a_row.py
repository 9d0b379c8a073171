"""Images as sequences of patches, with their sizes or positions as inputs (Gemma 4, MiniCPM-V 4.6, Molmo 2)."""

import copy

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.language.test_more_families import converted, logits
from tests.hosts.transformers.more import BREAK, LACKING, prompt, stock, text_part
from tests.hosts.transformers.tiny import END, IMAGE, PATCH, START, VIDEO, transformers
from vispe.errors import InputError
from vispe.hosts.transformers.language.families import language_model_of
from vispe.hosts.transformers.language.positions.call import LanguageCall
from vispe.multimodal import Image, Stream, Text, Video, create_scheme

needs_molmo2 = pytest.mark.skipif("molmo2" in LACKING, reason="this transformers has no Molmo 2")


def ids_of(model, inputs):
    """Return the coordinates (axes, s) that a call of one row uses."""
    call = LanguageCall(model.model, inputs["input_ids"], None, None, None, None, dict(inputs))
    keys = torch.arange(inputs["input_ids"].shape[1])[None]
    return call.coordinates(keys, torch.ones_like(keys, dtype=torch.bool), None)[0].ids[:, 0]


def by_hand(spec, *segments):
    return create_scheme(spec).coordinates(Stream.of([segments])).ids[:, 0]


@cases(("family", "side"), [("gemma4", 2), ("minicpmv4_6", 4)])
def test_order_of_tokens(family, side):
    """The patches of one token are changed at a time; that token changes most."""
    sample, model, recorded = prompt(family).inputs, stock(family), []
    hook = language_model_of(model.model).layers[0].register_forward_pre_hook(
        lambda _, args, kw: recorded.append(args[0] if args else kw["hidden_states"]), with_kwargs=True
    )  # fmt: skip
    positions = (sample["input_ids"][0] == IMAGE).nonzero()[:6, 0]
    changed = []
    logits(model, sample)
    for row in range(2):
        for column in range(3):
            other = sample["pixel_values"].clone()
            for y in range(side * row, side * row + side):
                for x in range(side * column, side * column + side):
                    n = y * 3 * side + x  # patches of the first image, row by row
                    part = (
                        other[0, n] if family == "gemma4" else other[0, :, :, n * PATCH : n * PATCH + PATCH]
                    )
                    part += 2 * torch.randn_like(part)
            logits(model, sample | {"pixel_values": other})
            changed.append(int((recorded[-1] - recorded[0])[0].norm(dim=-1)[positions].argmax()))
    hook.remove()
    assert changed == list(range(6))


def test_minicpm_with_less_downsampling():
    inputs = dict(prompt("minicpmv4_6").inputs) | {
        "downsample_mode": "4x",
        "target_sizes": torch.tensor([[4, 6]]),
    }
    tokens = torch.tensor([[5, START, *[IMAGE] * 6, END, 7]])
    inputs |= {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    inputs["pixel_values"] = inputs["pixel_values"][..., : 24 * PATCH]
    assert torch.equal(
        logits(converted("minicpmv4_6", "rope1d"), inputs), logits(stock("minicpmv4_6"), inputs)
    )
    expected = by_hand("mrope_i", Text(2), Image(2, 3), Text(2))
    assert torch.equal(ids_of(converted("minicpmv4_6", "mrope_i"), inputs), expected)


def test_frames_of_minicpm_are_separate_blocks():
    tokens = torch.tensor([[5, START, *[VIDEO] * 6, END, START, *[VIDEO] * 6, END, 7]])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    inputs["pixel_values_videos"] = torch.randn(1, 3, PATCH, 2 * 96 * PATCH)
    inputs["target_sizes_videos"] = torch.tensor([[8, 12], [8, 12]])
    assert torch.equal(
        logits(converted("minicpmv4_6", "rope1d"), inputs), logits(stock("minicpmv4_6"), inputs)
    )
    expected = by_hand("vrope", Text(2), Video(1, 2, 3), Text(2), Video(1, 2, 3), Text(2))
    assert torch.equal(ids_of(converted("minicpmv4_6", "vrope"), inputs), expected)


def molmo(columns=(True, True), video=False):
    """Return inputs of Molmo 2; `columns`, whether rows of the small and of the full image end in a token."""
    torch.manual_seed(0)
    inputs = {"image_token_pooling": torch.randint(0, 16, (8, 4))}
    ends = [[BREAK] * c for c in columns]
    if video:
        ids = [5, START, *([IMAGE] * 2 + ends[0]) * 2, END, 6, START, *([IMAGE] * 2 + ends[0]) * 2, END, 7]
        inputs = {
            "video_token_pooling": inputs["image_token_pooling"],
            "video_grids": torch.tensor([[2, 2, 2]]),
        }
    else:
        ids = [5, START, *([IMAGE] * 2 + ends[0]), END, START, *([IMAGE] * 3 + ends[1]) * 2, END, 7]
        inputs["image_grids"] = torch.tensor([[1, 2, 2, 3]])
    tokens = torch.tensor([ids])
    inputs |= {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    inputs["pixel_values_videos" if video else "pixel_values"] = torch.rand(
        2 if video else 1, 16, 3 * PATCH**2
    )
    inputs["mm_token_type_ids"] = torch.isin(tokens, torch.tensor([IMAGE, BREAK, START, END])).long()
    return inputs


@needs_molmo2
@cases("columns", [(True, True), (False, True), (False, False)])
def test_end_of_row_tokens_of_molmo(columns):
    inputs = molmo(columns)
    assert torch.equal(logits(converted("molmo2", "rope1d"), inputs), logits(stock("molmo2"), inputs))
    low, high = columns
    # an image of one row is like the others of its call, and the token behind it then ends its row
    low_end = int(high)
    between = 2 if low or not high else 1
    expected = by_hand("vrope", Text(2), Image(1, 2 + low_end), Text(between), Image(2, 3 + high), Text(2))
    assert torch.equal(ids_of(converted("molmo2", "vrope"), inputs), expected)


@needs_molmo2
@cases("columns", [True, False])
def test_frames_of_molmo_share_the_token_of_images(columns):
    inputs = molmo((columns, columns), video=True)
    assert torch.equal(logits(converted("molmo2", "rope1d"), inputs), logits(stock("molmo2"), inputs))
    frame = Video(1, 2, 2 + columns)
    expected = by_hand("mrope_i", Text(2), frame, Text(3), frame, Text(2))
    assert torch.equal(ids_of(converted("molmo2", "mrope_i"), inputs), expected)


@needs_molmo2
def test_molmo_locates_images_by_their_embedding():
    """Its types include the markers around images."""
    inputs, model = molmo(), converted("molmo2", "vrope")
    expected = logits(model, inputs)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    sample = {n: v for n, v in inputs.items() if n != "input_ids"} | {"inputs_embeds": embeds}
    torch.testing.assert_close(logits(model, sample), expected, rtol=0, atol=0)


@needs_molmo2
def test_layers_of_molmo_with_scaled_frequencies_and_without():
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
    config = copy.deepcopy(stock("molmo2").config).to_dict()
    config["text_config"] = text_part("molmo2") | {"rope_parameters": rope, "rope_scaling_layers": [1]}
    torch.manual_seed(0)
    model = transformers.Molmo2ForConditionalGeneration(transformers.Molmo2Config(**config)).eval()
    inputs = molmo()
    before, recorded = logits(model, inputs), {}
    vispe.convert(model, "rope1d")
    assert torch.equal(logits(model, inputs), before)
    vispe.convert(model, "vrope")
    for number, layer in enumerate(language_model_of(model.model).layers):

        def keep(_, args, kwargs, number=number):
            recorded[number] = kwargs["position_embeddings"]

        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
    early = logits(model, inputs)
    ids, text = ids_of(model, inputs), language_model_of(model.model)
    for number, module in ((0, text.rotary_emb_unscaled), (1, text.rotary_emb)):
        axes = create_scheme("vrope").allocation(16)
        angle = torch.stack(
            [ids[a] * r.double() for a, r in zip(axes.tolist(), module.inv_freq, strict=True)], -1
        )
        expected = torch.cat([angle, angle], -1).cos() * module.attention_scaling
        torch.testing.assert_close(recorded[number][0][0].double(), expected, rtol=0, atol=1e-5)
    assert text.rotary_emb.attention_scaling != 1
    late = logits(vispe.convert(model, "vrope", late_rotation=True), inputs)
    torch.testing.assert_close(late, early, rtol=1e-4, atol=1e-5)


@needs_molmo2
def test_the_error_names_images_without_sizes():
    for family, name in (("molmo2", "image_grids"), ("minicpmv4_6", "target_sizes")):
        with pytest.raises(InputError, match="image placeholders exceed the image grids"):
            converted(family, "vrope")(**prompt(family).inputs | {name: None})
