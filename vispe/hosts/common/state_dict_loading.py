"""How weights come into a converted model, and what its state dicts say about the encoding.

A checkpoint of the stock model loads strictly: the encoding keeps its values. One that names weights of an encoding, or
keeps the spec of one (`vispe.encodings.saved_spec`), is taken as it is, and refused where it is of another encoding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.fx
from torch import nn

from vispe.encodings.base import Encoding
from vispe.encodings.parts.sampler import Sampler
from vispe.encodings.registry import plain_terms
from vispe.encodings.saved_spec import keep, named, refuse_other, saved_grid, saved_terms
from vispe.errors import EncodingMismatch, UnsupportedCombination, UnsupportedHost
from vispe.grid import Grid
from vispe.hosts.common.checks import uses_reference
from vispe.hosts.common.context import HostState
from vispe.hosts.common.layer_access import check_layers
from vispe.hosts.common.position_cache import PositionCache

_logger = logging.getLogger("vispe.hosts")
_HOME = "pos_enc"  # the name of every module that holds an encoding


class LoadsWeights(nn.Module):
    """What loading and saving changes in every model or tower when it is converted."""

    vispe: HostState
    pos_enc: Encoding | None  # the encodings that all blocks share
    vispe_attentions: ClassVar[
        Callable[[Any], Iterator[tuple[int, str, Any]]]
    ]  # block, path, module of each layer
    vispe_layers: ClassVar[tuple[type[nn.Module], ...]] = (
        nn.Module,
    )  # the classes that they have when swapped

    def _vispe_paths(self) -> Iterator[tuple[str, Encoding]]:
        """Yield path and encoding of every encoding of the model."""
        if self.pos_enc is not None:
            yield _HOME, self.pos_enc
        for _, path, module in self.vispe_attentions() if self.vispe.layered else ():
            if module.pos_enc is not None:
                yield f"{path}.{_HOME}", module.pos_enc

    def _vispe_shared(self) -> tuple[Encoding, ...]:
        """Return the encodings that all blocks share."""
        return () if self.pos_enc is None else self.pos_enc.parts()

    def _vispe_all(self) -> tuple[Encoding, ...]:
        """Return the encodings that prepare positions: those of layers too, of which one of each kind counts."""
        return tuple(e for _, encoding in self._vispe_paths() for e in encoding.parts())

    def _vispe_intact(self) -> None:
        """Raise `UnsupportedHost` where another library has exchanged the class of an attention layer."""
        if self.vispe.inside:
            check_layers(self.vispe_attentions(), self.vispe_layers)

    def _vispe_refuse_draws(self, call: str) -> None:
        """Raise `UnsupportedCombination` where tokens would be assembled at positions that attention does not share."""
        for e in self._vispe_all() if self.training else ():
            if isinstance(e, Sampler):
                raise UnsupportedCombination(
                    f"{call}: {e.name} draws positions in training, which the blocks would not share. Call the model "
                    "or its forward_intermediates."
                )

    def _vispe_loop_grid(self, shape: tuple[int, ...], prefix: int | None) -> Grid:
        """Return the grid of `vispe.positions_for`.

        Args:
            shape: rows and columns of the patches.
            prefix: tokens without a position; None for those of the model.

        Raises:
            UnsupportedHost: positions do not reach the blocks from outside.
        """
        raise UnsupportedHost(
            f"vispe.positions_for: the attention layers of {self.vispe.stock.__name__} take no positions from a loop. "
            "Call the model; in models with windows, and in those of torchvision and MONAI, layers know their grid."
        )

    def _vispe_cache(self, image: Any) -> PositionCache | None:
        """Return where positions of a forward pass are kept; None while a graph is traced."""
        return None if isinstance(image, torch.fx.Proxy) else self.vispe.cache

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that must not decay."""
        theirs = getattr(super(), "no_weight_decay", set)()
        ours = {id(e.get_parameter(name)) for _, e in self._vispe_paths() for name in e.no_weight_decay()}
        return theirs | {
            name for name, p in self.named_parameters() if id(p) in ours
        }  # wrappers are in these names

    def _vispe_table_names(self) -> tuple[str, ...]:
        """Return the names of the state of the absolute table that the stock model has."""
        raise NotImplementedError

    def _vispe_unused(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Return the entries that belong to position information which was taken out."""
        names = () if self.vispe.keep_abs else self._vispe_table_names()
        return [prefix + name for name in names if prefix + name in state_dict]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        keep(destination, prefix, _terms(self), self.vispe.reference)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights, see torch; with `strict`, weights of another encoding are refused before the first change."""
        metadata = getattr(state_dict, "_metadata", {})
        theirs = {name for name in state_dict if _of_encoding(name)} if strict else set()
        if (
            theirs
            and saved_terms(metadata.get("", {})) is None
            and (foreign := sorted(theirs - set(self.state_dict())))
        ):
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            raise EncodingMismatch(
                f"The checkpoint has weights of another encoding, {foreign[0]}{more}, but the "
                f"{self.vispe.stock.__name__} has {named(_terms(self))}; load it into a model with the encoding "
                "that it was saved with, and exchange that afterwards with vispe.convert."
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        *lists: list[str],
    ) -> None:
        terms, (_, unexpected, _) = _terms(self), lists  # missing names, unexpected ones, errors
        refuse_other(local_metadata, terms, self.vispe.stock.__name__)
        if saved_terms(local_metadata) is not None:
            _compare_grids(self, saved_grid(local_metadata))
        paths = list(self._vispe_paths())
        for path, encoding in paths:
            encoding.adopt(state_dict, prefix + path.removesuffix(_HOME), f"{prefix}{path}.")
        theirs = any(
            name.startswith(prefix) and _of_encoding(name.removeprefix(prefix)) for name in state_dict
        )
        if not theirs and saved_terms(local_metadata) is None:  # a checkpoint of the stock model
            self._vispe_fill(state_dict, prefix, paths)
            for name in self._vispe_unused(state_dict, prefix):
                del state_dict[name]
                entry = "own rotary embedding" if ".rope." in f".{name}" else "absolute table"
                _logger.info("The checkpoint's %s is not used: this model has %s.", entry, self.vispe.spec)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        # what was taken out is a registered None, below which torch takes every entry for known
        gone = tuple(f"{prefix}{name}." for name, child in self._modules.items() if child is None)
        unexpected += [name for name in state_dict if name.startswith(gone)] if strict and gone else []

    def _vispe_fill(
        self, state_dict: dict[str, Any], prefix: str, paths: Iterable[tuple[str, Encoding]]
    ) -> None:
        """Let the encodings keep their values, except on the meta device, where they have none."""
        ours = {f"{prefix}{path}.{name}": p for path, e in paths for name, p in e.state_dict().items()}
        ours = {name: value for name, value in ours.items() if not value.is_meta}
        if not ours:
            return
        own = [name for name, _ in self.named_parameters() if not _of_encoding(name)]
        if 2 * sum(prefix + name in state_dict for name in own) >= len(own):  # a whole checkpoint, not a part
            self._vispe_tell(state_dict, prefix)
        state_dict.update(ours)

    def _vispe_tell(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Log that the checkpoint has nothing for the encoding; a warning where it is not of the stock model."""
        state, tables = self.vispe, self._vispe_table_names()
        had = state.keep_abs or state.table is not None or "absolute table" in state.lost
        if had and tables and not any(prefix + name in state_dict for name in tables):
            _logger.warning(
                "The checkpoint has neither the absolute table of %s nor weights of an encoding: it is of a model with "
                "another encoding, or none. The weights of %s stay as they are, which were not trained with it.",
                state.stock.__name__,
                named(_terms(self)),
            )
        else:
            _logger.info("The checkpoint has no weights for %s, which stay as they are.", named(_terms(self)))


def encodings_of(model: LoadsWeights) -> Iterator[tuple[str, Encoding]]:
    """Yield path and encoding of every encoding module of a converted model or tower."""
    return model._vispe_paths()


def _terms(model: LoadsWeights) -> list[dict[str, Any]]:
    """Return the whole spec of a model, with the words for what it keeps of its own.

    Options are those of its encodings, which know what an option that was left out stands for.
    """
    by_name: dict[str, list[dict[str, Any]]] = {}
    layers: set[str] = set()
    for path, encoding in model._vispe_paths():
        if not (path == _HOME or not layers):
            continue  # each layer has the same
        layers |= {path} - {_HOME}
        for part in encoding.parts():
            by_name.setdefault(part.name, []).append(part.spec)
    state = model.vispe
    kept = (("learn", state.keep_abs), ("rope", state.keep_rope))
    terms = [{"name": word} for word, stays in kept if stays]
    for term in plain_terms(state.spec):
        specs = by_name.get(term["name"])
        terms.append(specs.pop(0) if specs else term)  # those without effect in the first layer have none
    return terms


def _of_encoding(name: str) -> bool:
    return f".{_HOME}." in f".{name}"


def _compare_grids(model: LoadsWeights, trained: tuple[int, ...] | None) -> None:
    """Warn when the weights were trained on another grid than the one that the encoding takes as its training grid."""
    ours = model.vispe.reference
    if trained is None or ours is None or trained == tuple(ours):
        return
    parts = [part for _, encoding in model._vispe_paths() for part in encoding.parts()]
    names = dict.fromkeys(part.name for part in parts if uses_reference(part, trained))
    if names:
        _logger.warning(
            "The weights were trained on the grid %s, and %s takes that of this model, %s, as its training grid, which "
            "changes what it computes; give it reference=%s to keep the former.",
            trained,
            " + ".join(names),
            tuple(ours),
            list(trained),
        )
