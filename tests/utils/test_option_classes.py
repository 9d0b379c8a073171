"""Every dataclass of options raises a one-line error for values of the wrong type."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import torch

import vispe
from vispe.errors import OptionError
from vispe.train.data.augmentation import Augment
from vispe.train.linear.task import LinearTask
from vispe.train.retrofit.config import LossWeights, Probe, Retrofit, Stage, Student, Target, Teacher, Window
from vispe.utils.options import Options, check_options

PACKAGE = Path(vispe.__file__).parent
REQUIRED: dict[str, dict[str, Any]] = {
    "ExternalMemory": {"keys": torch.ones(1, 1, 1, 2), "values": torch.ones(1, 1, 1, 2)},
    "LinearTask": {"images": ["a.png"], "masks": ["a.png"], "out": "out"},
    "LoraTask": {"model": "m", "data": "d", "out": "out"},
    "ObjectOptions": {"classes": ("pore",)},
    "OrderTask": {"model": "m", "data": "d", "out": "out"},
    "Placement": {"content": (2, 2), "canvas": (3, 4)},
    "Request": {"command": "segment", "images": ("a.png",), "out": "out"},
    "Retrofit": {"teacher": Teacher("m"), "stages": [Stage(8, steps=1)], "data": [{}], "out": "out"},
    "Stage": {"img_size": 8},
    "Teacher": {"name": "m"},
    "Trials": {"targets": ("lr",)},
}
CONFIGS = (LinearTask, LossWeights, Probe, Retrofit, Stage, Student, Target, Teacher, Window)
"""Classes whose values are validated by `check_options` with the names of a config file, not on creation."""


def option_classes():
    """Return all dataclasses of options of the package."""
    modules = [
        path.relative_to(PACKAGE.parent).with_suffix("")
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\((Options|LoraRecipe|OrderRecipe)\):", path.read_text(encoding="utf-8"))
        and path.name != "options.py"
    ]
    for module in modules:
        importlib.import_module(".".join(module.parts))
    classes, pending = list(CONFIGS), list(Options.__subclasses__())
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        classes.append(cls)
    return sorted({c for c in classes if c.__module__.startswith("vispe.")}, key=lambda c: c.__name__)


def union_members(annotation):
    """Return the members of a union, or the annotation."""
    nested = (
        get_args(annotation) if get_origin(annotation) not in (Annotated, Literal, list, tuple, dict) else ()
    )
    return [leaf for member in nested for leaf in union_members(member)] if nested else [annotation]


def invalid_values(annotation):
    """Return values that are invalid for an annotation."""
    members = union_members(annotation)
    kinds = [get_args(m)[0] if get_origin(m) is Annotated else m for m in members]
    texts = any(k is str or k is Path or get_origin(k) is Literal for k in kinds)
    values: list[Any] = []
    if any(k in (int, float) for k in kinds):
        values += (
            [True, float("nan"), "1"] if str not in kinds and Path not in kinds else [True, float("nan")]
        )
        values += [] if float in kinds else [1.5]
    if bool in kinds:
        values += [1, "yes", float("nan")]
    if texts and not any(k in (int, float) for k in kinds):
        values += [1, True, float("nan")]
    if any(get_origin(k) is Literal for k in kinds) and str not in kinds and Path not in kinds:
        values += ["no such name"]
    if any(get_origin(k) in (list, tuple, dict) for k in kinds) and not texts:
        values += ["text", 1.5]
    if all(dataclasses.is_dataclass(k) or k is type(None) for k in kinds):
        values += ["text", 1, True]
    return values


CASES = [
    (cls, field.name, value)
    for cls in option_classes()
    for notes in [
        {k: v for base in cls.__mro__[::-1] for k, v in inspect.get_annotations(base, eval_str=True).items()}
    ]
    for field in dataclasses.fields(cls)
    for value in invalid_values(notes[field.name])
]


def test_option_classes_are_discovered():
    classes = {cls.__name__ for cls in option_classes()}
    assert {
        "Augment",
        "Extent",
        "FeatureConfig",
        "Fit",
        "LoraTask",
        "OrderTask",
        "Question",
        "ReadOptions",
    } <= classes
    assert Augment in option_classes()
    checked = {(cls.__name__, name) for cls, name, _ in CASES}
    assert len(checked) > 150
    fields = {(cls.__name__, f.name) for cls in option_classes() for f in dataclasses.fields(cls)}
    objects = {("ExternalMemory", name) for name in ("bias", "keys", "transform", "values")}
    assert fields - checked == objects | {("Request", "storage_options"), ("Request", "watch")}


def test_every_field_raises_for_values_of_the_wrong_type():
    accepted = []
    for cls, name, value in CASES:
        try:
            options = cls(**{**REQUIRED.get(cls.__name__, {}), name: value})
            if cls in CONFIGS:
                check_options(options)
        except OptionError as error:
            text = str(error)
            assert name in text, text
            assert "\n" not in text, text
            assert text.endswith((".", "?")), text
        else:
            accepted.append(f"{cls.__name__}.{name}={value!r}")
    assert not accepted


def test_unknown_names_raise_with_a_suggestion():
    with pytest.raises(
        OptionError,
        match=r"^Augment: place_teacher must be one of none, best, got 'bst'\. Did you mean 'best'\?",
    ):
        Augment(place_teacher="bst")
    with pytest.raises(
        OptionError, match=r"^retrofit: stages\[1\]\.lr needs a number above 0, got stages\[1\]\.lr=0\."
    ):
        check_options(Retrofit(Teacher("m"), [Stage(8, steps=1), Stage(8, steps=1, lr=0)], [{}], "out"))
