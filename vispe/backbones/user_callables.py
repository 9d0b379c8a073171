"""Python callables by name, and segmenters averaged over the eight poses of a square (D4)."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.hub import check_code
from vispe.errors import InputError, UnknownName, did_you_mean
from vispe.images.paths import expanded
from vispe.images.symmetry.d4 import D4


class D4Segmenter:
    """Segmenter that averages class probabilities over the eight poses of a square.

    Args:
        probabilities: image (c, H, W) -> class probabilities (K, H, W).

    >>> bright = D4Segmenter(lambda image: torch.stack([image[0], 1 - image[0]]))
    >>> bright(torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]))
    array([[2, 1],
           [1, 2]])
    """

    def __init__(self, probabilities: Callable[[Tensor], np.ndarray | Tensor]) -> None:
        self.probabilities = probabilities

    def __call__(self, image: Tensor) -> np.ndarray:
        """Return the labels (H, W), 1..K, of an image (c, H, W); 0 where all probabilities are 0."""
        total = 0.0
        for g in D4:
            posed = torch.as_tensor(self.probabilities(g.apply(image))).double()
            total = total + g.undo(posed) / len(D4)
        labels = (total.argmax(0) + 1) * (total.sum(0) > 0)
        return labels.numpy()


def named_callable(text: str, source: str, name: str) -> Callable[..., Any]:
    """Import a callable from a module or a Python file.

    Args:
        text: the user's text, for messages.
        source: name of the module, or path of the file with its suffix `.py`.
        name: name of the callable in the module.

    Raises:
        InputError: the object cannot be imported, is a class, or is not callable.
        UnknownName: the module has no such name.

    >>> named_callable("math:floor", "math", "floor")(2.5)
    2
    """
    module = _from_file(text, expanded(source)) if source.endswith(".py") else _imported(text, source)
    if not hasattr(module, name):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UnknownName(
            f"{text}: {module.__name__} has no {name!r}.{did_you_mean(name, known)} Its callables: "
            f"{', '.join(known) or 'none'}."
        )
    value = getattr(module, name)
    if inspect.isclass(value) or not callable(value):
        kind = "a class" if inspect.isclass(value) else f"a {type(value).__name__}"
        raise InputError(f"{text} must be a function of images or a callable object, got {kind}.")
    return value


def _imported(text: str, source: str) -> ModuleType:
    check_code(text)
    # the working directory comes first, as with `python -m`
    cwd = str(Path.cwd())
    sys.path.insert(0, cwd)
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{text}: the Python module {source!r} cannot be imported ({error}). Run vispe in its folder, or name the "
            "file: folder/file.py:name."
        ) from error
    finally:
        sys.path.remove(cwd)


def _from_file(text: str, path: Path) -> ModuleType:
    check_code(text)
    if not path.is_file():
        raise InputError(f"{text}: the file {path} does not exist. Check the path.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be loaded as a Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
