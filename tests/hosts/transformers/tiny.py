"""Random vision-language models of a few thousand weights, and inputs in the format of their processors."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from vispe.hosts.contracts.contract import release
from vispe.multimodal import Image, Stream, Text, Video

transformers = pytest.importorskip("transformers", reason="vispe[vlm] is not installed")

_ASKED = inspect.signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _ASKED else "past_key_values"  # until 5.23
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILIES = (*QWEN, "llava", "llava_onevision", "internvl")
WITH_VIDEO = (*QWEN, "llava_onevision")
PAD, WORDS, IMAGE, VIDEO, START, END = 0, 250, 290, 291, 292, 293  # words are 1 .. 249
PATCH, SIDE = 4, 3  # pixels of a patch; tokens in each direction of a fixed-size image
SECONDS = 0.75  # between the frames of a video, where a model is told

TEXT = {"intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300, "head_dim": 32}
TEXT |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "tie_word_embeddings": False}
TEXT |= {"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None}
# so low that every pair of channels turns within a short prompt
ROPE = {
    "rope_type": "default",
    "rope_theta": 100.0,
}
QWEN_VISION = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
MARKED = {"vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": VIDEO}


def needs(version: str, reason: str) -> None:
    """Skip the rest of a test or case with transformers older than a version."""
    installed = transformers.__version__
    if release(installed) < release(version):
        pytest.skip(f"transformers {version} or later is needed, got {installed}: {reason}")


def config(family: str, kv_heads: int = 1) -> Any:
    """Return the configuration of a tiny model; twice as many query heads as key heads."""
    hidden = 64 * kv_heads
    text = TEXT | {
        "hidden_size": hidden,
        "num_attention_heads": 2 * kv_heads,
        "num_key_value_heads": kv_heads,
    }
    one = text | {"model_type": "qwen2", "rope_parameters": dict(ROPE)}
    three = text | {
        "rope_parameters": ROPE | {"mrope_section": [8, 4, 4] if family == "qwen2_vl" else [6, 5, 5]}
    }
    common: dict[str, Any] = {"image_token_id": IMAGE, "tie_word_embeddings": False}
    if family == "qwen2_vl":
        vision = QWEN_VISION | {"embed_dim": 32, "hidden_size": hidden, "mlp_ratio": 2}
        return transformers.Qwen2VLConfig(text_config=three, vision_config=vision, **common, **MARKED)
    if family == "qwen2_5_vl":
        vision = QWEN_VISION | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": hidden}
        vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1], "tokens_per_second": 4}
        return transformers.Qwen2_5_VLConfig(text_config=three, vision_config=vision, **common, **MARKED)
    if family == "qwen3_vl":
        vision = QWEN_VISION | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": hidden}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        return transformers.Qwen3VLConfig(text_config=three, vision_config=vision, **common, **MARKED)
    vision = VISION | {"patch_size": PATCH, "image_size": SIDE * PATCH}
    if family == "llava":
        vision |= {"model_type": "clip_vision_model"}
        return transformers.LlavaConfig(
            text_config=one, vision_config=vision, image_seq_length=SIDE**2, **common
        )
    if family == "llava_onevision":
        vision |= {"model_type": "siglip_vision_model", "vision_use_head": False}
        size = SIDE * PATCH
        pins = {
            "image_grid_pinpoints": [[size, size], [size, 2 * size], [2 * size, size]],
            "video_token_id": VIDEO,
        }
        return transformers.LlavaOnevisionConfig(text_config=one, vision_config=vision, **pins, **common)
    vision |= {"image_size": 2 * SIDE * PATCH}
    return transformers.InternVLConfig(
        text_config=one, vision_config=vision, image_seq_length=SIDE**2, **common
    )


CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
}


def make(family: str, kv_heads: int = 1, seed: int = 0) -> Any:
    """Return a model in eval mode with sharp attention, so that positions matter, that generates only words."""
    torch.manual_seed(seed)
    model = getattr(transformers, CLASSES[family])(config(family, kv_heads)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            wide = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            weight.copy_(noise * wide / weight[0].numel() ** 0.5 if weight.ndim > 1 else weight + 0.1 * noise)
        model.lm_head.weight[WORDS:] = 0
        model.lm_head.weight[PAD] = 0
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


@dataclass
class Batch:
    """Inputs of a model, and the equivalent stream."""

    family: str
    inputs: dict[str, Any]
    stream: Stream
    rows: list[list[Any]] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]

    def without(self, *names: str) -> dict[str, Any]:
        """Return the inputs except for some."""
        return {k: v for k, v in self.inputs.items() if k not in names}

    def with_tokens(self, tokens: Tensor) -> dict[str, Any]:
        """Return the inputs with text tokens (b, n) appended to every row."""
        longer = dict(self.inputs, input_ids=torch.cat([self["input_ids"], tokens], 1))
        for name, fill in (("attention_mask", 1), ("mm_token_type_ids", 0)):
            if name in longer:
                longer[name] = torch.cat([longer[name], torch.full_like(tokens, fill)], 1)
        return longer


class _Writer:
    """Collects one batch: tokens and segments of each row, pixels and grids of all."""

    def __init__(self, family: str, seed: int) -> None:
        self.family = family
        self.generator = torch.Generator().manual_seed(seed)
        self.rows: list[tuple[list[int], list[Any]]] = []
        self.pixels: list[Tensor] = []
        self.frames: list[Tensor] = []
        self.grids: list[list[int]] = []
        self.clips: list[list[int]] = []
        self.sizes: list[list[int]] = []
        self.counts: list[int] = []
        self.tiles: list[list[int]] = []

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def text(self, count: int) -> None:
        tokens, segments = self.rows[-1]
        tokens.extend(torch.randint(1, WORDS, (count,), generator=self.generator).tolist())
        segments.append(Text(count))

    def marker(self, token: int) -> None:
        tokens, segments = self.rows[-1]
        tokens.append(token)
        segments.append(Text(1))

    def insert(self, token: int, *segments: Any) -> None:
        for segment in segments:
            self.rows[-1][0].extend([token] * sum(t * h * w for t, h, w, _ in segment.parts()))
            self.rows[-1][1].append(segment)

    def add(self, item: Any, single: bool) -> None:
        if isinstance(item, int):
            return self.text(item)
        if self.family in QWEN:
            return self.qwen(item)
        if item == "video":
            frames = 3
            self.frames.append(self.noise(frames, 3, SIDE * PATCH, SIDE * PATCH))
            half = (SIDE + 1) // 2
            return self.insert(VIDEO, Video(frames, half, half), Video(1, 1, 1))
        if self.family == "internvl":
            rows, cols = (1, 2) if item == "wide" else (1, 1)
            size = 2 * SIDE * PATCH
            count = rows * cols + (rows * cols > 1)
            self.pixels.append(self.noise(count, 3, size, size))
            self.tiles.append([rows, cols])
            if not item.startswith("bare"):
                self.marker(START)
            self.insert(IMAGE, *[Image(SIDE, SIDE)] * count)
            return self.marker(END) if not item.startswith("bare") else None
        size = SIDE * PATCH
        if self.family == "llava":
            self.pixels.append(self.noise(1, 3, size, size))
            return self.insert(IMAGE, Image(SIDE, SIDE))
        tall, cols = (size, 2 * size) if item == "wide" else (size, size)
        self.sizes.append([tall, cols])
        cut = (2 if item == "wide" else 1) if single else 0
        self.pixels.append(self.noise(1 + cut, 3, size, size))
        if not single:
            return self.insert(IMAGE, Image(SIDE, SIDE), Image(1, 1))
        return self.insert(IMAGE, Image(SIDE, SIDE), Image(SIDE, cut * SIDE + 1))

    def qwen(self, item: str) -> None:
        t, h, w = {
            "image": (1, 4, 6),
            "wide": (1, 4, 10),
            "bare": (1, 4, 6),
            "barewide": (1, 4, 10),
            "video": (5, 4, 6),
        }[item]
        values = self.noise(t * h * w, 3 * 2 * PATCH**2)
        if item != "video":
            self.grids.append([t, h, w])
            self.pixels.append(values)
            self.between([] if item.startswith("bare") else [START], IMAGE, Image(h // 2, w // 2))
            return
        self.clips.append([t, h, w])
        self.frames.append(values)
        if self.family == "qwen3_vl":
            for _ in range(t):
                self.text(2)  # when the frame was taken
                self.between([START], VIDEO, Video(1, h // 2, w // 2))
            return
        seconds = SECONDS if self.family == "qwen2_5_vl" else None
        self.between([START], VIDEO, Video(t, h // 2, w // 2, seconds=seconds))

    def between(self, markers: list[int], token: int, segment: Any) -> None:
        for marker in markers:
            self.marker(marker)
        self.insert(token, segment)
        if markers:
            self.marker(END)


def batch(
    family: str,
    *rows: list[Any],
    padding: str = "left",
    seed: int = 1,
    mask: bool = True,
    counted: bool = True,
) -> Batch:
    """Return inputs of a batch.

    Args:
        family: of the model.
        *rows: items of each row: a number of words, 'image', 'wide' (of another size in families with sizes, in
            tiles in families with tiles), 'bare' and 'barewide' (without markers), or 'video'.
        padding: side.
        seed: of words and pixels.
        mask: whether to return an attention mask.
        counted: whether LLaVA-OneVision receives the number of images; it tiles single images.
    """
    w = _Writer(family, seed)
    for items in rows:
        w.rows.append(([], []))
        images = [i for i in items if isinstance(i, str) and i != "video"]
        w.counts.append(len(images))
        for item in items:
            w.add(item, len(images) == 1 or not counted)
    length = max(len(tokens) for tokens, _ in w.rows)
    ids = torch.full((len(rows), length), PAD)
    recorded = torch.zeros(len(rows), length, dtype=torch.long)
    for row, (tokens, _) in enumerate(w.rows):
        where = slice(length - len(tokens), length) if padding == "left" else slice(0, len(tokens))
        ids[row, where] = torch.tensor(tokens)
        recorded[row, where] = 1
    inputs: dict[str, Any] = {"input_ids": ids}
    if mask:
        inputs["attention_mask"] = recorded
    if family in QWEN:
        inputs["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
        pixels = {"pixel_values": w.pixels, "pixel_values_videos": w.frames}
        grids = {"image_grid_thw": w.grids, "video_grid_thw": w.clips}
        inputs |= {k: torch.cat(v) for k, v in pixels.items() if v} | {
            k: torch.tensor(v) for k, v in grids.items() if v
        }
        if family == "qwen2_5_vl" and w.clips:
            inputs["second_per_grid_ts"] = torch.full((len(w.clips),), SECONDS)
    elif w.pixels and family == "llava_onevision":
        most = max(len(p) for p in w.pixels)
        padded = [torch.cat([p, p.new_zeros(most - len(p), *p.shape[1:])]) for p in w.pixels]
        inputs |= {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor(w.sizes)}
        if counted:
            inputs["batch_num_images"] = torch.tensor([n for n in w.counts if n])
    elif w.pixels:
        inputs["pixel_values"] = torch.cat(w.pixels)
    if w.frames and family == "llava_onevision":
        inputs["pixel_values_videos"] = torch.stack(w.frames)
    return Batch(family, inputs, Stream.of([s for _, s in w.rows], padding, length), [list(r) for r in rows])
