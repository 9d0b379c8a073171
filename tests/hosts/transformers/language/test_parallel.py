"""Unordered images: permuting them does not change the answer, with and without a cache."""

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import copy_of, generated, recomputed, same
from tests.hosts.transformers.tiny import CACHE, IMAGE, QWEN, batch, needs
from tests.products import partly
from vispe.errors import InputError, OptionError, UnsupportedCombination, UnsupportedHost
from vispe.hosts.transformers.version import CHUNKED_IMAGES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WAYS = ("graph_kv", "pine")
ROWS = ([3, "image", "wide", "image", 4], [1, "image", 5, "wide", "image", 2])


def permuted(sample, spans, sizes, order):
    """Exchange images of the first row, with their markers: spans of tokens, and patches of each."""
    inputs = dict(sample.inputs)
    ids = inputs["input_ids"].clone()
    tokens = [ids[0, a:b] for a, b in spans]
    ids[0, spans[0][0] : spans[-1][1]] = torch.cat([tokens[m] for m in order])
    inputs["input_ids"] = ids
    inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    count = len(spans)
    grids = inputs["image_grid_thw"]
    inputs["image_grid_thw"] = torch.cat([grids[:count][list(order)], grids[count:]])
    parts = inputs["pixel_values"].split([*sizes[:count], int(sum(sizes[count:]))])
    inputs["pixel_values"] = torch.cat([*(parts[m] for m in order), parts[-1]])
    return inputs


