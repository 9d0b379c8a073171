"""`vispe doctor`: capabilities of this installation, and attention backends of a model."""

from typing import Any, Literal

from vispe.errors import counted

POSITIONALS = ("model",)
TITLES = {
    "versions": "versions",
    "devices": "devices",
    "choice": "choice of the attention backend",
    "attention": "attention backend of each bias (37x37 patches, num_heads=6, head_dim=64)",
    "weights": "pretrained weights on disk",
    "extras": "extras",
}
PACKAGES = (
    "torch", "torchvision", "timm", "open_clip_torch", "einops", "numpy", "pillow", "scikit-learn", "scikit-image",
    "scipy", "tifffile", "skops", "matplotlib", "jsonargparse", "rich",
)  # fmt: skip


def doctor(
    model: str = "",
    encoding: str = "",
    img_size: list[int] | None = None,
    weights: str | None = None,
    batch_size: int = 1,
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    device: Literal["auto", "cuda", "cpu"] = "auto",
    json: bool = False,
) -> None:
    """Show the capabilities of this installation; with a model, the attention backend of each layer and why.

    Without a model: versions, devices, the selected attention backend and what selected it, whether the Triton kernels
    run (one is launched on each GPU), the backend of each bias, cached weights, missing extras.

    Args:
        model: timm model name, open_clip:NAME, hf:FOLDER of a transformers model, or folder of a retrofit; run once.
            timm and open_clip models have random weights unless weights is set.
        encoding: spec of an encoding for the model; default its own position information.
        img_size: side of the images in pixels, or height,width; default the input size of the model.
        weights: checkpoint file, which must match the model; the values do not affect the selected backends.
        dtype: dtype of the model and the images.
        device: auto uses the GPU if available.

    Examples:
        vispe doctor
        vispe doctor vit_small_patch14_dinov2 --encoding alibi2d --img-size 518
        vispe doctor vit_small_patch14_dinov2 --weights own.pth --img-size 224
        vispe doctor --json
    """
    from json import dumps

    from vispe.errors import OptionError

    model_options = {"encoding": encoding, "img-size": img_size, "weights": weights}
    model_options |= {"batch-size": batch_size != 1, "dtype": dtype != "float32", "device": device != "auto"}
    if model:
        report, layers = _model(model, encoding, img_size, weights, batch_size, dtype, device)
        print(dumps(report, indent=2) if json else _paths(report, layers))
        return
    if unused := [f"--{name}" for name, value in model_options.items() if value]:
        raise OptionError(f"doctor: no model for {', '.join(unused)}. Write the name of the model first.")
    parts = (_versions, _devices, _choice, _backends, _weights, _extras)
    report = {key: part() for key, part in zip(TITLES, parts, strict=True)}
    print(dumps(report, indent=2) if json else "\n".join(_facts(TITLES[key], report[key]) for key in TITLES))


def _facts(title: str, entries: dict[str, Any]) -> str:
    """Return a title and one line per entry; further lines of a value are indented below it."""
    width = max(map(len, entries), default=0)
    lines = [title]
    for name, value in entries.items():
        first, *rest = str(value).splitlines()
        lines += [f"  {name:<{width}}  {first}", *(f"  {'':<{width}}    {line}" for line in rest)]
    return "\n".join(lines if entries else [title, "  none"]) + "\n"


def _model(
    name: str,
    encoding: str,
    img_size: list[int] | None,
    weights: str | None,
    batch_size: int,
    dtype: str,
    device: str,
) -> tuple[dict[str, Any], list[str]]:
    """Return the attention backends of a model, grouped by equal reasons, and the names of all layers."""
    import torch

    from vispe.backbones.device import choose_device
    from vispe.backbones.load_model import load_model
    from vispe.backbones.local.debiased import inner_model
    from vispe.backbones.model_access import image_size
    from vispe.backbones.model_names import NETWORKS, has_weights
    from vispe.errors import OptionError, VispeError, short
    from vispe.hosts.attention_paths import attention_paths
    from vispe.hosts.convert import convert

    if img_size is not None and (len(img_size) > 2 or min(img_size, default=0) < 1):
        raise OptionError(f"doctor: --img-size is one side or height,width in pixels, got {img_size}.")
    if batch_size < 1:
        raise OptionError(f"doctor: --batch-size must be 1 or more, got {batch_size}.")
    size = [img_size[0], img_size[-1]] if img_size else None
    device = choose_device(device)
    loaded = weights or (None if has_weights(name) else "random")
    # a checkpoint contains the parameters of the encoding, so the encoding is set before loading
    pos_embed = encoding if weights else None
    net = load_model(name, pos_embed=pos_embed, weights=loaded, img_size=size, kinds=NETWORKS).model
    net = net.to(device, getattr(torch, dtype))
    if encoding and not weights:
        convert(inner_model(net), encoding)
    height, width = size or image_size(net)
    image = torch.zeros(batch_size, 3, height, width, device=device, dtype=getattr(torch, dtype))
    groups: dict[Any, list[str]] = {}
    try:
        attention = attention_paths(net, image)
    # timm, open_clip and transformers raise these for an unsupported size
    except (AssertionError, ValueError) as error:
        if isinstance(error, VispeError):
            raise
        raise OptionError(
            f"doctor: {name} does not accept images of {height} x {width} px ({short(error)}). Set --img-size to "
            "another size, such as a multiple of the patch size."
        ) from error
    for path in attention:
        groups.setdefault((path.backend, path.reason, tuple(path.unsupported.items())), []).append(path.layer)
    paths = [
        {"layers": layers, "backend": backend, "reason": reason, "refused": dict(unsupported)}
        for (backend, reason, unsupported), layers in groups.items()
    ]
    report = {"model": name, "encoding": encoding, "weights": loaded or "pretrained", "device": device}
    report |= {"dtype": dtype, "batch": batch_size, "image_size": [height, width], "paths": paths}
    return report, list(dict.fromkeys(path.layer for path in attention))


