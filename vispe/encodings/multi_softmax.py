"""Encodings with several softmaxes per layer, whose gated outputs are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from vispe.attention.backends import reference
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.call import Call
from vispe.attention.transform.abstract_transform import Transform
from vispe.encodings.base import Encoding
from vispe.encodings.compose import bias_of, multi_softmax_of, transform_of, value_term_of
from vispe.errors import UnsupportedCombination
from vispe.grid import Positions


class Branch(NamedTuple):
    """One softmax of several: ``gate * softmax(logits) v``.

    Attributes:
        gate: (b or 1, h or 1, n or 1, 1), weight of this branch in the output of each query.
        transform: transform of queries and keys; values and outputs are not transformed.
        bias: term added to the logits.
    """

    gate: Tensor
    transform: Transform | None = None
    bias: Bias | None = None


class MultiSoftmax(Protocol):
    """An encoding with several softmaxes: a `Rotary` or `Biased` class with ``multi_softmax = True``."""

    def branches(self, pos: Positions, layer: int, x: Tensor | None = None) -> Sequence[Branch]:
        """Return the branches of block `layer`."""
        ...


def branches_of(
    encodings: Sequence[Encoding], pos: Positions, layer: int, x: Tensor | None = None
) -> list[Branch]:
    """Return the branches of block `layer`; an empty list if no encoding uses several softmaxes.

    Raises:
        UnsupportedCombination: another encoding also works inside attention, or a branch transforms values.
    """
    multi_softmax = multi_softmax_of(encodings)
    if multi_softmax is None:
        return []
    branches = list(cast("MultiSoftmax", multi_softmax).branches(pos, layer, x))
    # branches share the values, so none of them can transform values
    if any(b.transform is not None and b.transform.changes_values for b in branches):
        raise UnsupportedCombination(
            f"A branch of {multi_softmax.name} transforms values, which all branches share. "
            "Transform only queries and keys."
        )
    return branches


def calls_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encodings: Sequence[Encoding],
    pos: Positions,
    layer: int,
    x: Tensor | None = None,
    **masks: Any,
) -> list[tuple[Tensor | None, Call]]:
    """Return every softmax of a layer as (gate, call); without branches, one call with gate None.

    Args:
        q: queries (b, h, n, d_h) after qk-norm.
        k: keys, likewise.
        v: values.
        encodings: encodings of the model; those that work outside attention are ignored.
        pos: prepared positions of the tokens.
        layer: index of the block.
        x: the block's input to attention (b, n, d), for encodings with gates.
        **masks: further arguments of `Call`.
    """
    branches = branches_of(encodings, pos, layer, x)
    if branches:
        # each branch has a separate bias and transform, and none has a value term
        return [(b.gate, Call(q, k, v, b.bias, b.transform, **masks)) for b in branches]
    arguments = (encodings, pos, layer, x)
    return [
        (
            None,
            Call(
                q, k, v, bias_of(*arguments), transform_of(*arguments), value_term_of(*arguments[:3]), **masks
            ),
        )
    ]


def weights_of(calls: Sequence[tuple[Tensor | None, Call]]) -> Tensor:
    """Return the summed attention weights (b, h, n, m) of all softmaxes of a layer, in float32 or better."""
    # outputs are linear in the weights, so gates can be applied to the weights
    maps = [
        reference.weights(call) if gate is None else gate * reference.weights(call) for gate, call in calls
    ]
    return sum(maps[1:], maps[0])
