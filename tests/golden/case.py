"""One golden case: arrays and configuration of an .npz file, with a record of the entries read by an adapter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

_MISSING = object()


class Case:
    """The contents of a golden file; records which entries were read."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.stem
        with np.load(path, allow_pickle=False) as arrays:
            self.meta: dict[str, Any] = json.loads(str(arrays["meta"]))
            groups: dict[str, dict[str, np.ndarray]] = {"in": {}, "param": {}, "out": {}}
            for key in arrays.files:
                group, _, name = key.partition(".")
                if key != "meta":
                    groups[group][name] = arrays[key]
        self._in, self._param, self.outputs = groups["in"], groups["param"], groups["out"]
        self.settings: dict[str, Any] = self.meta.get("config", {})
        self.ignored: dict[str, str] = {}
        self._read: set[str] = set()

    @property
    def encoding(self) -> str:
        """Name of the adapter."""
        return self.meta["encoding"]

    @property
    def inputs(self) -> set[str]:
        """Names of the inputs."""
        return set(self._in)

    @property
    def params(self) -> set[str]:
        """Names of the parameters."""
        return set(self._param)

    @property
    def output_names(self) -> set[str]:
        """Names of the expected outputs."""
        return set(self.outputs)

    def input(self, name: str) -> torch.Tensor:
        """Return an input as a tensor of its stored dtype."""
        self._read.add(f"in.{name}")
        return torch.from_numpy(self._in[name].copy())

    def param(self, name: str) -> torch.Tensor:
        """Return a parameter as a tensor of its stored dtype."""
        self._read.add(f"param.{name}")
        return torch.from_numpy(self._param[name].copy())

    def backward(self, **outputs: torch.Tensor) -> bool:
        """Backpropagate the cotangents of a case, each with its output; return False if the case has none of them.

        A case without cotangents has no gradients to compare.
        """
        arguments = {name: y for name, y in outputs.items() if name in self._in}
        if arguments:
            torch.autograd.backward(
                list(arguments.values()),
                [self.input(name).to(y).expand_as(y) for name, y in arguments.items()],
            )
        return bool(arguments)

    def close(self, actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
        """Return where values agree within the tolerance of the file."""
        rtol, atol = (float(self.meta.get("tolerance", {}).get(name, 0.0)) for name in ("rtol", "atol"))
        actual, expected = actual.astype(np.float64), expected.astype(np.float64)
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
        # a share of infinity is infinity: what is not finite has to be the same
        with np.errstate(invalid="ignore"):
            return same | (
                np.isfinite(expected) & (np.abs(actual - expected) <= atol + rtol * np.abs(expected))
            )

    def agree(self, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise ValueError unless two tensors that a case implies to be equal are so within its tolerance."""
        if (
            actual.shape != expected.shape
            or not self.close(actual.detach().numpy(), expected.detach().numpy()).all()
        ):
            raise ValueError(f"{what} are not those of the case")

    def usual_scale(self, width: int) -> bool:
        """Return whether the logits of a case are scaled by one over the square root of the width of a head."""
        scale = self.config("scale", None)
        if isinstance(scale, str | None):
            return scale in (None, "head_dim**-0.5")
        return math.isclose(scale, width**-0.5, rel_tol=1e-6)

    def config(self, key: str, default: Any = _MISSING) -> Any:
        """Return a value of the configuration."""
        self._read.add(f"config.{key}")
        if key not in self.settings and default is _MISSING:
            raise KeyError(f"{self.name} has no config key {key!r}; it has {sorted(self.settings)}")
        return self.settings.get(key, default)

    def ignore(self, key: str, reason: str) -> None:
        """Mark a configuration key as informational."""
        self.ignored[key] = reason
        self._read.add(f"config.{key}")

    def unread(self) -> list[str]:
        """Return the entries that no adapter has read."""
        arrays = [f"in.{n}" for n in self._in] + [f"param.{n}" for n in self._param]
        return sorted({*arrays, *(f"config.{k}" for k in self.settings)} - self._read)
