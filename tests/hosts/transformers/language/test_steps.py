"""Single tokens after a cache: their rotation is computed for many steps at once, bit-equal to one by one."""

import copy

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.language.test_more_families import converted as more
from tests.hosts.transformers.more import CLASSES, prompt
from tests.hosts.transformers.reference import converted, copy_of
from tests.hosts.transformers.tiny import CACHE, FAMILIES, IMAGE, QWEN, batch
from tests.products import partly
from vispe.hosts.transformers.language.converted_classes import model as converted_model
from vispe.hosts.transformers.language.converted_classes import rotations
from vispe.hosts.transformers.language.positions import position_assignment
from vispe.multimodal import alternating

LONG = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "several": {"num_beams": 3, "num_return_sequences": 2},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.fixture
def steps(monkeypatch):
    """Return the steps that took the fast path."""
    taken, step_of = [], converted_model.step_of

    def counted(*args):
        if (step := step_of(*args)) is not None:
            taken.append(step)
        return step

    monkeypatch.setattr(converted_model, "step_of", counted)
    # several tables in one short generation
    monkeypatch.setattr(rotations, "STEPS", 3)
    return taken


def both(model, inputs, steps, monkeypatch, **settings):
    """Return the output of the fast path, and of generation one token at a time."""
    actual = model.generate(**inputs, **LONG, **settings)
    assert steps
    with monkeypatch.context() as patch:
        patch.setattr(converted_model, "step_of", lambda *args: None)
        return actual, model.generate(**inputs, **LONG, **settings)


def assert_equal(actual, expected):
    assert torch.equal(actual.sequences, expected.sequences)
    assert all(map(torch.equal, actual.logits, expected.logits))


SPECS = ("v2pe(stride=4)", "tad_rope", "bilevel(rotate=both)")
SAMPLE = ("gemma3", "glm4v", "mistral3", "qwen3_5", "smolvlm")
slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "spec"), [*((f, "vrope") for f in FAMILIES), *(("qwen2_vl", s) for s in SPECS)]
)
def test_a_batch_with_padding(family, spec, steps, monkeypatch):
    sample = batch(family, [7], [3, "image", 4, "wide", 2], padding="left")
    assert_equal(*both(converted(family, spec), sample.inputs, steps, monkeypatch))
    assert len(steps) == 5


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_generation_methods(way, steps, monkeypatch):
    sample = batch("qwen2_5_vl", [4], [3, "image", 4, "wide", 2], padding="left")
    assert_equal(*both(converted("qwen2_5_vl", "vrope"), sample.inputs, steps, monkeypatch, **WAYS[way]))


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl"])
def test_assisted_generation(family, steps, monkeypatch):
    model, sample = converted(family, "vrope"), batch(family, [3, "image", 4])
    actual, expected = both(model, sample.inputs, steps, monkeypatch, assistant_model=copy.deepcopy(model))
    assert torch.equal(actual.sequences, expected.sequences)


@pytest.mark.parametrize("family", [f if f in SAMPLE else pytest.param(f, marks=slow) for f in CLASSES])
def test_all_families(family, steps, monkeypatch):
    assert_equal(*both(more(family, "vrope"), prompt(family).inputs, steps, monkeypatch))


@pytest.mark.parametrize("family", QWEN)
def test_a_loop_over_a_cache(family, steps):
    """Without position ids, with two turns, and with a cache that is cropped between them."""
    model, sample = converted(family, "vrope"), batch(family, [3, "image", 4, "wide", 2])
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        expected = model(**sample.with_tokens(tokens)).logits[:, -7:]
        recorded = model(**sample.inputs, use_cache=True)
        cache = recorded[CACHE]
        rows = [recorded.logits[:, -1:]]
        rows += [model(input_ids=tokens[:, n : n + 1], **{CACHE: cache}).logits for n in range(3)]
        cache.crop(-2)
        rows[2:] = [model(input_ids=tokens[:, n : n + 1], **{CACHE: cache}).logits for n in range(1, 4)]
        rows.append(model(input_ids=tokens[:, 4:], **{CACHE: cache}).logits)
        rows.append(model(input_ids=tokens[:, :1], **{CACHE: cache}).logits)
    torch.testing.assert_close(torch.cat(rows[:-1], 1), expected, rtol=1e-5, atol=1e-5)
    assert len(steps) == 7


