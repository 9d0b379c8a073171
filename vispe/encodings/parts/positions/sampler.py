"""Base of position samplers: a monotonic map per axis, drawn in training, that moves tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vispe.encodings.base import Encoding
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Positions


class Sampler(Encoding):
    """Moves tokens by a strictly increasing map per axis, drawn in every forward pass of training.

    All other encodings of the model read the new coordinates; samplers come first regardless of the order of a sum.

    Attributes:
        per: one draw for the whole batch, or one per sample (slower: coordinates then differ between samples).
        seed: seed of the draws, set by `set_progress`; None for torch's global generator.
        reader: name of an encoding that reads coordinates, for error messages.
        steered: whether `set_progress` was called; draws then run outside compiled code.
    """

    per: Literal["batch", "sample"] = "batch"
    seed: ClassVar[int | None] = None
    reader: ClassVar[str] = "rope_axial"
    steered: ClassVar[bool] = False

    @property
    def always(self) -> bool:
        """Whether it also draws in evaluation."""
        return False

    def on_progress(self, progress: float, seed: int | None) -> None:
        """Set the completed fraction of the training and the seed of the next draws; see `set_progress`."""
        super().on_progress(progress, seed)
        vars(self).update(seed=seed, steered=True)
        if not _APART:
            _APART.append(torch.compiler.disable(_drawn_apart))

    def check_origin(self, pos: Positions) -> None:
        """Raise `ShapeError` unless coordinates are counted from the start, as the drawn positions are."""
        self._need_start(pos, "draws positions counted from the start")
        if "spacing" in pos.attrs:
            raise ShapeError(
                f"{self.name} draws positions for the cells of one grid, got {pos}. Use it with the "
                "positions of a single grid."
            )

    def draw(self, cells: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Return drawn positions of the cells 0, 1, ... of one axis, (cells,) float64."""
        raise NotImplementedError

    def fixed(self, cells: int, device: torch.device) -> Tensor | None:
        """Return the fixed positions of evaluation, (cells,); None if positions are unchanged."""
        del cells, device
        return None

    def field(self, cells: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the length of an axis and the mean spacing of neighbours, in cells, for each row of `positions`."""
        one = torch.ones_like(positions[:, 0])
        return cells * one, one

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Return the tokens at their new positions, with `Positions.attrs["sampled"]`, which can be reused as `draws`.

        `draws` may contain the positions of the cells of each axis, as ``"rfs.0"`` (cells,) or (b, cells); these
        also apply in evaluation.

        Raises:
            ShapeError: the sampler moves tokens with coordinates that are not finite, or samples with fields of view
                of several sizes.
        """
        return _resampled(self, pos, generator, draws)


def _resampled(
    sampler: Sampler, pos: Positions, generator: torch.Generator | None, draws: dict[str, Tensor] | None
) -> Positions:
    """Return `pos` with the positions of `sampler`; the same object if unchanged."""
    sampler.check_origin(pos)
    done: dict[str, Tensor] = pos.attrs.get("sampled", {})
    names = [f"{sampler.name}.{axis}" for axis in range(pos.axes)]
    if names[0] in done:
        return pos
    supplied = [(draws or {}).get(name) for name in names]
    counts = _counts(pos)
    if any(draw is not None for draw in supplied):
        maps = [_checked(n, draw, c) for n, draw, c in zip(names, supplied, counts, strict=True)]
    elif sampler.training or sampler.always:
        # one map per sample, or one for the batch
        rows = pos.coords.shape[0] if sampler.per == "sample" else 1
        # the list is empty in another process
        draw = (_APART or [_drawn_apart])[0] if sampler.steered else _drawn
        maps = draw(sampler, rows, counts, generator, _exact(pos.coords.device))
    else:
        # fixed positions are cached with `pos`, and with them everything computed from them
        return pos.remember((sampler.name, sampler.config_key), lambda: _settled(sampler, pos, names, counts))
    return _moved(sampler, pos, names, counts, maps)


_APART: list[Callable[..., list[Tensor]]] = []  # filled on demand, as it imports the compiler


def _drawn(
    sampler: Sampler,
    rows: int,
    counts: list[int],
    generator: torch.Generator | None,
    device: torch.device,
) -> list[Tensor]:
    """Return drawn positions of the cells of every axis, (rows, cells) each."""
    return [torch.stack([sampler.draw(c, generator, device) for _ in range(rows)]) for c in counts]


def _drawn_apart(
    sampler: Sampler,
    rows: int,
    counts: list[int],
    generator: torch.Generator | None,
    device: torch.device,
) -> list[Tensor]:
    """Draw with the seed of `set_progress`, outside compiled code, which would recompile for every seed."""
    if generator is None and sampler.seed is not None:
        # drawn on the CPU, so that all devices get the same positions
        generator = torch.Generator().manual_seed(sampler.seed)
        return [m.to(device) for m in _drawn(sampler, rows, counts, generator, generator.device)]
    return _drawn(sampler, rows, counts, generator, device)


def _settled(sampler: Sampler, pos: Positions, names: list[str], counts: list[int]) -> Positions:
    """Return the positions of evaluation."""
    device = _exact(pos.coords.device)
    maps = [sampler.fixed(c, device) for c in counts]
    identity = [torch.arange(c, dtype=torch.float64, device=device) for c in counts]
    if all(m is None for m in maps):
        return pos
    return _moved(
        sampler,
        pos,
        names,
        counts,
        [(s if m is None else m)[None] for m, s in zip(maps, identity, strict=True)],
    )


def _moved(
    sampler: Sampler, pos: Positions, names: list[str], counts: list[int], maps: list[Tensor]
) -> Positions:
    """Return positions with cell i of axis a at ``maps[a][:, i]``, prefix tokens unchanged."""
    _check_free(sampler, pos)
    # fractional cells for coordinates that are not on a grid
    cells = pos.cells() if pos.on_grid else pos.coords / pos.cell[:, None]
    lines = [interpolated(m, cells[..., a]) for a, m in enumerate(maps)]
    # product in float64 where it exists, rounded once to the dtype of the coordinates
    cell = pos.cell.double() if pos.cell.device.type != "mps" else pos.cell
    coords = torch.stack(torch.broadcast_tensors(*lines), -1).to(cell) * cell[:, None]
    coords = coords.to(pos.coords) * pos.spatial[..., None]
    # the field of view and the spacing change with the map
    fields = [sampler.field(c, m) for c, m in zip(counts, maps, strict=True)]
    length, step = (torch.stack(list(f), -1).to(pos.coords) for f in zip(*fields, strict=True))
    sampled = {**pos.attrs.get("sampled", {}), **dict(zip(names, maps, strict=True))}
    return pos.replace(
        coords=coords,
        extent=length * pos.cell,
        cell=step * pos.cell,
        # without grid and index, so that encodings that look up cells raise
        index=None,
        grid=None,
        attrs={"unit": pos.cell, **pos.attrs, "sampled": sampled},
    )


def interpolated(line: Tensor, at: Tensor) -> Tensor:
    """Evaluate a map (b or 1, cells) at cells (b or 1, n): linear interpolation, slope 1 outside."""
    line = line.expand(max(len(line), len(at)), -1)
    at = at.to(line.device).expand(len(line), -1)
    last = line.shape[1] - 1
    if not at.is_floating_point():
        return line.gather(1, at.clamp(0, last))
    at = at.to(line)
    low = at.floor().clamp(0, max(last - 1, 0)).long()
    near, far = line.gather(1, low), line.gather(1, (low + 1).clamp(max=last))
    inside = near + (at - low) * (far - near)
    return torch.where(at < 0, line[:, :1] + at, torch.where(at > last, line[:, -1:] + at - last, inside))


def _counts(pos: Positions) -> list[int]:
    """Return the number of cells along each axis."""
    if pos.grid is not None:
        return list(pos.grid.shape)
    return [int(n) for n in _free_counts(pos).amax(0).tolist()]


def _free_counts(pos: Positions) -> Tensor:
    """Return the number of cells along each axis of every field of view, (b or 1, axes)."""
    return (pos.extent / pos.cell).round().clamp(min=1)


def _check_free(sampler: Sampler, pos: Positions) -> None:
    """Raise `ShapeError` for coordinates that are not finite, or fields of view of several sizes.

    Maps are for one number of cells. An earlier sampler may have changed the sizes of samples with equal numbers.
    """
    if pos.grid is not None or "sampled" in pos.attrs:
        return
    finite = pos.coords.isfinite()
    if not bool(finite.all()):
        raise ShapeError(f"{sampler.name} needs finite coordinates, got {pos.coords[~finite][0]:g}.")
    if len(pos.extent) == 1:
        return
    sizes = dict.fromkeys(tuple(int(n) for n in row) for row in _free_counts(pos).tolist())
    if len(sizes) > 1:
        shapes = ", ".join(" x ".join(str(n) for n in size) for size in sizes)
        raise ShapeError(
            f"{sampler.name} draws positions for one number of cells per axis and needs samples of equal sizes, got "
            f"{shapes} cells. Call the model with one size at a time."
        )


def _checked(name: str, draw: Tensor | None, cells: int) -> Tensor:
    """Return supplied positions (b or 1, cells), or raise."""
    if draw is None:
        raise OptionError(
            f"Draws need positions for every axis, got none for {name}. Pass the positions of the cells of every axis."
        )
    draw = draw[None] if draw.ndim == 1 else draw
    if draw.ndim != 2 or draw.shape[1] != cells:
        raise ShapeError(
            f"{name} needs one position for each of {counted(cells, 'cell')}, got {tuple(draw.shape)}."
        )
    if not bool((draw.diff(dim=1) > 0).all()):
        raise OptionError(
            f"{name} needs strictly increasing positions, got others. Sort them and remove duplicates."
        )
    return draw


def _exact(device: torch.device) -> torch.device:
    """Return a device with float64: the given device, or the CPU."""
    return torch.device("cpu") if device.type == "mps" else device
