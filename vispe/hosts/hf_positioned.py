"""What the classes of a converted vision-language model do differently: four small subclasses.

The model inside turns tokens and grids into coordinates, once per call, and hands them to its language model as
position ids; that turns them into cosines and sines for its layers. Nothing about a sequence is kept on a module.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.hosts import hf_late
from vispe.hosts.hf_late import LATE, LateRotation
from vispe.hosts.hf_pictures import stream_of, token_types
from vispe.hosts.hf_state import (
    SequenceState,
    by_key,
    check_filled_here,
    documents,
    look_up,
    next_keys,
    prompt_keys,
    remember,
    settled,
    split_ids,
    state_after,
    text_coordinates,
    valid_tokens,
)
from vispe.multimodal import Coordinates, Scheme, tables

PIXELS = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")
GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "tile_grids")
TABLE, SPAN, OFFSET = "vispe_table", "vispe_span", "vispe_offset"  # a prompt by key, while generating
FOUR_ROWS = (
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
)  # ordinary ids are the first of four rows there
ROTATION = "vispe_rotation"  # cosines and sines, from the language model to its layers


class PositionedGeneration:
    """The model with a head: it starts generation with ordinary ids, and with the coordinates of the prompt."""

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]
    ) -> Tensor:
        from transformers import GenerationMixin

        keys = GenerationMixin._prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs)  # type: ignore[arg-type]
        if not _given(model_kwargs, *PIXELS, *GRIDS):
            return keys
        inner: Any = self.model  # type: ignore[attr-defined]
        cache = model_kwargs.get("past_key_values")
        state: SequenceState | None = getattr(cache, "vispe_state", None)
        if state is None:
            check_filled_here(cache)
        seen = 0 if state is None else int(cache.get_seq_length())  # type: ignore[union-attr]
        given = {
            k: v
            for k, v in model_kwargs.items()
            if k not in ("attention_mask", "input_ids", "mm_token_type_ids")
        }
        ids = inputs_tensor if inputs_tensor.ndim == 2 else None
        if ids is None and (named := model_kwargs.get("input_ids")) is not None and named.shape[1]:
            ids = named
        mask, types = model_kwargs.get("attention_mask"), model_kwargs.get("mm_token_type_ids")
        new = keys.expand(len(inputs_tensor), -1)[:, seen:]
        valid = valid_tokens(new, mask)
        made = inner.vispe_prompt(
            None if ids is None else ids[:, -new.shape[1] :],
            None if types is None else types[:, seen:],
            new,
            valid,
            state,
            given,
        )
        table, span = by_key(made, new, valid)
        model_kwargs.update({TABLE: table, SPAN: span, OFFSET: state_after(made, new, valid).offset})
        model_kwargs.pop("tile_grids", None)
        return keys


class PositionedModel:
    """The model inside: it knows the scheme."""

    vispe_scheme: Scheme

    def vispe_prompt(
        self,
        input_ids: Tensor | None,
        types: Tensor | None,
        keys: Tensor,
        valid: Tensor,
        state: SequenceState | None,
        given: dict[str, Any],
    ) -> Coordinates:
        """Return the coordinates of tokens (b, s) that may contain pictures."""
        types = token_types(self.config, input_ids, types, (keys.shape[0], keys.shape[1]))  # type: ignore[attr-defined]
        if types is None:
            if found := _given(given, *PIXELS, *GRIDS):
                raise InputError(
                    f"inputs_embeds came with {found[0]} but without mm_token_type_ids, so nothing says which tokens "
                    "are pictures; give mm_token_type_ids (b, s)."
                )
            types = torch.zeros_like(keys)
        stream = stream_of(self, types, valid, documents(keys, valid), given)
        start = None
        if state is not None:
            first = torch.where(valid, keys, keys.max()).amin(1)
            start = state.offset + self.vispe_scheme.step * first
        return self.vispe_scheme.coordinates(stream, start=start, training=self.training)  # type: ignore[attr-defined]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model with the coordinates of its scheme.

        Args:
            input_ids: tokens (b, s), or `inputs_embeds` in their place.
            attention_mask: (b, s), 0 where there is padding, or a mask that is ready for the layers.
            position_ids: ordinary ids (b, s), where one that does not go on by 1 starts a packed sample; or
                coordinates (axes, b, s), or both (1 + axes, b, s).
            past_key_values: cache of what came before; it remembers where the sequences stand.
            inputs_embeds: (b, s, width).
            mm_token_type_ids: (b, s), 0 text, 1 image, 2 video; only read where there are no `input_ids`.
            **kwargs: what else the model of before takes; and `tile_grids`, rows and columns of the tiles of each image
                (n, 2), for models that cut images into tiles.
        """
        tokens = inputs_embeds if input_ids is None else input_ids
        if tokens is None:
            raise InputError("The model needs input_ids or inputs_embeds; got neither.")
        rows, length = tokens.shape[:2]
        scheme = self.vispe_scheme
        mask = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 else None
        keys, ids = (None, None) if position_ids is None else split_ids(position_ids, scheme.axes)
        state: SequenceState | None = getattr(past_key_values, "vispe_state", None)
        following = state
        if state is None:
            check_filled_here(past_key_values)
        table, span, offset = (kwargs.pop(name, None) for name in (TABLE, SPAN, OFFSET))
        pictures = bool(_given(kwargs, *PIXELS, *(GRIDS if state is None else ())))
        pictures |= input_ids is None and mm_token_type_ids is not None
        given = keys is not None
        if keys is None and state is not None:
            keys = next_keys(length, past_key_values, state, mask)
            given = mask is not None and state.by_mask
        elif keys is None:  # text alone is counted with its padding, as the model of before does
            keys = prompt_keys(length, rows, mask if pictures else None, tokens.device)
        keys = keys.expand(rows, length)
        if ids is not None:
            if state is None:
                last = ids[0, :, -1] - scheme.step * keys[:, -1]
                following = SequenceState(last, (~valid_tokens(keys, mask)).sum(1))
        elif table is not None:
            ids = look_up(scheme, keys, table, span, offset)
            if state is None:
                following = SequenceState(offset, (~valid_tokens(keys, mask)).sum(1))
        elif not pictures:
            if state is None:
                padding = (~valid_tokens(keys, mask)).sum(1) if given else keys.new_zeros(rows)
                following = SequenceState(
                    torch.zeros_like(padding, dtype=torch.float64), padding, by_mask=given
                )
            elif given and length > 1:  # another turn
                padding = state.padding + (~valid_tokens(keys, mask)).sum(1)
                following = replace(state, padding=padding)
            ids = text_coordinates(scheme, keys, following)
        else:
            valid = valid_tokens(keys, mask)
            made = self.vispe_prompt(input_ids, mm_token_type_ids, keys, valid, state, kwargs)
            ids, following = made.ids, state_after(made, keys, valid)
            if state is not None:
                padding = following.padding * given + state.padding  # else keys were counted with padding
                following = replace(following, padding=padding, by_mask=state.by_mask)
        kwargs.pop("tile_grids", None)
        if mm_token_type_ids is not None and hasattr(self, "get_rope_index"):
            kwargs["mm_token_type_ids"] = mm_token_type_ids
        outputs = super().forward(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=torch.cat([keys[None].to(ids), ids]),
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        if following is not None and self.language_model.vispe_late:  # type: ignore[attr-defined]
            before = None if state is None else state.ids
            seen = ids if before is None else torch.cat([before, ids], 2)
            following = replace(following, ids=seen)
        if following is not state and following is not None:
            cache = past_key_values if past_key_values is not None else _cache_of(outputs)
            if cache is not None:
                if following.settled is None:
                    following.settled = settled(following, cache, keys, ids, scheme.step)
                remember(cache, following)
        return outputs


def _given(kwargs: dict[str, Any], *names: str) -> list[str]:
    """Return which of these arguments say something; `generate` passes an empty dict where there are no pictures."""
    values = ((name, kwargs.get(name)) for name in names)
    return [name for name, v in values if v is not None and not (isinstance(v, dict) and not v)]


def _cache_of(outputs: Any) -> Any:
    return outputs.get("past_key_values") if hasattr(outputs, "get") else None


class PositionedText:
    """The language model: it hands its layers the rotation of the scheme."""

    vispe_axis_of_pair: Tensor
    vispe_late: bool

    def forward(self, *args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        """Run the model; `position_ids` are keys and coordinates (1 + axes, b, s)."""
        if self.vispe_late:
            hf_late.keep_on(self)
        keys, ids = position_ids[0].long(), position_ids[1:]
        rotary: Any = self.rotary_emb  # type: ignore[attr-defined]
        dtype = kwargs["inputs_embeds"].dtype
        turned = partial(
            tables,
            frequencies=rotary.inv_freq,
            axis_of_pair=self.vispe_axis_of_pair,
            scaling=rotary.attention_scaling,
            dtype=dtype,
        )
        cos, sin = turned(ids)
        if self.vispe_late:
            state: SequenceState | None = getattr(kwargs.get("past_key_values"), "vispe_state", None)
            past = None if state is None else state.ids
            every = (cos, sin) if past is None else turned(torch.cat([past, ids], 2))
            kwargs[LATE] = LateRotation(_with_heads(cos, sin), _with_heads(*every))
            kwargs[ROTATION] = cos.new_ones(1, 1, 1), cos.new_zeros(1, 1, 1)  # the host turns nothing
        else:
            kwargs[ROTATION] = cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
        four = self.config.model_type in FOUR_ROWS  # type: ignore[attr-defined]
        return super().forward(*args, position_ids=keys.expand(4, *keys.shape) if four else keys, **kwargs)  # type: ignore[misc]


def _with_heads(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return (cos, sin) if cos.ndim == 4 else (cos[:, None], sin[:, None])


class PositionedLayer:
    """A decoder layer: it turns queries and keys by what the language model hands down."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with the rotation of the scheme."""
        kwargs["position_embeddings"] = kwargs.pop(ROTATION)
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