def test_rotation_is_computed_once_for_many_tokens(steps, monkeypatch):
    calls = []
    rotated = rotations.rotation_of_kind
    monkeypatch.setattr(rotations, "rotation_of_kind", lambda *args: calls.append(args) or rotated(*args))
    monkeypatch.setattr(rotations, "STEPS", position_assignment.STEPS)
    sample = batch("qwen2_vl", [3, "image", 4])
    converted("qwen2_vl", "vrope").generate(**sample.inputs, max_new_tokens=20, do_sample=False)
    assert len(calls) == 2  # the prompt, then all steps


def test_a_cache_made_in_inference_mode_can_be_trained_on(steps):
    model, sample = converted("llava", "vrope"), batch("llava", [3, "image", 4])
    with torch.inference_mode():
        cache = model(**sample.inputs, use_cache=True)[CACHE]
        model(input_ids=torch.tensor([[5]]), **{CACHE: cache})
    known = cache.vispe_state.upcoming
    assert not any(t.is_inference() for pair in known.rotation.values() for t in pair)


@cases("family", ["qwen2_vl", "llava"])
@torch.no_grad()
def test_steps_with_padding_in_some_rows(family):
    """Padding is not counted, in a call of its own or in a turn in which a row has no token."""
    model, sample = converted(family, "mrope_i"), batch(family, [3, "image", 4], [6])
    second_turn = batch(family, [3], [1, "image", 2])
    tokens = torch.tensor([[5, 6, 7, 8], [0, 9, 0, 10]])
    mask = sample["attention_mask"]
    cache = model(**sample.inputs)[CACHE]
    for n in range(4):
        mask = torch.cat([mask, (tokens[:, n : n + 1] > 0).long()], 1)
        actual = model(input_ids=tokens[:, n : n + 1], attention_mask=mask, **{CACHE: cache}).logits[:, -1]
    longer = sample.with_tokens(tokens) | {"attention_mask": mask}
    torch.testing.assert_close(actual, model(**longer).logits[:, -1], rtol=1e-5, atol=1e-5)
    # a turn with an image, in which the first row has no token
    mask = torch.cat([mask, torch.zeros_like(second_turn["attention_mask"])], 1)
    mask[1, -second_turn["input_ids"].shape[1] :] = 1
    inputs = second_turn.without("attention_mask")
    model(**inputs, attention_mask=mask, **{CACHE: cache})
    mask = torch.cat([mask, torch.ones(2, 2, dtype=torch.long)], 1)
    words = torch.tensor([[11, 12], [11, 12]])
    first = model(input_ids=words, attention_mask=mask, **{CACHE: cache}).logits[:1]
    complete = sample.with_tokens(torch.tensor([[5, 6, 7, 8, 11, 12]]).expand(2, 6))
    torch.testing.assert_close(first, model(**complete).logits[:1, -2:], rtol=1e-5, atol=1e-5)


@partly(1)
@cases("image", [False, True])
@cases("length", [1, 2])
@cases("family", ["qwen2_vl", "llava"])
@torch.no_grad()
def test_rows_that_ended_before_others_in_generate(family, length, image):
    """Their further tokens are padding in the mask of the next turn, with or without `generate`."""
    model, sample = converted(family, "mrope_i"), batch(family, [3, "image", 4], [6])
    out = model.generate(**sample.inputs, **LONG)
    tokens = out.sequences[:, sample["input_ids"].shape[1] : -1]
    complete = sample.with_tokens(tokens)
    complete["attention_mask"][1, -3:] = 0
    second_turn = (
        batch(family, [1, "image", 2], [3], seed=5) if image else batch(family, [length], [length], seed=5)
    )
    more = {n: torch.cat([complete[n], second_turn[n]], 1) for n in ("input_ids", "attention_mask")}
    images = ("pixel_values", "image_grid_thw")
    more |= {
        n: torch.cat([s[n] for s in (sample, second_turn) if n in s.inputs]) for n in images if n in complete
    }
    expected = model(**more).logits[:, -1]
    inputs = {n: second_turn[n] for n in ("input_ids", *images) if n in second_turn.inputs}
    cache = copy.deepcopy(out[CACHE])
    actual = model(**inputs, attention_mask=more["attention_mask"], **{CACHE: cache}).logits[:, -1]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    # the rest of the conversation continues without a mask
    word, recorded = torch.tensor([[7], [8]]), more["attention_mask"]
    more["input_ids"] = torch.cat([more["input_ids"], word], 1)
    more["attention_mask"] = torch.cat([recorded, torch.ones_like(word)], 1)
    mask = torch.where(more["attention_mask"].bool(), 0.0, torch.finfo(torch.float32).min)[:, None, None]
    for turns in (cache, out[CACHE]):
        if turns is not cache:  # the turn itself in generate
            types = (
                {"mm_token_type_ids": (more["input_ids"][:, :-1] == IMAGE).long()} if family in QWEN else {}
            )
            inputs |= types | {"input_ids": more["input_ids"][:, :-1], "attention_mask": recorded}
            model.generate(**inputs, **{CACHE: turns}, max_new_tokens=1)
        actual = model(input_ids=word, attention_mask=mask, **{CACHE: turns}).logits[:, -1]
        torch.testing.assert_close(actual, model(**more).logits[:, -1], rtol=1e-5, atol=1e-5)


