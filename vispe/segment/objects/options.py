"""What counts as an object."""

from collections.abc import Sequence
from dataclasses import dataclass

from vispe.errors import OptionError, check_choice, check_flag, did_you_mean, is_whole
from vispe.images.annotations.object_files import ObjectKind, checked_kinds
from vispe.images.labels.class_values import class_number

TOUCHING = ("split", "keep")


@dataclass(frozen=True)
class ObjectOptions:
    """Which connected patches of a label map are objects.

    Attributes:
        classes: names of the classes whose patches are objects, or their numbers from 1 on.
        touching: `'split'`: cut at necks, by a watershed; `'keep'`: what is connected is one object. Split by default:
            on micrographs with known objects it finds more of them (`eval/results/objects.json`).
        min_area: objects with fewer pixels (voxels) are left out of map and table, and counted in the report.
        fill_holes: holes belong to the object around them, but for pixels of a class that is asked for.
        exclude_border: leave out objects that touch the border of the image (of a volume: also its first and last
            page), since their size is unknown.
        kinds: files for other programs: any of `'geojson'`, `'rois'` and `'coco'`; of one page only.

    >>> ObjectOptions(["pore"]).numbers(["matrix", "pore"])
    (2,)
    """

    classes: Sequence[str]
    touching: str = TOUCHING[0]
    min_area: int = 10
    fill_holes: bool = False
    exclude_border: bool = False
    kinds: Sequence[ObjectKind] = ()

    def __post_init__(self) -> None:
        names = (self.classes,) if isinstance(self.classes, str) else tuple(map(str, self.classes))
        object.__setattr__(self, "classes", tuple(dict.fromkeys(names)))
        if not names:
            raise OptionError("objects names no class; give one or more, such as --objects pore.")
        check_choice("touching", self.touching, TOUCHING)
        if not is_whole(self.min_area) or self.min_area < 0:
            raise OptionError(f"object_min_area={self.min_area!r} must be 0 or more pixels.")
        checked_kinds(self.kinds)
        check_flag("fill_holes", self.fill_holes)
        check_flag("exclude_border", self.exclude_border)

    def numbers(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the values of the classes in label maps, from 1 on, in their order there.

        Raises:
            OptionError: neither one of `names` nor the number of one.
        """
        found = set()
        for name in self.classes:
            number = class_number(name, names)
            if number is None:
                hint = did_you_mean(name, names)
                raise OptionError(
                    f"objects={name!r} is not a class; the classes are {', '.join(names)}.{hint}"
                )
            found.add(number)
        return tuple(sorted(found))


def options_or_none(classes: Sequence[str] | None, **more: object) -> ObjectOptions | None:
    """Make options of those of the command line, None where no objects are asked for; those that are None are defaults.

    Raises:
        OptionError: one of the others without `classes`.
    """
    given = {name: value for name, value in more.items() if value is not None and value is not False}
    if classes is None:
        if given:
            name = {"min_area": "object_min_area", "kinds": "objects_as"}.get(
                next(iter(given)), next(iter(given))
            )
            raise OptionError(f"{name} has no effect without objects; name their classes with --objects.")
        return None
    return ObjectOptions(classes, **given)  # type: ignore[arg-type] - checked there
