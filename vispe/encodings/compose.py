"""Sums of encodings: `Compose`, and the joint bias, transform and value term of several encodings in a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.affine import Affine
from vispe.attention.transform.chain import Chain
from vispe.attention.value_term import ValueTerm
from vispe.encodings.base import Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.parts.preparation import prepare
from vispe.errors import UnsupportedCombination, counted
from vispe.grid import Positions


class Compose(Additive, Rotary, Biased, Mixing):
    """Sum of encodings: tables and biases add up, mixing runs in order, at most one rotates, after calibrations.

    Args:
        encodings: the members, in order.

    Raises:
        UnsupportedCombination: there are no members, more than one rotates, or one uses several softmaxes and another
            also works inside attention.

    Example:
        >>> from vispe import create_encoding
        >>> rope, alibi = create_encoding('rope_axial', dim=16, num_heads=2), create_encoding('alibi2d', num_heads=2)
        >>> len(Compose([rope, alibi]).parts())
        2
    """

    name = "compose"

    def __init__(self, encodings: Sequence[Encoding]) -> None:
        super().__init__()
        # nested sums are flattened
        self.members = nn.ModuleList(part for e in encodings for part in e.parts())
        if not len(self.members):
            raise UnsupportedCombination(
                "Compose needs at least one encoding, got an empty list. Use 'none' for no encoding."
            )
        # members that scale channels can precede a rotation, but two rotations cannot be combined
        rotary = [e.name for e in self.parts() if isinstance(e, Rotary) and not e.scales_channels]
        if len(rotary) > 1:
            raise UnsupportedCombination(
                f"{' + '.join(rotary)}: two rotary encodings would rotate the same channels. Use only one."
            )
        # raises if a member with several softmaxes is combined with others inside attention
        multi_softmax_of(self.parts())

    def parts(self) -> tuple[Encoding, ...]:
        """Return the members, in order."""
        return tuple(e for e in self.members if isinstance(e, Encoding))

    @property
    def per_layer(self) -> bool:
        """Whether any member is built once per layer; hosts check the parts."""
        return any(e.per_layer for e in self.parts())

    @property
    def prefix_from(self) -> int:
        """The first block that prefix tokens enter, for all members."""
        return max(e.prefix_from for e in self.parts())

    def active(self, layer: int) -> bool:
        """Whether any member has an effect in block `layer`."""
        return any(e.active(layer) for e in self.parts())

    @property
    def config(self) -> Any:
        """The configs of the members."""
        return [e.config for e in self.parts()]

    @property
    def spec(self) -> Any:
        """The specs of the members."""
        return self._terms()

    def _terms(self) -> list[dict[str, Any]]:
        return [e.spec for e in self.parts()]

    def extra_repr(self) -> str:
        """Return an empty string: `repr` shows the members."""
        return ""

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Return the positions prepared by all members."""
        return prepare(self.parts(), pos, generator=generator, draws=draws)

    def reset_parameters(self) -> None:
        """Initialise the parameters of all members."""
        for e in self.parts():
            e.reset_parameters()

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename entries of released checkpoints for every member."""
        for i, e in enumerate(self.parts()):
            e.rename_checkpoint_keys(state_dict, parent_prefix, f"{prefix}members.{i}.")

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the sum of the members' tables; a zero when none is additive."""
        tables = [e.table(pos, image) for e in self.parts() if isinstance(e, Additive)]
        # broadcast over tokens and channels
        return sum(tables[1:], tables[0]) if tables else pos.coords.new_zeros(1, 1, 1)

    def embed(self, x: Tensor, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the tokens after all additive members, in order."""
        for e in self.parts():
            if isinstance(e, Additive):
                x = e.embed(x, pos, image)
        return x

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the transforms of the calibrating members, then of the rotating one; else the identity."""
        return transform_of(self.parts(), pos, layer, x) or Transform()

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the sum of the members' biases."""
        return bias_of(self.parts(), pos, layer, x)

    def value_term(self, pos: Positions, layer: int) -> ValueTerm | None:
        """Return the value term of the member that has one, or None."""
        return value_term_of(self.parts(), pos, layer)

    def mix(self, x: Tensor, pos: Positions, layer: int) -> Tensor:
        """Run the members that mix, in order."""
        for e in self.parts():
            if isinstance(e, Mixing):
                x = e.mix(x, pos, layer)
        return x


def bias_of(
    encodings: Sequence[Encoding], pos: Positions, layer: int, x: Tensor | None = None
) -> Bias | None:
    """Return the sum of the biases of `encodings` in block `layer`, or None.

    Raises:
        UnsupportedCombination: an encoding uses several softmaxes and therefore has several biases.
    """
    _refuse_branches(encodings)
    biases = [e.bias(pos, layer, x) for e in encodings if isinstance(e, Biased)]
    terms = [b for b in biases if b is not None]
    return SumBias(terms) if len(terms) > 1 else terms[0] if terms else None


def transform_of(
    encodings: Sequence[Encoding], pos: Positions, layer: int, x: Tensor | None = None
) -> Transform | None:
    """Return the transform of queries and keys in block `layer`, or None.

    Factors of queries come first, then calibrations, then the rotation.

    Raises:
        UnsupportedCombination: an encoding uses several softmaxes and therefore has several transforms.
    """
    _refuse_branches(encodings)
    # False sorts first: members that scale channels precede the rotation
    rotary = sorted((e for e in encodings if isinstance(e, Rotary)), key=lambda e: not e.scales_channels)
    # biases may also scale the queries, for example by their position
    factors = [e.query_factor(pos, layer) for e in encodings if isinstance(e, Biased)]
    transforms: list[Transform] = [Affine(q_mul=factor) for factor in factors if factor is not None]
    transforms += [e.transform(pos, layer, x) for e in rotary]
    return Chain(*transforms) if len(transforms) > 1 else transforms[0] if transforms else None


def _refuse_branches(encodings: Sequence[Encoding]) -> None:
    multi_softmax = next((e for e in encodings if e.multi_softmax), None)
    if multi_softmax is not None:
        raise UnsupportedCombination(
            f"{multi_softmax.name} uses several softmaxes, so it has no single bias or transform. Call its branches()."
        )


def multi_softmax_of(encodings: Sequence[Encoding]) -> Encoding | None:
    """Return the encoding that uses several softmaxes, or None.

    Raises:
        UnsupportedCombination: another encoding also works inside attention.
    """
    inside = [e for e in encodings if isinstance(e, Rotary | Biased)]
    multi_softmax = next((e for e in inside if e.multi_softmax), None)
    if multi_softmax is not None and len(inside) > 1:
        others = " + ".join(e.name for e in inside if e is not multi_softmax)
        raise UnsupportedCombination(
            f"{multi_softmax.name} uses several softmaxes, which cannot be combined with {others}. "
            "Use only one of them."
        )
    return multi_softmax


def value_term_of(encodings: Sequence[Encoding], pos: Positions, layer: int) -> ValueTerm | None:
    """Return the value term of `encodings` in block `layer`, or None.

    Raises:
        UnsupportedCombination: more than one encoding has a value term.
    """
    value_terms = (e.value_term(pos, layer) for e in encodings if isinstance(e, Biased))
    terms = [term for term in value_terms if term is not None]
    if len(terms) > 1:
        raise UnsupportedCombination(
            f"{counted(len(terms), 'encoding')} add to the attention output, but only one can. Remove the others."
        )
    return terms[0] if terms else None
