"""Names of open_clip on which vispe relies."""

from __future__ import annotations

from vispe.hosts.contracts.contract import Contract, Library

_TRANSFORMER = "open_clip.transformer"

_TOWER = (
    Contract(
        f"{_TRANSFORMER}:VisionTransformer.__init__",
        "`pos_embed_type` selects the absolute table",
        keywords="pos_embed_type image_size patch_size width layers heads mlp_ratio patch_dropout",
    ),
    Contract(
        f"{_TRANSFORMER}:VisionTransformer.__init__",
        "these arguments select the blocks",
        keywords="block_type scaled_cosine_attn",
        since="3.0.0",
    ),
    Contract(
        f"{_TRANSFORMER}:VisionTransformer",
        "the converted forward pass can be computed from these attributes",
        attributes=(
            "conv1 class_embedding positional_embedding grid_size patch_dropout ln_pre ln_post "
            "transformer proj output_tokens"
        ),
    ),
    Contract(
        f"{_TRANSFORMER}:VisionTransformer._embeds", "callers get the input of the blocks", positional="x"
    ),
    Contract(
        f"{_TRANSFORMER}:VisionTransformer._pool", "it returns pooled features and tokens", positional="x"
    ),
    Contract(
        f"{_TRANSFORMER}:VisionTransformer.forward_intermediates",
        "callers pass these options by keyword",
        positional="x",
        keywords=(
            "indices stop_early normalize_intermediates intermediates_only output_fmt output_extra_tokens"
        ),
    ),
    Contract(
        f"{_TRANSFORMER}:VisionTransformer.lock",
        "it freezes groups that contain the absolute table",
        keywords="unlocked_groups freeze_bn_stats",
    ),
    Contract(
        f"{_TRANSFORMER}:VisionTransformer.prune_intermediate_layers",
        "it removes the last blocks",
        positional="indices",
    ),
    Contract(
        f"{_TRANSFORMER}:Transformer",
        "these attributes are its blocks and their layout",
        attributes="resblocks grad_checkpointing batch_first",
    ),
    Contract(
        f"{_TRANSFORMER}:PatchDropout",
        "patches are dropped as these attributes define",
        attributes="prob exclude_first_token",
    ),
)
_ATTENTION = (
    Contract(f"{_TRANSFORMER}:ResidualAttentionBlock", "it has the attention of torch", attributes="attn"),
    Contract(
        f"{_TRANSFORMER}:ResidualAttentionBlock.forward",
        "it passes its mask to its attention",
        positional="q_x",
        keywords="attn_mask",
    ),
    Contract(
        f"{_TRANSFORMER}:ResidualAttentionBlock.attention",
        "the forward pass calls it with these arguments",
        positional="q_x k_x v_x",
        keywords="attn_mask",
    ),
    Contract(f"{_TRANSFORMER}:CustomResidualAttentionBlock", "it has its own attention", attributes="attn"),
    Contract(
        f"{_TRANSFORMER}:CustomResidualAttentionBlock.forward",
        "it passes its mask to its attention",
        positional="x",
        keywords="attn_mask",
    ),
    Contract(
        f"{_TRANSFORMER}:Attention.forward",
        "blocks pass positions to attention as its mask",
        positional="x",
        keywords="attn_mask",
    ),
    Contract(
        f"{_TRANSFORMER}:Attention",
        "attention with encodings can be computed from these attributes",
        attributes=(
            "in_proj_weight in_proj_bias num_heads ln_q ln_k ln_inner head_scale logit_scale "
            "attn_drop out_proj out_drop"
        ),
        since="3.0.0",
    ),
)
_NAMES = (
    Contract("open_clip.pretrained:_PRETRAINED", "it maps names of models to their pretrained tags"),
    Contract("open_clip:add_model_config", "it registers a configuration from a file", positional="path"),
    Contract("open_clip:get_model_config", "it returns the configuration of a name", positional="model_name"),
    Contract(
        "open_clip:CLIPVisionCfg",
        "it has the defaults of the image tower",
        keywords="pos_embed_type timm_model_name",
    ),
    Contract("open_clip.timm_model:TimmModel", "it has a model of timm", attributes="trunk"),
)
LIBRARY = Library("open_clip", "open_clip_torch", "3.3", (*_TOWER, *_ATTENTION, *_NAMES))
