"""Situations that users of vision-language models reported, tried on converted models."""

from __future__ import annotations

import pytest
import torch

import vispe
from tests.hosts.transformers.tiny import CACHE, batch, make, transformers
from vispe.errors import UnsupportedHost


def converted(family, spec):
    return vispe.convert(make(family), spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mrope_i", "mhrope", "vrope"])
def test_compiled_interleaved_schemes_equal_eager(spec):
    """vLLM#52005, pytorch#193183: compiled interleaved M-RoPE was wrong."""
    # mhrope gives each axis heads of its own
    model = vispe.convert(make("qwen3_vl", kv_heads=3 if spec == "mhrope" else 1), spec)
    inputs = batch("qwen3_vl", [3, "image", 5]).inputs
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        torch._dynamo.reset()
        actual = torch.compile(model, backend="eager")(**inputs, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sections", [None, [4, 4, 4, 4]])
def test_four_axes_of_hunyuan_are_named_in_the_refusal(sections):
    """vLLM#56078, #55140: four sections where three were assumed."""
    text = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 300,
    }  # fmt: skip
    if sections is not None:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    if not hasattr(transformers, "HunYuanVLConfig"):
        pytest.skip("this transformers has no HunYuan-VL")
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.HunYuanVLConfig(text_config=text, vision_config=vision | {"out_hidden_size": 64})
    model = transformers.HunYuanVLForConditionalGeneration(config)
    with pytest.raises(UnsupportedHost, match="its rotary embedding has four axes"):
        vispe.convert(model, "mrope_i")


@pytest.mark.parametrize("spec", ["vrope", "v2pe(stride=4)"])
def test_a_loop_of_ones_own_with_chunks_gives_the_tokens_of_full_passes(spec):
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
            whole = model(input_ids=ids, mm_token_type_ids=types, **images, use_cache=False).logits[:, -1]
            step = model(input_ids=token, **{CACHE: cache})
            torch.testing.assert_close(step.logits[:, -1], whole, rtol=1e-4, atol=1e-4)
