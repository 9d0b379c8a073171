"""Facts of an installation, as `vispe doctor` shows them: packages, devices, attention backends, weights, extras."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

import vispe
from vispe.attention.backend_selection import VARIABLE, selected
from vispe.attention.backends.triton.device import device_unsupported_reason
from vispe.backbones.hub import repositories
from vispe.encodings.multi_softmax import calls_of
from vispe.errors import BackendUnavailable, UnsupportedCombination, counted
from vispe.utils.version import __version__

PACKAGES = (
    "torch", "torchvision", "timm", "open_clip_torch", "einops", "numpy", "pillow", "scikit-learn", "scikit-image",
    "scipy", "tifffile", "skops", "matplotlib", "jsonargparse", "rich",
)  # fmt: skip


def installation() -> dict[str, dict[str, Any]]:
    """Return all facts by section."""
    return {
        "versions": package_versions(),
        "devices": devices(),
        "choice": backend_choice(),
        "attention": bias_backends(),
        "weights": cached_weights(),
        "extras": missing_packages(),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of vispe, Python and the packages that it uses."""
    versions = {"vispe": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def devices() -> dict[str, str]:
    """Return the devices that PyTorch detects, with threads or memory."""
    devices = {"cpu": f"{counted(torch.get_num_threads(), 'thread')}"}
    for i in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(i).total_memory / 2**30
        devices[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, {memory:.0f} GiB"
    return devices | ({"mps": "Apple GPU"} if torch.backends.mps.is_available() else {})


def backend_choice() -> dict[str, str]:
    """Return the selected backend, what selected it, and the devices on which the Triton kernels run."""
    backend, by = selected()
    choice = {"backend": backend + (f", chosen by {by}" if by else f" (set {VARIABLE} to choose another)")}
    for i in range(torch.cuda.device_count()):
        choice[f"triton on cuda:{i}"] = (
            device_unsupported_reason(torch.zeros(1, device=f"cuda:{i}")) or "its kernels run"
        )
    if not torch.cuda.device_count():
        choice["triton"] = device_unsupported_reason(torch.zeros(1)) or "its kernels run, interpreted"
    return choice


def bias_backends() -> dict[str, str]:
    """Return the attention backend of each bias on a grid of 37 x 37 patches, or why it has none."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {1: (37 * 37,), 2: (37, 37), 3: (37, 37, 1)}
    grids = {axes: vispe.Grid(shape, reference=shape) for axes, shape in shapes.items()}
    q, x = torch.zeros(1, 6, 37 * 37, 64, device=device), torch.zeros(1, 37 * 37, 384, device=device)
    backends = {}
    for name in vispe.list_encodings(kind="bias"):
        axes = vispe.encoding_info(name).ndim
        grid = grids[2 if 2 in axes else axes[0]]
        try:
            encoding = vispe.create_encoding(name, dim=384, num_heads=6, depth=12, grid=grid.shape).to(device)
            calls = calls_of(q, q, q, encoding.parts(), encoding.prepare(grid.positions(device)), 0, x)
            # an encoding may compute several softmaxes, each with its own backend
            backends_of_calls = [
                str(vispe.explain(q, q, q, bias=call.bias, transform=call.transform)) for _, call in calls
            ]
            backends[name] = "; ".join(dict.fromkeys(backends_of_calls))
        # the backend set in the environment does not support it, or the encoding needs causal attention
        except (BackendUnavailable, UnsupportedCombination) as error:
            backends[name] = str(error)
    return backends


def cached_weights() -> dict[str, str]:
    """Return the sizes of the pretrained weights on disk."""
    suffixes = (".safetensors", ".bin", ".pth", ".pt", ".npz")
    sizes: dict[str, int] = {}
    for repo in repositories():
        files = [f for revision in repo.revisions for f in revision.files if f.file_name.endswith(suffixes)]
        # revisions share files: count each blob once
        if files:
            sizes[repo.repo_id] = sum({f.blob_path: f.size_on_disk for f in files}.values())
    for file in sorted(Path(torch.hub.get_dir(), "checkpoints").glob("*")):
        if file.suffix in suffixes:
            sizes[file.name] = file.stat().st_size
    return {name: f"{size / 2**20:.0f} MiB" for name, size in sizes.items()}


def missing_packages() -> dict[str, Any]:
    """Return the missing packages of each extra of vispe."""
    try:
        extras = metadata.metadata("vispe").get_all("Provides-Extra") or ()
    except metadata.PackageNotFoundError:
        return {"all": "unknown: vispe is not installed, this is a source checkout"}
    return {
        extra: f"missing {', '.join(names)}; run: pip install 'vispe[{extra}]'" if names else "complete"
        for extra, names in zip(extras, map(_missing, extras), strict=True)
    }


def _missing(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    requirements = [Requirement(text) for text in metadata.requires("vispe") or ()]
    names = [
        requirement.name
        for requirement in requirements
        if requirement.marker is not None
        if requirement.name != "vispe" and "extra" in str(requirement.marker)
        if requirement.marker.evaluate({"extra": extra})
    ]
    return [name for name in names if not list(metadata.distributions(name=name))]
