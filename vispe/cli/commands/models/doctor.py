"""`vispe doctor`: capabilities of this installation, and attention backends of a model."""

from typing import Any, Literal

from vispe.errors import OptionError, VispeError, counted, short

POSITIONALS = ("model",)
TITLES = {  # of the sections of `vispe.cli.installation`
    "versions": "versions",
    "devices": "devices",
    "choice": "choice of the attention backend",
    "attention": "attention backend of each bias (37x37 patches, num_heads=6, head_dim=64)",
    "weights": "pretrained weights on disk",
    "extras": "extras",
}


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

    model_options = {"encoding": encoding, "img-size": img_size, "weights": weights}
    model_options |= {"batch-size": batch_size != 1, "dtype": dtype != "float32", "device": device != "auto"}
    if model:
        report, layers = _model(model, encoding, img_size, weights, batch_size, dtype, device)
        print(dumps(report, indent=2) if json else _paths(report, layers))
        return
    if unused := [f"--{name}" for name, value in model_options.items() if value]:
        raise OptionError(f"doctor: no model for {', '.join(unused)}. Write the name of the model first.")
    from vispe.cli.installation import installation

    report = installation()
    print(dumps(report, indent=2) if json else "\n".join(_facts(TITLES[key], report[key]) for key in report))


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
