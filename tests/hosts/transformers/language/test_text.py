"""Text without images is bit-equal before and after conversion, for every scheme, precision and padding."""

import functools
import warnings

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import converted, copy_of, generated, named, stock
from tests.hosts.transformers.tiny import CACHE, FAMILIES, QWEN, batch
from tests.products import partly
from vispe.multimodal import create_scheme, list_schemes

EXACT = [name for name in list_schemes() if create_scheme(name).text_exact]
INEXACT = [name for name in list_schemes() if not create_scheme(name).text_exact]
# one of every kind: integers, fractions, four axes, heads
PAIRS = [
    "mrope_i",
    "v2pe",
    "vrope",
    "mhrope",
]


def prompts(family):
    """Return prompts padded on the left and on the right; one row is not padded."""
    for padding in ("left", "right"):
        yield batch(family, [5], [9], [1], padding=padding)


@functools.cache
def changing(family, dtype):
    """Return a model that is converted repeatedly."""
    return copy_of(family, 1, dtype)


@functools.cache
def stock_logits(family, dtype):
    """Return stock logits of all prompts."""
    return [stock(family, 1, dtype)(**p.inputs).logits for p in prompts(family)]


@partly(2)
@cases("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@cases("scheme", EXACT)
@cases("family", FAMILIES)
@torch.no_grad()
def test_logits_are_bit_equal(family, scheme, dtype):
    model = vispe.convert(changing(family, dtype), named(scheme, 1))
    for sample, expected in zip(prompts(family), stock_logits(family, dtype), strict=True):
        actual = model(**sample.inputs).logits
        assert actual.dtype == dtype
        assert torch.equal(actual, expected)


@cases("family", FAMILIES)
@torch.no_grad()
def test_logits_are_bit_equal_with_ids(family):
    model, before = converted(family, "mrope_i"), stock(family)
    for sample in prompts(family):
        recorded = sample.inputs.get("attention_mask", torch.ones_like(sample["input_ids"]))
        ids = (recorded.cumsum(1) - 1).masked_fill(recorded == 0, 0)
        expected = before(**sample.inputs, position_ids=ids).logits
        assert torch.equal(model(**sample.inputs, position_ids=ids).logits, expected)
    one_row = torch.arange(6)[None]  # for a batch of two
    sample = batch(family, [6], [6])
    expected = before(**sample.inputs, position_ids=one_row).logits
    assert torch.equal(model(**sample.inputs, position_ids=one_row).logits, expected)


@partly(2)
@cases(
    ("scheme", "dtype"),
    [*((s, torch.float32) for s in PAIRS), ("mrope_i", torch.bfloat16), ("v2pe", torch.bfloat16)],
)
@cases("family", FAMILIES)
def test_generation_is_bit_equal(family, scheme, dtype):
    kv_heads = 2 if scheme == "mhrope" else 1
    sample = batch(family, [5], [9], [1])
    actual, expected = (
        generated(m(family, *args, kv_heads, dtype), sample, 3)
        for m, args in ((converted, [scheme]), (stock, []))
    )
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_cached_loop_is_bit_equal(family):
    """Right-padded rows continue after their padding, unaffected by a call after an image."""
    model, before = converted(family, "mrope_i"), copy_of(family)
    model(**batch(family, [2, "image", 2], [1, "wide"]).inputs)
    for sample in (batch(family, [6], [6]), batch(family, [5], [9], padding="left")):
        logits = []
        for m in (model, before):
            out = m(**sample.inputs, use_cache=True)
            steps = [out.logits]
            mask = sample["attention_mask"]
            for token in (3, 8):
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
                out = m(
                    input_ids=torch.tensor([[token], [token + 1]]),
                    attention_mask=mask,
                    **{CACHE: out[CACHE]},
                )
                steps.append(out.logits)
            logits.append(torch.cat(steps, 1))
        assert torch.equal(*logits)


@cases("family", [*QWEN[:1], "llava"])
def test_bf16_models_keep_positions_above_256(family):
    model, before = converted(family, "v2pe", 1, torch.bfloat16), stock(family, 1, torch.bfloat16)
    sample = batch(family, [301], seed=4)
    with torch.no_grad():
        assert torch.equal(model(**sample.inputs).logits, before(**sample.inputs).logits)


@cases("scheme", INEXACT)
def test_schemes_that_change_text_warn(scheme):
    model, sample = copy_of("qwen2_vl"), batch("qwen2_vl", [9])
    with pytest.warns(UserWarning, match="does not encode text as"):
        vispe.convert(model, scheme)
    with torch.no_grad():
        assert not torch.allclose(
            model(**sample.inputs).logits, stock("qwen2_vl")(**sample.inputs).logits, atol=1e-3
        )


@cases("spec", ["mhrope(sections=[1,0,0])", "mrope_i(text_axes=time)", "mrope(text_axes=time)"])
def test_options_that_change_text_warn(spec):
    with pytest.warns(UserWarning, match="does not encode text as"):
        model = vispe.convert(copy_of("llava", 2), spec)
    sample = batch("llava", [9])
    with torch.no_grad():
        assert not torch.allclose(
            model(**sample.inputs).logits, stock("llava", 2)(**sample.inputs).logits, atol=1e-3
        )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [named(scheme, 2) for scheme in EXACT])
def test_exact_schemes_do_not_warn(scheme):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vispe.convert(copy_of("llava", 2), scheme)
