"""Decoding: generate, an explicit loop and recomputation without cache agree token by token."""

import copy
import sys
import threading

import pytest
import torch
from transformers import DynamicCache

from tests.cases import cases
from tests.hosts.transformers.reference import (
    converted,
    generated,
    looped,
    recomputed,
    same,
    scheme_of,
    stock,
)
from tests.hosts.transformers.tiny import CACHE, FAMILIES, QWEN, WITH_VIDEO, batch, needs
from tests.products import partly
from vispe.errors import InputError, MissingExtra
from vispe.hosts.transformers.version import CHUNKED_IMAGES
from vispe.multimodal import list_schemes

STEPS = 3
KINDS = ["mrope(spatial_reset=true)", "v2pe", "mhrope"]
PROMPTS = {
    "text": [[6]],
    "image": [[3, "image", 4]],
    "several": [[2, "image", 1, "wide", 3]],
    "end": [[4, "bare"]],
    "mixed": [[7], [3, "image", 4], [1, "wide", 1, "image", 2], [2, "bare"]],
    "video": [[2, "video", 3], [5, "image"]],
}


def prompt(family, kind, padding="left"):
    """Return a batch; families without markers have none to omit."""
    rows = [[("image" if i == "bare" and family not in QWEN else i) for i in row] for row in PROMPTS[kind]]
    return batch(family, *rows, padding=padding)


CASES = [(f, k) for f in FAMILIES for k in PROMPTS if k != "video" or f in WITH_VIDEO]


@partly(11)
@cases(
    ("family", "kind", "spec"),
    [(*c, "mrope_i") for c in CASES] + [(*c, "v2pe") for c in CASES if c[1] in ("mixed", "video")],
)
def test_all_decoding_methods_agree(family, kind, spec):
    model, sample = converted(family, spec), prompt(family, kind)
    expected = recomputed(model, sample, STEPS)
    same(generated(model, sample, STEPS), expected)
    same(looped(model, sample, STEPS), expected)
    if spec == "mrope_i":
        same(looped(model, sample, STEPS, ids=True), expected)
    if spec == "mrope_i" and bool(sample["attention_mask"].all()):
        same(looped(model, sample, STEPS, mask=False), expected)
        same(looped(model, sample, STEPS, mask=False, ids=True), expected)


@partly(0.5)
@cases("scheme", list_schemes())
@cases("family", ["qwen2_5_vl", "llava_onevision"])
def test_every_scheme_decodes(family, scheme):
    kv_heads = 2 if scheme == "mhrope" else 1
    model, sample = converted(family, scheme, kv_heads), batch(family, [5], [2, "image", 2], [1, "video", 1])
    same(generated(model, sample, 2), recomputed(model, sample, 2))


