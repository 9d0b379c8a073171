"""Situations that users of vision-language models reported, reproduced with converted models."""

from __future__ import annotations

import copy

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.more import prompt, stock
from tests.hosts.transformers.tiny import CACHE, batch, make, transformers


def converted(family, spec):
    return vispe.convert(make(family), spec)


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("spec", ["mrope_i", "mhrope", "vrope"])
def test_compiled_interleaved_schemes_equal_eager(spec):
    """vLLM#52005, pytorch#193183: compiled interleaved M-RoPE was wrong."""
    # mhrope gives each axis heads of its own
    model = vispe.convert(make("qwen3_vl", kv_heads=3 if spec == "mhrope" else 1), spec)
    inputs = batch("qwen3_vl", [3, "image", 5]).inputs
    with torch.no_grad():
        expected = model(**inputs).logits
        torch._dynamo.reset()
        actual = torch.compile(model, backend="eager")(**inputs).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@cases("spec", ["xdrope", "mrope_i", "vrope"])
def test_four_sections_of_hunyuan(spec):
    """vLLM#56078, #55140: four sections instead of the assumed three."""
    if not hasattr(transformers, "HunYuanVLConfig"):
        pytest.skip("this transformers has no HunYuan-VL")
    inputs, model = prompt("hunyuan_vl").inputs, copy.deepcopy(stock("hunyuan_vl"))
    assert len(model.model.language_model.rotary_emb.mrope_section) == 4
    assert vispe.convert(model, spec)(**inputs).logits.isfinite().all()


@cases("spec", ["vrope", "v2pe(stride=4)"])
def test_a_custom_loop_with_chunks_equals_full_passes(spec):
    """mlx-vlm#1619, #1755, #1527: the offset was lost in decoding, and later chunks were counted from 0."""
    model = converted("qwen2_5_vl", spec)
    inputs = batch("qwen2_5_vl", ["image", 4, 6], mask=False).inputs
    ids, first = inputs["input_ids"], inputs["input_ids"].shape[1] - 5
    images = {k: v for k, v in inputs.items() if k in ("pixel_values", "image_grid_thw")}
    types = inputs["mm_token_type_ids"]
    cache = transformers.DynamicCache(config=model.config.get_text_config())
    with torch.no_grad():
        model(input_ids=ids[:, :first], mm_token_type_ids=types[:, :first], **images, **{CACHE: cache})
        step = model(input_ids=ids[:, first:], mm_token_type_ids=types[:, first:], **{CACHE: cache})
        for _ in range(4):
            token = step.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, token], 1)
            types = torch.cat([types, torch.zeros_like(token)], 1)
            expected = model(input_ids=ids, mm_token_type_ids=types, **images, use_cache=False).logits[:, -1]
            step = model(input_ids=token, **{CACHE: cache})
            torch.testing.assert_close(step.logits[:, -1], expected, rtol=1e-4, atol=1e-4)
