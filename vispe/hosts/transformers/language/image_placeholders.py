"""Image placeholders: token types, and the grid of each image, by a rule for each family of models."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.hosts.transformers.language.families import family_of
from vispe.hosts.transformers.subclasses import stock_of
from vispe.multimodal import Image, Stream, Video, newline_images
from vispe.multimodal.streams.segments import IMAGE, VIDEO

# for images and videos that are encoded before the call: the argument with their sizes, by the rule of the family
NEEDED: dict[str, dict[str, str]] = {
    "grids": {"image": "image_grid_thw", "video": "video_grid_thw"},
    "newline_grids": {"image": "image_grid_thw"},
    "sizes": {"image": "image_sizes"},
    "runs": {"image": "pixel_values"},
    "patch_positions": {"image": "image_position_ids", "video": "video_position_ids"},
    "patches": {"image": "target_sizes", "video": "target_sizes_videos"},
    "regions": {"image": "image_grids", "video": "video_grids"},
    "tiles": {"image": "image_sizes"},
    "one_vision": {"image": "image_sizes", "video": "pixel_values_videos"},
}


def token_types(
    config: Any, input_ids: Tensor | None, types: Tensor | None, shape: tuple[int, int]
) -> Tensor | None:
    """Return the type of every token (b, s), 0 text, 1 image, 2 video; None if it is unknown."""
    if input_ids is None:  # Molmo's types include the markers around images
        return None if family_of(config).image_layout == "regions" else types
    if tuple(input_ids.shape) != shape:
        raise InputError(
            f"input_ids must have the shape {shape} of the tokens, got {tuple(input_ids.shape)}."
        )
    types = torch.zeros_like(input_ids)
    for kind, token in _placeholders(config):
        types = types.masked_fill(input_ids == token, kind)
    if family_of(config).framed:
        start, end = (
            (input_ids == getattr(config, f"video_{n}_token_id")).cumsum(1) for n in ("start", "end")
        )
        types = types.masked_fill((types == IMAGE) & (start > end), VIDEO)
    return types


def types_by_embedding(model: Any, embeds: Tensor) -> Tensor:
    """Return the type of every token (b, s), by comparison of embeddings (b, s, width) with those of placeholders."""
    types = torch.zeros(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    with torch.no_grad():
        for kind, token in _placeholders(model.config):
            placeholder = model.get_input_embeddings()(torch.tensor(token, device=embeds.device))
            types = types.masked_fill((embeds == placeholder.to(embeds.device)).all(-1), kind)
    return types


def _placeholders(config: Any) -> list[tuple[int, int]]:
    """Return (type, token id) of the placeholders of images and videos."""
    named = ((IMAGE, "image_token_id"), (VIDEO, "video_token_id"))
    return [(kind, token) for kind, name in named if (token := getattr(config, name, None)) is not None]


def stream_of(
    model: Any, types: Tensor, mask: Tensor, documents: Tensor, arguments: dict[str, Any], **options: Any
) -> Stream:
    """Return the stream of a call; `arguments` are the keyword arguments of the model, `options` those of the stream.

    Raises:
        InputError: placeholders and sizes of images differ, or sizes are missing.
    """
    config = model.config
    common: dict[str, Any] = {"mask": mask, "documents": documents, **options}
    family = family_of(config)
    if arguments.get("tile_grids") is not None and family.image_layout not in ("squares", "sizes"):
        raise InputError(
            f"tile_grids is not supported by {config.model_type}, where tiles are determined from other arguments. "
            "Omit it."
        )
    _check_encoded(config, arguments)
    if family.image_layout == "grids":
        clips: Tensor | None = arguments.get("video_grid_thw")
        if clips is not None and (frames := getattr(config.vision_config, "temporal_merge_size", 1)) != 1:
            clips = torch.cat([clips[:, :1] // frames, clips[:, 1:]], 1)
        return Stream.from_ids(
            types,
            arguments.get("image_grid_thw"),
            clips,
            merge=config.vision_config.spatial_merge_size,
            seconds=_seconds(arguments),
            separate_frames=family.separate_frames,
            **common,
        )
    if family.image_layout == "newline_grids":
        grids: Tensor | None = arguments.get("image_grid_thw")
        merge = config.vision_config.spatial_merge_size
        return Stream.from_ids(*newline_images(types, grids, merge=merge, mask=mask), **common)
    if family.image_layout == "one_vision":
        if arguments.get("pixel_values_videos") is None:  # video tokens are then text, as in the host
            types = types.masked_fill(types == VIDEO, 0)
        return Stream.from_ids(types, _any_resolution(model, arguments), _frames(config, arguments), **common)
    if family.image_layout == "tiles":
        return Stream.from_ids(types, _any_resolution(model, arguments), **common)
    if family.image_layout == "patch_positions":
        images, frames = (_pooled(config, arguments.get(f"{n}_position_ids")) for n in ("image", "video"))
        clips = [Video(1, h, w) for h, w in frames]
        return Stream.from_ids(types, [Image(h, w) for h, w in images], clips, **common)
    if family.image_layout == "patches":
        images, frames = (
            _merged(config, arguments.get(f"target_sizes{n}"), arguments) for n in ("", "_videos")
        )
        clips = [Video(1, h, w) for h, w in frames]
        return Stream.from_ids(types, [Image(h, w) for h, w in images], clips, **common)
    if family.image_layout == "regions":
        types, *regions = _regions(types, mask, documents, arguments)
        return Stream.from_ids(types, *regions, **common)
    if family.image_layout == "runs":
        return Stream.from_ids(types, _even(model, types, mask, arguments), **common)
    if family.image_layout == "sizes" and (
        arguments.get("image_sizes") is not None or hasattr(config, "spatial_merge_size")
    ):
        sizes = _sizes(model, arguments.get("image_sizes"), types[mask])
        types, sizes = _with_row_ends(types, mask, documents, IMAGE, sizes, [0] * len(sizes))
        return Stream.from_ids(types, [Image(h, w) for h, w in sizes], **common)
    side = _side(model, arguments)
    if arguments.get("tile_grids") is not None:
        images = [_tiled(side, int(r), int(c)) for r, c in arguments["tile_grids"]]
        return Stream.from_ids(types, images, **common)
    tiles = math.ceil(int((types[mask] == IMAGE).sum()) / side**2)
    return Stream.from_ids(
        types, torch.tensor([[1, side, side]] * tiles, dtype=torch.long).reshape(-1, 3), **common
    )


def _seconds(arguments: dict[str, Any]) -> Any:
    """Return the seconds between frames of each video; None if they are not passed.

    Raises:
        InputError: audio is interleaved with the videos, which streams do not support.
    """
    if arguments.get("use_audio_in_video") and arguments.get("video_grid_thw") is not None:
        raise InputError(
            "use_audio_in_video interleaves audio with the frames of a video, which position schemes do not support, "
            "got True. Pass audio and videos separately, or restore the model."
        )
    named = (arguments.get(name) for name in ("second_per_grid_ts", "video_second_per_grid"))
    return next((seconds for seconds in named if seconds is not None), None)


def _check_encoded(config: Any, arguments: dict[str, Any]) -> None:
    """Raise `InputError` if images or videos are encoded before the call, and their sizes are not passed."""
    encoded = arguments.get("mm_encoder_outputs") or {}
    needed = NEEDED.get(family_of(config).image_layout, {})
    if hasattr(config, "scale_factor") or (
        family_of(config).image_layout == "sizes" and config.vision_config.model_type != "pixtral"
    ):
        needed = {}  # images are squares of the configured size
    for kind, name in needed.items():
        if encoded.get(kind) is None or arguments.get(name) is not None:
            continue
        instead = f"{name} in place of mm_encoder_outputs" if name.startswith("pixel_values") else name
        raise InputError(
            f"mm_encoder_outputs needs {name}, the sizes of {kind}s, got None. If generate() called the model, only "
            "the model inside was converted: call vispe.convert with the complete model, head included. Otherwise pass "
            f"{instead}."
        )


def _sizes(model: Any, pixels: Any, kinds: Tensor) -> list[tuple[int, int]]:
    """Return rows and columns of the tokens of images, from their height and width in pixels."""
    if pixels is None and bool((kinds == IMAGE).any()):
        raise InputError(
            f"The rows and columns of {int((kinds == IMAGE).sum())} image placeholders are unknown, got no "
            "image_sizes. Pass image_sizes, or coordinates as position_ids."
        )
    tower = getattr(model, "vision_tower", None) or model.vision_encoder
    patch = tower.patch_size * getattr(model.config, "spatial_merge_size", 1)
    return [(int(h) // patch, int(w) // patch) for h, w in (() if pixels is None else pixels)]


def _with_row_ends(
    types: Tensor, mask: Tensor, documents: Tensor, kind: int, sizes: list[tuple[int, int]], views: list[int]
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Include the tokens that end rows of images in these images; return types and sizes.

    Pixtral's processor writes [IMG_BREAK] after every row of placeholders and [IMG_END] after the last, Molmo's writes
    <im_col>; no configuration names these tokens, so they are detected as a text token after every row. Other
    processors write no such tokens. All images of a view are treated equally. Images of one row are
    ambiguous, and treated like images of several rows.
    """
    kinds, sample = types[mask], torch.arange(len(types), device=types.device)[:, None].expand_as(types)[mask]
    widths = torch.tensor([w for h, w in sizes for _ in range(h)], dtype=torch.long, device=types.device)
    indices = (kinds == kind).nonzero()[:, 0]
    origin = torch.stack([sample, documents[mask]])
    if not len(widths):
        return types, sizes  # the stream raises an error for placeholders without images
    if int(widths.sum()) != len(indices):
        raise InputError(_odd_run(indices, origin, sizes))
    # index of the last placeholder of each row, and of the token after it
    last = indices[widths.cumsum(0) - 1]
    after = (last + 1).clamp(max=len(kinds) - 1)
    has_end = (after > last) & (kinds[after] == 0) & (origin[:, after] == origin[:, last]).all(0)
    all_ended = [bool(part.all()) for part in has_end.split([h for h, _ in sizes])]
    rows = [(view, e) for view, e, (h, _) in zip(views, all_ended, sizes, strict=True) if h > 1]
    of_view = [[e for v, e in rows if v == view] or [e for _, e in rows] for view in views]
    ended = [e and all(others) for e, others in zip(all_ended, of_view, strict=True)]
    for number, (e, others, (h, w)) in enumerate(zip(all_ended, of_view, sizes, strict=True)):
        if h > 1 and not e and any(others):
            start = last[sum(rows for rows, _ in sizes[:number])] - w + 1
            raise InputError(
                f"Sample {int(origin[0, start])}, image {number} of {h} rows and {w} columns: image placeholders need "
                "a token after every row, as in other images of the call, got placeholders without. Pass the tokens of "
                "the model's processor."
            )
    of_row = torch.tensor(
        [e for e, (h, _) in zip(ended, sizes, strict=True) for _ in range(h)], device=types.device
    )
    marked = kinds.index_fill(0, after[of_row], kind)
    wider = [(h, w + e) for e, (h, w) in zip(ended, sizes, strict=True)]
    return types.masked_scatter(mask, marked), wider


