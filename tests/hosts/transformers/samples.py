"""Samples of different lengths for every family: text, and one or two images, each with an answer at its end."""

from __future__ import annotations

from typing import Any

import torch

from tests.hosts.transformers import more, reference, tiny
from tests.hosts.transformers.more import LACKING
from tests.hosts.transformers.tiny import IMAGE
from vispe.train.vlm.prompts import OrderedPrompt

NOT_PACKABLE = {  # layers that do not isolate samples of a row
    "qwen3_5": "linear_attention",
    "qwen3_5_moe": "linear_attention",
    "minicpmv4_6": "linear_attention",
    "minicpm_ocr": "linear_attention",
    "lfm2_vl": "conv",
    "minimax_m3_vl": "minimax_m3_sparse",
    "qwen4_exp": "indexed_attention, linear_attention",
    "hy_v4_vl": "indexed_attention",
    "mistral_large4": "indexed_attention",
    "unlimited_ocr": "reference_sliding_attention",
    "paligemma": "prefix_attention",
}
EVERY = (*tiny.FAMILIES, *(family for family in more.CLASSES if family not in LACKING))
TYPED = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids", "molmo2": "mm_token_type_ids"}
"""What the families read whose image tokens attend to each other."""


def model_of(family: str, attention: str = "sdpa") -> Any:
    """Return a new stock model; windows are shorter than the samples."""
    model = (reference if family in tiny.FAMILIES else more).copy_of(family)
    text = model.config.get_text_config()
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        text.sliding_window = 8
    model.set_attn_implementation(attention)
    return model


def inputs_of(family: str, images: bool, words: int, seed: int) -> dict[str, Any]:
    """Return the inputs of one sample, with this number of words at its end."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 200, (1, words), generator=generator)
    if not images:
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    elif family in tiny.FAMILIES:
        items = [3, "image", 2] if seed % 2 else [2, "wide", 1, "image", 2]
        inputs = tiny.batch(family, items, seed=seed).with_tokens(tokens)
    else:
        inputs = dict(more.prompt(family, seed=seed).inputs)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], tokens], 1)
        for name in [n for n in inputs if n.endswith("type_ids") or n == "attention_mask"]:
            fill = int(name == "attention_mask")
            inputs[name] = torch.cat([inputs[name], torch.full_like(tokens, fill)], 1)
    if (name := TYPED.get(family)) is not None and name not in inputs:
        inputs[name] = (inputs["input_ids"] == IMAGE).long()
    return inputs


def samples_of(family: str) -> list[OrderedPrompt]:
    """Return text, two images, one image or two more, and text."""
    samples = []
    for images, words, seed in ((False, 5, 1), (True, 4, 2), (True, 7, 3), (False, 9, 4)):
        inputs = inputs_of(family, images, words, seed)
        length = inputs["input_ids"].shape[1]
        samples.append(OrderedPrompt(inputs, (), slice(length - 2 - seed % 2, length)))
    return samples


def longest_of(samples: list[OrderedPrompt]) -> int:
    """Return a row length for two samples but not all, so that rows end in padding."""
    lengths = sorted(s.inputs["input_ids"].shape[1] for s in samples)
    return lengths[-1] + lengths[0] + lengths[1] + 1


def logits_of(model: Any, sample: OrderedPrompt) -> Any:
    """Return the logits (s, v) of one sample in a separate call."""
    return model(**sample.inputs).logits[0]
