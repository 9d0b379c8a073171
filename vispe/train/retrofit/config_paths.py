"""Absolute paths in the config of a retrofit, so that its card and an interrupted run do not depend on the folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vispe.backbones.model_names import absolute_name
from vispe.images.paths import absolute
from vispe.train.retrofit.config import Retrofit, Teacher

_PATHS = {"folder", "tar", "cache"}  # keys of the image sources


def with_absolute_paths(config: Retrofit) -> Retrofit:
    """Return a config in which the paths of teacher, data and target are absolute; `out` remains as it is.

    >>> from vispe.train.retrofit.config import Stage
    >>> config = Retrofit(Teacher("test_vit", "a.pt"), [Stage(64)], [{"folder": "images"}], "out")
    >>> Path(with_absolute_paths(config).data[0]["folder"]).is_absolute()
    True
    """
    folder = config.target.folder
    return replace(
        config,
        teacher=absolute_teacher(config.teacher),
        data=[_source(entry) if isinstance(entry, Mapping) else entry for entry in config.data],
        target=config.target if folder is None else replace(config.target, folder=absolute(folder)),
    )


def absolute_teacher(config: Teacher) -> Teacher:
    """Return the settings of a model with absolute paths."""
    weights = config.weights if config.weights in (None, "random") else absolute(config.weights)
    return replace(config, name=absolute_name(config.name), weights=weights)


def _source(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an image source with absolute paths; datasets of the hub may be names or folders."""
    values = dict(entry)
    for key in values.keys() & _PATHS:
        value = values[key]
        if isinstance(value, list | tuple):
            values[key] = [_absolute(v) for v in value]
        else:
            values[key] = _absolute(value)
    if isinstance(hub := values.get("hub"), str) and Path(hub).exists():
        values["hub"] = absolute(hub)
    return values


def _absolute(value: Any) -> Any:
    """Return an absolute path; other values and commands (`pipe:`) are refused by the source."""
    return absolute(value) if isinstance(value, str | Path) and not str(value).startswith("pipe:") else value