def _odd_run(indices: Tensor, origin: Tensor, sizes: list[tuple[int, int]]) -> str:
    """Return a message about the first run of placeholders that does not match the images, if their total is wrong.

    Args:
        indices: index of each placeholder among the tokens that are not padding (k), ascending.
        origin: sample and document of each of these tokens (2, n).
        sizes: rows and columns of the images. Either every row is followed by such a token, or no row is.
    """
    new = torch.ones_like(indices, dtype=torch.bool)
    new[1:] = (indices.diff() != 1) | (origin[:, indices[1:]] != origin[:, indices[:-1]]).any(0)
    starts = new.nonzero()[:, 0]
    runs = starts.diff(append=starts.new_tensor([len(indices)])).tolist()
    # index of the current run, number of its placeholders that are assigned, and its first image
    run = used = began = 0
    which: int | None = None
    for number, (h, w) in enumerate(sizes):
        began = began if used else number
        rows = runs[run : run + h]
        if not used and rows == [w] * h:
            run += h
        elif run < len(runs) and runs[run] - used >= h * w:
            used += h * w
            run, used = (run + 1, 0) if used == runs[run] else (run, used)
        else:
            which = began
            if not used and rows and rows[0] == w:  # the first row that differs
                run += next((n for n, row in enumerate(rows) if row != w), len(rows))
            break
    advice = "Pass as many placeholders as the model's processor."
    if run >= len(runs):
        return f"The placeholders of image {which} are missing, got a call with {len(sizes)} images. {advice}"
    first = int(indices[starts[run]])
    row = int(origin[0, first])
    token = first - int((origin[0] < row).sum())
    image = f"more than those of the {len(sizes)} images of the call"
    if which is not None:
        image = "but image {} has {} rows and {} columns".format(which, *sizes[which])
    return f"Sample {row}, token {token} (without padding): {runs[run]} adjacent image placeholders, {image}. {advice}"


