"""Saving and loading of encodings: their specs, renamed entries and resampled tables."""

from __future__ import annotations

from typing import Any, cast

from vispe.encodings.base.description import Described
from vispe.encodings.saved_spec import check_same_spec, keep, saved_grid


class Checkpointed(Described):
    """State dicts of an encoding, which contain its spec and grid, see `Encoding`."""

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename entries of released checkpoints to the parameter names of this module, in place.

        Args:
            state_dict: state dict that is being loaded.
            parent_prefix: prefix of the module that contains this encoding.
            prefix: prefix of this encoding.
        """

    def resample_checkpoint(
        self, state_dict: dict[str, Any], prefix: str, grid: tuple[int, ...] | None
    ) -> None:
        """Resample entries of another grid to the grid of this module, in place; the default has none.

        Args:
            state_dict: state dict that is being loaded.
            prefix: prefix of this encoding.
            grid: shape of the grid of the entries; None if unknown, so that it is inferred from their sizes.

        Raises:
            EncodingMismatch: the entries cannot be resampled.
        """

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        cast(Any, super())._save_to_state_dict(destination, prefix, keep_vars)
        keep(destination, prefix, self._terms(), getattr(self, "grid", None))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        check_same_spec(local_metadata, self._terms(), f"module {prefix.removesuffix('.') or self.name}")
        # before the shapes are compared
        self.resample_checkpoint(state_dict, prefix, saved_grid(local_metadata))
        reports = (missing_keys, unexpected_keys, error_msgs)
        cast(Any, super())._load_from_state_dict(state_dict, prefix, local_metadata, strict, *reports)

    def _terms(self) -> list[dict[str, Any]]:
        return [self.spec]
