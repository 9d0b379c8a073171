"""Access to the encodings of a converted model, and to the spec that they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch.fx
from torch import nn

from vispe.encodings.base import Encoding
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.registry import plain_terms
from vispe.errors import UnsupportedCombination, UnsupportedHost
from vispe.grid import Grid
from vispe.hosts.common.context import HostState
from vispe.hosts.common.layer_access import check_layers
from vispe.hosts.common.position_cache import PositionCache

ENCODING = "pos_enc"  # the name of every module that is an encoding


class HasEncodings(nn.Module):
    """Mixin of all converted models and towers: their state, encodings and attention layers."""

    vispe: HostState
    pos_enc: Encoding | None  # the encodings shared by all blocks
    # block, path, module of each layer
    vispe_attentions: ClassVar[Callable[[Any], Iterator[tuple[int, str, Any]]]]
    vispe_layers: ClassVar[tuple[type[nn.Module], ...]] = (nn.Module,)  # their classes when converted

    def _vispe_paths(self) -> Iterator[tuple[str, Encoding]]:
        """Yield path and encoding of every encoding of the model."""
        if self.pos_enc is not None:
            yield ENCODING, self.pos_enc
        for _, path, module in self.vispe_attentions() if self.vispe.layered else ():
            if module.pos_enc is not None:
                yield f"{path}.{ENCODING}", module.pos_enc

    def _vispe_shared(self) -> tuple[Encoding, ...]:
        """Return the encodings shared by all blocks."""
        return () if self.pos_enc is None else self.pos_enc.parts()

    def _vispe_all(self) -> tuple[Encoding, ...]:
        """Return all encodings, those of layers included; each of them prepares positions."""
        return tuple(e for _, encoding in self._vispe_paths() for e in encoding.parts())

    def _vispe_check_layers(self) -> None:
        """Raise `UnsupportedHost` if another library has replaced the class of an attention layer."""
        if self.vispe.inside:
            check_layers(self.vispe_attentions(), self.vispe_layers)

    def _vispe_refuse_draws(self, call: str) -> None:
        """Raise `UnsupportedCombination` if tokens would be assembled at positions that differ from attention's."""
        for e in self._vispe_all() if self.training else ():
            if isinstance(e, Sampler):
                raise UnsupportedCombination(
                    f"{call}: {e.name} samples positions in training, which the blocks would not share. Call the model "
                    "or its forward_intermediates."
                )

    def _vispe_loop_grid(self, shape: tuple[int, ...], prefix: int | None) -> Grid:
        """Return the grid of `vispe.positions_for`.

        Args:
            shape: rows and columns of the patches.
            prefix: number of tokens without a position; None for that of the model.

        Raises:
            UnsupportedHost: the blocks do not accept positions from the caller.
        """
        raise UnsupportedHost(
            f"vispe.positions_for: the attention layers of {self.vispe.stock.__name__} do not accept positions. Call "
            "the model; in windowed models, and in those of torchvision and MONAI, layers store their own grid."
        )

    def _vispe_cache(self, image: Any) -> PositionCache | None:
        """Return the cache of positions for a forward pass; None while a graph is traced."""
        return None if isinstance(image, torch.fx.Proxy) else self.vispe.cache

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: those of the stock model and of the encodings."""
        theirs = getattr(super(), "no_weight_decay", set)()
        # parameters are compared by identity, as wrappers change their names
        ours = {id(e.get_parameter(name)) for _, e in self._vispe_paths() for name in e.no_weight_decay()}
        return theirs | {name for name, p in self.named_parameters() if id(p) in ours}


def terms_of(model: HasEncodings) -> list[dict[str, Any]]:
    """Return the complete spec of a model, with the terms `learn` and `rope` for the model's own position information.

    Options are those of its encodings, which resolve omitted options to their defaults.
    """
    by_name: dict[str, list[dict[str, Any]]] = {}
    layers: set[str] = set()
    for path, encoding in model._vispe_paths():
        if not (path == ENCODING or not layers):
            continue  # all layers have the same encodings
        layers |= {path} - {ENCODING}
        for part in encoding.parts():
            by_name.setdefault(part.name, []).append(part.spec)
    state = model.vispe
    keywords = (("learn", state.keep_abs), ("rope", state.keep_rope))
    terms = [{"name": keyword} for keyword, in_use in keywords if in_use]
    for term in plain_terms(state.spec):
        specs = by_name.get(term["name"])
        terms.append(specs.pop(0) if specs else term)  # encodings inactive in the first layer have no spec
    return terms
