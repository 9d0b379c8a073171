"""Tiny models of the families beyond those of `tiny`, and a prompt with images for each."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor

from tests.hosts.transformers.newer import ALL, TINY
from tests.hosts.transformers.tiny import (
    END,
    IMAGE,
    MARKED,
    PAD,
    PATCH,
    QWEN_VISION,
    ROPE,
    START,
    VIDEO,
    VISION,
    WORDS,
    transformers,
)
from tests.hosts.transformers.tiny import TEXT as COMMON_TEXT
from vispe.multimodal import Image, Text, Video

TEXT = COMMON_TEXT | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
CLIP_START, CLIP_END = 294, 295
BOTH = {"image_token_id": IMAGE, "tie_word_embeddings": False}
FRAMED = BOTH | {"video_token_id": VIDEO, "image_start_token_id": START, "image_end_token_id": END}
FRAMED |= {"video_start_token_id": CLIP_START, "video_end_token_id": CLIP_END}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GEMMA_AUDIO = {
    "hidden_size": 32, "conf_num_attention_heads": 4, "conf_num_hidden_layers": 1, "sscp_conv_channel_size": (16, 8),
    "conf_conv_kernel_size": 3, "conf_attention_chunk_size": 4, "conf_attention_context_left": 5,
}  # fmt: skip
MOLMO_ADAPTER = {
    "vision_feature_layer": [0, 1], "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 48, "text_hidden_size": 64,
}  # fmt: skip
OMNI_AUDIO = {
    "d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "encoder_layers": 1, "num_mel_bins": 20,
    "output_dim": 64,
}  # fmt: skip
AUDIO, AUDIO_START, AUDIO_END = 287, 288, 289
SAID = {"audio_token_id": AUDIO, "audio_start_token_id": AUDIO_START, "audio_end_token_id": AUDIO_END}
LINEAR = {f"linear_{name}_head_dim": 16 for name in ("key", "value")}
LINEAR |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}

CLASSES = {
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "glm4v": "Glm4v",
    "glm4v_moe": "Glm4vMoe",
    "glm46v": "Glm46V",
    "glm_ocr": "GlmOcr",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoe",
    "paddleocr_vl": "PaddleOCRVL",
    "vipllava": "VipLlava",
    "aya_vision": "AyaVision",
    "cohere2_vision": "Cohere2Vision",
    "deepseek_vl": "DeepseekVL",
    "got_ocr2": "GotOcr2",
    "idefics3": "Idefics3",
    "ovis2": "Ovis2",
    "qianfan_ocr": "QianfanOCR",
    "smolvlm": "SmolVLM",
    "llava_next": "LlavaNext",
    "mistral3": "Mistral3",
    "lighton_ocr": "LightOnOcr",
    "gemma3": "Gemma3",
    "gemma3n": "Gemma3n",
    "gemma4": "Gemma4",
    "minicpmv4_6": "MiniCPMV4_6",
    "molmo2": "Molmo2",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinker",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinker",
    "hunyuan_vl": "HunYuanVL",
}
# no Molmo 2 yet, no model inside of Omni's thinkers, and a stock SmolVLM that fails with images
installed = Version(transformers.__version__)
LACKING = ("molmo2",) if installed < Version("5.20") else ()
LACKING += ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker") if installed < Version("5.21") else ()
LACKING += ("smolvlm",) if Version("5.20") <= installed < Version("5.21") else ()
CLASSES = {family: name for family, name in CLASSES.items() if family not in LACKING}
if not hasattr(transformers, "HunYuanVLConfig"):
    LACKING = (*LACKING, "hunyuan_vl")
    CLASSES.pop("hunyuan_vl")
LACKING = (*LACKING, *(family for family in ALL if family not in TINY))
OMNI = tuple(family for family in CLASSES if "omni" in family)
NEWLINES = tuple(family for family in CLASSES if family == "hunyuan_vl")  # rows end in a token of the image
GRIDS = (*tuple(CLASSES)[:9], *OMNI, *NEWLINES)
SIZED = ("mistral3", "lighton_ocr")
CLASSES |= {family: tiny.name for family, tiny in TINY.items()}
GRIDS = (*GRIDS, *(family for family, tiny in TINY.items() if tiny.axes == 3))
BREAK = 296  # ends a row of an image; END ends the last
# layers have frequencies by their kind
KINDS = (
    "gemma3",
    "gemma3n",
    "gemma4",
    *(family for family, tiny in TINY.items() if tiny.kinds),
)
PACKED = ("gemma4", "minicpmv4_6", "molmo2")  # images come as patches in a row
# some layers keep a window
SLIDING = (
    "aya_vision",
    "cohere2_vision",
    *KINDS,
    *(family for family, tiny in TINY.items() if tiny.sliding),
)
SIDES = {"gemma3n": 2, "got_ocr2": 4, "deepseek_vl": 6}  # tokens in each direction of a tile, 3 in the others


def text_part(family: str) -> dict[str, Any]:
    """Return the configuration of the language model."""
    sections = {"qwen3_5": [4, 2, 2], "glm": [2, 3, 3], "ernie": [6, 6, 4], "hunyuan": [5, 4, 4, 3]}
    kind = next((k for k in sections if family.startswith(k)), "")
    rope = ROPE | ({"mrope_section": sections.get(kind, [6, 5, 5])} if family in GRIDS else {})
    if family == "minicpmv4_6":
        rope |= {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}
    if kind in ("qwen3_5", "glm"):
        rope |= {"partial_rotary_factor": 0.5}
    text = TEXT | {"rope_parameters": rope}
    more = {
        "qwen3_omni_moe_thinker": EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        "qwen3_vl_moe": EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        "qwen3_5": LINEAR | {"layer_types": ["linear_attention", "full_attention"]},
        "glm4v_moe": {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        },
        "glm46v": {"model_type": "glm4v_text"},
        "ernie4_5_vl_moe": {
            "moe_intermediate_size": [48, 48], "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "minicpmv4_6": LINEAR
        | {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]},
        "molmo2": {"additional_vocab_size": 8, "model_type": "molmo2_text"},
        "got_ocr2": {"model_type": "qwen2"},
        "lighton_ocr": {"model_type": "qwen3"},
        "ovis2": {"model_type": "qwen2"},
        "qianfan_ocr": {"model_type": "qwen3"},
    }  # fmt: skip
    more["qwen3_5_moe"] = more["qwen3_5"] | EXPERTS | {"shared_expert_intermediate_size": 48}
    if family in ("aya_vision", "cohere2_vision"):
        layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
        return {k: v for k, v in text.items() if k != "head_dim"} | {"model_type": "cohere2"} | layers
    if family in KINDS:
        return text | gemma_part(family)
    plain = {} if family in GRIDS else {"model_type": "mistral" if family == "mistral3" else "llama"}
    plain |= {"sliding_window": None} if family == "mistral3" else {}
    return text | plain | more.get(family, {})


def gemma_part(family: str) -> dict[str, Any]:
    """Return the further options of Gemma's language models."""
    fast, slow = ({"rope_type": "default", "rope_theta": theta} for theta in (10.0, 100.0))
    if family == "gemma4":  # 4 of 16 pairs turn
        slow |= {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    part = {
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": fast, "full_attention": slow},
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "model_type": f"{family}_text",
        "query_pre_attn_scalar": 32,
    }
    if family != "gemma3":
        part |= {
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 300,
            "num_kv_shared_layers": 0,
        }
        part.pop("query_pre_attn_scalar")
    if family == "gemma3n":
        part |= {"activation_sparsity_pattern": None, "laurel_rank": 4, "altup_num_inputs": 2}
    if family == "gemma4":
        part |= {"global_head_dim": 64, "use_bidirectional_attention": "vision"}
    return part


def vision_part(family: str) -> dict[str, Any]:
    """Return the configuration of the vision tower."""
    wide = QWEN_VISION | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
    if family == "qwen2_5_omni_thinker":
        return wide | {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    if family.startswith("qwen3"):
        deep = {"deepstack_visual_indexes": [0, 1]} if family in ("qwen3_vl_moe", *OMNI) else {}
        return wide | {"num_position_embeddings": 16} | deep
    if family.startswith("glm"):
        return wide | {"image_size": 24} | ({"model_type": "glm4v_vision"} if family == "glm46v" else {})
    if family == "ernie4_5_vl_moe":
        return {k: v for k, v in wide.items() if k not in ("temporal_patch_size", "out_hidden_size")} | {
            "temporal_merge_size": 2
        }
    if family in NEWLINES:
        return VISION | {"patch_size": PATCH, "spatial_merge_size": 2, "max_image_size": 24}
    if family == "paddleocr_vl":
        return VISION | {"patch_size": PATCH, "spatial_merge_size": 2, "image_size": 24}
    if family == "got_ocr2":
        sizes = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        return sizes | {
            "image_size": 64,
            "patch_size": 4,
            "mlp_dim": 48,
            "window_size": 4,
            "global_attn_indexes": [1],
        }
    if family == "gemma3n":  # a tower of timm
        sizes = {"embed_dim": 64, "img_size": (28, 28), "depth": 2, "global_pool": "", "class_token": False}
        sizes |= {"use_post_transformer_norm": False, "ref_feat_shape": (1, 1)}
        return {"architecture": "vit_pe_core_large_patch14_336", "hidden_size": 64, "model_args": sizes}
    if family == "minicpmv4_6":
        return VISION | {"patch_size": PATCH, "image_size": 32, "insert_layer_id": 0}
    if family == "molmo2":
        sizes = {"num_key_value_heads": 2, "head_dim": 16, "patch_size": PATCH, "image_size": [16, 16]}
        return VISION | sizes
    if family == "gemma4":
        return VISION | {
            "patch_size": PATCH,
            "pooling_kernel_size": 2,
            "head_dim": 16,
            "num_key_value_heads": 2,
        }
    if family in SIZED:
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "head_dim": 16}
        return VISION | rope | {"patch_size": PATCH, "image_size": 32, "model_type": "pixtral"}
    if family == "ovis2":
        return VISION | {"patch_size": PATCH, "image_size": 24, "hidden_stride": 2, "vocab_size": 40}
    recorded = VISION | {
        "patch_size": PATCH,
        "image_size": 12 if family in ("vipllava", "llava_next") else 24,
    }
    kinds = {"clip_vision_model": ("vipllava", "llava_next")}
    kinds["siglip_vision_model"] = ("gemma3", "aya_vision", "cohere2_vision", "deepseek_vl")
    kind = next((k for k, names in kinds.items() if family in names), None)
    head = {"vision_use_head": False} if kind == "siglip_vision_model" else {}
    return recorded | ({} if kind is None else {"model_type": kind}) | head


@functools.cache
def stock(family: str) -> Any:
    """Return a shared random model in eval mode; its attention is sharp, so that positions matter."""
    more: dict[str, Any] = BOTH | (MARKED if family in GRIDS else {})
    if family.startswith("glm") or family == "ernie4_5_vl_moe":
        more = FRAMED
    more |= {
        "qwen2_5_omni_thinker": {"audio_config": OMNI_AUDIO} | SAID,
        "qwen3_omni_moe_thinker": {"audio_config": OMNI_AUDIO | {"downsample_hidden_size": 16}} | SAID,
        "vipllava": {"vision_feature_layers": [-1, 0]},
        "llava_next": {"image_grid_pinpoints": [[12, 24], [24, 12], [24, 24]]},
        "aya_vision": {"downsample_factor": 2, "alignment_intermediate_size": 64},
        "cohere2_vision": {"downsample_factor": 2, "alignment_intermediate_size": 64},
        "idefics3": {"scale_factor": 2},
        "smolvlm": {"scale_factor": 2},
        "ovis2": {"visual_indicator_token_ids": [295, 296, 297, 298, 299], "hidden_size": 64},
        "gemma3": {"mm_tokens_per_image": 9},
        "gemma3n": {"vision_soft_tokens_per_image": 4, "audio_config": GEMMA_AUDIO},
        "gemma4": {"video_token_id": VIDEO, "audio_token_id": 299},
        "minicpmv4_6": {"video_token_id": VIDEO, "insert_layer_id": 0},
        "molmo2": {"image_patch_id": IMAGE, "adapter_config": MOLMO_ADAPTER},
    }.get(family, {})
    if family in TINY:
        config = TINY[family].config()
    else:
        config = getattr(transformers, f"{CLASSES[family]}Config")(
            text_config=text_part(family), vision_config=vision_part(family), **more
        )
    torch.manual_seed(0)
    model = class_of(family)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.15 * torch.randn_like(weight))
        model.lm_head.weight[WORDS:] = 0
        model.lm_head.weight[PAD] = 0
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def class_of(family: str) -> Any:
    """Return the class of the models of a family."""
    if family in TINY:
        return TINY[family].kind()
    return getattr(transformers, f"{CLASSES[family]}ForConditionalGeneration")


