"""Private names of torch on which vispe relies, and the arguments of torch's attention layer."""

from __future__ import annotations

from vispe.hosts.contracts.contract import Contract, Library

_PRIVATE = (
    Contract("torch._C:_are_functorch_transforms_active", "it detects vmap and grad of torch.func"),
    Contract("torch._C:_len_torch_dispatch_stack", "it detects active dispatch modes"),
    Contract("torch._C:_current_graph_task_id", "it is -1 outside of a backward pass"),
    Contract("torch._C._functorch:is_functorch_wrapped_tensor", "it detects tensors of torch.func"),
    Contract("torch._guards:detect_fake_mode", "it returns the fake mode of a call"),
    Contract("torch._subclasses.fake_tensor:FakeTensor", "it is the class of tensors without values"),
    Contract("torch:_foreach_lerp_", "it interpolates lists of tensors in place"),
    Contract(
        "torch._dynamo.exc:FailOnRecompileLimitHit", "it is raised at the recompile limit", on_demand=True
    ),
)
_MODULES = (
    Contract(
        "torch.nn:Module",
        "these attributes contain submodules, buffers and their kinds",
        attributes="_modules _buffers _parameters _non_persistent_buffers_set",
    ),
    Contract("torch.nn:Module._apply", "all moves and casts of a module call it", positional="fn recurse"),
    Contract(
        "torch.nn:Module._load_from_state_dict",
        "load_state_dict calls it for each module",
        positional="state_dict prefix local_metadata strict missing_keys unexpected_keys error_msgs",
    ),
    Contract(
        "torch.nn:Module._save_to_state_dict",
        "state_dict calls it for each module",
        positional="destination prefix keep_vars",
    ),
    Contract(
        "torch.nn:MultiheadAttention.forward",
        "blocks call it with these arguments",
        positional=("query key value key_padding_mask need_weights attn_mask average_attn_weights is_causal"),
    ),
    Contract(
        "torch.nn:MultiheadAttention",
        "attention with encodings can be computed from these attributes",
        attributes="in_proj_weight in_proj_bias bias_k num_heads dropout out_proj",
    ),
    Contract(
        "torch.utils.checkpoint:checkpoint", "it passes keywords on to a block", keywords="use_reentrant **"
    ),
)
LIBRARY = Library("torch", "torch", "2.14", (*_PRIVATE, *_MODULES))
