"""Observation of attention calls in the attention interface of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from vispe.attention.call import Call
from vispe.errors import UnsupportedHost

OnCall = Callable[[nn.Module, Call, Tensor], None]


def attentions(net: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of the attention layers of a model of transformers, in order."""
    return [
        (path, module)
        for path, module in net.named_modules()
        if type(module).__name__.endswith("Attention")
        and hasattr(module, "config")
        and hasattr(module, "is_causal")
    ]


@contextmanager
def reading(layers: Sequence[nn.Module], on_call: OnCall) -> Iterator[None]:
    """Call `on_call(module, call, x)` for each attention layer that runs inside the context, without changing outputs.

    Raises:
        UnsupportedHost: a `Call` cannot describe the attention of a layer, or a layer does not use the interface.
    """
    from transformers import AttentionInterface

    original, inputs, observed = AttentionInterface.get_interface, {}, set()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # converted layers are recorded through their context
        if kwargs.get("vispe_context") is None:
            inputs[module] = args[0] if args else kwargs["hidden_states"]
        else:
            observed.add(module)

    def get_interface(self: Any, name: str, default: Any) -> Any:
        function = original(self, name, default)

        def run(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if module in inputs:
                observed.add(module)
                on_call(module, _call(module, q, k, v, mask, name, kwargs), inputs.pop(module))
            return function(module, q, k, v, mask, *args, **kwargs)

        return run

    with ExitStack() as stack:
        for module in layers:
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        AttentionInterface.get_interface = get_interface
        stack.callback(setattr, AttentionInterface, "get_interface", original)
        yield
    missed = next((module for module in layers if module not in observed), None)
    if missed is not None:
        raise UnsupportedHost(
            f"Attention layers must use the attention interface of transformers, got {type(missed).__name__}."
        )


def _call(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, name: str, options: dict[str, Any]
) -> Call:
    kind = type(module).__name__
    for key in ("softcap", "s_aux"):
        if options.get(key) is not None:
            raise UnsupportedHost(f"Attention maps cannot be computed for {kind} with {key}.")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 4):
        raise UnsupportedHost(
            f"The mask of {kind} must be a tensor (b, h, n, m). Load the model with attention sdpa or eager."
        )
    causal = options.get("is_causal")
    causal = bool(module.is_causal if causal is None else causal)
    # eager attention ignores is_causal; a single query during decoding attends to every key
    causal = causal and mask is None and name != "eager" and q.shape[2] > 1
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (k, v))
    mask = None if mask is None else mask[..., : k.shape[2]]
    return Call(q, k, v, attn_mask=mask, is_causal=causal, scale=options.get("scaling"))