@partly(2)
@cases("family", FAMILIES)
@cases("spec", KINDS)
def test_rows_padded_on_the_right(family, spec):
    model, sample = converted(family, spec), prompt(family, "mixed", "right")
    expected = recomputed(model, sample, 3)
    same(looped(model, sample, 3), expected)
    same(looped(model, sample, 3, ids=True), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_text_in_a_batch_with_images_equals_the_stock_model(family):
    sample = prompt(family, "mixed")
    text = batch(family, [7])
    text.inputs["input_ids"] = sample["input_ids"][:1, -7:]
    for spec in ("mrope_i", "v2pe"):
        actual = generated(converted(family, spec), sample, STEPS)
        same((actual[0][:1], actual[1][:1]), generated(stock(family), text, STEPS))


@partly(2)
@cases("family", FAMILIES)
@cases("spec", ["mrope_i", "v2pe", "bilevel", "tad_rope", "mrope(text_axes=time)"])
def test_decoding_continues_from_coordinates_of_the_prompt(family, spec):
    """The prompt has explicit coordinates, later calls have no ids."""
    model = converted(family, spec)
    sample = batch(family, [3, "image", 4], [2, "image", 1, "wide", 3])
    coordinates = scheme_of(family, spec).coordinates(sample.stream)
    keys = (sample["attention_mask"].cumsum(1) - 1).clamp(min=0)
    both = torch.cat([keys[None].double(), coordinates.ids])
    expected = recomputed(model, sample, STEPS)
    same(looped(model, sample, STEPS, position_ids=both), expected)
    out = generated(model, sample, STEPS, position_ids=both)
    same(out, expected)


@cases("family", FAMILIES)
def test_a_mask_of_four_dimensions(family):
    """If the mask does not determine the count, the cache stores how many tokens of each row are padding."""
    model, sample = converted(family, "mrope_i"), prompt(family, "mixed")
    expected = recomputed(model, sample, 3)
    with torch.no_grad():
        out = model(**sample.inputs, use_cache=True)
        recorded = sample["attention_mask"]
        for step in range(1, 3):
            recorded = torch.cat([recorded, torch.ones_like(recorded[:, :1])], 1)
            mask = torch.where(recorded.bool(), 0.0, torch.finfo(torch.float32).min)[:, None, None]
            token = expected[0][:, step - 1 : step]
            out = model(input_ids=token, attention_mask=mask, **{CACHE: out[CACHE]})
            torch.testing.assert_close(out.logits[:, -1], expected[1][:, step], rtol=1e-5, atol=1e-5)


@cases("family", FAMILIES)
def test_several_tokens_at_once(family):
    """Chunks of text after the prompt, as with speculative decoding and chunked prefill."""
    model, sample = converted(family, "v2pe"), prompt(family, "mixed")
    words = torch.tensor([[3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]])
    with torch.no_grad():
        expected = model(**sample.with_tokens(words)).logits[:, -3:]
        out = model(**sample.inputs, use_cache=True)
        recorded = sample.with_tokens(words)["attention_mask"]
        actual = model(input_ids=words, attention_mask=recorded, **{CACHE: out[CACHE]}).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@cases("family", ["qwen2_vl", "qwen2_5_vl"])
def test_the_position_of_text_after_a_long_video(family):
    sample = batch(family, [2, "video", 3])  # five frames of 2 x 3 tokens
    tokens = []
    for spec in ("mrope(after=side)", "mrope(after=max)"):
        tokens.append(generated(converted(family, spec), sample, STEPS))
        same(tokens[-1], recomputed(converted(family, spec), sample, STEPS))
    assert (tokens[0][1][:, 0] - tokens[1][1][:, 0]).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_models_are_independent(family):
    sample, other = prompt(family, "mixed"), prompt(family, "several")
    expected = {s: recomputed(converted(family, s), sample, 3) for s in ("mrope_i", "v2pe")}
    caches = {s: converted(family, s)(**sample.inputs, use_cache=True)[CACHE] for s in expected}
    converted(family, "mrope_i")(**other.inputs, use_cache=True)
    generated(stock(family), other, 2)
    for step in range(2):
        recorded = sample.with_tokens(expected["mrope_i"][0][:, : step + 1])["attention_mask"]
        for spec, (tokens, logits) in expected.items():
            token = tokens[:, step : step + 1]
            out = converted(family, spec)(input_ids=token, attention_mask=recorded, **{CACHE: caches[spec]})
            torch.testing.assert_close(out.logits[:, -1], logits[:, step + 1], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_threads_share_a_model(family):
    model = converted(family, "mrope_i")
    prompts = [prompt(family, kind) for kind in ("mixed", "several", "text")]
    expected = [generated(model, p, STEPS)[0] for p in prompts]
    actual: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(prompts))}

    def work(i: int) -> None:
        for _ in range(2):
            actual[i].append(generated(model, prompts[i], STEPS)[0])

    threads = [threading.Thread(target=work, args=(i,)) for i in actual]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, tokens in actual.items():
        assert len(tokens) == 2
        assert all(torch.equal(s, expected[i]) for s in tokens)


