"""Loading of weights into converted models, and metadata of the encoding in their state dicts.

A checkpoint of the stock model loads strictly: the encoding keeps its values. A checkpoint with weights or the spec of
an encoding (`vispe.encodings.saved_spec`) is loaded unchanged, and rejected if it belongs to another encoding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.fx
from torch import nn

from vispe.encodings.base import Encoding
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.registry import plain_terms
from vispe.encodings.saved_spec import check_same_spec, keep, named, saved_grid, saved_terms
from vispe.errors import EncodingMismatch, UnsupportedCombination, UnsupportedHost
from vispe.grid import Grid
from vispe.hosts.common.context import HostState
from vispe.hosts.common.conversion.training_grid import uses_reference
from vispe.hosts.common.layer_access import check_layers, state_path
from vispe.hosts.common.position_cache import PositionCache

_logger = logging.getLogger("vispe.hosts")
_ENCODING = "pos_enc"  # the name of every module that is an encoding


class LoadsWeights(nn.Module):
    """Mixin of all converted models and towers: loading, saving and access to the encodings."""

    vispe: HostState
    pos_enc: Encoding | None  # the encodings shared by all blocks
    # block, path, module of each layer
    vispe_attentions: ClassVar[Callable[[Any], Iterator[tuple[int, str, Any]]]]
    vispe_layers: ClassVar[tuple[type[nn.Module], ...]] = (nn.Module,)  # their classes when converted

    def _vispe_paths(self) -> Iterator[tuple[str, Encoding]]:
        """Yield path and encoding of every encoding of the model."""
        if self.pos_enc is not None:
            yield _ENCODING, self.pos_enc
        for _, path, module in self.vispe_attentions() if self.vispe.layered else ():
            if module.pos_enc is not None:
                yield f"{path}.{_ENCODING}", module.pos_enc

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

    def _vispe_table_names(self) -> tuple[str, ...]:
        """Return the state dict names of the stock model's absolute table."""
        raise NotImplementedError

    def _vispe_unused(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Return the entries of detached position information."""
        names = () if self.vispe.keep_abs else self._vispe_table_names()
        return [prefix + name for name in names if prefix + name in state_dict]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        keep(destination, prefix, _terms(self), self.vispe.reference)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights as in torch; with `strict`, weights of another encoding are rejected before the first change.

        Raises:
            EncodingMismatch: the checkpoint has weights of another encoding.
        """
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
                f"{self.vispe.stock.__name__} has {named(_terms(self))}. Load it into a model with the encoding of the "
                "checkpoint, and replace that afterwards with vispe.convert."
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
        terms, (_, unexpected, _) = _terms(self), lists  # missing names, unexpected names, errors
        check_same_spec(local_metadata, terms, self.vispe.stock.__name__)
        if saved_terms(local_metadata) is not None:
            _compare_grids(self, saved_grid(local_metadata))
        paths = list(self._vispe_paths())
        self._vispe_rename(state_dict, prefix)
        theirs = any(
            name.startswith(prefix) and _of_encoding(name.removeprefix(prefix)) for name in state_dict
        )
        if not theirs and saved_terms(local_metadata) is None:  # a checkpoint of the stock model
            self._vispe_fill(state_dict, prefix, paths)
            for name in self._vispe_unused(state_dict, prefix):
                del state_dict[name]
                entry = "own rotary embedding" if ".rope." in f".{name}" else "absolute table"
                _logger.info("The checkpoint's %s is ignored: this model has %s.", entry, self.vispe.spec)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        # detached modules are registered as None, and torch accepts every entry below a registered None
        detached = tuple(f"{prefix}{name}." for name, child in self._modules.items() if child is None)
        unexpected += (
            [name for name in state_dict if name.startswith(detached)] if strict and detached else []
        )

    def _vispe_rename(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Rename entries of released checkpoints to weights of the encodings, except those of the model itself."""
        # a table that stays in use may have the name of the encoding's in released checkpoints
        of_model = {
            prefix + state_path(f"{path}.{name}".removeprefix("."))
            for path, module in self.named_modules()
            for name in module._parameters.keys()
            | (module._buffers.keys() - module._non_persistent_buffers_set)
            if not _of_encoding(f"{path}.{name}") and getattr(module, name) is not None
        }
        entries = {name: state_dict.pop(name) for name in of_model & state_dict.keys()}
        for path, encoding in self._vispe_paths():
            encoding.rename_checkpoint_keys(
                state_dict, prefix + path.removesuffix(_ENCODING), f"{prefix}{path}."
            )
        state_dict.update(entries)

    def _vispe_fill(
        self, state_dict: dict[str, Any], prefix: str, paths: Iterable[tuple[str, Encoding]]
    ) -> None:
        """Add the current values of the encodings to a state dict, except on the meta device, where there are none."""
        ours = {f"{prefix}{path}.{name}": p for path, e in paths for name, p in e.state_dict().items()}
        ours = {name: value for name, value in ours.items() if not value.is_meta}
        if not ours:
            return
        stock = [name for name, _ in self.named_parameters() if not _of_encoding(name)]
        # partial checkpoints (LoRA, a single layer) are not reported
        if 2 * sum(prefix + name in state_dict for name in stock) >= len(stock):
            self._vispe_log_missing(state_dict, prefix)
        state_dict.update(ours)

    def _vispe_log_missing(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Log that a checkpoint has no weights of the encoding, as a warning if it is not from the stock model."""
        state, tables = self.vispe, self._vispe_table_names()
        stock_has_table = state.keep_abs or state.table is not None or "absolute table" in state.lost
        if stock_has_table and tables and not any(prefix + name in state_dict for name in tables):
            _logger.warning(
                "The checkpoint has neither the absolute table of %s nor weights of an encoding: it is of a model with "
                "another encoding, or none. The weights of %s, which were not trained with it, are unchanged.",
                state.stock.__name__,
                named(_terms(self)),
            )
        else:
            _logger.info("The checkpoint has no weights for %s, which are unchanged.", named(_terms(self)))


def encodings_of(model: LoadsWeights) -> Iterator[tuple[str, Encoding]]:
    """Yield path and encoding of every encoding module of a converted model or tower."""
    return model._vispe_paths()


def _terms(model: LoadsWeights) -> list[dict[str, Any]]:
    """Return the complete spec of a model, with the terms `learn` and `rope` for the model's own position information.

    Options are those of its encodings, which resolve omitted options to their defaults.
    """
    by_name: dict[str, list[dict[str, Any]]] = {}
    layers: set[str] = set()
    for path, encoding in model._vispe_paths():
        if not (path == _ENCODING or not layers):
            continue  # all layers have the same encodings
        layers |= {path} - {_ENCODING}
        for part in encoding.parts():
            by_name.setdefault(part.name, []).append(part.spec)
    state = model.vispe
    keywords = (("learn", state.keep_abs), ("rope", state.keep_rope))
    terms = [{"name": keyword} for keyword, in_use in keywords if in_use]
    for term in plain_terms(state.spec):
        specs = by_name.get(term["name"])
        terms.append(specs.pop(0) if specs else term)  # encodings inactive in the first layer have no spec
    return terms


def _of_encoding(name: str) -> bool:
    return f".{_ENCODING}." in f".{name}"


def _compare_grids(model: LoadsWeights, trained: tuple[int, ...] | None) -> None:
    """Warn when the weights were trained on another grid than the training grid of the encoding."""
    ours = model.vispe.reference
    if trained is None or ours is None or trained == tuple(ours):
        return
    parts = [part for _, encoding in model._vispe_paths() for part in encoding.parts()]
    names = dict.fromkeys(part.name for part in parts if uses_reference(part, trained))
    if names:
        _logger.warning(
            "The weights were trained on the grid %s, but %s uses the grid %s of this model as its training grid, "
            "which changes its output. Set reference=%s to keep the former.",
            trained,
            " + ".join(names),
            tuple(ours),
            list(trained),
        )
