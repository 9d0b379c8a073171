"""Loading of weights into converted models, and metadata of the encoding in their state dicts.

A checkpoint of the stock model loads strictly: the encoding keeps its values. A checkpoint with weights or the spec of
an encoding (`vispe.encodings.saved_spec`) is loaded unchanged, and rejected if it belongs to another encoding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from vispe.encodings.base import Encoding
from vispe.encodings.saved_spec import check_same_spec, keep, named, saved_grid, saved_terms
from vispe.errors import EncodingMismatch
from vispe.hosts.common.conversion.training_grid import uses_reference
from vispe.hosts.common.encoding_access import ENCODING, HasEncodings, terms_of
from vispe.hosts.common.layer_access import state_path

_logger = logging.getLogger("vispe.hosts")


class LoadsWeights(HasEncodings):
    """Mixin of all converted models and towers: loading of weights, and the spec in their state dicts."""

    def _vispe_table_names(self) -> tuple[str, ...]:
        """Return the state dict names of the stock model's absolute table."""
        raise NotImplementedError

    def _vispe_unused(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Return the entries of detached position information."""
        names = () if self.vispe.keep_abs else self._vispe_table_names()
        return [prefix + name for name in names if prefix + name in state_dict]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        keep(destination, prefix, terms_of(self), self.vispe.reference)

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
                f"{self.vispe.stock.__name__} has {named(terms_of(self))}. Load it into a model with the encoding of "
                "the checkpoint, and replace that afterwards with vispe.convert."
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
        terms, (_, unexpected, _) = terms_of(self), lists  # missing names, unexpected names, errors
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
                state_dict, prefix + path.removesuffix(ENCODING), f"{prefix}{path}."
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
                named(terms_of(self)),
            )
        else:
            _logger.info("The checkpoint has no weights for %s, which are unchanged.", named(terms_of(self)))


def _of_encoding(name: str) -> bool:
    return f".{ENCODING}." in f".{name}"


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
