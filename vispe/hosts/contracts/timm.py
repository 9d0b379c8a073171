"""Names of timm on which vispe relies."""

from __future__ import annotations

from vispe.hosts.contracts.contract import Contract, Library
from vispe.hosts.contracts.windows import TIMM

_VIT = "timm.models.vision_transformer"
_EVA = "timm.models.eva"
_NAFLEX = "timm.models.naflexvit"

_ATTENTION = (
    Contract(
        "timm.layers:Attention.forward",
        "blocks pass positions to attention as its mask",
        positional="x",
        keywords="attn_mask is_causal",
    ),
    Contract(
        "timm.layers:Attention",
        "attention with encodings can be computed from these attributes",
        attributes="qkv q_norm k_norm norm proj proj_drop attn_drop num_heads head_dim fused_attn",
    ),
    Contract(
        "timm.layers:DiffAttention.forward",
        "blocks pass positions to attention as its mask",
        positional="x",
        keywords="attn_mask is_causal",
    ),
    Contract(
        "timm.layers:DiffAttention",
        "the two attention maps and their weight can be computed from these attributes",
        attributes=(
            "_compute_lambda lambda_init sub_norm qkv q_norm k_norm norm proj proj_drop attn_drop "
            "attn_drop_p num_heads head_dim fused_attn"
        ),
    ),
    Contract(
        "timm.layers:AttentionRope.forward",
        "blocks pass the rotary embedding and positions to attention",
        positional="x",
        keywords="rope attn_mask is_causal",
    ),
    Contract(
        "timm.layers:AttentionRope",
        "attention with encodings can be computed from these attributes",
        attributes=(
            "qkv q_proj k_proj v_proj q_norm k_norm norm proj proj_drop attn_drop num_heads "
            "head_dim num_prefix_tokens rotate_half fused_attn"
        ),
    ),
    Contract(
        f"{_EVA}:EvaAttention.forward",
        "blocks pass the rotary embedding and positions to attention",
        positional="x",
        keywords="rope attn_mask is_causal",
    ),
    Contract(
        f"{_EVA}:EvaAttention",
        "attention with encodings can be computed from these attributes",
        attributes=(
            "qkv q_proj k_proj v_proj q_norm k_norm norm proj proj_drop attn_drop num_heads "
            "head_dim num_prefix_tokens rotate_half fused_attn q_bias k_bias v_bias qkv_bias_separate"
        ),
    ),
    Contract(
        f"{_VIT}:ParallelScalingBlock.forward",
        "the model passes positions as the mask",
        positional="x",
        keywords="attn_mask is_causal",
    ),
    Contract(
        f"{_VIT}:ParallelScalingBlock",
        "the block can be computed from these attributes",
        attributes=(
            "in_norm in_proj in_split q_norm k_norm mlp_bias mlp_drop mlp_act out_proj drop_path "
            "ls num_heads attn_drop fused_attn attn_out_proj mlp_out_proj"
        ),
    ),
    Contract(
        f"{_VIT}:DiffParallelScalingBlock.forward",
        "the model passes positions as the mask",
        positional="x",
        keywords="attn_mask is_causal",
    ),
    Contract(
        f"{_VIT}:DiffParallelScalingBlock",
        "the block can be computed from these attributes",
        attributes=(
            "in_norm in_proj in_split q_norm k_norm mlp_bias mlp_drop mlp_act out_proj drop_path "
            "ls num_heads attn_drop fused_attn _compute_lambda lambda_init sub_norm attn_drop_p"
        ),
    ),
    Contract(
        f"{_VIT}:Block.forward",
        "the mask is the first argument after the tokens",
        positional="x attn_mask is_causal",
    ),
    Contract(
        f"{_EVA}:EvaBlock.forward",
        "the mask follows the rotary embedding",
        positional="x rope attn_mask is_causal",
    ),
)
_MODELS = (
    Contract(
        f"{_VIT}:VisionTransformer.__init__", "`pos_embed` selects the absolute table", keywords="pos_embed"
    ),
    Contract(
        f"{_VIT}:VisionTransformer",
        "the converted forward pass can be computed from these attributes",
        attributes=(
            "cls_token reg_token num_prefix_tokens embed_dim norm_pre norm patch_embed patch_drop "
            "pos_embed pos_drop no_embed_class dynamic_img_size blocks _pos_embed"
        ),
    ),
    Contract(
        f"{_VIT}:VisionTransformer.forward_features",
        "callers pass masks by keyword",
        positional="x",
        keywords="attn_mask is_causal",
    ),
    Contract(
        f"{_VIT}:VisionTransformer.forward_intermediates",
        "callers pass these options by keyword",
        positional="x",
        keywords=(
            "indices return_prefix_tokens norm stop_early output_fmt intermediates_only attn_mask "
            "is_causal output_dict"
        ),
    ),
    Contract(
        f"{_VIT}:VisionTransformer.prune_intermediate_layers",
        "it removes the last blocks from `blocks`",
        positional="indices",
    ),
    Contract(f"{_VIT}:VisionTransformer.group_matcher", "it returns the groups by name", keywords="coarse"),
    Contract("timm.models.deit:VisionTransformerDistilled", "it has a second token", attributes="dist_token"),
    Contract(
        f"{_EVA}:Eva",
        "the converted forward pass can be computed from these attributes",
        attributes=(
            "cls_token reg_token num_prefix_tokens embed_dim norm_pre norm patch_embed patch_drop "
            "pos_embed pos_drop no_embed_class blocks rope rope_mixed _pos_embed"
        ),
    ),
    Contract(
        f"{_EVA}:Eva.forward_features",
        "callers pass masks by keyword",
        positional="x",
        keywords="attn_mask is_causal",
    ),
    Contract(
        f"{_EVA}:Eva.forward_intermediates",
        "callers pass these options by keyword",
        positional="x",
        keywords=(
            "indices return_prefix_tokens norm stop_early output_fmt intermediates_only attn_mask is_causal"
        ),
    ),
    Contract(
        f"{_NAFLEX}:NaFlexVit._forward_embeds",
        "forward_features and forward_intermediates call it with these arguments",
        positional="x patch_coord patch_valid attn_mask",
    ),
    Contract(
        f"{_NAFLEX}:NaFlexVit._generate_rope_naflex",
        "it returns the rotary embedding of packed patches",
        positional="x patch_coord",
    ),
    Contract(
        f"{_NAFLEX}:NaFlexVit",
        "the converted embedding can be computed from these attributes",
        attributes="embeds rope rope_is_mixed patch_drop norm_pre num_prefix_tokens blocks",
    ),
    Contract(
        f"{_NAFLEX}:NaFlexEmbeds.forward",
        "it embeds images or packed patches",
        positional="x",
        keywords="patch_coord patch_valid",
    ),
    Contract(
        f"{_NAFLEX}:NaFlexEmbeds",
        "these attributes are its absolute table",
        attributes="pos_embed pos_embed_y pos_embed_x pos_embed_type pos_embed_grid_size pos_drop",
    ),
    Contract(f"{_NAFLEX}:NaFlexVitCfg", "`pos_embed` selects the absolute table", keywords="pos_embed"),
    Contract(
        f"{_NAFLEX}:create_attention_mask",
        "it returns the padding mask",
        positional="patch_valid",
        keywords="num_prefix_tokens symmetric q_len dtype",
    ),
)
_FUNCTIONS = (
    Contract(
        "timm.layers:apply_rot_embed_cat",
        "it rotates queries and keys by a rotary embedding",
        positional="x emb",
        keywords="half",
    ),
    Contract(
        "timm.layers:apply_keep_indices_nlc",
        "it selects the rotations of the remaining patches",
        positional="x pos_embed keep_indices",
        keywords="pos_embed_has_batch",
    ),
    Contract(
        "timm.layers:resample_abs_pos_embed",
        "it resamples an absolute table to another grid",
        positional="posemb new_size old_size num_prefix_tokens",
    ),
    Contract(
        "timm.layers:patch_dropout_forward",
        "it returns tokens and the indices of the remaining patches",
        positional="x prob num_prefix_tokens ordered training",
    ),
    Contract("timm.layers:register_notrace_function", "it makes a function a leaf of torch.fx"),
    Contract("timm.layers:register_notrace_module", "it makes a module a leaf of torch.fx"),
    Contract("timm.layers:PatchEmbed", "it has a grid", attributes="grid_size num_patches proj"),
    Contract(
        "timm.layers:RotaryEmbeddingCat.get_embed",
        "it returns the rotary embedding of a grid",
        keywords="shape",
    ),
    Contract(
        "timm.layers:RotaryEmbeddingCat",
        "these attributes are its grids",
        attributes="feat_shape ref_feat_shape update_feat_shape",
    ),
    Contract(
        "timm.models:checkpoint", "it runs a block with activation checkpointing", positional="function"
    ),
    Contract(
        "timm.models._builder:build_model_with_cfg",
        "modules of timm.models import it by name and pass the loading of weights to it by keyword",
        positional="model_cls",
        keywords="pretrained_filter_fn pretrained_strict **",
    ),
    Contract("timm.models._helpers:load_checkpoint", "its module defines how checkpoints are read"),
    Contract(
        "timm.models._helpers:clean_state_dict",
        "it removes the prefixes of wrappers",
        positional="state_dict",
    ),
)
LIBRARY = Library("timm", "timm", "1.0.31", (*_ATTENTION, *_MODELS, *_FUNCTIONS, *TIMM))