def prepared(family, padding="left"):
    sample = batch(family, *ROWS, padding=padding)
    start = int(sample["attention_mask"][0].argmax()) + 3
    lengths = [8, 12, 8]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = [(start + end - n, start + end) for n, end in zip(lengths, ends, strict=True)]
    return sample, spans, sample["image_grid_thw"].prod(1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("parallel", WAYS)
@pytest.mark.parametrize(
    ("family", "spec"),
    [("qwen2_vl", "mrope"), ("qwen2_5_vl", "mrope_i(spatial_reset=true)"), ("qwen3_vl", "rope1d")],
)
def test_permuting_images_does_not_change_the_answer(family, spec, parallel, padding):
    sample, spans, sizes = prepared(family, padding)
    model = vispe.convert(copy_of(family), spec, parallel=parallel)
    plain = vispe.convert(copy_of(family), spec)
    with torch.no_grad():
        logits, before = model(**sample.inputs).logits, plain(**sample.inputs).logits
        for order in ((1, 0, 2), (2, 0, 1)):
            moved = permuted(sample, spans, sizes, order)
            actual = model(**moved).logits
            where = sample["attention_mask"][0].bool()
            where[: spans[-1][1]] = False
            assert where.any()
            scale = logits[0, where].abs().max()
            assert (actual[0, where] - logits[0, where]).abs().max() < 1e-5 * scale
            assert (actual[1] - logits[1])[sample["attention_mask"][1].bool()].abs().max() < 1e-5 * scale
            assert (plain(**moved).logits - before)[0, where].abs().max() > 1e-3 * scale
            if padding == "left":
                tokens = [
                    model.generate(**g, max_new_tokens=5, do_sample=False)[0, -5:]
                    for g in (sample.inputs, moved)
                ]
                assert torch.equal(*tokens)


@partly(1)
@cases("parallel", WAYS)
@cases("family", QWEN)
def test_decoding_equals_a_longer_prompt(family, parallel):
    sample, *_ = prepared(family)
    model = vispe.convert(copy_of(family), "mrope", parallel=parallel)
    same(generated(model, sample, 4), recomputed(model, sample, 4))


@cases("options", [{"parallel": "graph_kv"}, {"parallel": "pine"}, {"self_extend": (3, 64)}], ids=str)
@cases("family", ["qwen2_5_vl", "llava"])
def test_text_without_images_is_unchanged(family, options):
    sample = batch(family, [9], [4])
    model, stock = vispe.convert(copy_of(family), "mrope_i", **options), copy_of(family)
    with torch.no_grad():
        assert torch.equal(model(**sample.inputs).logits, stock(**sample.inputs).logits)
        tokens = [m.generate(**sample.inputs, max_new_tokens=4, do_sample=False) for m in (model, stock)]
        assert torch.equal(*tokens)
        vispe.restore(model)
        assert torch.equal(model(**sample.inputs).logits, stock(**sample.inputs).logits)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", WAYS)
@pytest.mark.parametrize("family", ["llava", "internvl", "llava_onevision"])
def test_families_without_sizes_in_the_call(family, parallel):
    """All images have one size, so swapping pixels swaps images; markers of InternVL are not in its config."""
    sample = batch(family, [3, *["bare" if family == "internvl" else "image"] * 3, 4])
    model = vispe.convert(copy_of(family), "rope1d", parallel=parallel)
    moved = dict(sample.inputs, pixel_values=sample["pixel_values"][[2, 0, 1]])
    with torch.no_grad():
        a, b = (model(**x).logits[:, -4:] for x in (sample.inputs, moved))
        assert (a - b).abs().max() < 1e-5 * a.abs().max()
        same(generated(model, sample, 3), recomputed(model, sample, 3))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("parallel", WAYS)
def test_caches_of_fixed_size_and_beams(parallel, implementation):
    sample, *_ = prepared("qwen2_5_vl")
    model = copy_of("qwen2_5_vl", 2)
    model.set_attn_implementation(implementation)
    vispe.convert(model, "mrope", parallel=parallel)
    same(generated(model, sample, 3, cache_implementation="static"), recomputed(model, sample, 3))
    with torch.no_grad():
        beams = model.generate(**sample.inputs, max_new_tokens=3, num_beams=3, do_sample=False)
        longer = sample.with_tokens(beams[:, -3:-2])
        assert beams.shape == (2, sample["input_ids"].shape[1] + 3)
        assert torch.isfinite(model(**longer).logits).all()


@cases("parallel", WAYS)
def test_parallel_texts_by_parallel_ids(parallel):
    """Retrieved texts, as in Graph-KV and PINE."""
    model = vispe.convert(copy_of("qwen2_vl"), "rope1d", parallel=parallel)
    ids = torch.randint(1, 249, (2, 14), generator=torch.Generator().manual_seed(3))
    members = torch.full((2, 14), -1)
    members[0, 2:11] = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    moved, numbers = ids.clone(), members.clone()
    moved[0, 2:11] = torch.cat([ids[0, 7:11], ids[0, 2:5], ids[0, 5:7]])
    numbers[0, 2:11] = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
    mask = torch.ones_like(ids)
    with torch.no_grad():
        a = model(input_ids=ids, attention_mask=mask, parallel_ids=members).logits
        b = model(input_ids=moved, attention_mask=mask, parallel_ids=numbers).logits
        plain = model(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(a[:, 11:], b[:, 11:], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a[1], plain[1], rtol=1e-5, atol=1e-5)
        assert (a - plain)[0, 11:].abs().max() > 1e-3
        tokens = [model.generate(input_ids=i, attention_mask=mask, parallel_ids=m, max_new_tokens=4, do_sample=False)
                  for i, m in ((ids, members), (moved, numbers))]  # fmt: skip
        assert torch.equal(tokens[0][:, -4:], tokens[1][:, -4:])
        # what was generated is what one call over all tokens would say
        long = torch.cat([members, members.new_full((2, 4), -1)], 1)
        logits = model(input_ids=tokens[0], attention_mask=torch.ones_like(long), parallel_ids=long).logits
        assert torch.equal(logits[:, 13:17].argmax(-1), tokens[0][:, -4:])


@cases("parallel", WAYS)
def test_a_second_turn_after_a_cache(parallel):
    model = vispe.convert(copy_of("qwen2_vl"), "mrope", parallel=parallel)
    ids = torch.randint(1, 249, (1, 20), generator=torch.Generator().manual_seed(3))
    members = torch.full((1, 20), -1)
    members[0, 2:6] = torch.tensor([0, 0, 1, 1])
    members[0, 12:17] = torch.tensor([0, 0, 1, 1, 1])
    with torch.no_grad():
        expected = model(input_ids=ids, parallel_ids=members).logits
        for cut in (8, 1):
            first = model(
                input_ids=ids[:, :cut], parallel_ids=members[:, :cut] if cut > 2 else None, use_cache=True
            )
            second = model(
                input_ids=ids[:, cut:],
                parallel_ids=members[:, cut:],
                **{CACHE: first[CACHE]},
            )
            torch.testing.assert_close(second.logits, expected[:, cut:], rtol=1e-5, atol=1e-5)


def test_gradients_with_blocks_and_none_with_pine():
    sample, *_ = prepared("qwen2_vl")
    model = vispe.convert(copy_of("qwen2_vl"), "mrope", parallel="graph_kv").train()
    model(**sample.inputs).logits.mul(torch.randn(300)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    with pytest.raises(UnsupportedCombination, match="importance, which has no gradient"):
        vispe.convert(model, "mrope", parallel="pine")(**sample.inputs)


def test_unsupported_combinations():
    model = copy_of("qwen2_vl")
    with pytest.raises(OptionError, match="parallel must be 'graph_kv', 'pine' or None"):
        vispe.convert(model, "mrope", parallel="all")
    with pytest.raises(UnsupportedCombination, match="exclude"):
        vispe.convert(model, "mrope", parallel="pine", self_extend=(2, 4))
    with pytest.raises(OptionError, match="a group and a window"):
        vispe.convert(model, "mrope", self_extend=4)
    model.model.language_model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        UnsupportedHost,
        match="needs the attention implementation sdpa or eager, with dense masks, got 'flash_attention_2'",
    ):
        vispe.convert(model, "mrope", parallel="pine")
    model.model.language_model.config._attn_implementation = "sdpa"
    ids, members = torch.ones(1, 5, dtype=torch.long), torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(InputError, match="whose images are ordered"):
        vispe.convert(model, "mrope")(input_ids=ids, parallel_ids=members)
    vispe.convert(model, "mrope", parallel="pine")
    with pytest.raises(InputError, match="one member per token"):
        model(input_ids=ids, parallel_ids=members[:, :3])
    assert "no order: pine" in vispe.describe(model)


def test_a_prompt_in_chunks_is_rejected():
    needs(CHUNKED_IMAGES, "images of prompts in chunks are refused")
    model = vispe.convert(copy_of("qwen2_vl"), "mrope", parallel="pine")
    sample, *_ = prepared("qwen2_vl")
    with pytest.raises(InputError, match="got a part of the prompt"):
        model.generate(**sample.inputs, max_new_tokens=2, prefill_chunk_size=9)


@cases("options", [{"parallel": "pine"}, {"self_extend": [2, 6]}], ids=str)
def test_parallel_in_the_configuration(options, tmp_path):
    sample, *_ = prepared("qwen2_vl")
    model = vispe.convert(copy_of("qwen2_vl"), "mrope", **options)
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(other(**sample.inputs).logits, model(**sample.inputs).logits)
    assert vispe.describe(other) == vispe.describe(model)


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize(
    ("family", "spec"), [("qwen2_5_vl", "mrope"), ("qwen3_vl", "mrope_i"), ("llava", "rope1d")]
)
def test_decoding_with_self_extend_equals_a_longer_prompt(family, spec, padding):
    sample = batch(family, [3, "image", "image", 4], [6, "image", 2], padding=padding)
    model = vispe.convert(copy_of(family), spec, self_extend=(2, 6))
    plain = vispe.convert(copy_of(family), spec, late_rotation=True)
    extended = vispe.convert(copy_of(family), spec, self_extend=(1, 6))
    if padding == "left":
        same(generated(model, sample, 6), recomputed(model, sample, 6))
        same(generated(model, sample, 3, cache_implementation="static"), recomputed(model, sample, 3))
    mask = sample["attention_mask"].bool()
    with torch.no_grad():
        actual, before, one = (m(**sample.inputs).logits[mask] for m in (model, plain, extended))
    assert (actual - before).abs().max() > 1e-3
    torch.testing.assert_close(one, before, rtol=1e-4, atol=1e-4)  # groups of one
