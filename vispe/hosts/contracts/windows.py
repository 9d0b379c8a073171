"""Names of attention layers in windows, in timm and transformers, on which vispe relies."""

from __future__ import annotations

from vispe.hosts.contracts.contract import Contract

_MAXVIT = "timm.models.maxxvit"
_SAM = "timm.models.vision_transformer_sam"
_SWIN = "timm.models.swin_transformer"
_SWIN2 = "timm.models.swin_transformer_v2"

TIMM = (
    Contract(
        f"{_SWIN}:WindowAttention.forward",
        "blocks pass the mask of shifted windows",
        positional="x mask",
        on_demand=True,
    ),
    Contract(
        f"{_SWIN}:WindowAttention",
        "attention in windows can be computed from these attributes",
        attributes=(
            "qkv num_heads attn_drop proj proj_drop window_size window_area "
            "relative_position_bias_table relative_position_index _get_rel_pos_bias _init_buffers "
            "set_window_size"
        ),
        on_demand=True,
    ),
    Contract(
        f"{_SWIN2}:WindowAttention.forward",
        "blocks pass the mask of shifted windows",
        positional="x mask",
        on_demand=True,
    ),
    Contract(
        f"{_SWIN2}:WindowAttention",
        "attention in windows can be computed from these attributes",
        attributes=(
            "qkv num_heads attn_drop proj proj_drop window_size logit_scale cpb_mlp "
            "relative_coords_table relative_position_index q_bias k_bias v_bias qkv_bias_separate"
        ),
        on_demand=True,
    ),
    Contract(
        f"{_MAXVIT}:AttentionCl.forward",
        "blocks pass a shared relative bias",
        positional="x",
        keywords="shared_rel_pos",
        on_demand=True,
    ),
    Contract(
        f"{_MAXVIT}:Attention2d.forward",
        "blocks pass a shared relative bias",
        positional="x",
        keywords="shared_rel_pos",
        on_demand=True,
    ),
    Contract(
        f"{_MAXVIT}:AttentionCl",
        "attention in windows can be computed from these attributes",
        attributes="qkv num_heads attn_drop proj proj_drop head_first rel_pos",
        on_demand=True,
    ),
    Contract(
        f"{_MAXVIT}:Attention2d",
        "attention can be computed from these attributes",
        attributes="qkv num_heads attn_drop proj proj_drop head_first rel_pos",
        on_demand=True,
    ),
    Contract(
        f"{_SAM}:Attention",
        "attention in windows can be computed from these attributes",
        attributes="qkv num_heads attn_drop proj proj_drop q_norm k_norm use_rel_pos rel_pos_h rel_pos_w",
        on_demand=True,
    ),
    Contract(
        f"{_SAM}:get_decomposed_rel_pos_bias",
        "it returns the decomposed relative bias",
        positional="q rel_pos_h rel_pos_w q_size k_size",
        on_demand=True,
    ),
)
TRANSFORMERS = (
    Contract(
        "transformers.models.sam.modeling_sam:SamVisionAttention.get_decomposed_rel_pos",
        "it returns the decomposed relative bias",
        positional="query rel_pos_h rel_pos_w q_size k_size",
        on_demand=True,
    ),
    Contract(
        "transformers.models.sam3.modeling_sam3:Sam3ViTRoPEAttention.forward",
        "blocks pass the rotary embedding to attention",
        positional="hidden_states",
        keywords="position_embeddings",
        on_demand=True,
    ),
    Contract(
        "transformers.models.sam3.modeling_sam3:apply_rotary_pos_emb_2d",
        "it rotates queries and keys",
        positional="q k cos sin",
        on_demand=True,
    ),
    Contract(
        "transformers.models.vitdet.modeling_vitdet:add_decomposed_relative_positions",
        "it adds the decomposed relative bias",
        positional="attn queries rel_pos_h rel_pos_w q_size k_size",
        on_demand=True,
    ),
    Contract(
        "transformers.models.vitdet.modeling_vitdet:VitDetAttention.forward",
        "blocks pass these arguments to attention",
        positional="hidden_state output_attentions",
        on_demand=True,
    ),
    Contract(
        "transformers.models.swin.modeling_swin:SwinAttention.forward",
        "blocks pass the mask of shifted windows to attention",
        positional="hidden_states attention_mask",
        on_demand=True,
    ),
    Contract(
        "transformers.models.swin.modeling_swin:SwinAttention",
        "attention in windows can be computed from these attributes",
        attributes="q_proj k_proj v_proj o_proj relative_position_bias num_attention_heads attention_dropout",
        on_demand=True,
    ),
)
