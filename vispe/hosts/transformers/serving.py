"""Position schemes of vision-language models in serving engines: a table per model, positions per request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vispe.errors import InputError, UnsupportedCombination, UnsupportedHost
from vispe.hosts.transformers.language.allocation import with_host_sections
from vispe.hosts.transformers.language.convert import is_vision_language_model
from vispe.hosts.transformers.language.families import FAMILIES, family_of, language_model_of, model_inside
from vispe.hosts.transformers.language.families.grids import GRIDS, NEWLINE_GRIDS, ROW_END_GRIDS
from vispe.hosts.transformers.language.image_placeholders import stream_of, token_types
from vispe.hosts.transformers.language.rotary_detection import rotaries_of
from vispe.hosts.transformers.saving import config_record
from vispe.multimodal import Scheme, create_scheme
from vispe.multimodal.concatenated_scheme import scheme_of
from vispe.multimodal.serving import RotaryTable, TableRows, install, table_of
from vispe.utils.files import atomic_path, check_writable, write_json
from vispe.utils.version import __version__

POSITIONS, TABLE = "positions.json", "table.safetensors"


@dataclass(frozen=True, eq=False)
class ServedPositions:
    """Positions of the tokens of prompts, for a serving engine.

    Attributes:
        rows: mapping from coordinates to rows of the table.
        table: cosines and sines of each row.
        config: configuration of the model, which names its image tokens.
    """

    rows: TableRows
    table: RotaryTable
    config: Any

    def positions(
        self,
        input_ids: Sequence[int] | Tensor,
        image_grid_thw: Any = None,
        video_grid_thw: Any = None,
        second_per_grid_ts: Any = None,
    ) -> tuple[Tensor, int]:
        """Return the position ids of a request, and the position delta of its generated tokens.

        Args:
            input_ids: tokens of the prompt (n,), with one placeholder per image token.
            image_grid_thw: grids (m, 3) of frames, rows and columns in patches, in the order of the prompt.
            video_grid_thw: grids of videos in the same form.
            second_per_grid_ts: seconds between frames of each video.

        Returns:
            Rows of the table (3, n) int64, and the offset from the index of a generated token to its row.

        Raises:
            InputError: grids and placeholders differ, or a coordinate is outside the table.
        """
        tokens = torch.as_tensor(input_ids, dtype=torch.long).reshape(1, -1)
        grids = {"image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw}
        inputs = {
            name: torch.as_tensor(g, dtype=torch.long).reshape(-1, 3)
            for name, g in grids.items()
            if g is not None
        }
        seconds = {} if second_per_grid_ts is None else {"second_per_grid_ts": second_per_grid_ts}
        types = token_types(self.config, tokens, None, (1, tokens.shape[1]))
        valid = torch.ones_like(tokens, dtype=torch.bool)  # a request has no padding
        model = SimpleNamespace(config=self.config)
        stream = stream_of(
            model, torch.zeros_like(tokens) if types is None else types, valid,
            torch.zeros_like(tokens), inputs | seconds,
        )  # fmt: skip
        (request,) = self.rows.requests(stream)
        return request.ids, request.delta

    def install(self, model: nn.Module) -> list[str]:
        """Replace the table of the rotary layers of an engine's model; see `vispe.multimodal.serving.install`."""
        return install(model, self.table)

    def save(self, folder: str | Path, force: bool = False) -> list[Path]:
        """Write the configuration, the numbering and the table into a folder, and return the files.

        Raises:
            InputError: a file exists and `force` is False.
        """
        from safetensors.torch import save_file

        folder = Path(folder)
        files = [folder / name for name in ("config.json", POSITIONS, TABLE)]
        check_writable(files, force)
        with atomic_path(files[2], force) as path:
            save_file({"cos_sin_cache": self.table.cache, "axis_of_pair": self.table.axis_of_pair}, path)
        with atomic_path(files[0], force) as path:
            path.write_text(self.config.to_json_string(use_diff=False))
        write_json(files[1], self.described(), force)
        return files

    def described(self) -> dict[str, Any]:
        """Return the numbering and the layout of the table, JSON-able."""
        rows, table = self.rows, self.table
        return {
            "version": __version__,
            "model_type": self.config.model_type,
            "scheme": {"name": rows.scheme.name, **rows.scheme.options()},
            "positions": rows.positions,
            "below": rows.below,
            "parts": rows.parts,
            "nearest": rows.nearest,
            "rows": rows.size,
            "megabytes_float32": round(4 * table.cache.numel() / 2**20, 1),
            "axis_of_pair": table.axis_of_pair.tolist(),
            "mrope_section": None if table.sections is None else list(table.sections),
            "mrope_interleaved": table.interleaved,
        }


