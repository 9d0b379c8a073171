"""Images and masks that are read from files when they are asked for, and synthetic ones that are rendered then."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from vispe.errors import InputError, OptionError
from vispe.images.file_search import match_files
from vispe.images.labels.label_files import read_truth
from vispe.images.normalize import normalize
from vispe.images.orientation import AS_STORED
from vispe.images.read import read_image
from vispe.images.textures import Texture, disc_packing, random_field, voronoi

TEXTURE_SIDE = 320
"""Side of the synthetic images in pixels: 14 patches of 16 pixels, and room to turn them."""

_SINGLE = (".png", ".jpg", ".jpeg", ".bmp")


class FileImages(Sequence[Tensor]):
    """Every page of image files as a tensor; only the last file that was read is kept.

    Args:
        paths: image files.
        tensor: page (H, W, c) in [0, 1] -> image (c, H, W).
        mode: what shares one pair of grey limits: 'stack', 'image' or 'none'.
        clip: percentiles that become 0 and 1.

    Attributes:
        names: of the pages.
        places: file and page of each image.
        notes: what was noticed while reading, without repetition.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        tensor: Callable[[np.ndarray], Tensor],
        mode: str = "stack",
        clip: tuple[float, float] = (0.5, 99.5),
    ) -> None:
        self._tensor, self._mode, self._clip = tensor, mode, clip
        self._last: tuple[Path, np.ndarray] | None = None
        self.frame = AS_STORED  # of the last file
        self.notes: list[str] = []
        self.places = [(p, z) for p in paths for z in range(self._count(p))]
        several = {p for p, z in self.places if z}
        self.names = tuple(f"{p.name} page {z}" if p in several else p.name for p, z in self.places)

    def __len__(self) -> int:
        """Return the number of pages."""
        return len(self.places)

    def __getitem__(self, number: int) -> Tensor:
        """Return one image (c, H, W)."""
        path, page = self.places[number]
        return self._tensor(self._pages(path)[page])

    def shape(self, path: Path) -> tuple[int, int, int]:
        """Return pages, height and width of a file."""
        z, h, w = self._pages(path).shape[:3]
        return z, h, w

    def _count(self, path: Path) -> int:
        return 1 if path.suffix.lower() in _SINGLE else len(self._pages(path))

    def _pages(self, path: Path) -> np.ndarray:
        if self._last is None or self._last[0] != path:
            image = read_image(path, orientation="stored")
            pages, notes = normalize(image, self._mode, self._clip)
            self.notes += [n for n in (*image.notes, *notes) if n not in self.notes]
            self._last, self.frame = (path, pages), image.frame
        return self._last[1]


class FileMasks(Sequence[np.ndarray]):
    """The mask of every image of a `FileImages`, 1..K and 0 for what does not count.

    Args:
        images: the images.
        files: mask files; matched to the image files by name (a.png with a.png or a_mask.png), or, where no name fits
            and there are as many, by order.
        zero: whether the value 0 is the first class, or does not count.
        n_classes: K where it is known; else what is found in the masks.

    Attributes:
        n_classes: K.
        notes: what the user should know.

    Raises:
        InputError: a mask is missing, does not fit its image, or holds no classes.
    """

    def __init__(
        self, images: FileImages, files: Sequence[Path], zero: str = "class", n_classes: int | None = None
    ) -> None:
        self._images, self._zero = images, zero
        self._last: tuple[Path, np.ndarray] | None = None
        self.notes: list[str] = []
        self._files = self._matched(list(dict.fromkeys(p for p, _ in images.places)), files)
        self.n_classes = n_classes
        if n_classes is None:
            self.n_classes = self._counted()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._images)

    def __getitem__(self, number: int) -> np.ndarray:
        """Return one mask (H, W)."""
        path, page = self._images.places[number]
        return self._read(path)[page]

    def _read(self, image: Path) -> np.ndarray:
        if self._last is None or self._last[0] != image:
            shape = self._images.shape(image)
            known = {"zero_is": self._zero, "n_classes": self.n_classes}
            found = read_truth(self._files[image], shape, **known, note=self._note, frame=self._images.frame)
            self._last = image, found
        return self._last[1]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _counted(self) -> int:
        """Count the classes: values 0..K-1, or else the different grey levels."""
        try:
            return max(int(self._read(image).max()) for image in self._files)
        except InputError:
            levels: set[int] = set()
            for file in self._files.values():
                levels |= {int(v) for v in np.unique(read_image(file).pages)}
            levels -= {0} if self._zero == "ignore" else set()
            if len(levels) > 20:
                raise
            self._last = None
            listed = ", ".join(map(str, sorted(levels)))
            self.notes.append(
                f"The masks hold the grey levels {listed}: they are the classes 1 to {len(levels)}."
            )
            return len(levels)

    def _matched(self, images: list[Path], files: Sequence[Path]) -> dict[Path, Path]:
        matched, strays = match_files(images, files, "masks")
        if not matched and len(images) == len(files):
            self.notes.append("No mask is named like an image; they were matched in the order given.")
            return dict(zip(images, files, strict=True))
        missing = next((path for path in images if path not in matched), None)
        if missing is not None:
            raise InputError(
                f"{missing} has no mask among the {len(files)} given; name it {missing.stem}_mask.png, or give as many "
                "masks as images."
            )
        if strays:
            listed = ", ".join(path.name for path in strays[:5])
            self.notes.append(f"{len(strays)} mask(s) belong to no image and are not used: {listed}.")
        return matched


class TextureImages(Sequence[Tensor]):
    """Synthetic micrographs of two phases in turn: random fields, discs in a matrix, grains. They have no "up".

    Args:
        count: number of images.
        tensor: page (H, W, 1) in [0, 1] -> image (c, H, W).
        side: of the images in pixels.
        seed: of the textures.

    Attributes:
        names: of the images.
        masks: exact classes (H, W) 1, 2 of each, a sequence that renders them when they are asked for.
        classes: their names.
    """

    def __init__(
        self, count: int, tensor: Callable[[np.ndarray], Tensor], side: int = TEXTURE_SIDE, seed: int = 0
    ) -> None:
        if count < 1:
            raise OptionError(f"--textures needs at least one, got {count}.")
        self._tensor, self._side = tensor, side
        kinds: tuple[tuple[str, Callable[[int], Texture]], ...] = (
            ("random field", lambda k: random_field(k, wavelength=32.0)),
            ("discs", lambda k: disc_packing(k, radius=14.0)),
            ("grains", lambda k: voronoi(k, grain=40.0)),
        )
        self._made = [kinds[k % 3][1](seed * 1000 + k) for k in range(count)]
        self.names = tuple(f"texture {k}, {kinds[k % 3][0]}" for k in range(count))
        self.masks = _TextureMasks(self._made, side)
        self.classes = ("phase 0", "phase 1")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._made)

    def __getitem__(self, number: int) -> Tensor:
        """Return one image (c, side, side)."""
        grey = self._made[number].render(self._side)[0][0]
        return self._tensor(grey.clamp(0, 1).numpy()[..., None])


class _TextureMasks(Sequence[np.ndarray]):
    """The classes of textures, from 1."""

    def __init__(self, made: Sequence[Texture], side: int) -> None:
        self._made, self._side = made, side

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, number: int) -> np.ndarray:
        return self._made[number].render(self._side)[1].numpy() + 1