@cases("family", FAMILIES)
def test_calls_add_no_attributes_to_modules(family):
    def remaining(model):
        return {
            (name, key): value if isinstance(value, (int, float, str, bool, type(None))) else id(value)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
        }

    model = converted(family, "mrope_i")
    generated(model, prompt(family, "text"), 2)
    before = remaining(model)
    generated(model, prompt(family, "mixed"), 2)
    looped(model, prompt(family, "several"), 2)
    assert remaining(model) == before


@cases(("family", "chunk"), [("qwen2_vl", None), ("llava", None), ("qwen2_vl", 4)])
def test_images_in_every_turn_of_a_conversation(family, chunk):
    """The cache of `generate` is continued in further turns, equal to a full recomputation."""
    if chunk:
        needs(CHUNKED_IMAGES, "images of prompts in chunks are refused")
    model = converted(family, "mrope_i")
    turns = [3, "image", 2], [2, "wide", 3], [4], [1, "image", 2]
    cache = DynamicCache(config=model.config.get_text_config())
    for n in range(len(turns)):
        complete = batch(family, [item for turn in turns[: n + 1] for item in turn])
        new = batch(family, turns[n])
        inputs = {k: new.inputs.get(k, v) if k == "image_grid_thw" else v for k, v in complete.inputs.items()}
        inputs.pop("pixel_values", None)
        if "pixel_values" in new.inputs:
            inputs["pixel_values"] = complete["pixel_values"][-len(new["pixel_values"]) :]
        if "image" not in turns[n] and "wide" not in turns[n]:
            inputs.pop("image_grid_thw", None)
        options = {"prefill_chunk_size": chunk} if chunk else {}
        tokens = model.generate(**inputs, **{CACHE: cache}, max_new_tokens=1, do_sample=False, **options)
        expected = recomputed(model, complete, 2)
        length = complete["input_ids"].shape[1]
        assert torch.equal(tokens[:, length:], expected[0][:, :1])
        with torch.no_grad():
            step = model(input_ids=tokens[:, -1:], **{CACHE: copy.deepcopy(cache)})
        torch.testing.assert_close(step.logits[:, -1], expected[1][:, 1], rtol=1e-5, atol=1e-5)


@cases("version", ["5.17.0", "5.22.2"])
@cases("family", ["qwen2_vl", "llava"])
def test_chunks_with_images_are_rejected_if_the_host_drops_images(monkeypatch, family, version):
    model, sample = converted(family, "mrope_i"), batch(family, [2, "image", 3])
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    settings = {"max_new_tokens": 1, "do_sample": False, "prefill_chunk_size": 4}
    with pytest.raises(
        MissingExtra, match=rf"images needs transformers {CHUNKED_IMAGES} or later, got {version}"
    ):
        model.generate(**sample.inputs, **settings)
    text = batch(family, [6]).inputs
    assert torch.equal(
        model.generate(**text, **settings), model.generate(**text, max_new_tokens=1, do_sample=False)
    )


@cases("family", ["qwen2_vl", "llava"])
def test_padding_and_images_in_later_chunks_of_a_prompt(family):
    needs(CHUNKED_IMAGES, "images of prompts in chunks are refused")
    model, sample = converted(family, "mrope_i"), batch(family, [7, "image", 4], [6])
    out = model.generate(
        **sample.inputs, max_new_tokens=1, prefill_chunk_size=4, return_dict_in_generate=True, do_sample=False
    )
    cache, word = out[CACHE], out.sequences[:, -1:]
    longer = sample.with_tokens(word)
    with torch.no_grad():
        step = model(input_ids=word, attention_mask=longer["attention_mask"], **{CACHE: copy.deepcopy(cache)})
        expected = model(**longer).logits[:, -1]
    torch.testing.assert_close(step.logits[:, -1], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="the last image in it"):
        cache.crop(-8)
