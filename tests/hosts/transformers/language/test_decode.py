"""Caches: beams, reordered rows, continued prefixes, and the compiled step."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import (
    converted,
    copy_of,
    generated,
    looped,
    recomputed,
    same,
    stock,
)
from tests.hosts.transformers.tiny import CACHE, FAMILIES, IMAGE, QWEN, WORDS, Batch, batch, needs
from tests.products import partly
from vispe.errors import InputError
from vispe.hosts.transformers.language.positions.kv_cache import set_state, text_state
from vispe.hosts.transformers.version import CHUNKED_IMAGES

ROWS = [7], [3, "image", 4], [1, "wide", 1, "image", 2]


def prefilled(model, sample):
    """Return the output for a prompt."""
    with torch.no_grad():
        return model(**sample.inputs, use_cache=True)


def step(model, cache, recorded, token) -> Tensor:
    """Return logits (b, v) after one more token."""
    with torch.no_grad():
        out = model(input_ids=token, attention_mask=recorded, **{CACHE: cache})
    return out.logits[:, -1]


def after(model, sample, tokens) -> Tensor:
    """Return logits (b, v) after more tokens (b, n), recomputed without a cache."""
    with torch.no_grad():
        return model(**sample.with_tokens(tokens)).logits[:, -1]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def beams(model, sample, count, steps):
    """Return the best sequence of a beam search without cache and end token, (steps)."""
    alive = [(0.0, [])]
    for _ in range(steps):
        actual = []
        for score, tokens in alive:
            scores = after(model, sample, torch.tensor([tokens], dtype=torch.long)).log_softmax(-1)[0]
            best = scores.topk(2 * count)
            actual += [(score + float(s), [*tokens, int(t)]) for s, t in zip(*best, strict=True)]
        alive = sorted(actual, reverse=True)[:count]
    return torch.tensor(alive[0][1])


@cases(("family", "spec"), [("qwen2_vl", "v2pe"), *((f, "mrope_i") for f in FAMILIES)])
def test_beam_search(family, spec):
    needs("5.19", "the stock model scores beams without their images")
    model = converted(family, spec)
    sample = batch(family, ROWS[2])
    actual = model.generate(**sample.inputs, max_new_tokens=3, num_beams=3, do_sample=False)
    assert torch.equal(actual[0, sample["input_ids"].shape[1] :], beams(model, sample, 3, 3))


@cases("family", FAMILIES)
def test_beam_search_of_a_batch(family):
    """Rows of different offsets are reordered repeatedly: each has the scores of a full recomputation."""
    needs("5.19", "the stock model scores beams without their images")
    model, sample = converted(family, "mrope_i"), batch(family, *ROWS)
    out = model.generate(
        **sample.inputs,
        max_new_tokens=4,
        num_beams=3,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    generated = out.sequences[:, sample["input_ids"].shape[1] :]
    with torch.no_grad():
        logits = model(**sample.with_tokens(generated)).logits[:, -5:-1]
    close(out.sequences_scores, logits.log_softmax(-1).gather(2, generated[..., None]).sum((1, 2)))


@partly(1)
@cases("family", FAMILIES)
@cases("change", ["reorder", "select", "repeat", "copy"])
def test_rows_of_a_cache_can_be_reordered(family, change):
    model, sample = converted(family, "mrope_i"), batch(family, *ROWS)
    cache = prefilled(model, sample)[CACHE]
    rows = {"reorder": [2, 0, 0], "select": [2, 1], "repeat": [0, 0, 1, 1, 2, 2], "copy": [0, 1, 2]}[change]
    if change == "reorder":
        cache.reorder_cache(torch.tensor(rows))
    elif change == "select":
        cache.batch_select_indices(torch.tensor(rows))
    elif change == "repeat":
        cache.batch_repeat_interleave(2)
    else:
        other = copy.deepcopy(cache)
        step(
            model, cache, sample.with_tokens(torch.ones(3, 1).long())["attention_mask"], torch.full((3, 1), 9)
        )
        cache = other
    words = torch.tensor([[5], [6], [7]])
    recorded = sample.with_tokens(words)["attention_mask"]
    close(step(model, cache, recorded[rows], words[rows]), after(model, sample, words)[rows])


@partly(1)
@cases("spec", ["mrope_i", "v2pe", "mrope(spatial_reset=true)"])
@cases("family", FAMILIES)
def test_a_conversation_continues_with_another_image(family, spec):
    """A cache of one image and an answer is continued with a second image, equal to one joint prompt."""
    model = converted(family, spec)
    complete = batch(family, [3, "image", 4, "wide", 5], counted=False)
    parts, at = load_images(family, complete), cut_of(complete)
    with torch.no_grad():
        expected = model(**complete.inputs).logits
        shared = {
            k: complete[k]
            for k in ("input_ids", "attention_mask", "mm_token_type_ids")
            if k in complete.inputs
        }
        out = model(**{k: v[:, :at] for k, v in shared.items()}, **parts[0], use_cache=True)
        close(out.logits, expected[:, :at])
        continued = {k: v if k == "attention_mask" else v[:, at:] for k, v in shared.items()}
        second = model(**continued, **parts[1], **{CACHE: copy.deepcopy(out[CACHE])})
        close(second.logits, expected[:, at:])
        generated = model.generate(
            **shared,
            **parts[1],
            **{CACHE: copy.deepcopy(out[CACHE])},
            max_new_tokens=3,
            do_sample=False,
        )
    assert torch.equal(generated[:, complete["input_ids"].shape[1] :], recomputed(model, complete, 3)[0])
    same(looped_from(model, complete, second[CACHE], second.logits[:, -1]), recomputed(model, complete, 3))


def looped_from(model, sample, cache, logits):
    """Return greedy decoding from a cache that contains a prompt, and its last logits (b, v)."""
    tokens, all_logits = logits.argmax(-1, keepdim=True), [logits]
    for _ in range(2):
        recorded = sample.with_tokens(tokens)["attention_mask"]
        all_logits.append(step(model, cache, recorded, tokens[:, -1:]))
        tokens = torch.cat([tokens, all_logits[-1].argmax(-1, keepdim=True)], 1)
    return tokens, torch.stack(all_logits, 1)


def cut_of(sample):
    """Return a position between the two images: two words after the first of them."""
    words = (sample["input_ids"][0] < WORDS).long()
    images = (words[1:] < words[:-1]).nonzero()[:, 0]
    start = int(images[0]) + 1
    return start + int(words[start:].argmax()) + 2


def load_images(family, sample):
    """Return the inputs of the first image, and those of the second."""
    parts: tuple[dict, dict] = {}, {}
    for name in ("pixel_values", "image_grid_thw", "image_sizes"):
        if name in sample.inputs:
            patches = family in QWEN and name == "pixel_values"
            first = int(sample["image_grid_thw"][0].prod()) if patches else 1
            parts[0][name], parts[1][name] = sample[name][:first], sample[name][first:]
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("counted", [True, False], ids=["ids", "no ids"])
@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["mrope_i", "bilevel"])
def test_padding_between_turns(family, image, counted, spec):
    """Padding between turns is not counted, whether position ids or the mask define it."""
    model = converted(family, spec)
    first = batch(family, [3, "image", 4], [6], counted=False)
    turn = batch(family, [2], [1, "wide", 3] if image else [5], seed=8, counted=False)
    out = prefilled(model, first)
    length = turn["input_ids"].shape[1]
    recorded = torch.cat([first["attention_mask"], turn["attention_mask"]], 1)
    ids = (recorded.cumsum(1) - 1).clamp(min=0)
    word = torch.tensor([[5], [6]])
    complete = {
        "attention_mask": torch.cat([recorded, torch.ones_like(word)], 1),
        "position_ids": torch.cat([ids, ids[:, -1:] + 1], 1),
    }
    complete["input_ids"] = torch.cat([first["input_ids"], turn["input_ids"], word], 1)
    if family in QWEN:
        complete["mm_token_type_ids"] = (complete["input_ids"] == IMAGE).long()
    images = ("pixel_values", "image_grid_thw", "image_sizes")
    sample = {n: turn[n] for n in images if n in turn.inputs}
    for name in images:
        if name in first.inputs:
            complete[name] = joined(*(t[name] for t in (first, turn) if name in t.inputs))
    with torch.no_grad():
        expected = model(**complete).logits
        sample |= {"input_ids": turn["input_ids"], "attention_mask": recorded}
        sample |= {"mm_token_type_ids": turn["mm_token_type_ids"]} if family in QWEN else {}
        sample |= {"position_ids": ids[:, -length:]} if counted else {}
        actual = model(**sample, **{CACHE: out[CACHE]}).logits
    valid = turn["attention_mask"].bool()
    close(actual[valid], expected[:, -length - 1 : -1][valid])
    close(step(model, out[CACHE], complete["attention_mask"], word), expected[:, -1])


@cases("family", FAMILIES)
def test_the_cache_has_its_current_and_its_former_name(family):
    model, sample = converted(family, "mrope_i"), batch(family, ROWS[1])
    word, recorded = torch.tensor([[5]]), torch.ones(1, sample["input_ids"].shape[1] + 1, dtype=torch.long)
    expected = after(model, sample, word)
    with warnings.catch_warnings():
        # nothing of ours calls the host by a name that it gives up
        warnings.simplefilter("error", FutureWarning)
        actual = {name: prefilled(model, sample)[CACHE] for name in {CACHE, "past_key_values"}}
        with torch.no_grad():
            for name, cache in actual.items():
                out = model.model(input_ids=word, attention_mask=recorded, **{name: cache})
                close(model.lm_head(out[0])[:, -1], expected)


def joined(*parts):
    """Return pixels or grids of several calls as one tensor; images of fewer tiles are padded."""
    if parts[0].ndim < 5:
        return torch.cat(parts)
    most = max(p.shape[1] for p in parts)
    return torch.cat([torch.cat([p, p.new_zeros(len(p), most - p.shape[1], *p.shape[2:])], 1) for p in parts])


@cases("family", FAMILIES)
def test_a_cache_is_cropped_inside_the_text(family):
    model, sample = converted(family, "mrope_i"), batch(family, [3, "image", 4])
    expected = recomputed(model, sample, 2)
    out = prefilled(model, sample)
    cache = out[CACHE]
    for token in (9, 11):
        step(
            model,
            cache,
            sample.with_tokens(torch.full((1, 1 + (token > 9)), 1))["attention_mask"],
            torch.tensor([[token]]),
        )
    cache.crop(-2)
    recorded = sample.with_tokens(expected[0][:, :1])["attention_mask"]
    close(step(model, cache, recorded, expected[0][:, :1]), expected[1][:, 1])


@cases("family", FAMILIES)
def test_a_cache_is_cropped_before_an_image(family):
    """Raises: text would be positioned after the removed image. The original cache is correct."""
    model, sample = converted(family, "mrope_i"), batch(family, [3, "image", 4, "wide", 5], counted=False)
    at = cut_of(sample)
    cache = prefilled(model, sample)[CACHE]
    word = torch.tensor([[7]])
    pixels = load_images(family, sample)[0]
    tokens = torch.cat([sample["input_ids"][:, :at], word], 1)
    types = {"mm_token_type_ids": (tokens == IMAGE).long()} if family in QWEN else {}
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **types, **pixels).logits[
            :, -1
        ]
        with pytest.raises(InputError, match="the last image in it, which ends at token"):
            cache.crop(at - sample["input_ids"].shape[1])
        out = model(
            input_ids=tokens[:, :-1],
            attention_mask=torch.ones_like(tokens[:, :-1]),
            **first_types(types),
            **pixels,
        )
    actual = step(model, out[CACHE], torch.ones_like(tokens), word)
    close(actual, expected)


@cases("spec", ["v2pe", "mrope_i", "mrope(spatial_reset=true)"])
@cases("size", [1, 4])
@cases("ends", [[9], [3, 9], [2, 5, 9], [4, 9]])
def test_a_cache_is_cropped_after_the_last_token_of_an_image(spec, size, ends):
    """The last or only token of an image may have the coordinates of text after it."""
    model, tokens = converted("qwen2_vl", spec), torch.tensor([[5, 6, 7, *[IMAGE] * size, 8, 9, 4, 1, 2]])
    pixels = {"pixel_values": torch.randn(4 * size, 96, generator=torch.Generator().manual_seed(0))}
    pixels["image_grid_thw"] = torch.tensor([[1, 2 * size**0.5, 2 * size**0.5]]).long()
    cache, turn, first = None, torch.tensor([[9, 10]]), 0
    # calls end before, right after and some tokens after the image
    for end in (end if end < 4 else end + size - 1 for end in ends):
        part, images = tokens[:, first:end], pixels if first < 4 <= end else {}
        with torch.no_grad():
            cache = model(input_ids=part, **images, **{CACHE: cache}, use_cache=True)[CACHE]
        first = end
    # one image token of mrope is where a text token would be, so its cache can be cropped anywhere
    last = 0 if (spec, size) == ("mrope_i", 1) else 3 + size
    for length in range(1, first):
        part = copy.deepcopy(cache)
        if length < last:
            with pytest.raises(InputError, match=f"which ends at token {last}, got"):
                part.crop(length - first)
            continue
        part.crop(length - first)
        images = pixels if length > 3 else {}
        with torch.no_grad():
            complete = model(input_ids=torch.cat([tokens[:, :length], turn], 1), **images).logits[:, -2:]
            close(model(input_ids=turn, **{CACHE: part}).logits, complete)


class OfLength:
    """Cache whose positive argument of crop is its new length, as in transformers 5.17."""

    length = 9

    def get_seq_length(self):
        return self.length

    def crop(self, tokens_to_remove):
        more = tokens_to_remove > 0
        self.length = min(tokens_to_remove, self.length) if more else self.length + tokens_to_remove


def test_a_crop_to_a_length_is_checked():
    cache = OfLength()
    set_state(cache, replace(text_state(1, torch.device("cpu")), settled=4))
    with pytest.raises(InputError, match=r"which ends at token 4, got a crop to 3 tokens"):
        cache.crop(3)
    for argument, length in ((12, 9), (7, 7), (4, 4)):
        cache.crop(argument)
        assert cache.get_seq_length() == length


def first_types(types):
    """Return types of all tokens but the last."""
    return {k: v[:, :-1] for k, v in types.items()}


@partly(1)
@cases("spec", ["mrope_i", "mrope(spatial_reset=true)", "v2pe"])
@cases("side", ["left", "right"])
@cases("family", FAMILIES)
def test_padding_that_is_cropped_is_not_counted(family, side, spec):
    """Tokens after the crop continue each row, equal to one call without the removed tokens."""
    model = converted(family, spec)
    first, turn = batch(family, [3, "image", 4], [6]), batch(family, [5], [2], padding=side, seed=8)
    recorded = torch.cat([first["attention_mask"], turn["attention_mask"]], 1)
    cache, word = prefilled(model, first)[CACHE], torch.tensor([[5], [6]])
    with torch.no_grad():
        model(input_ids=turn["input_ids"], attention_mask=recorded, **{CACHE: cache})
        for removed in (2, 5):
            part = copy.deepcopy(cache)
            part.reorder_cache(torch.tensor([1, 0]))
            part.crop(-removed)
            part.reorder_cache(torch.tensor([1, 0]))
            mask = torch.cat([recorded[:, :-removed], torch.ones_like(word)], 1)
            complete = first.with_tokens(torch.cat([turn["input_ids"][:, : 5 - removed], word], 1))
            close(step(model, part, mask, word), model(**complete | {"attention_mask": mask}).logits[:, -1])


@partly(1)
@cases("spec", ["mrope_i", "mrope(spatial_reset=true)", "v2pe"])
@cases("family", FAMILIES)
def test_padding_after_an_image_is_cropped(family, spec):
    """The crop removes text of the first row, and padding on the right of the second, which ends with an image."""
    model, sample = converted(family, spec), batch(family, [1, "image", 6], [1, "image"], padding="right")
    out, words = prefilled(model, sample), torch.tensor([[5, 6], [7, 8]])
    for removed in (1, 4, 6):
        cache = copy.deepcopy(out[CACHE])
        cache.crop(-removed)
        complete = sample.inputs | {n: sample[n][:, :-removed] for n in ("input_ids", "attention_mask")}
        longer = Batch(family, complete, sample.stream).with_tokens(words)
        longer.pop("mm_token_type_ids", None)
        with torch.no_grad():
            actual = model(input_ids=words, attention_mask=longer["attention_mask"], **{CACHE: cache}).logits
            close(actual, model(**longer).logits[:, -2:])
    with pytest.raises(InputError, match="the last image in it, which ends at token"):
        out[CACHE].crop(-8)  # two tokens, or one and a marker


@cases("family", FAMILIES)
def test_a_cache_without_tokens_after_a_crop_is_empty(family):
    model = converted(family, "mrope(spatial_reset=true)")
    sample = batch(family, [3, "image", 4], [6])
    out = prefilled(model, sample)
    out[CACHE].crop(-sample["input_ids"].shape[1])
    with torch.no_grad():
        close(model(**sample.inputs, **{CACHE: out[CACHE]}).logits, out.logits)


@cases("family", FAMILIES)
def test_a_cache_of_another_model_is_refused(family):
    sample = batch(family, [3, "image", 4])
    cache = stock(family)(**sample.inputs, use_cache=True)[CACHE]
    with pytest.raises(InputError, match="The cache must be filled by a model with"):
        converted(family, "mrope_i")(input_ids=torch.tensor([[4]]), **{CACHE: cache})


@cases("words", [1, 2])
@cases(
    ("options", "others"),
    [
        ({}, {"spec": "vrope"}),
        ({}, {"late_rotation": True}),
        ({"late_rotation": True}, {}),
        ({"late_rotation": True}, {"spec": "mrope_i", "late_rotation": True}),
        ({"parallel": "graph_kv"}, {"late_rotation": True}),
    ],
)
def test_a_cache_of_another_conversion_is_refused(options, others, words):
    sample, tokens = batch("qwen2_vl", [3, "image", 4]), torch.full((1, words), 4)
    cache = prefilled(vispe.convert(copy_of("qwen2_vl"), "mrope", **options), sample)[CACHE]
    model = vispe.convert(copy_of("qwen2_vl"), **{"spec": "mrope", **others})
    for call in (model, model.model):
        with pytest.raises(InputError, match="with this position scheme and these options"):
            call(input_ids=tokens, **{CACHE: copy.deepcopy(cache)})
    longer = sample.with_tokens(tokens)
    with pytest.raises(InputError, match="with this position scheme and these options"):
        model.generate(**longer, **{CACHE: cache}, max_new_tokens=2)


@cases("family", FAMILIES)
def test_a_cache_is_reused(family):
    """A static cache that is reset discards its rows."""
    from transformers import StaticCache

    model = converted(family, "mrope_i")
    cache = StaticCache(model.config.get_text_config(), max_cache_len=64)
    for rows in (ROWS, ([2, "image", 6], [3], [5])):
        sample = batch(family, *rows)
        same(looped(model, sample, 3, **{CACHE: cache}), recomputed(model, sample, 3))
        cache.reset()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_static_cache(family):
    model, sample = converted(family, "v2pe"), batch(family, *ROWS)
    same(generated(model, sample, 3, cache_implementation="static"), recomputed(model, sample, 3))


@partly(1)
@cases("spec", ["mrope_i", "v2pe"])
@cases("family", FAMILIES)
@torch.no_grad()
def test_beams_of_a_turn_with_an_image(family, spec):
    """The cache is repeated before the call, in which the host repeats the tokens of the turn."""
    needs("5.19", "the stock model scores beams without their images")
    model = converted(family, spec)
    first, turn = batch(family, [3, "image", 4], [6], counted=False), batch(family, [1, "image", 2], [3])
    inputs = turn.inputs | {"attention_mask": torch.cat([first["attention_mask"], turn["attention_mask"]], 1)}
    inputs.pop("batch_num_images", None)
    options = {
        "max_new_tokens": 3,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    expected = model.generate(**inputs, **{CACHE: prefilled(model, first)[CACHE]}, **options)
    cache = prefilled(model, first)[CACHE]
    cache.batch_repeat_interleave(2)
    actual = model.generate(**inputs, **{CACHE: cache}, **options, num_beams=2)
    # the first scores of the first beam are those of greedy decoding
    close(actual.scores[0][::2], expected.scores[0].log_softmax(-1))
    cache = prefilled(model, first)[CACHE]
    cache.batch_select_indices(torch.tensor([0, 1, 1]))
    with pytest.raises(
        InputError, match=r"one row for each of 2 sequences, or equal repetitions .* got 3 rows"
    ):
        model.generate(**inputs, **{CACHE: cache}, **options)


@partly(1)
@cases("chunk", [None, 2])
@cases("image", [False, True])
@cases("family", FAMILIES)
@torch.no_grad()
def test_padding_of_a_turn_in_a_static_cache(family, image, chunk):
    """The host passes no padding mask with a static cache; padding is not counted in later calls without ids."""
    from transformers import StaticCache

    if image and chunk:
        needs(CHUNKED_IMAGES, "images in chunks")
    model = converted(family, "mrope_i")
    first = batch(family, [3, "image", 4], [6], counted=False)
    turn = batch(family, [7], [2, "image", 1] if image else [2], seed=8, counted=False)
    cache = StaticCache(model.config.get_text_config(), max_cache_len=128)
    model(**first.inputs, **{CACHE: cache})
    complete = {n: torch.cat([first[n], turn[n]], 1) for n in ("input_ids", "attention_mask")}
    types = {"mm_token_type_ids": (complete["input_ids"] == IMAGE).long()} if family in QWEN else {}
    images = ("pixel_values", "image_grid_thw", "image_sizes")
    new = {n: turn[n] for n in images if n in turn.inputs}
    options = {"max_new_tokens": 1, "prefill_chunk_size": chunk}
    generated = model.generate(**complete, **new, **types, **{CACHE: cache}, **options)[:, -1:]
    complete["attention_mask"] = torch.cat([complete["attention_mask"], torch.ones_like(generated)], 1)
    actual = step(model, cache, complete["attention_mask"], generated)
    complete["input_ids"] = torch.cat([complete["input_ids"], generated], 1)
    for n in images:
        if n in first.inputs:
            complete[n] = joined(*(t[n] for t in (first, turn) if n in t.inputs))
    close(actual, model(**complete).logits[:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava"])
def test_the_compiled_step_is_compiled_once(family):
    from transformers import StaticCache

    model, sample = converted(family, "mrope_i"), batch(family, *ROWS)
    length = sample["input_ids"].shape[1]
    cache = StaticCache(model.config.get_text_config(), max_cache_len=64)
    expected = recomputed(model, sample, 6)
    with torch.no_grad():
        out = model(**sample.inputs, **{CACHE: cache}, use_cache=True)
    close(out.logits[:, -1], expected[1][:, 0])
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, dynamic=False, backend="eager")
    recorded = torch.zeros(3, 64, dtype=torch.long)
    recorded[:, :length] = sample["attention_mask"]
    for i in range(1, 6):
        recorded[:, length + i - 1] = 1
        mask = torch.where(recorded.bool(), 0.0, torch.finfo(torch.float32).min)[:, None, None]
        ids = recorded.sum(1, keepdim=True) - 1
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=i > 2):
            out = compiled(
                input_ids=expected[0][:, i - 1 : i].clone(),
                attention_mask=mask,
                position_ids=ids,
                **{CACHE: cache},
            )
        close(out.logits[:, -1], expected[1][:, i])