def _paths(report: dict[str, Any], all_layers: list[str]) -> str:
    """Return the attention backends of a model as text."""
    height, width = report["image_size"]
    encoding = report["encoding"] or "its own position information"
    images = f"{report['batch']} x {height}x{width} px, {report['dtype']}, {report['device']}"
    lines = [f"{report['model']} with {encoding}, {images}"]
    for path in report["paths"]:
        lines += [f"  {_layer_range(path['layers'], all_layers)}", f"    {path['backend']}: {path['reason']}"]
        lines += [f"    not {other}: {why}" for other, why in path["refused"].items()]
    return "\n".join(lines if report["paths"] else [*lines, "  no attention layers detected"])


def _layer_range(layers: list[str], all_layers: list[str]) -> str:
    """Return the names of layers, consecutive ones as a range."""
    first = all_layers.index(layers[0])
    if len(layers) > 2 and all_layers[first : first + len(layers)] == layers:
        return f"{layers[0]} to {layers[-1]} ({counted(len(layers), 'layer')})"
    return ", ".join(layers)


def _versions() -> dict[str, str]:
    import platform
    from importlib import metadata

    from vispe.utils.version import __version__

    versions = {"vispe": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _devices() -> dict[str, str]:
    import torch

    devices = {"cpu": f"{counted(torch.get_num_threads(), 'thread')}"}
    for i in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(i).total_memory / 2**30
        devices[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, {memory:.0f} GiB"
    return devices | ({"mps": "Apple GPU"} if torch.backends.mps.is_available() else {})


def _choice() -> dict[str, str]:
    """Return the selected backend, what selected it, and the devices on which the Triton kernels run."""
    import torch

    from vispe.attention.backend_selection import VARIABLE, selected
    from vispe.attention.backends.triton.device import device_unsupported_reason

    backend, by = selected()
    choice = {"backend": backend + (f", chosen by {by}" if by else f" (set {VARIABLE} to choose another)")}
    for i in range(torch.cuda.device_count()):
        choice[f"triton on cuda:{i}"] = (
            device_unsupported_reason(torch.zeros(1, device=f"cuda:{i}")) or "its kernels run"
        )
    if not torch.cuda.device_count():
        choice["triton"] = device_unsupported_reason(torch.zeros(1)) or "its kernels run, interpreted"
    return choice


_GRIDS = {1: (37 * 37,), 2: (37, 37), 3: (37, 37, 1)}


def _backends() -> dict[str, str]:
    import torch

    import vispe
    from vispe.encodings.multi_softmax import calls_of
    from vispe.errors import BackendUnavailable, UnsupportedCombination

    device = "cuda" if torch.cuda.is_available() else "cpu"
    grids = {axes: vispe.Grid(shape, reference=shape) for axes, shape in _GRIDS.items()}
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


def _weights() -> dict[str, str]:
    from pathlib import Path

    import torch

    from vispe.backbones.hub import repositories

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


def _extras() -> dict[str, Any]:
    """Return the missing packages of each extra of vispe."""
    from importlib import metadata

    from packaging.requirements import Requirement

    def missing(extra: str) -> list[str]:
        requirements = [Requirement(text) for text in metadata.requires("vispe") or ()]
        names = [
            requirement.name
            for requirement in requirements
            if requirement.marker is not None
            if requirement.name != "vispe" and "extra" in str(requirement.marker)
            if requirement.marker.evaluate({"extra": extra})
        ]
        return [name for name in names if not list(metadata.distributions(name=name))]

    try:
        extras = metadata.metadata("vispe").get_all("Provides-Extra") or ()
    except metadata.PackageNotFoundError:
        return {"all": "unknown: vispe is not installed, this is a source checkout"}
    return {
        extra: f"missing {', '.join(names)}; run: pip install 'vispe[{extra}]'" if names else "complete"
        for extra, names in zip(extras, map(missing, extras), strict=True)
    }
