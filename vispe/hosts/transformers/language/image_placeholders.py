"""Which placeholders belong to which grid: one rule for each family of models."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.hosts.transformers.language.families import family_of
from vispe.hosts.transformers.subclasses import stock_of
from vispe.multimodal import Image, Stream, Video
from vispe.multimodal.streams.segments import IMAGE, VIDEO

# of images and videos that were encoded before a call: the argument that gives their sizes, by the rule of the family
NEEDED: dict[str, dict[str, str]] = {
    "grids": {"image": "image_grid_thw", "video": "video_grid_thw"},
    "sizes": {"image": "image_sizes"},
    "runs": {"image": "pixel_values"},
    "places": {"image": "image_position_ids", "video": "video_position_ids"},
    "patches": {"image": "target_sizes", "video": "target_sizes_videos"},
    "regions": {"image": "image_grids", "video": "video_grids"},
    "tiles": {"image": "image_sizes"},
    "one_vision": {"image": "image_sizes", "video": "pixel_values_videos"},
}


def token_types(
    config: Any, input_ids: Tensor | None, given: Tensor | None, shape: tuple[int, int]
) -> Tensor | None:
    """Return the type of every token (b, s), 0 text, 1 image, 2 video; None where it cannot be known."""
    if input_ids is None:  # Molmo's types count the tokens around pictures, too
        return None if family_of(config).pictures == "regions" else given
    if tuple(input_ids.shape) != shape:
        raise InputError(f"input_ids has the shape {tuple(input_ids.shape)}, but the tokens are {shape}.")
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
    """Return the type of every token (b, s), by the embedding (b, s, width) that a placeholder has."""
    types = torch.zeros(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    with torch.no_grad():
        for kind, token in _placeholders(model.config):
            wanted = model.get_input_embeddings()(torch.tensor(token, device=embeds.device)).to(embeds.device)
            types = types.masked_fill((embeds == wanted).all(-1), kind)
    return types


def _placeholders(config: Any) -> list[tuple[int, int]]:
    """Return the tokens that stand for pictures, each with its type."""
    named = ((IMAGE, "image_token_id"), (VIDEO, "video_token_id"))
    return [(kind, token) for kind, name in named if (token := getattr(config, name, None)) is not None]


def stream_of(
    model: Any, types: Tensor, mask: Tensor, documents: Tensor, given: dict[str, Any], **beside: Any
) -> Stream:
    """Return the stream of a call; `given` are the keyword arguments of the model, `beside` more of the stream's."""
    config = model.config
    common: dict[str, Any] = {"mask": mask, "documents": documents, **beside}
    family = family_of(config)
    if given.get("tile_grids") is not None and family.pictures not in ("squares", "sizes"):
        raise InputError(
            f"tile_grids was given to a {config.model_type}, which says by itself how its pictures are cut; leave it "
            "out."
        )
    _check_encoded(config, given)
    if family.pictures == "grids":
        clips: Tensor | None = given.get("video_grid_thw")
        if clips is not None and (frames := getattr(config.vision_config, "temporal_merge_size", 1)) != 1:
            clips = torch.cat([clips[:, :1] // frames, clips[:, 1:]], 1)
        return Stream.from_ids(
            types,
            given.get("image_grid_thw"),
            clips,
            merge=config.vision_config.spatial_merge_size,
            seconds=_seconds(given),
            frames_apart=family.frames_apart,
            **common,
        )
    if family.pictures == "one_vision":
        if given.get("pixel_values_videos") is None:  # as the host has it, their token is then like any other
            types = types.masked_fill(types == VIDEO, 0)
        return Stream.from_ids(types, _any_resolution(model, given), _frames(config, given), **common)
    if family.pictures == "tiles":
        return Stream.from_ids(types, _any_resolution(model, given), **common)
    if family.pictures == "places":
        pictures, frames = (_pooled(config, given.get(f"{n}_position_ids")) for n in ("image", "video"))
        clips = [Video(1, h, w) for h, w in frames]
        return Stream.from_ids(types, [Image(h, w) for h, w in pictures], clips, **common)
    if family.pictures == "patches":
        pictures, frames = (_merged(config, given.get(f"target_sizes{n}"), given) for n in ("", "_videos"))
        clips = [Video(1, h, w) for h, w in frames]
        return Stream.from_ids(types, [Image(h, w) for h, w in pictures], clips, **common)
    if family.pictures == "regions":
        types, *regions = _regions(types, mask, documents, given)
        return Stream.from_ids(types, *regions, **common)
    if family.pictures == "runs":
        return Stream.from_ids(types, _even(model, types, mask, given), **common)
    if family.pictures == "sizes" and (
        given.get("image_sizes") is not None or hasattr(config, "spatial_merge_size")
    ):
        sizes = _sizes(model, given.get("image_sizes"), types[mask])
        types, sizes = _with_ends(types, mask, documents, IMAGE, sizes, [0] * len(sizes))
        return Stream.from_ids(types, [Image(h, w) for h, w in sizes], **common)
    side = _side(model, given)
    if given.get("tile_grids") is not None:
        pictures = [_tiled(side, int(r), int(c)) for r, c in given["tile_grids"]]
        return Stream.from_ids(types, pictures, **common)
    tiles = math.ceil(int((types[mask] == IMAGE).sum()) / side**2)
    return Stream.from_ids(
        types, torch.tensor([[1, side, side]] * tiles, dtype=torch.long).reshape(-1, 3), **common
    )


def _seconds(given: dict[str, Any]) -> Any:
    """Return the seconds from frame to frame of each video, where the call says them.

    Raises:
        InputError: audio is woven into the videos, which no stream describes.
    """
    if given.get("use_audio_in_video") and given.get("video_grid_thw") is not None:
        raise InputError(
            "use_audio_in_video weaves the audio of a video into its frames, and a stream describes audio as text and "
            "frames as one block; give audio and videos apart, or restore the model."
        )
    named = (given.get(name) for name in ("second_per_grid_ts", "video_second_per_grid"))
    return next((seconds for seconds in named if seconds is not None), None)


def _check_encoded(config: Any, given: dict[str, Any]) -> None:
    """Raise `InputError` where images or videos were encoded before the call, which does not give their sizes."""
    encoded = given.get("mm_encoder_outputs") or {}
    needed = NEEDED.get(family_of(config).pictures, {})
    if hasattr(config, "scale_factor") or (
        family_of(config).pictures == "sizes" and config.vision_config.model_type != "pixtral"
    ):
        needed = {}  # squares of the configured size
    for kind, name in needed.items():
        if encoded.get(kind) is None or given.get(name) is not None:
            continue
        instead = f"{name} in place of mm_encoder_outputs" if name.startswith("pixel_values") else name
        raise InputError(
            f"mm_encoder_outputs came without {name}, which gives the sizes of {kind}s. If this came from generate(), "
            "only the model inside was converted: call vispe.convert with the whole model, head included. Otherwise "
            f"pass {instead}."
        )


def _sizes(model: Any, pixels: Any, kinds: Tensor) -> list[tuple[int, int]]:
    """Return rows and columns of the tokens of images whose height and width in pixels are given."""
    if pixels is None and bool((kinds == IMAGE).any()):
        raise InputError(
            f"{int((kinds == IMAGE).sum())} placeholders of images came without image_sizes, which say how many rows "
            "and columns they are; give image_sizes, or coordinates as position_ids."
        )
    tower = getattr(model, "vision_tower", None) or model.vision_encoder
    patch = tower.patch_size * getattr(model.config, "spatial_merge_size", 1)
    return [(int(h) // patch, int(w) // patch) for h, w in (() if pixels is None else pixels)]


def _with_ends(
    types: Tensor, mask: Tensor, documents: Tensor, kind: int, sizes: list[tuple[int, int]], views: list[int]
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return types in which the tokens that end rows of pictures belong to these, and sizes that count them.

    Pixtral's processor writes [IMG_BREAK] after every row of placeholders and [IMG_END] after the last, Molmo's writes
    <im_col>. No configuration names them, but then a token that is no placeholder follows every row. Others write no
    such tokens. All pictures of a view are alike; one of one row is as those of more rows are.
    """
    kinds, sample = types[mask], torch.arange(len(types), device=types.device)[:, None].expand_as(types)[mask]
    widths = torch.tensor([w for h, w in sizes for _ in range(h)], dtype=torch.long, device=types.device)
    places = (kinds == kind).nonzero()[:, 0]
    about = torch.stack([sample, documents[mask]])
    if not len(widths):
        return types, sizes  # placeholders without images are named where blocks are made
    if int(widths.sum()) != len(places):
        raise InputError(_odd_run(places, about, sizes))
    last = places[widths.cumsum(0) - 1]
    after = (last + 1).clamp(max=len(kinds) - 1)
    broken = (after > last) & (kinds[after] == 0) & (about[:, after] == about[:, last]).all(0)
    found = [bool(part.all()) for part in broken.split([h for h, _ in sizes])]
    rows = [(view, e) for view, e, (h, _) in zip(views, found, sizes, strict=True) if h > 1]
    alike = [[e for v, e in rows if v == view] or [e for _, e in rows] for view in views]
    ended = [e and all(others) for e, others in zip(found, alike, strict=True)]
    for number, (e, others, (h, w)) in enumerate(zip(found, alike, sizes, strict=True)):
        if h > 1 and not e and any(others):
            start = last[sum(rows for rows, _ in sizes[:number])] - w + 1
            raise InputError(
                f"Sample {int(about[0, start])}, image {number} of {h} rows and {w} columns: image placeholders stand "
                "together without a token after every row, which other images of the call have; give the tokens that "
                "the processor of the model does."
            )
    of_row = torch.tensor(
        [e for e, (h, _) in zip(ended, sizes, strict=True) for _ in range(h)], device=types.device
    )
    marked = kinds.index_fill(0, after[of_row], kind)
    wider = [(h, w + e) for e, (h, w) in zip(ended, sizes, strict=True)]
    return types.masked_scatter(mask, marked), wider


def _odd_run(places: Tensor, about: Tensor, sizes: list[tuple[int, int]]) -> str:
    """Return a sentence about the first run of placeholders that does not fit the images, whose total is wrong.

    Args:
        places: number of each placeholder among the tokens that are not padding (k), ascending.
        about: sample and document of each of these tokens (2, n).
        sizes: rows and columns of the images. Either a token follows every row, or none.
    """
    new = torch.ones_like(places, dtype=torch.bool)
    new[1:] = (places.diff() != 1) | (about[:, places[1:]] != about[:, places[:-1]]).any(0)
    starts = new.nonzero()[:, 0]
    runs = starts.diff(append=starts.new_tensor([len(places)])).tolist()
    at = used = began = (
        0  # the run, its placeholders that belong to images, and the image that it begins with
    )
    which: int | None = None
    for number, (h, w) in enumerate(sizes):
        began = began if used else number
        rows = runs[at : at + h]
        if not used and rows == [w] * h:
            at += h
        elif at < len(runs) and runs[at] - used >= h * w:
            used += h * w
            at, used = (at + 1, 0) if used == runs[at] else (at, used)
        else:
            which = began
            if not used and rows and rows[0] == w:  # the first row that differs
                at += next((n for n, row in enumerate(rows) if row != w), len(rows))
            break
    counted = "give as many placeholders as the processor of the model does."
    if at >= len(runs):
        return f"The call has {len(sizes)} images, but its placeholders end before those of image {which}; {counted}"
    first = int(places[starts[at]])
    row = int(about[0, first])
    token = first - int((about[0] < row).sum())
    image = f"more than the {len(sizes)} images of the call have"
    if which is not None:
        image = "where image {} has {} rows and {} columns".format(which, *sizes[which])
    where = f"Sample {row}, token {token} (without padding)"
    return f"{where}: {runs[at]} image placeholders stand together, {image}; {counted}"


def _regions(
    types: Tensor, mask: Tensor, documents: Tensor, given: dict[str, Any]
) -> tuple[Tensor, list[Image], list[Video]]:
    """Return types and pictures of Molmo 2, which has one token for images and frames, and either in a call.

    An image is a small copy and, behind it, the whole; a video is its frames, with words between.
    """
    clips = given.get("video_grids")
    kind = IMAGE if clips is None else VIDEO
    types = torch.where(types > 0, kind, types)
    if clips is not None:
        sizes = [(int(h), int(w)) for t, h, w in clips for _ in range(int(t))]
        views = [0] * len(sizes)
    else:
        grids = given.get("image_grids")
        four = [] if grids is None else torch.as_tensor(grids).tolist()
        sizes = [(h, w) for grid in four for h, w in (grid[:2], grid[2:]) if h * w]
        views = [n for grid in four for n in (0, 1) if grid[2 * n] * grid[2 * n + 1]]
    types, sizes = _with_ends(types, mask, documents, kind, sizes, views)
    if clips is not None:
        return types, [], [Video(1, h, w) for h, w in sizes]
    return types, [Image(h, w) for h, w in sizes], []


def _merged(config: Any, patches: Any, given: dict[str, Any]) -> list[tuple[int, int]]:
    """Return rows and columns of the tokens of MiniCPM-V's images or frames, of which patches (n, 2) are given."""
    mode = given.get("downsample_mode") or config.downsample_mode
    down, across = (n**config.merger_times * (1 if mode == "4x" else 2) for n in config.merge_kernel_size)
    return [] if patches is None else [(int(h) // down, int(w) // across) for h, w in patches]


def _tiled(side: int, rows: int, cols: int) -> Image:
    """Return an image in tiles, with a thumbnail after them unless there is one tile only."""
    return Image(side, side) if rows * cols == 1 else Image(side, side, tiles=(rows, cols), thumbnail="last")


def _side(model: Any, given: dict[str, Any]) -> int:
    """Return how many tokens an image, or a tile, has in each direction."""
    config = model.config.vision_config
    tower = model.vision_tower
    if hasattr(tower, "timm_model"):
        patch: Any = tower.timm_model.patch_embed.patch_size
        size: Any = tower.timm_model.patch_embed.img_size
    else:
        patch, size = config.patch_size, config.image_size
    pixels = given.get("pixel_values")
    rows, cols = pixels.shape[-2:] if pixels is not None else _pair(size)
    h, w = _pair(patch)
    if rows // h != cols // w:
        raise InputError(
            f"Images of {rows} x {cols} pixels have a grid that is not square; image_sizes must say so."
        )
    return round(rows // h * float(getattr(model.config, "downsample_ratio", 1.0)))


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _even(model: Any, types: Tensor, mask: Tensor, given: dict[str, Any]) -> Tensor:
    """Return the grids (n, 3) of tiles that are squares of one size, however many tokens that is.

    Raises:
        InputError: the tokens are not so many squares.
    """
    tokens, config = int((types[mask] == IMAGE).sum()), model.config
    pixels = given.get("pixel_values")
    if hasattr(config, "scale_factor"):  # Idefics pads the images of a row, so pixels do not count them
        vision = config.vision_config
        tile = (int(vision.image_size) // int(vision.patch_size) // int(config.scale_factor)) ** 2
    elif pixels is None and tokens:
        raise InputError(
            f"{tokens} placeholders of images came without pixel_values, so nothing says how many tiles they are; give "
            "pixel_values, or coordinates as position_ids."
        )
    else:
        tile = tokens / max(1, 0 if pixels is None else len(pixels))
    side = math.isqrt(int(tile))
    if side**2 != tile or tokens % max(1, int(tile)):
        raise InputError(
            f"{tokens} placeholders of images were found, which are not squares of one size, one for each tile; give "
            "as many as the processor of the model does."
        )
    return torch.tensor([[1, side, side]] * (tokens // max(1, side**2)), dtype=torch.long).reshape(-1, 3)


def _pooled(config: Any, places: Tensor | None) -> list[tuple[int, int]]:
    """Return rows and columns of the tokens of images, whose patches (n, patches, 2) have column and row, or -1."""
    if places is None:
        return []
    ends = (places.amax(1) + 1) // config.vision_config.pooling_kernel_size
    return [(int(h), int(w)) for w, h in ends.tolist()]


def _any_resolution(model: Any, given: dict[str, Any]) -> list[Image]:
    """Return the blocks of images of LLaVA-NeXT and OneVision: the small copy, then the tiles or one token."""
    config, llava = model.config, sys.modules[(stock_of(type(model)) or type(model)).__module__]
    sizes = [] if given.get("image_sizes") is None else list(given["image_sizes"])
    counts = given.get("batch_num_images")
    side = config.vision_config.image_size // config.vision_config.patch_size
    cut = [True] * len(sizes)
    if counts is not None:
        cut = [int(n) == 1 for n in counts for _ in range(int(n))]
    if len(cut) != len(sizes):
        raise InputError(f"batch_num_images adds up to {len(cut)} images, but image_sizes has {len(sizes)}.")
    aspect = given.get("vision_aspect_ratio") or getattr(config, "vision_aspect_ratio", None)
    limit = math.inf if aspect is None else int(aspect.removeprefix("anyres_max_"))
    blocks: list[Image] = []
    for size, is_cut in zip(sizes, cut, strict=True):
        blocks.append(Image(side, side))
        if not is_cut:
            blocks.append(Image(1, 1))  # the token that ends the image
            continue
        pixels, tile = torch.as_tensor(size).tolist(), config.vision_config.image_size
        rows, cols = llava.get_anyres_image_grid_shape(pixels, config.image_grid_pinpoints, tile)
        canvas = torch.empty(1, rows * side, cols * side, device="meta")
        _, h, w = llava.unpad_image(canvas, pixels).shape
        ratio = math.sqrt(h * w / (limit * side**2))
        h, w = (int(h // ratio), int(w // ratio)) if ratio > 1.1 else (h, w)
        blocks.append(Image(h, w + 1))  # each row has a token that ends it
    return blocks


def _frames(config: Any, given: dict[str, Any]) -> list[Video]:
    """Return the blocks of LLaVA-OneVision's videos: the pooled frames and the token that ends them."""
    pixels = given.get("pixel_values_videos")
    if pixels is None:
        return []
    side = math.ceil(config.vision_config.image_size // config.vision_config.patch_size / 2)
    return [v for _ in range(len(pixels)) for v in (Video(pixels.shape[1], side, side), Video(1, 1, 1))]
