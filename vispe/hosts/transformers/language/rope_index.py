"""`get_rope_index` of Qwen models, as called by collators and serving code before the forward pass."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.hosts.transformers.language.converted_classes.generation import PositionedGeneration
from vispe.hosts.transformers.language.converted_classes.model import PositionedModel
from vispe.hosts.transformers.language.families import language_model_of
from vispe.hosts.transformers.language.positions.cache_checks import (
    check_conversion,
    check_end,
    check_filled_here,
)
from vispe.hosts.transformers.language.positions.call import LanguageCall
from vispe.hosts.transformers.language.positions.kv_cache import text_coordinates
from vispe.hosts.transformers.language.positions.sequence_state import SequenceState
from vispe.hosts.transformers.language.positions.token_index import (
    check_mask,
    next_token_index,
    prompt_token_index,
    valid_tokens,
)
from vispe.hosts.transformers.signature import copy_signatures
from vispe.multimodal import Coordinates, create_scheme
from vispe.multimodal.properties import is_whole

INDEX = ("get_rope_index", "compute_3d_position_ids")


class PositionedIndexGeneration(PositionedGeneration):
    """The model with a head and its own `get_rope_index` (Qwen-Omni)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Copy the signature from the stock class."""
        super().__init_subclass__(**kwargs)
        copy_signatures(cls, "get_rope_index")

    def get_rope_index(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the result of the model inside."""
        return self.model.get_rope_index(*args, **kwargs)  # type: ignore[attr-defined]


class PositionedIndex(PositionedModel):
    """The model inside, of families with `get_rope_index`, which returns the coordinates of the scheme."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Copy the signatures from the stock class; they differ between families."""
        super().__init_subclass__(**kwargs)
        copy_signatures(cls, *INDEX)

    def get_rope_index(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        attention_mask: Tensor | None = None,
        second_per_grid_ts: Any = None,
        second_per_grids: Any = None,
        use_audio_in_video: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the coordinates of a batch, for use as `position_ids`, and the delta of each row.

        Args:
            input_ids: tokens (b, s).
            mm_token_type_ids: (b, s); ignored, as `input_ids` contain the same information.
            image_grid_thw: grids (n, 3) of frames, rows, columns.
            video_grid_thw: grids of videos in the same form.
            attention_mask: (b, s), 0 for padding.
            second_per_grid_ts: seconds between frames of each video.
            second_per_grids: the same argument in Qwen-Omni.
            use_audio_in_video: not supported with videos.

        Returns:
            ids (axes, b, s), 0 for padding, and the difference between position and token index of the text after the
            prompt (b, 1). Both have the dtype of `input_ids` if all coordinates of the scheme are integers,
            otherwise float64: a cast to half precision would change positions, and is rejected by the model.

        Raises:
            InputError: placeholders and grids differ, or the mask numbers packed samples.
        """
        check_mask(
            attention_mask, "get_rope_index", "get the ids of the samples one by one and concatenate them."
        )
        mask = None if attention_mask is None else attention_mask.bool()
        grids: dict[str, Any] = {"image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw}
        seconds = second_per_grids if second_per_grid_ts is None else second_per_grid_ts
        grids |= {"second_per_grid_ts": seconds, "use_audio_in_video": use_audio_in_video}
        coordinates = self._indexed(input_ids, mask, grids)
        delta = coordinates.delta()
        kind = input_ids.dtype if _has_integer_coordinates(str(self.vispe_scheme)) else torch.float64
        return coordinates.ids.to(kind), delta.to(kind)

    def compute_3d_position_ids(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        mm_token_type_ids: Tensor | None = None,
        second_per_grid_ts: Any = None,
        video_second_per_grid: Any = None,
        use_audio_in_video: bool | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Tensor | None:
        """Return the coordinates (axes, b, s) that a call with these arguments would use; None for a prompt of text.

        The model stores no state: positions after a cache are computed from the state of the cache.
        """
        # past_key_values is the name before transformers 5.24
        past = past_key_values if cache is None else cache
        state: SequenceState | None = getattr(past, "vispe_state", None)
        check_conversion(state, language_model_of(self).vispe_text.of_keys)
        check_end(state)
        if state is None:
            check_filled_here(past)
            if input_ids is None or (image_grid_thw is None and video_grid_thw is None):
                return None
            return self.get_rope_index(
                input_ids,
                image_grid_thw=image_grid_thw,
                video_grid_thw=video_grid_thw,
                attention_mask=attention_mask,
                second_per_grid_ts=second_per_grid_ts,
                second_per_grids=video_second_per_grid,
                use_audio_in_video=bool(use_audio_in_video),
            )[0]
        tokens = inputs_embeds if input_ids is None else input_ids
        mask = attention_mask if state.by_mask else None
        token_index = next_token_index(tokens.shape[1], past, state, mask)  # type: ignore[union-attr]
        return text_coordinates(self.vispe_scheme, token_index, state)

    @property
    def rope_deltas(self) -> None:
        """None: the state is stored with the KV cache; `get_rope_index` returns the deltas of a batch."""
        return None

    @rope_deltas.setter
    def rope_deltas(self, deltas: Tensor | None) -> None:
        if deltas is not None:
            raise InputError(
                "rope_deltas cannot be set on a converted model, which ignores it. If generate() set it, only the "
                "model inside was converted: call vispe.convert with the complete model, head included."
            )

    def _indexed(self, input_ids: Tensor, mask: Tensor | None, grids: dict[str, Any]) -> Coordinates:
        """Return the coordinates of a batch of complete prompts."""
        token_index = prompt_token_index(input_ids.shape[1], len(input_ids), mask, input_ids.device)
        call = LanguageCall(self, input_ids, None, None, mask, None, grids)
        return call.coordinates(token_index, valid_tokens(token_index, mask), None)[0]


@cache
def _has_integer_coordinates(spec: str) -> bool:
    return is_whole(create_scheme(spec))
