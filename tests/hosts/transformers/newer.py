"""Tiny models of further families, one entry each: configuration, images by hand, and the inputs of the processor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.hosts.transformers.tiny import IMAGE, PATCH, QWEN_VISION, ROPE, VIDEO, VISION, transformers
from tests.hosts.transformers.tiny import TEXT as COMMON_TEXT
from vispe.hosts.transformers.language.families import FAMILIES
from vispe.hosts.transformers.version import OLDEST, release
from vispe.multimodal import Image, Video

TEXT = COMMON_TEXT | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
TEXT |= {"rope_parameters": ROPE}
LLAMA = TEXT | {"model_type": "llama"}
QWEN2 = TEXT | {"model_type": "qwen2"}
SEEN = VISION | {"patch_size": PATCH, "image_size": 12}
CLIP = SEEN | {"model_type": "clip_vision_model"}
SIGLIP = SEEN | {"model_type": "siglip_vision_model", "vision_use_head": False}
PINS = [[12, 24], [24, 12], [24, 24]]
SQUARES = [[Image(3, 3)], [Image(3, 3)]]
GRIDS = [[Image(2, 3)], [Image(2, 2)]]
LLAVA_NEXT = [[Image(3, 3), Image(3, 7)], [Image(3, 3), Image(6, 4)]]


@dataclass(frozen=True)
class Tiny:
    """A tiny model and its prompt.

    Attributes:
        name: prefix of its classes.
        text: configuration of the language model.
        vision: configuration of the vision tower.
        inputs: function for the inputs with images.
        images: blocks of each image, by hand.
        more: other parts of the configuration.
        model: name of the class of the model, by default the prefix with ForConditionalGeneration.
        axes: number of axes of the positions of the stock model.
        sliding: whether some layers have a sliding window.
        kinds: whether layers of several types have frequencies of their own.
        square: whether images are squares of patches in raster order, given as pixels.
        prefix: whether the processor marks tokens of the prefix, which all attend to each other.
        late: whether late rotation is supported.
        saved: whether a stock model has equal outputs after saving and loading.
        videos: blocks of a video, by hand.
        video_inputs: function for the inputs with a video.
        separated: whether text separates the blocks of a video.
    """

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    images: list[list[Image]] = field(default_factory=lambda: SQUARES)
    more: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    axes: int = 1
    sliding: bool = False
    kinds: bool = False
    square: bool = False
    prefix: bool = False
    late: bool = True
    saved: bool = True
    videos: list[Video] = field(default_factory=list)
    video_inputs: Callable[[], dict[str, Tensor]] = dict
    separated: bool = False

    def kind(self) -> Any:
        """Return the class of the model."""
        return getattr(transformers, self.model or f"{self.name}ForConditionalGeneration")

    def config(self) -> Any:
        """Return the configuration."""
        ids = {"image_token_id": IMAGE, "tie_word_embeddings": False} | self.more
        kind = getattr(transformers, f"{self.name}Config")
        return kind(text_config=dict(self.text), vision_config=dict(self.vision), **ids)


def pixels(*shape: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(*shape)}


def frames(number: int = 2, side: int = 12) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values_videos": torch.randn(1, number, 3, side, side)}


def clip(*shape: int, frames: int = 2) -> Callable[[], dict[str, Tensor]]:
    def inputs() -> dict[str, Tensor]:
        patches = torch.randn(frames * 16, *(shape or (2 * 3 * PATCH**2,)))
        return {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([[frames, 4, 4]])}

    return inputs


def renamed() -> dict[str, Tensor]:
    return {"pixel_values_images": torch.randn(2, 3, 12, 12)}


def tiles() -> dict[str, Tensor]:
    sizes = torch.tensor([[12, 24], [24, 12]])
    return {"pixel_values": torch.randn(2, 3, 3, 12, 12), "image_sizes": sizes}


def grids(channels: int = 2 * 3 * PATCH**2, *shape: int) -> Callable[[], dict[str, Tensor]]:
    def inputs() -> dict[str, Tensor]:
        patches = torch.randn(40, *(shape or (channels,)))
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 6], [1, 4, 4]])}

    return inputs


def high_res() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 12, 12), "high_res_pixel_values": torch.randn(2, 3, 64, 64)}


def spatial() -> dict[str, Tensor]:
    shapes = torch.tensor([[4, 6], [4, 4]])
    pixels, mask = torch.randn(2, 24, 3 * PATCH**2), torch.arange(24)[None] < shapes.prod(1)[:, None]
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask.long()}


def merged() -> dict[str, Tensor]:
    return grids(3 * PATCH**2)() | {"image_merge_sizes": torch.tensor([2, 2])}


def merged_clip() -> dict[str, Tensor]:
    return clip(3 * PATCH**2)() | {"video_merge_sizes": torch.tensor([2])}


def granite() -> dict[str, Tensor]:
    sizes = torch.tensor([[24, 48], [48, 24]])
    return {"pixel_values": torch.randn(2, 3, 3, 24, 24), "image_sizes": sizes}


def sized() -> dict[str, Tensor]:
    sizes = torch.tensor([[16, 24], [24, 16]])
    return {"pixel_values": torch.randn(2, 3, 24, 24), "image_sizes": sizes}


def targets() -> dict[str, Tensor]:
    sizes = torch.tensor([[8, 12], [12, 8]])
    return {"pixel_values": torch.randn(1, 3, PATCH, 2 * 96 * PATCH), "target_sizes": sizes}


def unified() -> dict[str, Tensor]:
    positions = torch.tensor([[[x, y] for y in range(h) for x in range(w)] for h, w in ((2, 3), (3, 2))])
    return {"pixel_values": torch.rand(2, 6, 3 * (2 * PATCH) ** 2), "image_position_ids": positions}


def docling() -> dict[str, Tensor]:
    mask = torch.ones(1, 2, dtype=torch.bool)
    return {"pixel_values": torch.randn(1, 2, 3, 24, 24), "pixel_attention_mask": mask}


def views() -> dict[str, Tensor]:
    local = torch.randn(2, 3, 32, 32)
    return {"pixel_values": torch.randn(2, 3, 64, 64), "pixel_values_local": local,
            "num_local_patches": torch.tensor([2, 0])}  # fmt: skip


def joined() -> dict[str, Tensor]:
    return views() | {"num_local_patches": [2, 0], "patches_grid": [[2, 1], [0, 0]]}


def step() -> dict[str, Tensor]:
    local = torch.randn(2, 3, 32, 32)
    return {"pixel_values": torch.randn(2, 3, 48, 48), "pixel_values_local": local,
            "num_local_patches": torch.tensor([2, 0])}  # fmt: skip


BOTH = {"video_token_id": VIDEO}
INDEXED = {"image_token_index": IMAGE, "image_token_id": IMAGE}
SAM = {
    "model_type": "sam_vision_model", "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 64, "patch_size": 4, "mlp_dim": 48, "window_size": 4,
    "global_attn_indexes": [1],
}  # fmt: skip
PERCEPTION = {
    "architecture": "vit_pe_core_large_patch14_336", "hidden_size": 64,
    "model_args": {"embed_dim": 64, "img_size": (42, 42), "depth": 2, "global_pool": "", "class_token": True,
                   "use_post_transformer_norm": False, "ref_feat_shape": (3, 3)},
}  # fmt: skip
QWEN_TOWER = QWEN_VISION | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
WINDOWED = QWEN_TOWER | {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
GEMMA = TEXT | {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "query_pre_attn_scalar": 32,
    "rope_parameters": {
        f"{kind}_attention": {"rope_type": "default", "rope_theta": theta}
        for kind, theta in (("sliding", 10.0), ("full", 100.0))
    },
    "model_type": "gemma3_text",
}  # fmt: skip
GEMMA4 = GEMMA | {
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 64,
    "use_bidirectional_attention": "vision", "model_type": "gemma4_unified_text",
}  # fmt: skip
GEMMA4.pop("query_pre_attn_scalar")
LINEAR = {f"linear_{name}_head_dim": 16 for name in ("key", "value")}
LINEAR |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
STEP = TEXT | WINDOWS | {
    "model_type": "step3p5", "mlp_layer_types": ["dense", "sparse"], "moe_intermediate_size": 48,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "share_expert_dim": 48,
}  # fmt: skip
MLA = TEXT | {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "model_type": "deepseek_v3", "num_key_value_heads": 2,
}  # fmt: skip
MLA.pop("head_dim")

ALL: dict[str, Tiny] = {
    "llava_next_video": Tiny(
        "LlavaNextVideo", LLAMA, CLIP, tiles, LLAVA_NEXT, INDEXED | BOTH | {"image_grid_pinpoints": PINS},
        videos=[Video(2, 1, 1)], video_inputs=frames(),
    ),
    "video_llava": Tiny("VideoLlava", LLAMA, CLIP, pixels(2, 3, 12, 12), more=INDEXED | BOTH, square=False,
        videos=[Video(1, 1, 1), Video(1, 3, 3)] * 2, video_inputs=frames(),
    ),
    "janus": Tiny(
        "Janus", LLAMA, SEEN | {"projection_dim": 64}, pixels(2, 3, 12, 12), square=True,
        more={"vq_config": {"base_channels": 32, "num_embeddings": 20, "channel_multiplier": [1, 1],
                            "num_res_blocks": 1, "latent_channels": 16, "projection_dim": 64, "num_patches": 2}},
    ),
    "deepseek_vl_hybrid": Tiny(
        "DeepseekVLHybrid", LLAMA, SIGLIP, high_res, square=True, more={"high_res_vision_config": SAM}
    ),
    "perception_lm": Tiny("PerceptionLM", LLAMA, PERCEPTION, pixels(1, 2, 3, 42, 42), more=BOTH, square=True,
        videos=[Video(2, 3, 3)], video_inputs=frames(2, 42),
    ),
    "fast_vlm": Tiny(
        "FastVlm", QWEN2, {"model_type": "timm_wrapper", "architecture": "fastvit_t8", "hidden_size": 768,
                           "do_pooling": True, "model_args": {"inference_mode": True}},
        pixels(2, 3, 96, 96), more=INDEXED, saved=False,
    ),
    "paligemma": Tiny(
        "PaliGemma", TEXT | {"model_type": "gemma"}, SIGLIP, pixels(2, 3, 12, 12),
        more=INDEXED | {"projection_dim": 64}, prefix=True,
    ),
    "lfm2_vl": Tiny(
        "Lfm2Vl", TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        VISION | {"patch_size": PATCH, "num_patches": 16, "model_type": "siglip2_vision_model"}, spatial, GRIDS,
        {"projector_hidden_size": 64},
    ),
    "idefics2": Tiny(
        "Idefics2", LLAMA | {"model_type": "mistral", "sliding_window": None}, SEEN, pixels(1, 2, 3, 12, 12),
        [[Image(1, 4)], [Image(1, 4)]],
        {"perceiver_config": {"hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
                              "resampler_head_dim": 16, "num_key_value_heads": 1}},
    ),
    "aria": Tiny(
        "Aria", TEXT | {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2},
        SEEN | {"model_type": "idefics3_vision"}, pixels(2, 3, 12, 12), [[Image(1, 5)], [Image(1, 5)]],
        INDEXED | {"projector_patch_to_query_dict": {9: 5}},
    ),
    "shieldgemma2": Tiny(
        "ShieldGemma2", GEMMA, SIGLIP | {"image_size": 24}, pixels(2, 3, 24, 24),
        more={"mm_tokens_per_image": 9}, sliding=True, kinds=True, square=True, saved=False,
        model="Gemma3ForConditionalGeneration",
    ),
    "exaone4_5": Tiny(
        "Exaone4_5_", TEXT | WINDOWS | {"model_type": "exaone4"},
        WINDOWED | {"num_key_value_heads": 2},
        grids(), GRIDS, BOTH, sliding=True, videos=[Video(2, 2, 2)], video_inputs=clip(),
    ),
    "hyperclovax_vision_v2": Tiny(
        "HyperCLOVAXVisionV2", TEXT | {"model_type": "hyperclovax"},
        WINDOWED | {"model_type": "qwen2_5_vl_vision"}, grids(), GRIDS, BOTH,
        videos=[Video(2, 2, 2)], video_inputs=clip(),
    ),
    "muse_glimmer": Tiny(
        "MuseGlimmer",
        TEXT | WINDOWS,
        VISION | {"patch_size": PATCH, "pos_emb_height": 6, "pos_emb_width": 6, "patch_temporal": 1},
        grids(3 * PATCH**2), GRIDS, BOTH | {"projector_hidden_size": 32, "out_hidden_size": 128}, sliding=True,
        videos=[Video(1, 2, 2)] * 2, video_inputs=clip(3 * PATCH**2), separated=True,
    ),
    "kimi_k25": Tiny(
        "Kimi_K25", MLA, VISION | {"patch_size": PATCH, "pos_emb_height": 6, "pos_emb_width": 6},
        grids(0, 3, PATCH, PATCH), GRIDS, BOTH | {"projection_hidden_size": 32}, late=False,
        videos=[Video(1, 2, 2)], video_inputs=clip(3, PATCH, PATCH),
    ),
    "minimax_m3_vl": Tiny(
        "MiniMaxM3VL",
        TEXT | {"num_experts_per_tok": 2, "num_local_experts": 4, "dense_intermediate_size": 48,
                "shared_intermediate_size": 48, "rotary_dim": 32, "mlp_layer_types": ["dense", "sparse"],
                "layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 1,
                "index_head_dim": 32, "index_block_size": 4, "index_topk_blocks": 2},
        SEEN | {"spatial_merge_size": 2, "temporal_patch_size": 2}, grids(), GRIDS,
        INDEXED | {"video_token_index": VIDEO, "projector_hidden_size": 64},
        videos=[Video(1, 2, 2)] * 2, video_inputs=clip(), separated=True, late=False,
        model="MiniMaxM3SparseForConditionalGeneration",
    ),
    "cosmos3_edge": Tiny(
        "Cosmos3Edge", TEXT | {"rope_parameters": ROPE | {"mrope_section": [6, 5, 5]}},
        VISION | {"patch_size": PATCH, "num_patches": 16}, grids(3 * PATCH**2), GRIDS,
        BOTH | {"projector_hidden_size": 64, "vision_start_token_id": 292, "vision_end_token_id": 293},
        axes=3, videos=[Video(1, 2, 2)] * 2, video_inputs=clip(3 * PATCH**2), separated=True,
    ),
    "cosmos3_omni": Tiny(
        "Cosmos3Omni",
        TEXT | {"rope_parameters": ROPE | {"mrope_section": [6, 5, 5]}, "model_type": "qwen3_vl_text"},
        QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
                      "model_type": "qwen3_vl_vision"},
        grids(), GRIDS, BOTH | {"vision_start_token_id": 292, "vision_end_token_id": 293},
        axes=3, videos=[Video(1, 2, 2)] * 2, video_inputs=clip(), separated=True,
    ),
    "qwen4_exp": Tiny(
        "Qwen4Exp",
        TEXT | LINEAR | {"layer_types": ["linear_attention", "indexed_attention"], "num_experts": 4,
                         "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
                         "rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5},
                         "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
                         "indexer_head_dim": 32, "indexer_budget": 8, "indexer_compress_ratio": 4},
        QWEN_TOWER | {"num_position_embeddings": 16}, grids(), GRIDS,
        BOTH | {"vision_start_token_id": 292, "vision_end_token_id": 293}, axes=3, late=False,
        videos=[Video(1, 2, 2)] * 2, video_inputs=clip(), separated=True,
    ),
    "hy_v4_vl": Tiny(
        "HYV4VL",
        MLA | {"index_topk": 8, "index_head_dim": 32, "index_n_heads": 2, "mlp_layer_types": ["dense", "sparse"],
               "indexer_types": ["full", "shared"], "hc_mult": 2,
               "rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}, "model_type": "hy_v4_vl_text"},
        VISION | {"patch_size": PATCH, "spatial_merge_size": 2, "max_image_size": 24, "out_hidden_size": 64},
        grids(3 * PATCH**2), [[Image(2, 4)], [Image(2, 3)]], BOTH, axes=3, late=False,
        videos=[Video(1, 2, 3)] * 2, video_inputs=clip(3 * PATCH**2),
    ),
    "video_llama_3": Tiny(
        "VideoLlama3", QWEN2, VISION | {"patch_size": PATCH}, merged, GRIDS, BOTH,
        videos=[Video(1, 2, 2)] * 2, video_inputs=merged_clip, separated=True,
    ),
    "mistral_large4": Tiny(
        "MistralLarge4",
        TEXT | {k: MLA[k] for k in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
                "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace")}
        | {"num_key_value_heads": 2, "index_topk": 8, "index_head_dim": 32, "index_n_heads": 2, "head_dim": 16},
        SEEN | {"model_type": "pixtral", "image_size": 32, "head_dim": 16,
                "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        sized, [[Image(2, 3)], [Image(3, 2)]], INDEXED, late=False,
    ),
    "granite4_vision": Tiny(
        "Granite4Vision", TEXT, CLIP | {"hidden_size": 64, "image_size": 24}, granite,
        [[Image(3, 3), Image(3, 7)], [Image(3, 3), Image(6, 4)]],
        INDEXED | {"image_grid_pinpoints": [[24, 48], [48, 24]], "downsample_rate": "1/2",
                   "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1, 1, 1, 1]},
    ),
    "minicpm_ocr": Tiny(
        "MiniCPMOcr",
        TEXT | LINEAR | {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"],
                         "rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}},
        SEEN | {"image_size": 32, "insert_layer_id": 0}, targets, [[Image(2, 3)], [Image(3, 2)]],
        BOTH | {"insert_layer_id": 0, "downsample_mode": "16x"},
    ),
    "gemma4_unified": Tiny(
        "Gemma4Unified", GEMMA4, {"patch_size": PATCH, "pooling_kernel_size": 2, "mm_embed_dim": 32,
                                  "mm_posemb_size": 8, "output_proj_dims": 32},
        unified, [[Image(2, 3)], [Image(3, 2)]], BOTH | {"audio_token_id": 299}, sliding=True, kinds=True,
    ),
    "granite_docling": Tiny(
        "GraniteDocling", TEXT | {"model_type": "granite_docling_text", "attention_multiplier": 0.2},
        SEEN | {"image_size": 24, "scale_factor": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        docling,
    ),
    "deepseek_ocr2": Tiny(
        "DeepseekOcr2",
        TEXT | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1,
                "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
        {"sam_config": SAM | {"model_type": "deepseek_ocr2_sam_vision_model", "downsample_channels": [32, 64]},
         "encoder_config": TEXT | {"num_hidden_layers": 1, "model_type": "deepseek_ocr2_encoder"}},
        views, [[Image(1, 144), Image(1, 144), Image(1, 144), Image(1, 1)], [Image(1, 144), Image(1, 1)]],
    ),
    "unlimited_ocr": Tiny(
        "UnlimitedOcr",
        TEXT | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1,
                "topk_group": 1, "mlp_layer_types": ["dense", "sparse"], "sliding_window": 64},
        {"sam_config": SAM | {"model_type": "unlimited_ocr_sam_vision_model", "downsample_channels": [32, 64]},
         "encoder_config": VISION | {"hidden_size": 64, "image_size": 64, "patch_size": 16}},
        joined, [[Image(2, 5), Image(4, 5), Image(1, 1)], [Image(4, 5), Image(1, 1)]], sliding=True,
    ),
    "muse_spark": Tiny(
        "MuseSpark",
        TEXT | WINDOWS | {"moe_intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
                          "moe_hidden_size": 32},
        VISION | {"patch_size": PATCH, "pos_emb_height": 6, "pos_emb_width": 6, "patch_temporal": 1},
        grids(3 * PATCH**2), GRIDS,
        BOTH | {"projector_hidden_size": 32, "out_hidden_size": 128, "audio_token_id": 299,
                "audio_config": {"patch_sizes": [16, 6], "hidden_sizes": [16, 32], "depths": [1, 1],
                                 "num_hidden_layers": 2, "out_hidden_size": 64}},
        sliding=True, videos=[Video(1, 2, 2)] * 2, video_inputs=clip(3 * PATCH**2), separated=True,
    ),
    "step3p7": Tiny(
        "Step3p7", STEP, SEEN | {"image_size": 48, "max_position_embeddings": 144, "mlp_ratio": 2.0}, step,
        [[Image(2, 2), Image(2, 2), Image(3, 3)], [Image(3, 3)]], sliding=True, kinds=True,
    ),
}  # fmt: skip
TINY = {  # of this version
    family: tiny
    for family, tiny in ALL.items()
    if hasattr(transformers, f"{tiny.name}Config")
    and release(transformers.__version__) >= release(FAMILIES[family].since or OLDEST)
}
if "pixel_values" not in inspect.signature(transformers.VideoLlavaModel.forward).parameters:  # before 5.24
    TINY["video_llava"] = replace(TINY["video_llava"], inputs=renamed)
if "kimi_k25" in TINY and release(transformers.__version__) < release("5.24"):
    TINY["kimi_k25"] = replace(TINY["kimi_k25"], videos=[])  # the stock model fails