def serve_positions(
    model: nn.Module | str | Path,
    scheme: str | Scheme | None = None,
    *,
    positions: int = 32768,
    grid_thw: tuple[int, int, int] = (64, 64, 64),
    nearest: bool = False,
) -> ServedPositions:
    """Return the positions and tables for serving a vision-language model with a position scheme.

    Args:
        model: a converted model, or the folder of a saved model, of which only the configuration is read. A
            stock model is served with its own scheme.
        scheme: position scheme that replaces that of the model.
        positions: number of integer coordinates from 0 in the table, an upper bound of prompt plus answer.
        grid_thw: frames, rows and columns of the largest video, in tokens, which determine the negative and fractional
            coordinates in the table.
        nearest: round coordinates of schemes without a common denominator.

    Raises:
        UnsupportedHost: the model is not a vision-language model, or its image sizes are not passed as grids.
        UnsupportedCombination: the scheme needs its own attention implementation.
        InputError: the folder contains no configuration.

    Example:
        >>> import pytest; transformers = pytest.importorskip("transformers")
        >>> folder = getfixture("tmp_path")
        >>> transformers.Qwen2VLConfig().save_pretrained(folder)
        >>> served = serve_positions(folder, "mrope_i", positions=64)
        >>> ids = [5, 151655, 151655, 151655, 151655, 151655, 151655, 7]
        >>> served.positions(ids, image_grid_thw=[[1, 4, 6]])
        (tensor([[0, 1, 1, 1, 1, 1, 1, 4],
                [0, 1, 1, 1, 2, 2, 2, 4],
                [0, 1, 2, 3, 1, 2, 3, 4]]), -3)
    """
    built = model if isinstance(model, nn.Module) else _built(Path(model))
    if not is_vision_language_model(built):
        raise UnsupportedHost(
            "serve_positions: the model must be a vision-language model of transformers, got "
            f"{type(built).__name__}."
        )
    inner: Any = model_inside(built)
    config = inner.config
    if config.model_type not in FAMILIES or family_of(config).images is not GRIDS:
        names = ", ".join(name for name, family in FAMILIES.items() if family.images is GRIDS)
        newlines = config.model_type in FAMILIES and family_of(config).images in (
            NEWLINE_GRIDS,
            ROW_END_GRIDS,
        )
        numbered = (
            "whose positions they compute themselves" if newlines else "whose tokens they number one by one"
        )
        raise UnsupportedHost(
            f"serve_positions: engines support position schemes only for models with image grids ({names}), got "
            f"{config.model_type}, {numbered}. Serve it with transformers."
        )
    text = language_model_of(inner)
    entry = config_record.read(config)
    unsupported = [name for name in ("parallel", "self_extend") if entry.get(name)]
    if unsupported:
        raise UnsupportedCombination(
            f"serve_positions: the option {unsupported[0]} needs an attention that engines do not have. Convert the "
            "model without it."
        )
    stock = family_of(config).own(config)
    chosen = scheme_of(scheme or getattr(inner, "vispe_scheme", None) or entry.get("scheme") or stock)
    rotaries = rotaries_of(text)
    (rotary,) = rotaries.values()  # all layers of models with image grids are of one kind
    chosen = with_host_sections(chosen, inner, rotaries)
    # the model may be on the meta device, so its rotary embedding is built again
    with torch.device("cpu"):
        holder = SimpleNamespace(rotary_emb=type(text.rotary_emb)(text.config))
        rates = rotary.rates(holder).float()
        rows = TableRows.reaching(chosen, positions, grid_thw, nearest)
        return ServedPositions(rows, table_of(rows, rates, rotary.scaling(holder)), config)


def load_positions(folder: str | Path) -> ServedPositions:
    """Load a folder written by `ServedPositions.save`.

    Raises:
        InputError: the folder contains no positions.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    if not (folder / POSITIONS).is_file():
        raise InputError(f"{folder} contains no {POSITIONS}. Write it with `vispe export-positions`.")
    entries = json.loads((folder / POSITIONS).read_text())
    tensors = load_file(folder / TABLE)
    scheme = create_scheme(entries["scheme"])
    rows = TableRows(scheme, entries["positions"], entries["below"], entries["parts"], entries["nearest"])
    sections = entries["mrope_section"]
    table = RotaryTable(
        tensors["cos_sin_cache"], tensors["axis_of_pair"],
        None if sections is None else tuple(sections), entries["mrope_interleaved"],
    )  # fmt: skip
    return ServedPositions(rows, table, _config(folder))


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} contains no config.json. Pass the folder of a saved model of transformers."
        )
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _built(folder: Path) -> nn.Module:
    """Return the model of a folder on the meta device, whose modules define its rotary embedding."""
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(_config(folder))
