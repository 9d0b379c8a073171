"""Mixins of the converted model inside and of its language model.

The model inside computes coordinates from tokens and grids, once per call, and passes them to its language model as
position ids, which computes cosines and sines for its layers. Modules store no state of a sequence.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor

from vispe.hosts.transformers.language.converted_classes.allocation_buffers import AllocationBuffers
from vispe.hosts.transformers.language.converted_classes.layer import ROTATION
from vispe.hosts.transformers.language.converted_classes.rotations import rotation_of_step, rotations_of_call
from vispe.hosts.transformers.language.families import family_of, language_model_of
from vispe.hosts.transformers.language.parallel_sets import IDS
from vispe.hosts.transformers.language.positions.pipeline import (
    is_paged,
    paged_positions,
    positions_of_call,
    text_call_positions,
)
from vispe.hosts.transformers.language.positions.position_assignment import (
    OWN,
    DecodingStep,
    DeferredPositions,
    cache_class,
    call_of,
    is_deferred,
    open_cache,
    step_of,
    store_state,
)
from vispe.hosts.transformers.language.positions.position_ids import TokenPositions
from vispe.hosts.transformers.language.positions.sequence_state import SequenceState
from vispe.hosts.transformers.language.positions.traced_positions import numbered
from vispe.hosts.transformers.language.rope_in_attention import LATE, ensure_late_rotation
from vispe.hosts.transformers.packed_samples import (
    SAMPLES,
    Samples,
    flash_arguments,
    isolated,
    samples_of,
)
from vispe.hosts.transformers.signature import by_name, copy_signature_only, copy_signatures, positional_names
from vispe.hosts.transformers.version import CACHE_NAMES, cache_of
from vispe.multimodal import Scheme

POSITIONS = "vispe_placed"  # keyword: positions, in models that create masks from ordinary position ids


class PositionedModel:
    """The model inside, with the scheme."""

    vispe_scheme: Scheme
    vispe_number: int
    vispe_accepts_types: ClassVar[bool] = False  # whether the stock model accepts mm_token_type_ids
    vispe_cache: ClassVar[str]  # its name of the cache argument
    vispe_order: ClassVar[tuple[str, ...]]  # names of its positional arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy, and give the copy a separate number for compiled programs."""
        super().__setstate__(state)  # type: ignore[misc]
        numbered(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Copy the signature from the stock class."""
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "vispe_stock"):
            more = dict.fromkeys(("mm_token_type_ids", "tile_grids", IDS), Tensor | None)
            copy_signature_only(cls, "forward", **more)
            stock = cls.vispe_stock.forward  # type: ignore[attr-defined]
            named = inspect.signature(stock).parameters
            cls.vispe_accepts_types = "mm_token_type_ids" in named
            cls.vispe_cache = next(name for name in CACHE_NAMES if name in named)
            cls.vispe_order = positional_names(stock)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with the coordinates of its scheme.

        Args:
            *args: positional arguments of the stock model.
            **kwargs: keyword arguments of the stock model; the KV cache stores the decode state. `position_ids` are
                ordinary ids (b, s), where an id that is not the previous one plus 1 starts a packed sample; or
                coordinates (axes, b, s), as returned by `get_rope_index`; or both (1 + axes, b, s).
                `mm_token_type_ids` (b, s), 0 text, 1 image, 2 video, are only used without `input_ids`; without both,
                image tokens are those with the embedding of an image placeholder in `inputs_embeds`. Additional
                arguments: `tile_grids`, rows and columns of the tiles of each image (n, 2), for models with tiled
                images; and `parallel_ids` (b, s), the member of each token in a parallel set, -1 outside, for models
                converted with `parallel`.

        Raises:
            InputError, ShapeError: tokens, grids, masks and position ids do not match.
        """
        named = by_name(f"{type(self).__qualname__}.forward", self.vispe_order, args, kwargs)
        call = call_of(self, named)
        host = {name: named[name] for name in named if name not in OWN and name not in CACHE_NAMES}
        host |= {self.vispe_cache: call.cache}
        if not self.vispe_accepts_types:
            host.pop("mm_token_type_ids", None)
        position_ids = named.get("position_ids")
        if is_paged(call.cache):
            host |= self._position_arguments(paged_positions(call, position_ids), position_ids)
            return super().forward(**host)  # type: ignore[misc]
        if (step := step_of(call, position_ids)) is not None:
            host |= self._position_arguments(step, step.token_index)
            return super().forward(**host)  # type: ignore[misc]
        if is_deferred(call, position_ids):
            deferred = DeferredPositions(call, position_ids)
            try:
                return super().forward(**host | {"position_ids": deferred})  # type: ignore[misc]
            except Exception:
                if not deferred.computed:
                    deferred.compute()  # errors in the arguments take precedence over those of the model
                raise
        positions = positions_of_call(call, position_ids)
        host |= self._position_arguments(positions.of_tokens, positions.token_index)
        if positions.packed and POSITIONS in host:
            # the host locates image blocks by position id, so ids that restart would merge blocks
            token_index = positions.token_index
            host[SAMPLES] = samples_of(token_index)
            host["position_ids"] = torch.arange(token_index.shape[1], device=token_index.device)[None]
        outputs = super().forward(**host)  # type: ignore[misc]
        store_state(language_model_of(self), call.cache, outputs, positions)
        return outputs

    def _position_arguments(
        self, positions: TokenPositions | DecodingStep, token_index: Tensor | None
    ) -> dict[str, Any]:
        """Return the keyword arguments with positions; some models also create masks from ordinary ids (b, s)."""
        if family_of(self.config).masks:  # type: ignore[attr-defined]
            return {POSITIONS: positions, "position_ids": token_index}
        return {"position_ids": positions}


class PositionedText(AllocationBuffers):
    """The language model, which passes the rotation of the scheme to its layers."""

    # class of the caches that the language model creates; None for unsupported classes
    vispe_cache_class: ClassVar[type | None]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Copy the signature from the stock class."""
        super().__init_subclass__(**kwargs)
        copy_signatures(cls, "forward")
        if hasattr(cls, "vispe_stock"):
            cls.vispe_cache_class = cache_class(cls.vispe_stock)

    @property
    def vispe_scheme(self) -> Scheme:
        """The scheme; not an instance attribute, as `config_record` lists the modules with such an attribute."""
        return self.vispe_text.scheme

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        """Run the language model, with positions from the model around it, or alone.

        Args:
            *args: positional arguments of the stock language model.
            position_ids: positions from the model around it. If the language model is called alone: ordinary
                ids (b, s) of text; coordinates (axes, b, s); both (1 + axes, b, s); or None for text that
                starts at 0 or follows cached tokens.
            **kwargs: keyword arguments of the stock language model.

        Raises:
            InputError, ShapeError: tokens, masks and position ids do not match.
        """
        tokens = [kwargs.get(name) for name in ("input_ids", "inputs_embeds")]
        if (tokens[0] is None) == (tokens[1] is None):
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # the host rejects both and neither
        if self.vispe_text.late_rotation:
            ensure_late_rotation(self)
        positions, computed, cache = kwargs.pop(POSITIONS, position_ids), None, cache_of(kwargs)
        if isinstance(positions, DecodingStep):
            kwargs[ROTATION] = rotation_of_step(self, positions, kwargs["inputs_embeds"])
            return super().forward(*args, position_ids=self._host_ids(positions.token_index), **kwargs)  # type: ignore[misc]
        # only ids of the caller can restart, that is, pack several samples into a row
        of_caller = positions.position_ids if isinstance(positions, DeferredPositions) else positions
        if is_paged(cache):
            of_caller = None
            if not isinstance(positions, TokenPositions):
                positions = paged_positions(call_of(self, kwargs), positions)
        elif not isinstance(positions, TokenPositions):
            deferred = isinstance(positions, DeferredPositions)
            computed = (
                positions.compute() if deferred else text_call_positions(call_of(self, kwargs), positions)
            )
            positions, cache = computed.of_tokens, open_cache(self, kwargs)
        like = self.get_input_embeddings().weight if tokens[1] is None else tokens[1]  # type: ignore[attr-defined]
        positions = positions.to(like.device)
        token_index = positions.token_index
        state: SequenceState | None = getattr(cache, "vispe_state", None)
        samples = kwargs.pop(SAMPLES, None)
        unmasked = kwargs.get("attention_mask") is None
        if of_caller is not None and samples is None and state is None and unmasked:
            samples = samples_of(token_index)
        if samples is not None:
            kwargs.update(flash_arguments(self, samples))
            kwargs[SAMPLES] = samples
        kwargs[ROTATION], late = rotations_of_call(self, positions, state, like.dtype)
        if self.vispe_text.late_rotation:
            kwargs[LATE] = late
        outputs = super().forward(*args, position_ids=self._host_ids(token_index), **kwargs)  # type: ignore[misc]
        if computed is not None:
            store_state(self, cache, outputs, computed)
        return outputs

    def _host_ids(self, token_index: Tensor) -> Tensor:
        """Return token indices (b, s) with the number of rows that the stock class expects."""
        rows = next(iter(self.vispe_text.rotary.values())).rows
        return token_index if rows == 1 else token_index.expand(rows, *token_index.shape)

    def _maybe_slice_kv_shared_inputs(
        self,
        hidden_states: Tensor,
        per_layer_inputs: Any,
        position_embeddings: Any,
        masks: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Select the tokens of layers that share keys (Gemma 4), with their rotations and masks."""
        samples: Samples | None = kwargs.get(SAMPLES)
        if samples is not None:
            kinds, cache, dtype = self.config.layer_types, cache_of(kwargs), hidden_states.dtype  # type: ignore[attr-defined]
            layers = {kind: self.layers[kinds.index(kind)] for kind in masks}  # type: ignore[attr-defined]
            masks = {
                kind: isolated(mask, samples, layers[kind], cache, dtype) for kind, mask in masks.items()
            }
        inputs = hidden_states, per_layer_inputs, kwargs.get(ROTATION, position_embeddings), masks, *args
        return super()._maybe_slice_kv_shared_inputs(*inputs, **kwargs)  # type: ignore[misc]
