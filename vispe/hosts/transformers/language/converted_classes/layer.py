"""Mixin of a converted decoder layer: rotation by the cosines and sines of the language model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vispe.errors import InputError
from vispe.hosts.transformers.language.positions.sequence_state import SequenceState
from vispe.hosts.transformers.language.rope_in_attention import LATE
from vispe.hosts.transformers.packed_samples import (
    SAMPLES,
    Samples,
    isolated,
)
from vispe.hosts.transformers.signature import copy_signatures
from vispe.hosts.transformers.version import cache_of

ROTATION = "vispe_rotation"  # keyword: cosines and sines, from the language model to its layers


class PositionedLayer:
    """A decoder layer, which rotates queries and keys by the cosines and sines of the language model."""

    vispe_kind: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Copy the signature from the stock class, before checkpointing wraps the method."""
        copy_signatures(cls, "forward")
        super().__init_subclass__(**kwargs)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with the rotation of the language model.

        If the layer is called directly, it needs the rotation in `position_embeddings`, as the stock layer
        does.

        Raises:
            InputError: there is no rotation, or the cache contains unrotated keys.
        """
        rotation, late = kwargs.pop(ROTATION, None), kwargs.get(LATE)
        if rotation is None:
            self._check_alone(kwargs)
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        samples: Samples | None = kwargs.pop(SAMPLES, None)
        # layers that share keys may get the last tokens only, with their masks; Gemma 3n stacks its inputs
        if samples is not None and samples.number.shape[1] == hidden_states.shape[-2]:
            kwargs["attention_mask"] = isolated(
                kwargs.get("attention_mask"), samples, self, cache_of(kwargs), hidden_states.dtype
            )
        if kwargs.get("position_embeddings", rotation) is None:  # the host does not rotate this layer (NoPE)
            kwargs.pop(LATE, None)
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        if isinstance(rotation, dict):
            selected, rotation = kwargs["position_embeddings"], rotation[self.vispe_kind]
            # layers that share keys may get some tokens only, with their rotation
            rotation = selected if selected[0].shape[1] < rotation[0].shape[1] else rotation
        kwargs["position_embeddings"] = rotation
        if isinstance(late, dict):
            kwargs[LATE] = late[self.vispe_kind]
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]

    def _is_rotated(self) -> bool:
        """Return whether the host rotates queries and keys of this layer; models may list layers that it does not."""
        rates = getattr(getattr(self, "config", None), "layer_rope_theta", None)
        return rates is None or bool(rates[self.self_attn.layer_idx])  # type: ignore[attr-defined]

    def _check_alone(self, kwargs: dict[str, Any]) -> None:
        """Raise `InputError` if a direct call of the layer has no rotation, or a cache of unrotated keys."""
        if kwargs.get("position_embeddings") is None and self._is_rotated():
            raise InputError(
                f"{type(self).__qualname__}: position_embeddings are missing, got None. Pass the cosines and sines "
                "returned by the rotary embedding of the language model, or call the language model."
            )
        state: SequenceState | None = getattr(cache_of(kwargs), "vispe_state", None)
        if state is not None and state.ids is not None and not state.rotated:
            raise InputError(
                f"{type(self).__qualname__}: the cache contains unrotated keys, which only the attention of the "
                "language model rotates, got a direct call of a layer. Call the language model, or omit the cache."
            )