@cases("family", ["qwen2_vl", "llava"])
@torch.no_grad()
def test_padding_before_the_first_image_of_a_conversation(family):
    """Text without images counts padding, as in the stock model; from the first image on, padding is not counted."""
    model, first = converted(family, "mrope_i"), batch(family, [4], [4])
    second_turn, words = batch(family, [2, "image", 1], [3]), torch.tensor([[5, 6], [7, 8]])
    ids = torch.cat([first["input_ids"], second_turn["input_ids"], words], 1)
    mask = torch.cat([first["attention_mask"], second_turn["attention_mask"], torch.ones_like(words)], 1)
    complete = second_turn.inputs | {"input_ids": ids, "attention_mask": mask}
    complete.pop("mm_token_type_ids", None)
    expected = model(**complete).logits[:, -2:]
    cache = model(**first.inputs)[CACHE]
    model(**second_turn.inputs | {"attention_mask": mask[:, :-2]}, **{CACHE: cache})
    actual = model(input_ids=words, attention_mask=mask, **{CACHE: cache}).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@cases("spec", ["mrope(spatial_reset=true)", "omnirope", "xdrope", alternating(["mrope_i", "ilrope"], 2)])
@cases("family", ["qwen2_vl", "llava"])
@torch.no_grad()
def test_padding_before_text_does_not_separate_it_from_later_images(family, spec):
    """Rows and columns of images that are counted from 0 are as far from the text as without padding."""
    model = vispe.convert(copy_of(family), spec)
    first, second_turn, word = (
        batch(family, [2], [6]),
        batch(family, [1, "image", 2], [3]),
        torch.tensor([[5], [6]]),
    )
    mask = torch.cat([first["attention_mask"], second_turn["attention_mask"]], 1)
    cache = model(**first.inputs)[CACHE]
    actual = [model(**second_turn.inputs | {"attention_mask": mask}, **{CACHE: cache}).logits[0]]
    for inputs in (
        second_turn.inputs | {"attention_mask": torch.cat([mask, second_turn["attention_mask"]], 1)},
        None,
    ):
        mask = torch.cat([mask, second_turn["attention_mask"] if inputs else torch.ones_like(word)], 1)
        call = inputs or {"input_ids": word, "attention_mask": mask}
        actual.append(model(**call, **{CACHE: cache}).logits[0])
    ids = [first["input_ids"][:1, -2:], *[second_turn["input_ids"][:1]] * 2, word[:1]]
    unpadded = {"input_ids": torch.cat(ids, 1)}
    for name in ("pixel_values", "image_grid_thw"):
        if name in second_turn.inputs:
            unpadded[name] = torch.cat([second_turn[name]] * 2)
    expected = model(**unpadded).logits[0, 2:]
    if spec == "xdrope":  # each call numbers its images from 0
        length = second_turn["input_ids"].shape[1]
        expected, actual = expected[:length], actual[:1]
    torch.testing.assert_close(torch.cat(actual), expected, rtol=1e-5, atol=1e-5)
