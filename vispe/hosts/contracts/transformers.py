"""Names of transformers on which vispe relies, apart from those of the classes of one model."""

from __future__ import annotations

from vispe.hosts.contracts.contract import Contract, Library
from vispe.hosts.contracts.windows import TRANSFORMERS

_GENERATION = "transformers.generation.utils:GenerationMixin"
_MODELING = "transformers.modeling_utils"
CACHE = "cache|past_key_values"  # from 5.24 on, and in older versions
_CACHES = "transformers.cache_utils:Cache"

_GENERATE = (
    Contract(
        f"{_GENERATION}._prepare_position_ids_for_generation",
        "generate calls it for the position ids of a prompt",
        positional="inputs_tensor model_kwargs",
    ),
    Contract(
        f"{_GENERATION}._maybe_prepare_encoder_kwargs_for_generation",
        "generate calls it before images are encoded",
        positional="inputs_tensor model_kwargs",
        since="5.23.0",
    ),
    Contract(
        f"{_GENERATION}._prefill",
        "generate calls it to process the prompt",
        positional="input_ids generation_config model_kwargs",
    ),
    Contract(
        f"{_GENERATION}._update_model_kwargs_for_generation",
        "generate calls it after each step",
        positional="outputs model_kwargs",
    ),
    Contract(
        f"{_GENERATION}._expand_inputs_for_generation",
        "generate calls it to repeat rows",
        keywords="**",
        positional="expand_size",
    ),
    Contract(
        f"{_GENERATION}._validate_model_kwargs",
        "generate calls it to check keywords",
        positional="model_kwargs",
    ),
    Contract(
        f"{_GENERATION}._get_candidate_generator",
        "generate passes the arguments of the model to an assistant model",
        keywords="model_kwargs",
    ),
    Contract(
        f"{_GENERATION}.prepare_inputs_for_generation",
        "it returns the arguments of a step",
        keywords=f"{CACHE} inputs_embeds **",
        positional="input_ids",
    ),
)
_MODEL = (
    Contract(f"{_MODELING}:PreTrainedModel._init_weights", "it initialises one module", positional="module"),
    Contract(
        f"{_MODELING}:PreTrainedModel.from_pretrained",
        "it passes other keywords, such as output_loading_info, on",
        keywords="**",
        positional="pretrained_model_name_or_path",
    ),
    Contract(
        f"{_MODELING}:PreTrainedModel.save_pretrained",
        "it writes the configuration",
        keywords="save_directory **",
    ),
    Contract(f"{_MODELING}:PreTrainedModel.get_input_embeddings", "it returns the embedding of the tokens"),
    Contract(
        f"{_MODELING}:AttentionInterface.get_interface",
        "it returns an attention function by name",
        positional="attn_implementation default",
    ),
    Contract(f"{_MODELING}:ALL_ATTENTION_FUNCTIONS", "it contains the attention functions"),
    Contract(
        "transformers:AttentionInterface.register",
        "it registers an attention function",
        positional="key value",
    ),
    Contract(
        "transformers:AttentionMaskInterface.register", "it registers a mask function", positional="key value"
    ),
    Contract("transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS", "it contains the mask functions"),
    Contract(
        "transformers.configuration_utils:PreTrainedConfig._attn_implementation",
        "it is the name of the attention function, and can be set",
    ),
)
_DECODE = (
    Contract(f"{_CACHES}.reorder_cache", "generation with beams calls it", positional="beam_idx"),
    Contract(f"{_CACHES}.batch_select_indices", "it selects rows", positional="indices"),
    Contract(f"{_CACHES}.batch_repeat_interleave", "it repeats rows", positional="repeats"),
    Contract(f"{_CACHES}.crop", "it removes the last tokens"),
    Contract(f"{_CACHES}.reset", "it removes all tokens"),
    Contract(f"{_CACHES}.get_seq_length", "it returns the number of cached tokens"),
    Contract(
        f"{_CACHES}.get_mask_sizes", "it returns the number of keys", positional="query_length layer_idx"
    ),
    Contract("transformers:DynamicCache", "it is built from a configuration", keywords="config"),
)
_VISION = (
    Contract(
        "transformers.vision_utils:get_vision_position_ids",
        "it returns rows and columns of patches",
        keywords="kwargs",
        positional="grid_thw spatial_merge_size",
    ),
    Contract(
        "transformers.vision_utils:get_vision_cu_seqlens",
        "it returns the ends of frames",
        keywords="kwargs",
        positional="grid_thw",
    ),
    Contract(
        "transformers.vision_utils:get_vision_window_index",
        "it returns the order and the ends of windows",
        keywords="kwargs",
        positional="grid_thw spatial_merge_size window_size patch_size",
    ),
    Contract("transformers.utils.generic:merge_with_config_defaults", "it decorates a forward pass"),
    Contract(
        "transformers.utils.output_capturing:capture_outputs",
        "it decorates a forward pass",
        keywords="tie_last_hidden_states",
    ),
)
_FAMILIES = (
    Contract(
        "transformers.models.gemma4.modeling_gemma4:Gemma4TextModel._maybe_slice_kv_shared_inputs",
        "it selects the tokens of layers that share keys",
        positional="hidden_states per_layer_inputs position_embeddings causal_mask_mapping",
        since="5.23.0",
        on_demand=True,
    ),
    *(
        Contract(
            f"transformers.models.{name}.modeling_{name}:{function}",
            purpose,
            positional=arguments,
            on_demand=True,
        )
        for name in ("llava_next", "llava_onevision")
        for function, purpose, arguments in (
            (
                "get_anyres_image_grid_shape",
                "it returns the grid of tiles",
                "image_size grid_pinpoints patch_size",
            ),
            ("unpad_image", "it removes the padding of an image", "tensor original_size"),
        )
    ),
    *(
        Contract(f"transformers.models.{name}:{output}", "it is the output of a tower", on_demand=True)
        for name, output in (
            ("videomae.modeling_videomae", "BaseModelOutput"),
            ("internvl.modeling_internvl", "BaseModelOutput"),
            ("internvl.modeling_internvl", "InternVLVisionModelOutputWithPooling"),
        )
    ),
)
LIBRARY = Library(
    "transformers",
    "transformers",
    "5.24",
    (*_GENERATE, *_MODEL, *_DECODE, *_VISION, *_FAMILIES, *TRANSFORMERS),
)
