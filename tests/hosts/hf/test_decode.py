"""Caches: beams, rows that move, prefixes that are continued, and the compiled step."""

import copy

import pytest
import torch
from torch import Tensor

from tests.hosts.hf.reference import converted, generated, looped, recomputed, same, stock
from tests.hosts.hf.tiny import FAMILIES, QWEN, WORDS, batch
from vispe.errors import InputError

ROWS = [7], [3, "image", 4], [1, "wide", 1, "image", 2]


def prefilled(model, given):
    """The output for a prompt."""
    with torch.no_grad():
        return model(**given.inputs, use_cache=True)


def step(model, cache, seen, token) -> Tensor:
    """Logits (b, v) after one more token."""
    with torch.no_grad():
        out = model(input_ids=token, attention_mask=seen, past_key_values=cache)
    return out.logits[:, -1]


def after(model, given, tokens) -> Tensor:
    """Logits (b, v) after more tokens (b, n), from nothing."""
    with torch.no_grad():
        return model(**given.with_tokens(tokens), use_cache=False).logits[:, -1]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def beams(model, given, count, steps):
    """The best sequence of a beam search without a cache and without an end, (steps)."""
    alive = [(0.0, [])]
    for _ in range(steps):
        found = []
        for score, tokens in alive:
            scores = after(model, given, torch.tensor([tokens], dtype=torch.long)).log_softmax(-1)[0]
            best = scores.topk(2 * count)
            found += [(score + float(s), [*tokens, int(t)]) for s, t in zip(*best, strict=True)]
        alive = sorted(found, reverse=True)[:count]
    return torch.tensor(alive[0][1])


@pytest.mark.parametrize("spec", ["mrope_i", "v2pe"])
@pytest.mark.parametrize("family", FAMILIES)
def test_beam_search(family, spec):
    model = converted(family, spec)
    given = batch(family, ROWS[2])
    found = model.generate(**given.inputs, max_new_tokens=3, num_beams=3, do_sample=False)
    assert torch.equal(found[0, given["input_ids"].shape[1] :], beams(model, given, 3, 3))


@pytest.mark.parametrize("family", FAMILIES)
def test_beam_search_of_a_batch(family):
    """Rows of different offsets: each is found as it would be alone."""
    model = converted(family, "mrope_i")
    given = batch(family, *ROWS)
    found = model.generate(**given.inputs, max_new_tokens=3, num_beams=3, do_sample=False)
    given_twice = batch(family, *ROWS, *ROWS)
    assert given_twice["input_ids"].shape[0] == 6
    length = given["input_ids"].shape[1]
    text = batch(family, ROWS[0])
    text.inputs["input_ids"] = given["input_ids"][:1, -7:]
    assert torch.equal(found[0, length:], beams(model, text, 3, 3))
    for row in (1, 2):
        scores = [float(after_scores(model, given, row, found[row, length:]))]
        greedy = recomputed(model, given, 3)[0][row]
        assert scores[0] >= float(after_scores(model, given, row, greedy)) - 1e-5


def after_scores(model, given, row, tokens):
    """The log-probability of tokens (n) after a row, from nothing."""
    all_rows = tokens.expand(len(given["input_ids"]), -1)
    with torch.no_grad():
        logits = model(**given.with_tokens(all_rows), use_cache=False).logits[row]
    scores = logits[-len(tokens) - 1 : -1].log_softmax(-1)
    return scores.gather(1, tokens[:, None]).sum()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", ["reorder", "select", "repeat", "copy"])
def test_rows_of_a_cache_may_move(family, change):
    model, given = converted(family, "mrope_i"), batch(family, *ROWS)
    cache = prefilled(model, given).past_key_values
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
            model, cache, given.with_tokens(torch.ones(3, 1).long())["attention_mask"], torch.full((3, 1), 9)
        )
        cache = other
    words = torch.tensor([[5, 6, 7], [8, 9, 10]])
    wanted = [
        after(model, given, w[None].T.expand(-1, 1)[rows_of].reshape(3, 1))
        for w in words
        for rows_of in ([0, 1, 2],)
    ]
    seen = given["attention_mask"][rows]
    seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
    found = step(model, cache, seen, words[0][rows][:, None])
    close(found, wanted[0][rows])


