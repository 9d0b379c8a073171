"""External memory: each query also attends to its top-k most similar memory keys (Extended Mind, arXiv 2406.02332)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.backends.reference import logits, weighted
from vispe.attention.call import Call
from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Transform
from vispe.errors import OptionError, ShapeError, UnsupportedCombination, counted, is_integer
from vispe.utils.autocast import no_autocast
from vispe.utils.options import Options

MemoryPosition = Literal["origin", "far", "own"]
Mode = Literal["unturned", "reference"]


@dataclass(frozen=True, eq=False)
class ExternalMemory(Options):
    """Keys and values of other texts or images, stored before rotation.

    Attributes:
        keys: (b or 1, h_kv, m, d), unrotated.
        values: (b or 1, h_kv, m, d_v).
        position: position of the memories. ``'origin'``: position 0, as in the paper; their distance grows with the
            position of the query. ``'far'``: one fixed distance from all queries. ``'own'``: each at its position in
            its own image. Where directions have no meaning, as in micrographs, use ``'far'`` without a transform.
        transform: for ``'own'`` the rotation by the coordinates of the memories (n = m tokens), for ``'far'`` the
            rotation of all queries by one distance (n = 1 token); None for no rotation.
        bias: added to the logits of memories, (h or 1, 1, 1); see `external_memory_bias`.

    Raises:
        OptionError: unknown `position`, or a `transform` that does not fit it.
        ShapeError: `keys` and `values` are not (b, h_kv, m, d) and (b, h_kv, m, d_v).
    """

    keys: Tensor
    values: Tensor
    position: MemoryPosition = "origin"
    transform: Transform | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.position == "origin" and self.transform is not None) or (
            self.position == "own" and self.transform is None
        ):
            raise OptionError(
                f"position={self.position!r} does not fit transform={type(self.transform).__name__}. 'origin' takes no "
                "transform, 'own' needs the rotation of the memories, 'far' the rotation of the queries or None."
            )
        if self.keys.ndim != 4 or self.keys.shape[:3] != self.values.shape[:3]:
            raise ShapeError(
                f"ExternalMemory needs keys and values (b, h_kv, m, d), got {tuple(self.keys.shape)} and "
                f"{tuple(self.values.shape)}."
            )


def external_memory_bias(slopes: Tensor, length: int) -> Tensor:
    """Return ``-slope * length`` (h, 1, 1): with ALiBi all memories are one step beyond the context.

    Args:
        slopes: ALiBi slopes (h,).
        length: number of tokens so far, including those in the KV cache.
    """
    return -(slopes * length)[:, None, None]


def attend_with_external_memory(
    call: Call,
    memories: ExternalMemory,
    *,
    topk: int,
    threshold: float | None = None,
    mode: Mode = "unturned",
) -> Tensor:
    """Return attention (b, h, n, d_v) in which each query also attends to its `topk` most similar memories.

    Similarity is the cosine of query and memory key. Keys of the sequence and memories share one softmax. A row whose
    keys are all masked attends to its memories alone.

    Args:
        call: the arguments of `vispe.attention.attention`; its transform rotates queries and keys of the sequence.
        memories: the external memory.
        topk: number of memories per query and head; all if there are fewer.
        threshold: memories with a cosine at or below it are ignored.
        mode: similarity of unrotated queries (``'unturned'``), or of rotated queries as in the paper's code
            (``'reference'``), with unrotated memory keys. In the latter, the selection depends on the query's position.

    Raises:
        OptionError: `topk` is not a positive integer, or `mode` is unknown.
        ShapeError: the memories have another batch size, number of heads or head_dim than the call.
        UnsupportedCombination: the call uses dropout, sinks, `softcap`, `return_lse` or a transform of values.

    Example:
        >>> import torch
        >>> q = torch.randn(1, 4, 5, 8)
        >>> k, bank = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 30, 8)
        >>> call = Call(q, k, k, is_causal=True, enable_gqa=True)
        >>> attend_with_external_memory(call, ExternalMemory(bank, bank), topk=3).shape
        torch.Size([1, 4, 5, 8])
    """
    _check(call, memories, topk, mode)
    with no_autocast(call.q.device):
        sequence_logits, dead = logits(call)
        if dead is not None:
            sequence_logits = sequence_logits.masked_fill(dead, -torch.inf)
        groups = call.q.shape[1] // call.k.shape[1]
        # with grouped queries the top-k selection is still per query head, so keys are repeated
        keys, values = (
            at_least_float32(x).expand(len(call.q), -1, -1, -1).repeat_interleave(groups, 1)
            for x in (memories.keys, memories.values)
        )
        query = at_least_float32(call.q)
        rotated = query if call.transform is None else call.transform.query(query)
        # similarity (b, h, n, m) decides which memories are selected, in float32 or better
        cosine = F.normalize(rotated if mode == "reference" else query, dim=-1) @ F.normalize(
            keys, dim=-1
        ).transpose(-1, -2)
        indices = cosine.topk(min(topk, keys.shape[2]), -1).indices
        # bool mask (b, h, n, m) of the top-k memories
        selected = torch.zeros_like(cosine, dtype=torch.bool).scatter_(-1, indices, True)
        if threshold is not None:
            selected = selected & (cosine > threshold)
        memory_logits = call.factor * _product(memories, query, rotated, keys)
        if memories.bias is not None:
            memory_logits = memory_logits + memories.bias
        # one softmax over memories and sequence, (b, h, n, m + keys)
        all_logits = torch.cat([memory_logits.masked_fill(~selected, -torch.inf), sequence_logits], -1)
        # rows without any key or memory return 0
        no_key = (all_logits == -torch.inf).all(-1, keepdim=True)
        attn = all_logits.masked_fill(no_key, 0.0).softmax(-1).masked_fill(no_key, 0.0)
        # split the weights into those of memories and of the sequence
        count = keys.shape[2]
        output = weighted(call, attn[..., count:])
        return output + (attn[..., :count] @ values.to(attn)).to(output)


def _product(memories: ExternalMemory, query: Tensor, rotated: Tensor, keys: Tensor) -> Tensor:
    """Return ``q . k`` (b, h, n, m) of queries and memories at the positions given by `position`."""
    if memories.position == "own" and memories.transform is not None:
        keys = memories.transform.key(keys)
    if memories.position == "far":
        rotated = query if memories.transform is None else memories.transform.query(query)
    return rotated @ keys.transpose(-1, -2)


def _check(call: Call, memories: ExternalMemory, topk: object, mode: object) -> None:
    if not is_integer(topk) or topk < 1:  # type: ignore[operator]
        raise OptionError(f"topk must be a positive integer, got {topk!r}.")
    if mode not in ("unturned", "reference"):
        raise OptionError(f"mode must be 'unturned' or 'reference', got {mode!r}.")
    b, heads, _, width = call.k.shape
    shape = memories.keys.shape
    if shape[0] not in (1, b) or (shape[1], shape[3]) != (heads, width) or not shape[2]:
        raise ShapeError(
            f"Memory keys must match the keys {tuple(call.k.shape)} in batch size (or 1), heads and head_dim, with at "
            f"least one memory, got {tuple(shape)}."
        )
    if memories.values.shape[3] != call.v.shape[3]:
        raise ShapeError(
            f"Memory values must have the {counted(call.v.shape[3], 'channel')} of the values, got "
            f"{memories.values.shape[3]}."
        )
    arguments = {"dropout_p": call.dropout_p, "sinks": call.sinks is not None, "softcap": call.softcap}
    arguments |= {"return_lse": call.return_lse}
    arguments |= {"transforms of values": call.transform is not None and call.transform.changes_values}
    unsupported = next((name for name, value in arguments.items() if value), None)
    if unsupported is not None:
        raise UnsupportedCombination(f"External memories do not support {unsupported}. Omit it.")
