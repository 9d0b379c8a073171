"""`vispe doctor`: what this installation can do."""

from typing import Any


def doctor(json: bool = False) -> None:
    """Show versions, devices, attention backends, weights on disk and missing extras.

    Args:
        json: print JSON.

    Examples:
        vispe doctor
        vispe doctor --json
    """
    from json import dumps

    report = {
        "versions": _versions(),
        "devices": _devices(),
        "attention": _backends(),
        "weights": _weights(),
        "extras": _extras(),
    }
    if json:
        print(dumps(report, indent=2))
        return
    titles = {
        "versions": "versions",
        "devices": "devices",
        "attention": "attention backend of each bias (37x37 patches, 6 heads of 64 channels)",
        "weights": "pretrained weights on disk",
        "extras": "extras",
    }
    for key, entries in report.items():
        print(titles[key])
        width = max(map(len, entries), default=0)
        for name, value in entries.items():
            first, *rest = str(value).splitlines()
            print(f"  {name:<{width}}  {first}")
            print("".join(f"  {'':<{width}}    {line}\n" for line in rest), end="")
        if not entries:
            print("  none")
        print()


def _versions() -> dict[str, str]:
    import platform
    from importlib import metadata

    import vispe

    names = ["torch", "torchvision", "timm", "open_clip_torch", "einops", "numpy", "pillow"]
    names += [
        "scikit-learn",
        "scikit-image",
        "scipy",
        "tifffile",
        "skops",
        "matplotlib",
        "jsonargparse",
        "rich",
    ]
    found = {"vispe": vispe.__version__, "python": platform.python_version(), "system": platform.platform()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _devices() -> dict[str, str]:
    import torch

    found = {"cpu": f"{torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(i).total_memory / 2**30
        found[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, {memory:.0f} GiB"
    if torch.backends.mps.is_available():
        found["mps"] = "Apple GPU"
    return found


_GRIDS = {1: (37 * 37,), 2: (37, 37), 3: (37, 37, 1)}


def _backends() -> dict[str, str]:
    import torch

    import vispe
    from vispe.base import bias_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    grids = {axes: vispe.Grid(shape, reference=shape) for axes, shape in _GRIDS.items()}
    q, x = torch.zeros(1, 6, 37 * 37, 64, device=device), torch.zeros(1, 37 * 37, 384, device=device)
    found = {}
    for name in vispe.list_encodings(kind="bias"):
        axes = vispe.encoding_info(name).ndim
        grid = grids[2 if 2 in axes else axes[0]]
        encoding = vispe.create_encoding(name, dim=384, num_heads=6, depth=12, grid=grid.shape).to(device)
        bias = bias_of(encoding.parts(), encoding.prepare(grid.positions(device)), 0, x)
        found[name] = str(vispe.explain(q, q, q, bias=bias))
    return found


def _weights() -> dict[str, str]:
    from pathlib import Path

    import torch
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    endings = (".safetensors", ".bin", ".pth", ".pt", ".npz")
    found: dict[str, str] = {}
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        repos = frozenset()
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        files = [f for revision in repo.revisions for f in revision.files if f.file_name.endswith(endings)]
        if files:
            found[repo.repo_id] = (
                f"{sum({f.blob_path: f.size_on_disk for f in files}.values()) / 2**20:.0f} MiB"
            )
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    for file in sorted(folder.glob("*")) if folder.is_dir() else ():
        if file.suffix in endings:
            found[file.name] = f"{file.stat().st_size / 2**20:.0f} MiB"
    return found


def _extras() -> dict[str, Any]:
    """Return, for each extra of vispe, which of its packages are missing."""
    from importlib import metadata

    from packaging.requirements import Requirement

    found = {}
    for extra in metadata.metadata("vispe").get_all("Provides-Extra") or ():
        missing = []
        for text in metadata.requires("vispe") or ():
            need = Requirement(text)
            if need.marker is None or need.name == "vispe" or "extra" not in str(need.marker):
                continue
            if need.marker.evaluate({"extra": extra}):
                try:
                    metadata.version(need.name)
                except metadata.PackageNotFoundError:
                    missing.append(need.name)
        install = f"missing {', '.join(missing)}; run: pip install 'vispe[{extra}]'"
        found[extra] = install if missing else "complete"
    return found
