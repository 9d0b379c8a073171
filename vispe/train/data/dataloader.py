"""Reproducible batches by step, independent of the number of processes and workers and of resumption."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vispe.errors import InputError, OptionError, VispeError
from vispe.train.data.augmentation import Augment, Resize, apply_pose, perturb, scale, window
from vispe.train.data.dataset import Source, check_integer, digest
from vispe.train.data.sampler import ROW, Order, stream

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as in timm and DINOv2
AHEAD = 2  # batches prefetched by each worker
# settings that determine the content of a step, in the order of the fingerprint
_CONTENT = ("img_size", "batch_size", "seed", "mean", "std", "resize", "crop", "small")


class Batches:
    """Infinite sequence of batches, indexed by step.

    Global step s contains the rows [s b, (s + 1) b) of the order of images, b = batch_size: a new permutation in each
    epoch, or the exact proportions of a `Mixture`. Each row is resized, cropped to `img_size`, augmented and
    normalised; all
    random numbers are derived from (seed, s, row). The content of a step therefore does not depend on rank,
    world_size, num_workers or the first step. Rank r of `world_size` processes has the rows r, r + world_size, ...

    Memory: at most `AHEAD` + 1 local batches and one image (or stack) per worker, and 8 bytes per image for each
    permutation, two of which are needed at the end of an epoch.

    >>> from vispe.train.data import SyntheticSource
    >>> batches = Batches(SyntheticSource(10, side=80), img_size=(56, 70), batch_size=4, seed=1)
    >>> next(batches.from_step(7)).shape
    torch.Size([4, 3, 56, 70])

    Args:
        source: image source.
        img_size: height and width of a row in pixels, or one number for both.
        batch_size: rows of a global batch, a multiple of `world_size`.
        seed: seed of all random numbers.
        rank: rank of this process.
        world_size: number of processes.
        num_workers: data-loading processes; 0 reads in this process.
        mean: mean of each channel, subtracted.
        std: standard deviation of each channel, divided by.
        resize: resizing before cropping: 'cover', to the smallest size that covers the window; the shorter side in
            pixels, at least the larger side of `size`; or 'none'.
        crop: 'random' or 'centre'.
        small: handling of images that are too small: 'enlarge' (with one warning), 'skip' (reads every image of the
            source once during construction), or 'error'.
        augment: random augmentation; default none. Its settings of placements have no effect here.

    Raises:
        OptionError: an invalid value.
        InputError: with small='skip', no image is large enough.
    """

    def __init__(
        self,
        source: Source,
        img_size: int | Sequence[int],
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        resize: Resize = "cover",
        crop: Literal["random", "centre"] = "random",
        small: Literal["enlarge", "skip", "error"] = "enlarge",
        augment: Augment | None = None,
    ) -> None:
        self.source = source
        sides = tuple(img_size) if isinstance(img_size, Sequence) else (img_size, img_size)
        if len(sides) != 2:
            raise OptionError(
                f"img_size must be a height and a width, or one number for both, got {img_size!r}."
            )
        self.img_size = (check_integer("img_size", sides[0], 1), check_integer("img_size", sides[1], 1))
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self.rank, self.world_size = rank, world_size
        self.resize, self.crop, self.small = resize, crop, small
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        self.augment = augment or Augment()
        self._check()
        self._order = Order(source.shares(), seed, self._large() if small == "skip" else None)
        empty = [k for k, (start, stop) in enumerate(self._order.parts) if start == stop]
        if empty:
            where = f" of source {empty[0]} of the mixture" if len(self._order.parts) > 1 else ""
            raise InputError(
                f"no image{where} is large enough for img_size={self.img_size} with resize={resize}. Reduce `img_size`."
            )
        self._noted = False

    def __len__(self) -> int:
        """Return the number of distinct images."""
        return len(self._order)

    def indices(self, step: int) -> np.ndarray:
        """Return the indices of the images of a global batch, (batch,) int64."""
        first = _step(step) * self.batch_size
        return self._order(np.arange(first, first + self.batch_size))

    def load(self, step: int) -> Tensor:
        """Return this rank's rows of a global batch, (batch_size / world_size, 3, H, W) float32, normalised."""
        rows, note = self._load(_step(step))
        self._note(note)
        return rows

    def from_step(self, step: int = 0) -> Iterator[Tensor]:
        """Yield this rank's rows of every global batch from a step on, indefinitely.

        Workers run until the iterator is deleted. The global random state of torch does not change.
        """
        _step(step)
        if self.num_workers == 0:
            return map(self.load, itertools.count(step))
        return self._loaded(step)

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine the content of each step, and the description of the source, as JSON."""
        values = {key: getattr(self, key) for key in _CONTENT}
        return {
            "source": self.source.describe(),
            "pictures": len(self),
            **{key: list(value) if isinstance(value, tuple) else value for key, value in values.items()},
            "augment": self.augment.of_rows(),
        }

    def fingerprint(self) -> str:
        """Return a sha256 of the settings that determine the content of each step, and of the source."""
        values = {key: value for key, value in self.describe().items() if key != "source"}
        return digest(self.source.fingerprint(), values)

    def _loaded(self, step: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed % 2**63)
        options = {"num_workers": self.num_workers, "prefetch_factor": AHEAD, "generator": generator}
        loader = DataLoader(_Steps(self), batch_size=None, sampler=itertools.count(step), **options)
        for rows, note in loader:
            if isinstance(rows, VispeError):
                raise rows
            self._note(note)
            yield rows

    def _load(self, step: int) -> tuple[Tensor, str]:
        """Return the rows of this rank, and the first note, or ''."""
        rows = range(self.rank, self.batch_size, self.world_size)
        numbers = self._order(step * self.batch_size + np.arange(self.rank, self.batch_size, self.world_size))
        out = torch.empty(len(rows), 3, *self.img_size)
        note = ""
        for target, row, number in zip(out, rows, numbers.tolist(), strict=True):
            image, enlarged = self._row(step, row, number)
            target.copy_(image)
            note = note or enlarged
        mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (self.mean, self.std))
        return out.sub_(mean).div_(std), note

    def _row(self, step: int, row: int, number: int) -> tuple[Tensor, str]:
        generator = np.random.Generator(stream(self.seed, ROW, step, row))
        # always draw all numbers, so that the numbers of one option do not depend on other options
        draws = generator.random(8)
        image = self.source[number]
        if self.augment.pose:
            image = apply_pose(image, int(8 * draws[0]))
        shape = image.shape[-2:]
        note = ""
        if self._enlarges(shape):
            note = f"{self.source.name(number)} has {shape[0]} x {shape[1]} pixels"
            if self.small == "error":
                raise InputError(
                    f"{note}, too few for img_size={self.img_size} with resize={self.resize}. Set `small` to "
                    "'enlarge' or 'skip'."
                )
        at = (draws[1], draws[2]) if self.crop == "random" else (0.5, 0.5)
        image = window(image, self.img_size, self.resize, at)
        return perturb(image, self.augment, draws[3:], generator), note

    def _enlarges(self, shape: tuple[int, int]) -> bool:
        return scale(shape, self.img_size, self.resize) > 1

    def _large(self) -> np.ndarray:
        """Return the indices of the images that are large enough in all of their poses."""

        def fits(shape: tuple[int, int]) -> bool:
            return not self._enlarges(shape) and not (self.augment.pose and self._enlarges(shape[::-1]))

        return np.flatnonzero([fits(self.source.shape(i)) for i in range(len(self.source))])

    def _note(self, note: str) -> None:
        if note and not self._noted:
            self._noted = True
            warnings.warn(
                f"images that are too small for img_size={self.img_size} with resize={self.resize} are enlarged, such "
                f"as: {note}.",
                stacklevel=3,
            )

    def _check(self) -> None:
        for name, least in {"batch_size": 1, "world_size": 1, "rank": 0, "num_workers": 0, "seed": 0}.items():
            check_integer(name, getattr(self, name), least)
        for problem in self._problems():
            raise OptionError(problem)
        if not isinstance(self.resize, str):
            check_integer("resize", self.resize, max(self.img_size))

    def _problems(self) -> Iterator[str]:
        """Yield a message for each invalid option."""
        if self.rank >= self.world_size:
            yield f"rank must be below world_size={self.world_size}, got {self.rank}."
        if self.batch_size % self.world_size:
            yield f"batch_size must be a multiple of world_size={self.world_size}, got {self.batch_size}."
        for name, choices in (("crop", ("random", "centre")), ("small", ("enlarge", "skip", "error"))):
            if getattr(self, name) not in choices:
                yield f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}."
        if isinstance(self.resize, str) and self.resize not in ("cover", "none"):
            yield f"resize must be 'cover', 'none' or a number of pixels, got {self.resize!r}."
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            yield f"mean and std must have 3 values each, std positive ones, got {self.mean} and {self.std}."
        roll = self.augment.roll
        if roll and any(n % roll for n in self.img_size):
            yield f"img_size must be a multiple of roll={roll}, got {self.img_size}."


class _Steps(Dataset[Any]):
    """Dataset of the workers. Errors are returned as values to avoid the traceback of a worker process."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __getitem__(self, step: int) -> tuple[Tensor | VispeError, str]:
        try:
            return self.batches._load(step)
        except VispeError as error:
            return type(error)(str(error)), ""


def _step(step: int) -> int:
    return check_integer("step", step, 0)
