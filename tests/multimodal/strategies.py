"""Random streams and options for hypothesis."""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from tests.multimodal.oracle import documents_of, length_of
from vispe.multimodal import Image, Text, Video

SECONDS = (0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)  # exact in binary, so that products have one value
side = st.integers(1, 4)
halves = st.integers(1, 12).map(lambda n: n / 4)

texts = st.builds(Text, st.integers(1, 6))
plain_images = st.builds(Image, side, side)
tiled = st.builds(
    Image,
    side,
    side,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([None, "first", "last"]),
)
videos = st.builds(Video, st.integers(1, 5), side, side, st.sampled_from([None, *SECONDS]))
shared = st.builds(Text, st.integers(1, 4), st.just(True))
grouped = st.builds(Text, st.integers(1, 6), st.just(False), st.integers(0, 2))
with_thumbnail = st.builds(
    Image, side, side, st.tuples(st.integers(1, 3), st.integers(1, 3)), st.sampled_from(["first", "last"])
)
with_middle = st.builds(Image, st.integers(1, 9), st.integers(1, 9))  # up to five rings
EVERY = (texts, plain_images, tiled, videos)
sentences = st.builds(Text, st.integers(1, 6), boundary=st.booleans())
PIECES = {  # what schemes that do not take everything take
    "bilevel": (texts, sentences, plain_images, tiled, videos),
    "group_pe": (texts, grouped, plain_images, tiled, videos),
    "pype": (texts, with_middle, tiled, videos),
    "rope_dhr": (texts, plain_images, with_thumbnail, videos),
}


@st.composite
def batches(draw, pieces=(*EVERY, shared), packed=True, largest=4):
    """Return rows as `Stream.of` takes them; some are empty, which is all padding, but not all of them."""
    segments = st.lists(st.one_of(*pieces), min_size=1, max_size=largest)
    row = st.one_of(segments, st.lists(segments, min_size=2, max_size=3)) if packed else segments
    rows = draw(st.lists(row, min_size=1, max_size=3))
    if draw(st.integers(0, 4)) == 0:
        rows.insert(draw(st.integers(0, len(rows))), [])
    return rows


def joined(segments):
    """Return segments with adjacent texts of one group merged, as token types describe them."""
    out = []
    for s in segments:
        before = out[-1] if out else None
        both = isinstance(s, Text) and isinstance(before, Text) and not before.boundary
        if both and before.group == s.group:
            out[-1] = replace(s, tokens=before.tokens + s.tokens)
        else:
            out.append(s)
    return out


def is_packed(row):
    """Return whether a row is a list of samples."""
    return bool(row) and isinstance(row[0], list)


