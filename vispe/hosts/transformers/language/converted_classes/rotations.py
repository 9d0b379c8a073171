"""Rotations that a converted language model passes to its layers, in a call and in decoding steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.hosts.transformers.language.converted_classes.allocation_buffers import buffer_of
from vispe.hosts.transformers.language.pairwise_scores import PairwiseLogits, extended, ordered, rates_of
from vispe.hosts.transformers.language.parallel_sets import append_attributes, parallel_mask
from vispe.hosts.transformers.language.positions.position_assignment import STEPS, DecodingStep
from vispe.hosts.transformers.language.positions.position_ids import TokenPositions
from vispe.hosts.transformers.language.positions.sequence_state import NextTokens, SequenceState
from vispe.hosts.transformers.language.rope_in_attention import LateRotation
from vispe.multimodal import tables


def rotations_of_call(
    text: Any, positions: TokenPositions, state: SequenceState | None, dtype: torch.dtype
) -> tuple[Any, Any]:
    """Return cosines and sines (b, s, width), and the late rotation of the attention, or None.

    Each of the two is a dictionary by kind of layers, or the value itself if all layers are of one kind.

    Args:
        text: the converted language model.
        positions: positions of the tokens of the call.
        state: state of the cache before the call, or None.
        dtype: dtype of the hidden states.
    """
    both = {kind: rotation_of_kind(text, kind, positions, state, dtype) for kind in text.vispe_text.rotary}
    rotation, late = ({kind: pair[n] for kind, pair in both.items()} for n in (0, 1))
    return rotation.get("", rotation), late.get("", late)


def rotation_of_step(text: Any, step: DecodingStep, embeds: Tensor) -> Any:
    """Return the cosines and sines of one text token for each kind of layers, computed for `STEPS` tokens."""
    cached = step.upcoming()
    if cached is None or any(
        cos.device != embeds.device or (cos.dtype != embeds.dtype and not text.vispe_text.rotary[kind].full)
        for kind, (cos, _) in cached.rotation.items()
    ):
        # the cache may later be used outside inference mode
        with torch.inference_mode(False), torch.no_grad():
            token_index = step.token_index + torch.arange(STEPS, device=step.token_index.device)
            ids = step.scheme.continue_text(token_index, step.offset).to(embeds.device)
            positions = TokenPositions(token_index, ids)
            rotation = {
                kind: rotation_of_kind(text, kind, positions, None, embeds.dtype)[0]
                for kind in text.vispe_text.rotary
            }
        cached = NextTokens(step.scheme, token_index, step.offset, step.length, rotation)
        step.state.upcoming = cached
    i = step.length - cached.length
    rotation = {kind: (cos[:, i : i + 1], sin[:, i : i + 1]) for kind, (cos, sin) in cached.rotation.items()}
    return rotation.get("", rotation)


def rotation_of_kind(
    text: Any, kind: str, positions: TokenPositions, state: SequenceState | None, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], LateRotation | None]:
    """Return cosines and sines for layers of a kind, and the late rotation of their attention, if enabled."""
    settings, ids = text.vispe_text, positions.coordinates
    rotary = settings.rotary[kind]
    pairs = {"frequencies": rotary.rates(text), "axis_of_pair": getattr(text, buffer_of(kind))}
    factor, dtype = rotary.scaling(text), torch.float32 if rotary.full else dtype

    def tables_at(ids: Tensor) -> tuple[Tensor, Tensor]:
        first = settings.first
        return tables(ids + first if first else ids, **pairs, scaling=factor, dtype=dtype)

    past = None if state is None else state.ids
    if settings.all_positions and past is not None:
        ids = torch.cat([past, ids], 2)
    cos, sin = tables_at(ids)
    if not settings.late_rotation:
        return (rotary.expand(cos), rotary.expand(sin)), None
    of_keys = (cos, sin) if past is None else tables_at(torch.cat([past, ids], 2))
    pairwise = _pairwise(text, ids, positions.token_attributes, state, factor, **pairs)
    late = LateRotation(_with_heads(cos, sin), _with_heads(*of_keys), *pairwise, rotary.layout)
    identity = (1, 1, 2 * rotary.pairs)
    # the host's own rotation becomes the identity
    return (cos.new_ones(identity), cos.new_zeros(identity)), late


def _pairwise(
    text: Any,
    ids: Tensor,
    token_attributes: Tensor | None,
    state: SequenceState | None,
    factor: float,
    frequencies: Tensor,
    axis_of_pair: Tensor,
) -> tuple[Tensor | None, PairwiseLogits | None]:
    """Return the mask of parallel sets, and the arguments of pairwise logits; None if there are none."""
    of_keys = ids if state is None or state.ids is None else torch.cat([state.ids, ids], 2)
    common = ids.movedim(0, -1), of_keys.movedim(0, -1), rates_of(frequencies, axis_of_pair, len(ids)), factor
    if text.vispe_text.self_extend is not None:
        return None, extended(*common, *text.vispe_text.self_extend)
    if token_attributes is None:
        return None, None
    past = None if state is None else state.token_attributes
    token_attributes = append_attributes(past, token_attributes)
    mask = parallel_mask(token_attributes, ids.shape[2])
    return mask, ordered(*common, token_attributes) if text.vispe_text.parallel == "pine" else None


def _with_heads(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return (cos, sin) if cos.ndim == 4 else (cos[:, None], sin[:, None])
