"""Options that a class declares: their annotations, their signature, and the choices of each."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar, get_origin

from vispe.utils.option_values import choices


def declared(cls: type) -> dict[str, Any]:
    """Return the options declared in the body of a class, name to annotation as written, without `ClassVar`."""
    annotations = inspect.get_annotations(cls)
    return {
        n: a
        for n, a in annotations.items()
        if get_origin(a) is not ClassVar and not str(a).startswith("ClassVar")
    }


def option_signature(cls: type, root: type, first: Sequence[str] = ()) -> inspect.Signature:
    """Return the options of a class as keyword-only parameters with their defaults.

    Options of the class precede those of its bases up to `root`, except that base options in `first` come first. A
    `ClassVar` fixes an option of a base, which is then not a parameter. Options of a class that defines `__init__`, and
    of its bases, are excluded, since its constructor handles them.
    """
    classes = cls.__mro__[: cls.__mro__.index(root)]
    with_init = [i for i, base in enumerate(classes) if "__init__" in vars(base)]
    classes = classes[with_init[-1] + 1 :] if with_init else classes
    options: dict[str, Any] = {}
    names: set[str] = set()
    for i, base in enumerate(classes):
        new = {name: note for name, note in declared(base).items() if name not in names}
        leading = {name: new.pop(name) for name in first if i and name in new}
        options = {**leading, **options, **new}
        names |= inspect.get_annotations(base).keys()
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(cls, name, inspect.Parameter.empty),
                annotation=note,
            )
            for name, note in options.items()
        ]
    )


# cache of `annotations_of`; a dict, since Dynamo would trace into functools.cache
_ANNOTATIONS: dict[type, dict[str, Any]] = {}


def annotations_of(cls: type) -> dict[str, Any]:
    """Return the options of a class and its bases, name to evaluated annotation; subclasses take precedence."""
    if cls not in _ANNOTATIONS:
        notes: dict[str, Any] = {}
        for base in cls.__mro__:
            if names := declared(base):
                evaluated = inspect.get_annotations(base, eval_str=True)
                notes = {**{n: evaluated[n] for n in names}, **notes}
        _ANNOTATIONS[cls] = notes
    return _ANNOTATIONS[cls]


def option_choices(cls: type) -> dict[str, list[Any]]:
    """Return the values of the options of a class that enumerate them: those of a `Literal`, and False and True.

    >>> class Recipe:
    ...     wrap: bool = True
    ...     depth: int = 12
    >>> option_choices(Recipe)
    {'wrap': [False, True]}
    """
    return {name: values for name, note in annotations_of(cls).items() if (values := choices(note))}
