"""Options of object detection."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vispe.errors import OptionError, did_you_mean
from vispe.images.annotations.object_files import ObjectKind, checked_kinds
from vispe.images.labels.class_names import class_number
from vispe.utils.options import NonNegativeInt, Options, PositiveInt


@dataclass(frozen=True)
class ObjectOptions(Options):
    """Definition of the connected components of a label map that are objects.

    Attributes:
        classes: names of the classes whose components are objects, or their numbers from 1.
        touching: `'split'`: split at necks, by a watershed; `'keep'`: each component is one object. Split by default:
            on micrographs with known objects it finds more of them (`eval/results/objects.json`).
        min_area: objects with fewer pixels (voxels) are excluded from map and table, and counted in the report.
        fill_holes: add holes to the surrounding object, except pixels of a requested class.
        exclude_border: exclude objects that touch the border of the image (of a volume: also its first and last
            page) or pixels without data, such as those outside of a crop or mask, since their size is unknown.
        kinds: exchange formats: any of `'geojson'`, `'rois'` and `'coco'`; single pages only.

    Raises:
        OptionError: there is no class, or a value is invalid.

    Example:
        >>> ObjectOptions(["pore"]).numbers(["matrix", "pore"])
        (2,)
    """

    classes: str | Sequence[str | PositiveInt]
    touching: Literal["split", "keep"] = "split"
    min_area: NonNegativeInt = 10
    fill_holes: bool = False
    exclude_border: bool = False
    kinds: Sequence[ObjectKind] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        names = (self.classes,) if isinstance(self.classes, str) else tuple(map(str, self.classes))
        object.__setattr__(self, "classes", tuple(dict.fromkeys(names)))
        if not names:
            raise OptionError("objects names no class. Pass one or more, such as objects=pore.")
        checked_kinds(self.kinds)

    def numbers(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the values of the classes in label maps, from 1, ascending.

        Raises:
            OptionError: neither one of `names` nor its number.
        """
        numbers = set()
        for name in self.classes:
            number = class_number(name, names)
            if number is None:
                hint = did_you_mean(name, names)
                raise OptionError(
                    f"objects={name!r} is not a class. The classes are {', '.join(names)}.{hint}"
                )
            numbers.add(number)
        return tuple(sorted(numbers))


def options_or_none(classes: Sequence[str] | None, **more: object) -> ObjectOptions | None:
    """Create `ObjectOptions` from command-line values; None without `classes`, and None values are defaults.

    Raises:
        OptionError: another option without `classes`.
    """
    options = {name: value for name, value in more.items() if value is not None and value is not False}
    if classes is None:
        if options:
            name = {"min_area": "object_min_area", "kinds": "objects_as"}.get(
                next(iter(options)), next(iter(options))
            )
            raise OptionError(f"{name} has no effect without objects. Pass class names as objects.")
        return None
    return ObjectOptions(classes, **options)  # type: ignore[arg-type] - checked there