def copy_of(family: str) -> Any:
    """Return a copy of `stock`, without the offset that the stock model stores in calls."""
    model = copy.deepcopy(stock(family))
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    return model


class Prompt(NamedTuple):
    """Inputs of a model, and the expected segments."""

    inputs: dict[str, Tensor]
    segments: list[Any]


def prompt(family: str, video: bool = False, seed: int = 0) -> Prompt:
    """Return words, an image, words, another image (of another size in families with sizes) and a word."""
    torch.manual_seed(seed)
    words = torch.randint(1, WORDS, (6,)).tolist()
    if family in TINY:
        images = TINY[family].images
    elif family in NEWLINES:
        images = [[Image(2, 4)], [Image(2, 3)]]
    elif family in GRIDS:
        images = [[Image(2, 3)], [Image(2, 2)]]
    elif family == "molmo2":  # the small copy, whose rows end in a token, then the whole
        images = [[Image(2, 3), Image(2, 4)], [Image(2, 3), Image(3, 3)]]
    elif family in ("gemma4", "minicpmv4_6"):
        images = [[Image(2, 3)], [Image(3, 2)]]
    elif family in SIZED:  # rows of the first kind end in a token
        wide = int(family == "mistral3")
        images = [[Image(2, 3 + wide)], [Image(3, 2 + wide)]]
    elif family == "llava_next":  # the small copy, then two tiles whose rows end in a token
        images = [[Image(3, 3), Image(3, 7)], [Image(3, 3), Image(6, 4)]]
    else:
        side = SIDES.get(family, 3)
        images = [[Image(side, side)], [Image(side, side)]]
    ids, segments, around = words[:2], [Text(2)], 0
    for number, blocks in enumerate(images):
        count = sum(t * h * w for b in blocks for t, h, w, _ in b.parts())
        positioned = [IMAGE] * count
        if family == "molmo2":
            low, high = (([IMAGE] * (b.w - 1) + [BREAK]) * b.h for b in blocks)
            positioned = [*low, END, START, *high]
            blocks = [blocks[0], Text(2), blocks[1]]
        if family == "mistral3":
            positioned = ([IMAGE] * (blocks[0].w - 1) + [BREAK]) * blocks[0].h
            positioned[-1] = END
        if family in NEWLINES:  # with a token before and after the rows
            positioned, around = [IMAGE, *positioned, IMAGE], 1
        ids += [START, *positioned, END, *words[2 + 2 * number : 4 + 2 * number]]
        segments += [Text(1 + around), *blocks, Text(3 + around)]
    inputs = {"input_ids": torch.tensor([ids])}
    if family in TINY:
        inputs |= TINY[family].inputs()
    elif family in GRIDS:
        grids = [[1, 4, 6], [1, 4, 4]]
        channels = 3 * PATCH**2 * (1 if family in ("ernie4_5_vl_moe", "paddleocr_vl", *NEWLINES) else 2)
        pixels = torch.randn(40, channels)
        inputs["pixel_values"] = pixels.reshape(40, 3, PATCH, PATCH) if family == "paddleocr_vl" else pixels
        inputs["image_grid_thw"] = torch.tensor(grids)
    elif family == "molmo2":  # each token is the mean of four patches of the image's crops
        sizes = torch.tensor([[2, 2, 2, 3], [2, 2, 3, 2]])
        inputs |= {"pixel_values": torch.rand(2, 16, 3 * PATCH**2), "image_grids": sizes}
        inputs["image_token_pooling"] = torch.randint(0, 32, (20, 4))
        around = torch.tensor([IMAGE, BREAK, START, END])
        inputs["mm_token_type_ids"] = torch.isin(inputs["input_ids"], around).long()
    elif family == "minicpmv4_6":
        sizes = torch.tensor([[8, 12], [12, 8]])
        inputs |= {"pixel_values": torch.randn(1, 3, PATCH, 2 * 96 * PATCH), "target_sizes": sizes}
    elif family == "gemma4":  # patches of both images have a column and a row
        positions = [[[x, y] for y in range(h) for x in range(w)] for h, w in ((4, 6), (6, 4))]
        inputs |= {
            "pixel_values": torch.rand(2, 24, 3 * PATCH**2),
            "image_position_ids": torch.tensor(positions),
        }
    elif family in SIZED:
        sizes = [[16, 24], [24, 16]]
        inputs |= {"pixel_values": torch.randn(2, 3, 24, 24), "image_sizes": torch.tensor(sizes)}
    elif family == "llava_next":
        inputs |= {
            "pixel_values": torch.randn(2, 3, 3, 12, 12),
            "image_sizes": torch.tensor([[12, 24], [24, 12]]),
        }
    else:
        side = {"vipllava": 12, "got_ocr2": 64, "gemma3n": 28}.get(family, 24)
        lead = (1, 2) if family in ("idefics3", "smolvlm") else (2,)
        inputs["pixel_values"] = torch.randn(*lead, 3, side, side)
    if video and family in TINY:
        ids, segments = words[:2], [Text(2)]
        groups = (
            [[block] for block in TINY[family].videos] if TINY[family].separated else [TINY[family].videos]
        )
        for group in groups:
            count = sum(t * h * w for block in group for t, h, w, _ in block.parts())
            ids += [9, START, *[VIDEO] * count, END]
            segments += [Text(2), *group, Text(1)]
        inputs = {"input_ids": torch.tensor([[*ids, words[5]]])} | TINY[family].video_inputs()
        segments += [Text(1)]
    elif video:  # of grid families: two frames of two patches in time each, with words between
        frames = 4 if family == "ernie4_5_vl_moe" else 2
        inputs |= {"video_grid_thw": torch.tensor([[frames, 4, 4]])}
        inputs["pixel_values_videos"] = torch.randn(frames * 16, channels)
        inputs.pop("pixel_values"), inputs.pop("image_grid_thw")
        token = IMAGE if family.startswith("glm") else VIDEO
        if family in ("paddleocr_vl", "ernie4_5_vl_moe", *OMNI):
            seconds = 0.75 if family in OMNI else None
            clip, segments = [START] + [token] * 8 + [END], [Text(3), Video(2, 2, 2, seconds), Text(2)]
            if family in OMNI:
                inputs["video_second_per_grid"] = torch.tensor([seconds])
        else:
            opened, closed = ([CLIP_START], [CLIP_END]) if family.startswith("glm") else ([], [])
            clip = [*opened, *([9, START] + [token] * 4 + [END]) * 2, *closed]
            segments = [Text(4 + len(opened)), Video(1, 2, 2), Text(3), Video(1, 2, 2), Text(2 + len(closed))]
        inputs["input_ids"] = torch.tensor([[*words[:2], *clip, words[5]]])
    tokens = inputs["input_ids"]
    inputs["attention_mask"] = torch.ones_like(tokens)
    if family in TINY and TINY[family].prefix:
        inputs["token_type_ids"] = torch.zeros_like(tokens)
    if family in GRIDS and family not in OMNI:
        inside = (tokens == CLIP_START).cumsum(1) > (tokens == CLIP_END).cumsum(1)
        film = (tokens == VIDEO) | ((tokens == IMAGE) & inside)
        inputs["mm_token_type_ids"] = ((tokens == IMAGE) & ~film).int() + 2 * film.int()
    if family == "ernie4_5_vl_moe":
        inputs["moe_mm_token_type_ids"] = (inputs["mm_token_type_ids"] > 0).int()
    return Prompt(inputs, segments)
