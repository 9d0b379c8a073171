"""What a sampler is: a map of each axis, drawn in training, that moves tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vispe.encodings.base import Encoding
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions


class Sampler(Encoding):
    """Changes where tokens are: a strictly increasing map of each axis, drawn anew in every forward pass of training.

    All other encodings of the model read the new coordinates, so samplers come first whatever the order of a sum.

    Attributes:
        per: one draw for the whole batch, or one for every sample (slower: coordinates then differ in each).
        seed: of the draws, as `set_progress` says; None for torch's global generator.
        reader: an encoding that notices the new coordinates, for advice in errors.
        steered: whether `set_progress` says how training goes; programs then draw outside compiled code.
    """

    per: Literal["batch", "sample"] = "batch"
    seed: ClassVar[int | None] = None
    reader: ClassVar[str] = "rope_axial"
    steered: ClassVar[bool] = False

    @property
    def always(self) -> bool:
        """Whether it draws in evaluation too."""
        return False

    def advance(self, progress: float, seed: int | None) -> None:
        """Take the share of training that is done and the seed of the next draws; see `set_progress`."""
        super().advance(progress, seed)
        vars(self).update(seed=seed, steered=True)
        if not _APART:
            _APART.append(torch.compiler.disable(_drawn_apart))

    def check_origin(self, pos: Positions) -> None:
        """Raise `ShapeError` unless coordinates are counted from the start, as the places are that are drawn."""
        self._need_start(pos, "draws places that are counted from the start")

    def draw(self, cells: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Return the new places of the cells 0, 1, ... of one axis, (cells,) float64, as drawn in training."""
        raise NotImplementedError

    def fixed(self, cells: int, device: torch.device) -> Tensor | None:
        """Return the new places in evaluation, always the same; None where tokens stay as they are."""
        del cells, device
        return None

    def field(self, cells: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the length of an axis and the mean distance of neighbours there, in cells, for each row of places."""
        one = torch.ones_like(places[:, 0])
        return cells * one, one

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Return the tokens at their new places, with `Positions.attrs["sampled"]`, which replays them as `draws`.

        `draws` may hold the new places of the cells of each axis, as ``"rfs.0"`` (cells,) or (b, cells); given ones
        count in evaluation too.
        """
        return _resampled(self, pos, generator, draws)


def _resampled(
    sampler: Sampler, pos: Positions, generator: torch.Generator | None, draws: dict[str, Tensor] | None
) -> Positions:
    """Return `pos` with its tokens where `sampler` puts them; the same object where they stay."""
    sampler.check_origin(pos)
    done: dict[str, Tensor] = pos.attrs.get("sampled", {})
    names = [f"{sampler.name}.{axis}" for axis in range(pos.axes)]
    if names[0] in done:
        return pos
    given = [(draws or {}).get(name) for name in names]
    counts = _counts(pos)
    if any(draw is not None for draw in given):
        maps = [_checked(n, draw, c) for n, draw, c in zip(names, given, counts, strict=True)]
    elif sampler.training or sampler.always:
        rows = pos.coords.shape[0] if sampler.per == "sample" else 1
        draw = (
            (_APART or [_drawn_apart])[0] if sampler.steered else _drawn
        )  # a copy may be in another process
        maps = draw(sampler, rows, counts, generator, _exact(pos.coords.device))
    else:
        # what is the same in every forward pass is kept with the positions, and so is all that is made from it
        return pos.remember((sampler.name, sampler.config_key), lambda: _settled(sampler, pos, names, counts))
    return _moved(sampler, pos, names, counts, maps)


_APART: list[Callable[..., list[Tensor]]] = []  # made when needed: it imports the compiler


def _drawn(
    sampler: Sampler,
    rows: int,
    counts: list[int],
    generator: torch.Generator | None,
    device: torch.device,
) -> list[Tensor]:
    """Return the new places of the cells of every axis, (rows, cells) each, with the draws of training."""
    return [torch.stack([sampler.draw(c, generator, device) for _ in range(rows)]) for c in counts]


def _drawn_apart(
    sampler: Sampler,
    rows: int,
    counts: list[int],
    generator: torch.Generator | None,
    device: torch.device,
) -> list[Tensor]:
    """Do the same as `set_progress` says, outside compiled code: it would be compiled anew for every seed."""
    if generator is None and sampler.seed is not None:
        # drawn on the CPU, so that all devices get the same places
        generator = torch.Generator().manual_seed(sampler.seed)
        return [m.to(device) for m in _drawn(sampler, rows, counts, generator, generator.device)]
    return _drawn(sampler, rows, counts, generator, device)


def _settled(sampler: Sampler, pos: Positions, names: list[str], counts: list[int]) -> Positions:
    """Return the positions of evaluation."""
    device = _exact(pos.coords.device)
    maps = [sampler.fixed(c, device) for c in counts]
    still = [torch.arange(c, dtype=torch.float64, device=device) for c in counts]
    if all(m is None for m in maps):
        return pos
    return _moved(
        sampler, pos, names, counts, [(s if m is None else m)[None] for m, s in zip(maps, still, strict=True)]
    )


def _moved(
    sampler: Sampler, pos: Positions, names: list[str], counts: list[int], maps: list[Tensor]
) -> Positions:
    """Return the positions with cell i of axis a at ``maps[a][:, i]``, prefix tokens as they were."""
    cells = pos.cells() if pos.in_place else pos.coords / pos.cell[:, None]
    lines = [interpolated(m, cells[..., a]) for a, m in enumerate(maps)]
    cell = pos.cell.double() if pos.cell.device.type != "mps" else pos.cell
    coords = torch.stack(torch.broadcast_tensors(*lines), -1).to(cell) * cell[:, None]
    coords = coords.to(pos.coords) * pos.spatial[..., None]
    # the field of view and the distance of neighbours change with the map
    fields = [sampler.field(c, m) for c, m in zip(counts, maps, strict=True)]
    length, step = (torch.stack(list(f), -1).to(pos.coords) for f in zip(*fields, strict=True))
    sampled = {**pos.attrs.get("sampled", {}), **dict(zip(names, maps, strict=True))}
    return pos.replace(
        coords=coords,
        extent=length * pos.cell,
        cell=step * pos.cell,
        index=None,
        grid=None,
        attrs={"unit": pos.cell, **pos.attrs, "sampled": sampled},
    )


def interpolated(line: Tensor, at: Tensor) -> Tensor:
    """Return a map (b or 1, cells) at cells (b or 1, n): linear between them, slope 1 outside."""
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
    """Return how many cells there are along each axis."""
    if pos.grid is not None:
        return list(pos.grid.shape)
    whole = (pos.extent / pos.cell).amax(0).round().clamp(min=1)
    return [int(n) for n in whole.tolist()]


def _checked(name: str, draw: Tensor | None, cells: int) -> Tensor:
    """Return given places (b or 1, cells), or raise."""
    if draw is None:
        raise OptionError(f"Draws need {name} too; give the places of the cells of every axis.")
    draw = draw[None] if draw.ndim == 1 else draw
    if draw.ndim != 2 or draw.shape[1] != cells:
        raise ShapeError(f"{name} needs one place for each of {cells} cells, got {tuple(draw.shape)}.")
    if not bool((draw.diff(dim=1) > 0).all()):
        raise OptionError(f"{name} needs places that grow from cell to cell; sort them, and keep each once.")
    return draw


def _exact(device: torch.device) -> torch.device:
    """Return where float64 exists: the device, or the CPU."""
    return torch.device("cpu") if device.type == "mps" else device
