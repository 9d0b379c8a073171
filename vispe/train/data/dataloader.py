"""Batches by step: the same for any number of processes and workers, and from wherever training goes on."""

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
from vispe.train.data.augmentation import Augment, Resize, changed, posed, scale, window
from vispe.train.data.dataset import Source, digest, whole
from vispe.train.data.sampler import ROW, Order, stream

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as timm and DINOv2 normalise
AHEAD = 2  # batches that each worker prepares ahead
# what decides the content of a step, in the order in which the fingerprint has it
_CONTENT = ("size", "batch", "seed", "mean", "std", "resize", "crop", "small")


class Batches:
    """An endless series of batches, asked for by step.

    Global step s has the rows [s batch, (s + 1) batch) of the order of pictures: a new permutation of all of them in
    each epoch, or, of a `Mixture`, its exact proportions. A row is resized, cut to `size`, changed and normalised;
    whatever is random is drawn from (seed, s, row). So the content of a step does not depend on rank, world, workers or
    on where the series was begun. Rank r of `world` processes has the rows r, r + world, ...

    Memory: a worker holds at most `AHEAD` + 1 local batches and one picture (or stack); besides, 8 bytes for each
    picture of the source for each permutation, two of which are needed when an epoch ends.

    >>> from vispe.train.data import SyntheticSource
    >>> batches = Batches(SyntheticSource(10, side=80), size=(56, 70), batch=4, seed=1)
    >>> next(batches.from_step(7)).shape
    torch.Size([4, 3, 56, 70])

    Args:
        source: of pictures.
        size: height and width of a row in pixels, or one number for both.
        batch: rows of a global batch, a multiple of `world`.
        seed: of everything drawn.
        rank: this process.
        world: processes.
        workers: processes that read ahead; 0 reads in this process when a batch is asked for.
        mean: of each channel, subtracted.
        std: of each channel, divided by.
        resize: before the window is cut: 'cover', to the smallest size that covers it; the shortest side in pixels, at
            least the larger side of `size`; or 'none', which leaves pictures as they are.
        crop: 'random' or 'centre'.
        small: what is done with pictures that would have to be enlarged: 'enlarge' does it and says so once, 'skip'
            leaves them out (reads every picture of the source once, at once), 'error' names the first.
        augment: changes at random; none by default. Of placements, nothing is read here.

    Raises:
        OptionError: a value that does not fit, named.
        InputError: with small='skip', a source without any picture that is large enough.
    """

    def __init__(
        self,
        source: Source,
        size: int | Sequence[int],
        batch: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        resize: Resize = "cover",
        crop: Literal["random", "centre"] = "random",
        small: Literal["enlarge", "skip", "error"] = "enlarge",
        augment: Augment | None = None,
    ) -> None:
        self.source = source
        sides = tuple(size) if isinstance(size, Sequence) else (size, size)
        if len(sides) != 2:
            raise OptionError(
                f"size={size!r} is not a height and a width; give two numbers, or one for both."
            )
        self.size = (whole("size", sides[0], 1), whole("size", sides[1], 1))
        self.batch, self.seed, self.rank, self.world, self.workers = batch, seed, rank, world, workers
        self.resize, self.crop, self.small = resize, crop, small
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        self.augment = augment or Augment()
        self._check()
        self._order = Order(source.shares(), seed, self._large() if small == "skip" else None)
        empty = [k for k, (start, stop) in enumerate(self._order.parts) if start == stop]
        if empty:
            of = f" of source {empty[0]} of the mixture" if len(self._order.parts) > 1 else ""
            raise InputError(
                f"no picture{of} is large enough for size={self.size} with resize={resize}; choose a smaller one."
            )
        self._noted = False

    def __len__(self) -> int:
        """Return how many different pictures are used."""
        return len(self._order)

    def indices(self, step: int) -> np.ndarray:
        """Return the numbers of the pictures of a global batch, (batch,) int64."""
        first = _step(step) * self.batch
        return self._order(np.arange(first, first + self.batch))

    def load(self, step: int) -> Tensor:
        """Return this rank's rows of a global batch, (batch / world, 3, H, W) float32, normalised."""
        rows, note = self._load(_step(step))
        self._note(note)
        return rows

    def from_step(self, step: int = 0) -> Iterator[Tensor]:
        """Yield this rank's rows of every global batch from a step on, without end.

        With workers, these live as long as the iterator. torch's global random numbers are not touched.
        """
        _step(step)
        if self.workers == 0:
            return map(self.load, itertools.count(step))
        return self._loaded(step)

    def describe(self) -> dict[str, Any]:
        """Return what decides the content of each step, and the description of the source, as JSON."""
        own = {key: getattr(self, key) for key in _CONTENT}
        return {
            "source": self.source.describe(),
            "pictures": len(self),
            **{key: list(value) if isinstance(value, tuple) else value for key, value in own.items()},
            "augment": self.augment.of_rows(),
        }

    def fingerprint(self) -> str:
        """Return a sha256 over what decides the content of each step, and that of the source."""
        own = {key: value for key, value in self.describe().items() if key != "source"}
        return digest(self.source.fingerprint(), own)

    def _loaded(self, step: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed % 2**63)
        ahead = {"num_workers": self.workers, "prefetch_factor": AHEAD, "generator": generator}
        loader = DataLoader(_Steps(self), batch_size=None, sampler=itertools.count(step), **ahead)
        for rows, note in loader:
            if isinstance(rows, VispeError):
                raise rows
            self._note(note)
            yield rows

    def _load(self, step: int) -> tuple[Tensor, str]:
        """Return the rows of this rank, and the first thing to note, or ''."""
        rows = range(self.rank, self.batch, self.world)
        numbers = self._order(step * self.batch + np.arange(self.rank, self.batch, self.world))
        out = torch.empty(len(rows), 3, *self.size)
        note = ""
        for place, row, number in zip(out, rows, numbers.tolist(), strict=True):
            picture, enlarged = self._row(step, row, number)
            place.copy_(picture)
            note = note or enlarged
        mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (self.mean, self.std))
        return out.sub_(mean).div_(std), note

    def _row(self, step: int, row: int, number: int) -> tuple[Tensor, str]:
        generator = np.random.Generator(stream(self.seed, ROW, step, row))
        # always all of them: what one option draws does not depend on the others
        draws = generator.random(8)
        picture = self.source[number]
        if self.augment.pose:
            picture = posed(picture, int(8 * draws[0]))
        shape = picture.shape[-2:]
        note = ""
        if self._enlarges(shape):
            note = f"{self.source.name(number)} has {shape[0]} x {shape[1]} pixels"
            if self.small == "error":
                raise InputError(
                    f"{note}, too few for size={self.size} with resize={self.resize}; set small= to 'enlarge' or "
                    "'skip'."
                )
        at = (draws[1], draws[2]) if self.crop == "random" else (0.5, 0.5)
        picture = window(picture, self.size, self.resize, at)
        return changed(picture, self.augment, draws[3:], generator), note

    def _enlarges(self, shape: tuple[int, int]) -> bool:
        return scale(shape, self.size, self.resize) > 1

    def _large(self) -> np.ndarray:
        """Return the numbers of the pictures that need not be enlarged, in any pose that they may get."""

        def fits(shape: tuple[int, int]) -> bool:
            return not self._enlarges(shape) and not (self.augment.pose and self._enlarges(shape[::-1]))

        return np.flatnonzero([fits(self.source.shape(i)) for i in range(len(self.source))])

    def _note(self, note: str) -> None:
        if note and not self._noted:
            self._noted = True
            warnings.warn(
                f"pictures that are too small for size={self.size} with resize={self.resize} are enlarged, such as: "
                f"{note}.",
                stacklevel=3,
            )

    def _check(self) -> None:
        for name, least in {"batch": 1, "world": 1, "rank": 0, "workers": 0, "seed": 0}.items():
            whole(name, getattr(self, name), least)
        for problem in self._problems():
            raise OptionError(problem)
        if not isinstance(self.resize, str):
            whole("resize", self.resize, max(self.size))

    def _problems(self) -> Iterator[str]:
        """Yield a sentence for each option that does not fit."""
        if self.rank >= self.world:
            yield f"rank={self.rank} is not below world={self.world}."
        if self.batch % self.world:
            yield f"batch={self.batch} cannot be shared by world={self.world} processes; choose a multiple of it."
        for name, known in (("crop", ("random", "centre")), ("small", ("enlarge", "skip", "error"))):
            if getattr(self, name) not in known:
                yield f"{name}={getattr(self, name)!r} is not one of {', '.join(known)}."
        if isinstance(self.resize, str) and self.resize not in ("cover", "none"):
            yield f"resize={self.resize!r} is not 'cover', 'none' or a number of pixels."
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            yield f"mean={self.mean} and std={self.std} need 3 values each, std positive ones."
        roll = self.augment.roll
        if roll and any(n % roll for n in self.size):
            yield f"roll={roll} does not divide size={self.size}; choose a size of whole patches."


class _Steps(Dataset[Any]):
    """What workers run. Errors come back as values, so that users read one sentence and no traceback of a worker."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __getitem__(self, step: int) -> tuple[Tensor | VispeError, str]:
        try:
            return self.batches._load(step)
        except VispeError as error:
            return type(error)(str(error)), ""


def _step(step: int) -> int:
    return whole("step", step, 0)