@pytest.mark.parametrize("spec", ["mrope_i", "v2pe", "mrope(spatial_reset=true)"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_with_another_picture(family, spec):
    """A cache of one picture and an answer is continued with a second picture, as if all had come at once."""
    model = converted(family, spec)
    whole = batch(family, [3, "image", 4, "wide", 5])
    first = batch(family, [3, "image", 4])
    cut = first["input_ids"].shape[1]
    first.inputs["input_ids"] = whole["input_ids"][:, :cut]
    if family == "llava_onevision":  # two pictures of one conversation are not cut in tiles
        first = batch(family, [3, "image", 4])
        first.inputs["batch_num_images"] = torch.tensor([2])
    wanted = None
    pictures = ("pixel_values", "image_grid_thw", "image_sizes")
    parts = [{}, {}]
    at = cut_of(family, whole)
    for name in pictures:
        if name in whole.inputs:
            split = split_of(family, whole, name)
            parts[0][name], parts[1][name] = whole[name][:split], whole[name][split:]
    if family == "llava_onevision":
        for part in parts:
            part["batch_num_images"] = torch.tensor([2])
    with torch.no_grad():
        wanted = model(**whole.inputs, use_cache=False).logits
        shared = {
            k: whole[k] for k in ("input_ids", "attention_mask", "mm_token_type_ids") if k in whole.inputs
        }
        out = model(**{k: v[:, :at] for k, v in shared.items()}, **parts[0], use_cache=True)
        close(out.logits, wanted[:, :at])
        rest = {k: v if k == "attention_mask" else v[:, at:] for k, v in shared.items()}
        again = model(**rest, **parts[1], past_key_values=copy.deepcopy(out.past_key_values))
        close(again.logits, wanted[:, at:])
        said = model.generate(
            **shared,
            **parts[1],
            past_key_values=copy.deepcopy(out.past_key_values),
            max_new_tokens=3,
            do_sample=False,
        )
    assert torch.equal(said[:, whole["input_ids"].shape[1] :], recomputed(model, whole, 3)[0])
    same(looped_from(model, whole, again.past_key_values, again.logits[:, -1]), recomputed(model, whole, 3))


def looped_from(model, given, cache, logits):
    """Greedy decoding from a cache that holds a prompt, and its last logits (b, v)."""
    tokens, all_logits = logits.argmax(-1, keepdim=True), [logits]
    for _ in range(2):
        seen = given.with_tokens(tokens)["attention_mask"]
        all_logits.append(step(model, cache, seen, tokens[:, -1:]))
        tokens = torch.cat([tokens, all_logits[-1].argmax(-1, keepdim=True)], 1)
    return tokens, torch.stack(all_logits, 1)


def cut_of(family, whole):
    """A place between the two pictures: one word after the first of them."""
    words = (whole["input_ids"][0] < WORDS).long()
    pictures = (words[1:] < words[:-1]).nonzero()[:, 0]
    start = int(pictures[0]) + 1
    return start + int(words[start:].argmax()) + 1


def split_of(family, whole, name):
    """How many entries of an input belong to the first picture."""
    return int(whole["image_grid_thw"][0].prod()) if family in QWEN and name == "pixel_values" else 1


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_conversation_may_be_padded_between_turns(family):
    """The second turn is shorter in one row; padding between the turns counts for nothing."""
    model = converted(family, "mrope_i")
    first = batch(family, [3, "image", 4], [6])
    out = prefilled(model, first)
    turn = batch(family, [2], [5], seed=8)
    seen = torch.cat([first["attention_mask"], turn["attention_mask"]], 1)
    types = {"mm_token_type_ids": turn["mm_token_type_ids"]} if family in QWEN else {}
    ids = (seen.cumsum(1) - 1).clamp(min=0)[:, -5:]
    with torch.no_grad():
        whole = dict(first.inputs, attention_mask=seen)
        for name in ("input_ids", "mm_token_type_ids"):
            if name in whole:
                whole[name] = torch.cat([first[name], turn[name]], 1)
        wanted = model(**whole, use_cache=False).logits[:, -5:]
        given = {"input_ids": turn["input_ids"], "attention_mask": seen, **types}
        for more in ({}, {"position_ids": ids}):
            cache = copy.deepcopy(out.past_key_values)
            found = model(**given, **more, past_key_values=cache).logits
            close(found[turn["attention_mask"].bool()], wanted[turn["attention_mask"].bool()])
            word = torch.tensor([[5], [6]])
            longer = torch.cat([seen, torch.ones(2, 1).long()], 1)
            after_turn = {
                k: torch.cat([v, word * 0], 1) if k == "mm_token_type_ids" else v for k, v in whole.items()
            }
            after_turn |= {"input_ids": torch.cat([whole["input_ids"], word], 1), "attention_mask": longer}
            close(step(model, cache, longer, word), model(**after_turn, use_cache=False).logits[:, -1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_is_cropped_inside_the_text(family):
    model, given = converted(family, "mrope_i"), batch(family, [3, "image", 4])
    wanted = recomputed(model, given, 2)
    out = prefilled(model, given)
    cache = out.past_key_values
    for token in (9, 11):
        step(
            model,
            cache,
            given.with_tokens(torch.full((1, 1 + (token > 9)), 1))["attention_mask"],
            torch.tensor([[token]]),
        )
    cache.crop(2)
    seen = given.with_tokens(wanted[0][:, :1])["attention_mask"]
    close(step(model, cache, seen, wanted[0][:, :1]), wanted[1][:, 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_is_cropped_before_a_picture(family):
    """What goes on from before the second picture is right, or is refused; it is never placed after that picture."""
    model, given = converted(family, "mrope_i"), batch(family, [3, "image", 4, "wide", 5])
    at = cut_of(family, given)
    cache = prefilled(model, given).past_key_values
    word = torch.tensor([[7]])
    pixels = {
        n: given[n][: split_of(family, given, n)]
        for n in ("pixel_values", "image_grid_thw", "image_sizes")
        if n in given.inputs
    }
    if "image_sizes" in pixels:
        pixels["batch_num_images"] = torch.tensor([2])
    tokens = torch.cat([given["input_ids"][:, :at], word], 1)
    types = {"mm_token_type_ids": (tokens == 290).long()} if family in QWEN else {}
    with torch.no_grad():
        wanted = model(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), **types, **pixels, use_cache=False
        ).logits[:, -1]
        try:
            cache.crop(given["input_ids"].shape[1] - at)
            found = step(model, cache, torch.ones_like(tokens), word)
        except InputError:
            return
    close(found, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_another_model_is_refused(family):
    given = batch(family, [3, "image", 4])
    cache = stock(family)(**given.inputs, use_cache=True).past_key_values
    with pytest.raises(InputError, match="past_key_values was filled by a model without"):
        converted(family, "mrope_i")(input_ids=torch.tensor([[4]]), past_key_values=cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_is_used_again(family):
    """A static cache that is reset forgets the rows of before."""
    from transformers import StaticCache

    model = converted(family, "mrope_i")
    cache = StaticCache(model.config.get_text_config(), max_cache_len=64)
    for rows in (ROWS, ([2, "image", 6], [3], [5])):
        given = batch(family, *rows)
        same(looped(model, given, 3, past_key_values=cache), recomputed(model, given, 3))
        cache.reset()


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_static_cache(family):
    model, given = converted(family, "v2pe"), batch(family, *ROWS)
    same(generated(model, given, 3, cache_implementation="static"), recomputed(model, given, 3))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_compiled_step_is_compiled_once(family):
    from transformers import StaticCache

    model, given = converted(family, "mrope_i"), batch(family, *ROWS)
    length = given["input_ids"].shape[1]
    cache = StaticCache(model.config.get_text_config(), max_cache_len=64)
    wanted = recomputed(model, given, 6)
    with torch.no_grad():
        out = model(**given.inputs, past_key_values=cache, use_cache=True)
    close(out.logits[:, -1], wanted[1][:, 0])
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, dynamic=False, backend="eager")
    seen = torch.zeros(3, 64, dtype=torch.long)
    seen[:, :length] = given["attention_mask"]
    for i in range(1, 6):
        seen[:, length + i - 1] = 1
        mask = torch.where(seen.bool(), 0.0, torch.finfo(torch.float32).min)[:, None, None]
        ids = seen.sum(1, keepdim=True) - 1
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=i > 2):
            out = compiled(
                input_ids=wanted[0][:, i - 1 : i].clone(),
                attention_mask=mask,
                position_ids=ids,
                past_key_values=cache,
            )
        close(out.logits[:, -1], wanted[1][:, i])