@st.composite
def masks(draw, rows):
    """Return a mask (b, s) with as many valid tokens as each row has, and padding anywhere."""
    lengths = [sum(length_of(s) for d in documents_of(row) for s in d) for row in rows]
    longest = max(lengths) + draw(st.integers(0, 3))
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, n in enumerate(lengths):
        layout = draw(st.sampled_from(["left", "right", "inside"]))
        if layout == "inside":
            order = torch.randperm(longest, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
            mask[row, order[:n]] = True
        else:
            mask[row] = (
                torch.arange(longest) >= longest - n if layout == "left" else torch.arange(longest) < n
            )
    return mask


def ids_of(rows, mask, merge=1, as_tensors=True):
    """Return the arguments of `Stream.from_ids` that describe rows: types, grids in patch units, mask, samples.

    Grids are tensors, which cannot describe tiles, or lists of segments.
    """
    types, documents, groups, ends = (torch.zeros(mask.shape, dtype=torch.long) for _ in range(4))
    images, films = [], []
    for number, row in enumerate(rows):
        kinds = []
        for document, segments in enumerate(documents_of(row)):
            for s in segments:
                kind = 0 if isinstance(s, Text) else 1 if isinstance(s, Image) else 2
                kinds += [(kind, document, s.group if kind == 0 else 0, 0)] * length_of(s)
                kinds[-1] = (*kinds[-1][:3], int(kind == 0 and s.boundary))
                if kind:
                    (images if kind == 1 else films).append(s)
        positions = mask[number].nonzero()[:, 0]
        for position, kind_of_token in zip(positions.tolist(), kinds, strict=True):
            for field, value in zip((types, documents, groups, ends), kind_of_token, strict=True):
                field[number, position] = value
    arguments = {"types": types, "mask": mask, "documents": documents, "groups": groups, "boundaries": ends}
    if not as_tensors:
        return {**arguments, "images": images, "videos": films}
    grid = [[1, s.h * merge, s.w * merge] for s in images]
    clips = [[s.t, s.h * merge, s.w * merge] for s in films]
    clock = [float("nan") if s.seconds is None else s.seconds for s in films]
    return {
        **arguments,
        "images": torch.tensor(grid, dtype=torch.long).reshape(-1, 3),
        "videos": torch.tensor(clips, dtype=torch.long).reshape(-1, 3),
        "seconds": torch.tensor(clock, dtype=torch.float64),
        "merge": merge,
    }


@st.composite
def mrope_options(draw):
    """Return common options of the MRoPE family."""
    return {
        "stride": draw(halves),
        "spatial_reset": draw(st.booleans()),
        "after": draw(st.sampled_from(["max", "side"])),
        "tokens_per_second": draw(st.sampled_from([None, 1.0, 2.0, 2.5, 4.0, 25.0])),
        "text_axes": draw(st.sampled_from(["all", "time"])),
    }


@st.composite
def diagonal_options(draw):
    """Return options of videorope and hope_vlm."""
    return {
        "scale": draw(halves),
        "centre": draw(st.sampled_from(["floor", "exact"])),
        "after": draw(st.sampled_from(["time", "max"])),
        "tokens_per_second": draw(st.sampled_from([None, 1.0, 2.5])),
    }


def without_reset(options):
    """Return options of the MRoPE family for members that always reset."""
    return {k: v for k, v in options.items() if k != "spatial_reset"}


OPTIONS = {
    "bilevel": st.fixed_dictionaries(
        {
            "rotate": st.sampled_from(["both", "inter", "intra"]),
            "train_length": st.sampled_from([1, 2, 5, 1024]),
        }
    ),
    "circlerope": st.fixed_dictionaries(
        {
            "radius": st.sampled_from([10.0, 0.5, -3.0, 7.25]),
            "alpha": st.sampled_from([0.0, 0.25, 0.5, 1.0]),
            "blend": st.sampled_from([0.0, 0.3, 1.0]),
            "move_to_origin": st.booleans(),
            "relative": st.booleans(),
            "offset": st.sampled_from([None, 0.0, 1.5]),
            "stride": halves,
        }
    ),
    "group_pe": st.fixed_dictionaries({"phi": st.one_of(halves, st.tuples(halves, halves))}),
    "hope_vlm": diagonal_options(),
    "ilrope": mrope_options().map(without_reset),
    "mousi": st.fixed_dictionaries({"share": st.sampled_from(["all", "row"])}),
    "omnirope": mrope_options().map(without_reset),
    "ppe": st.builds(lambda o, k: {**o, "k": k}, mrope_options(), st.integers(1, 3)),
    "pype": st.fixed_dictionaries({"rings": st.one_of(st.none(), st.integers(1, 4))}),
    "rope_dhr": st.fixed_dictionaries(
        {
            "tile_order": st.sampled_from(["row_major", "column_major"]),
            "sampling": st.sampled_from(["centre", "corner"]),
        }
    ),
    "tad_rope": st.just({}),
    "v2pe": st.fixed_dictionaries(
        {"stride": st.sampled_from([0.25, 1, 3, 16, "1/3"]), "per": st.sampled_from(["tile", "picture"])}
    ),
    "videorope": diagonal_options(),
    "vrope": st.fixed_dictionaries({"stride": st.one_of(st.none(), halves)}),
    "rope1d": st.just({}),
    "mrope": mrope_options(),
    "ernie_vl": mrope_options(),
    "mrope_i": mrope_options(),
    "tmrope": mrope_options(),
    "tmrope_i": mrope_options(),
    "mhrope": mrope_options(),
    "xdrope": st.fixed_dictionaries(
        {
            "sections": st.sampled_from([None, (4, 4, 4, 4), (6, 5, 5)]),
            "layout": st.sampled_from(["paired", "elementwise"]),
            "image_index": st.sampled_from(["sample", "batch"]),
        }
    ),
    "mmrope": st.builds(lambda o, s: {**o, "scale": s}, mrope_options(), st.tuples(halves, halves, halves)),
}