def _regions(
    types: Tensor, mask: Tensor, documents: Tensor, arguments: dict[str, Any]
) -> tuple[Tensor, list[Image], list[Video]]:
    """Return types, images and videos of Molmo 2, which has one token for both; a call has images or videos only.

    An image is a thumbnail followed by the image itself; a video is a sequence of frames, with text between them.
    """
    clips = arguments.get("video_grids")
    kind = IMAGE if clips is None else VIDEO
    types = torch.where(types > 0, kind, types)
    if clips is not None:
        sizes = [(int(h), int(w)) for t, h, w in clips for _ in range(int(t))]
        views = [0] * len(sizes)
    else:
        grids = arguments.get("image_grids")
        four = [] if grids is None else torch.as_tensor(grids).tolist()
        sizes = [(h, w) for grid in four for h, w in (grid[:2], grid[2:]) if h * w]
        views = [n for grid in four for n in (0, 1) if grid[2 * n] * grid[2 * n + 1]]
    types, sizes = _with_row_ends(types, mask, documents, kind, sizes, views)
    if clips is not None:
        return types, [], [Video(1, h, w) for h, w in sizes]
    return types, [Image(h, w) for h, w in sizes], []


def _merged(config: Any, patches: Any, arguments: dict[str, Any]) -> list[tuple[int, int]]:
    """Return rows and columns of the tokens of MiniCPM-V's images or frames, from those of patches (n, 2)."""
    mode = arguments.get("downsample_mode") or config.downsample_mode
    down, across = (n**config.merger_times * (1 if mode == "4x" else 2) for n in config.merge_kernel_size)
    return [] if patches is None else [(int(h) // down, int(w) // across) for h, w in patches]


def _tiled(side: int, rows: int, cols: int) -> Image:
    """Return a tiled image, with a thumbnail after the tiles unless there is only one."""
    return Image(side, side) if rows * cols == 1 else Image(side, side, tiles=(rows, cols), thumbnail="last")


def _side(model: Any, arguments: dict[str, Any]) -> int:
    """Return the number of tokens along each axis of an image or a tile."""
    config = model.config.vision_config
    tower = model.vision_tower
    if hasattr(tower, "timm_model"):
        patch: Any = tower.timm_model.patch_embed.patch_size
        size: Any = tower.timm_model.patch_embed.img_size
    else:
        patch, size = config.patch_size, config.image_size
    pixels = arguments.get("pixel_values")
    rows, cols = pixels.shape[-2:] if pixels is not None else _pair(size)
    h, w = _pair(patch)
    if rows // h != cols // w:
        raise InputError(
            f"The grid of images must be square, got images of {rows} x {cols} pixels. Pass image_sizes."
        )
    return round(rows // h * float(getattr(model.config, "downsample_ratio", 1.0)))


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _even(model: Any, types: Tensor, mask: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return the grids (n, 3) of square tiles of equal size, from the number of tokens.

    Raises:
        InputError: the number of tokens is not that of equal squares.
    """
    tokens, config = int((types[mask] == IMAGE).sum()), model.config
    pixels = arguments.get("pixel_values")
    if hasattr(config, "scale_factor"):  # Idefics pads the images of a row, so pixel_values do not count them
        vision = config.vision_config
        tile = (int(vision.image_size) // int(vision.patch_size) // int(config.scale_factor)) ** 2
    elif pixels is None and tokens:
        raise InputError(
            f"The number of tiles of {tokens} image placeholders is unknown, got no pixel_values. Pass pixel_values, "
            "or coordinates as position_ids."
        )
    else:
        tile = tokens / max(1, 0 if pixels is None else len(pixels))
    side = math.isqrt(int(tile))
    if side**2 != tile or tokens % max(1, int(tile)):
        raise InputError(
            f"The image placeholders must form equal squares, one per tile, got {tokens} placeholders. Pass as many as "
            "the model's processor."
        )
    return torch.tensor([[1, side, side]] * (tokens // max(1, side**2)), dtype=torch.long).reshape(-1, 3)


def _pooled(config: Any, positions: Tensor | None) -> list[tuple[int, int]]:
    """Return rows and columns of the tokens of images, from the column and row of patches (n, patches, 2), or -1."""
    if positions is None:
        return []
    sizes = (positions.amax(1) + 1) // config.vision_config.pooling_kernel_size
    return [(int(h), int(w)) for w, h in sizes.tolist()]


def _any_resolution(model: Any, arguments: dict[str, Any]) -> list[Image]:
    """Return the blocks of images of LLaVA-NeXT and OneVision: the thumbnail, then the tiles or one token."""
    config, llava = model.config, sys.modules[(stock_of(type(model)) or type(model)).__module__]
    sizes = [] if arguments.get("image_sizes") is None else list(arguments["image_sizes"])
    counts = arguments.get("batch_num_images")
    side = config.vision_config.image_size // config.vision_config.patch_size
    tiled = [True] * len(sizes)
    if counts is not None:  # an image is only tiled if its sample has no other image
        tiled = [int(n) == 1 for n in counts for _ in range(int(n))]
    if len(tiled) != len(sizes):
        raise InputError(
            f"batch_num_images must add up to the {len(sizes)} images of image_sizes, got {len(tiled)}."
        )
    aspect = arguments.get("vision_aspect_ratio") or getattr(config, "vision_aspect_ratio", None)
    limit = math.inf if aspect is None else int(aspect.removeprefix("anyres_max_"))
    blocks: list[Image] = []
    for size, is_tiled in zip(sizes, tiled, strict=True):
        blocks.append(Image(side, side))
        if not is_tiled:
            blocks.append(Image(1, 1))  # the token after the image
            continue
        pixels, tile = torch.as_tensor(size).tolist(), config.vision_config.image_size
        rows, cols = llava.get_anyres_image_grid_shape(pixels, config.image_grid_pinpoints, tile)
        # tokens of padding are removed, then the image is downsampled to at most `limit` tiles
        canvas = torch.empty(1, rows * side, cols * side, device="meta")
        _, h, w = llava.unpad_image(canvas, pixels).shape
        ratio = math.sqrt(h * w / (limit * side**2))
        h, w = (int(h // ratio), int(w // ratio)) if ratio > 1.1 else (h, w)
        blocks.append(Image(h, w + 1))  # each row ends with a token
    return blocks


def _frames(config: Any, arguments: dict[str, Any]) -> list[Video]:
    """Return the blocks of LLaVA-OneVision's videos: the pooled frames and the token after them."""
    pixels = arguments.get("pixel_values_videos")
    if pixels is None:
        return []
    side = math.ceil(config.vision_config.image_size // config.vision_config.patch_size / 2)
    return [v for _ in range(len(pixels)) for v in (Video(pixels.shape[1], side, side), Video(1, 1, 1))]
