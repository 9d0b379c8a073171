"""Tiny CLIP models in folders of open_clip, with random or hand-crafted weights."""

from __future__ import annotations

import json
from pathlib import Path

import open_clip
import torch
from safetensors.torch import save_file

from tests.hosts.helpers import shake
from vispe.backbones.clip_weights import quiet

VOCABULARY = 49408  # of the tokenizer that comes with open_clip
TEXT = {"context_length": 24, "width": 16, "heads": 2, "layers": 1}
VISION = {"image_size": [24, 40], "patch_size": 8, "width": 32, "layers": 2, "head_width": 8}
TIMM = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear", "image_size": 160}
TOWERS = {
    "default": VISION,
    "layer_scale": {**VISION, "ls_init_value": 0.3},
    "custom": {**VISION, "block_type": "custom"},
    "norms": {
        **VISION, "qk_norm": True, "scale_heads": True, "scale_attn_inner": True, "scale_attn": True, "scale_fc": True
    },
}  # fmt: skip


def write_folder(folder: Path, vision: dict, embed: int = 16, vocabulary: int = 64) -> Path:
    """Write the configuration of a model with a vision tower, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    card = {
        "model_cfg": {
            "embed_dim": embed,
            "vision_cfg": vision,
            "text_cfg": {**TEXT, "vocab_size": vocabulary},
        },
        "preprocess_cfg": {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]},
    }
    (folder / "open_clip_config.json").write_text(json.dumps(card))
    return folder


def stock(folder: Path):
    """Return the model of a folder as built by open_clip, with all parameters random and non-zero."""
    torch.manual_seed(0)
    with quiet():
        model = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    return shake(model).eval().requires_grad_(False)


def with_trunk(folder: Path, trunk):
    """Return a model whose image tower is `trunk` of width 64, followed by a linear projection."""
    model = stock(write_folder(folder, TIMM))
    model.visual.trunk = shake(trunk).eval().requires_grad_(False)
    return model


def save(model, folder: Path) -> None:
    state = {key: value.contiguous().clone() for key, value in model.state_dict().items()}
    save_file(state, str(folder / "open_clip_model.safetensors"))


def planted(folder: Path) -> Path:
    """Save a model that matches "bright" to bright and "dark" to dark patches; other words have zero embeddings."""
    vision = {**VISION, "image_size": 32, "layers": 1, "head_width": 32}
    model = stock(write_folder(folder, vision, vocabulary=VOCABULARY))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float("ln_" in name and name.endswith("weight")))
        model.logit_scale.fill_(3.0)
        tower, (block,) = model.visual, model.visual.transformer.resblocks
        for channel, sign in ((0, 1.0), (1, -1.0)):
            tower.conv1.weight[channel] = sign / tower.conv1.weight[channel].numel()
            tower.proj[channel, 0] = sign
            model.text_projection[channel, 0] = sign
        eye = torch.eye(32)
        block.attn.in_proj_weight[32:64] = 2 * eye  # keys: patches of equal grey level attend to each other
        block.attn.in_proj_weight[64:] = eye
        block.attn.out_proj.weight.copy_(eye)
        (sentence,) = model.transformer.resblocks  # the last token gathers all words
        sentence.attn.in_proj_weight[32:] = torch.eye(16)
        sentence.attn.out_proj.weight.copy_(torch.eye(16))
        sentence.attn.in_proj_weight[:32] = 0
        encode = open_clip.get_tokenizer("ViT-B-32").encode
        for word, sign in (("bright", 1.0), ("dark", -1.0)):
            (token,) = encode(word)
            model.token_embedding.weight[token, :2] = torch.tensor([sign, -sign])
    save(model, folder)
    return folder
