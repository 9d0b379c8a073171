"""Reference coordinates of streams: token by token, in fractions, from the definitions."""

import math
from fractions import Fraction

import torch

from vispe.multimodal import Image, Text, Video


def cells(t, h, w):
    """Return (frame, row, column) of every token of a block, in order."""
    return [(f, y, x) for f in range(t) for y in range(h) for x in range(w)]


def parts_of(segment):
    """Return (frames, rows, columns, tile) of every block of an image; tile is None for a thumbnail."""
    if isinstance(segment, Video):
        return [(segment.t, segment.h, segment.w, (0, 0))]
    rows, cols = segment.tiles
    parts = [(1, segment.h, segment.w, (r, c)) for r in range(rows) for c in range(cols)]
    small = [(1, segment.h, segment.w, None)]
    before, after = segment.thumbnail == "first", segment.thumbnail == "last"
    return (small if before else []) + parts + (small if after else [])


def length_of(segment):
    """Return the number of tokens of a segment."""
    if isinstance(segment, Text):
        return segment.tokens
    return sum(t * h * w for t, h, w, _ in parts_of(segment))


def documents_of(row):
    """Return the samples that are packed into a row."""
    return [row] if all(isinstance(s, Text | Image | Video) for s in row) else row


class Rule:
    """Rule of a scheme for one text token, and for one image."""

    axes = 3
    step = 1

    def __init__(self, options):
        self.options = options
        for name, value in options.items():
            setattr(self, name, Fraction(value) if isinstance(value, float) else value)

    def text(self, c):
        """Return the coordinates of a text token at the counter `c`."""
        return (c,) * self.axes

    def image(self, segment, c, draws):
        """Return the coordinates of the tokens of an image, and the counter after it; one draw for each part."""
        tokens = []
        for (t, h, w, _), draw in zip(parts_of(segment), draws, strict=True):
            coords, c = self.block(t, h, w, getattr(segment, "seconds", None), c, draw)
            tokens += coords
        return tokens, c

    def block(self, t, h, w, seconds, c, draw):
        """Return the same for one part of it."""
        raise NotImplementedError

    def begin(self, document):
        """Start a sample (row, number)."""

    def first(self, group):
        """Return the initial counter of a group."""
        return 0

    def close(self, c):
        """Return the counter after a boundary token with the counter `c`."""
        return c


class Line(Rule):
    """rope1d: consecutive integers."""

    axes = 1

    def block(self, t, h, w, seconds, c, draw):
        return [(c + i,) for i in range(t * h * w)], c + t * h * w


class MRoPE(Rule):
    """mrope, mrope_i, mhrope: frames, rows and columns, starting at the counter."""

    scale = (1, 1, 1)

    def text(self, c):
        return (c, c, c) if self.text_axes == "all" else (c, 0, 0)

    def time(self, frame, seconds):
        if self.tokens_per_second is None or seconds is None:
            return frame * self.stride
        return math.floor(frame * self.tokens_per_second * Fraction(seconds))

    def block(self, t, h, w, seconds, c, draw):
        stretch = [Fraction(s) for s in self.scale]
        local = [
            (self.time(f, seconds) * stretch[0], y * stretch[1], x * stretch[2]) for f, y, x in cells(t, h, w)
        ]
        corner = 0 if self.spatial_reset else c
        tokens = [(c + a, corner + b, corner + d) for a, b, d in local]
        distances = [max(p[1:]) if self.after == "side" else max(p) for p in local]
        return tokens, c + max(distances) + 1


class TMRoPEInterleaved(MRoPE):
    """tmrope_i: times of frames are not rounded down."""

    def time(self, frame, seconds):
        if self.tokens_per_second is None or seconds is None:
            return frame * self.stride
        return frame * Fraction(self.tokens_per_second) * Fraction(seconds)


class PPE(MRoPE):
    """ppe: each coordinate of mrope k times."""

    @property
    def axes(self):
        return 3 * self.k

    def text(self, c):
        return tuple(x for x in super().text(c) for _ in range(self.k))

    def block(self, t, h, w, seconds, c, draw):
        tokens, c = super().block(t, h, w, seconds, c, draw)
        return [tuple(x for x in p for _ in range(self.k)) for p in tokens], c


class Diagonal(Rule):
    """videorope and hope_vlm: frames centred on t = h = w."""

    def block(self, t, h, w, seconds, c, draw):
        gap = self.scale if draw is None else Fraction(draw)
        if self.tokens_per_second is not None and seconds is not None:
            gap = self.tokens_per_second * Fraction(seconds)
        middle = [Fraction(n - 1, 2) for n in (h, w)]
        if self.centre == "floor":
            middle = [math.floor(m) for m in middle]
        tokens = []
        for f, y, x in cells(t, h, w):
            time = c + f * gap
            tokens.append((time, time + y - middle[0], time + x - middle[1]))
        return tokens, (tokens[-1][0] if self.after == "time" else max(map(max, tokens))) + 1


class Twice(Rule):
    """tad_rope: the number of the token, plus the number of the frame, where each text token is a frame."""

    axes = 1
    step = 2

    def block(self, t, h, w, seconds, c, draw):
        tokens = [(c + i + f,) for i, (f, _, _) in enumerate(cells(t, h, w))]
        return tokens, c + t * h * w + t


class Circle(Rule):
    """circlerope: points in space, with basis vectors from a cross product; floats."""

    def block(self, t, h, w, seconds, c, draw):
        mid = ((h - 1) / 2, (w - 1) / 2) if self.move_to_origin else (0.0, 0.0)
        flat = [(y - mid[0], x - mid[1]) for _, y, x in cells(1, h, w)]
        toward = [math.atan2(y, x) for y, x in flat]
        low, high = min(toward), max(toward)
        if high > low:
            toward = [(a - low) / (high - low) * 2 * math.pi for a in toward]
        radius = float(self.radius)
        if self.relative:
            radius *= max(max(p) for p in flat)
        alpha, blend = float(self.alpha), float(self.blend)
        normal = [1 / math.sqrt(3)] * 3
        u = [-1 / math.sqrt(2), 1 / math.sqrt(2), 0]
        v = [normal[(i + 1) % 3] * u[(i + 2) % 3] - normal[(i + 2) % 3] * u[(i + 1) % 3] for i in range(3)]
        points = []
        for k, ((y, x), a) in enumerate(zip(flat, toward, strict=True)):
            angle = alpha * a + (1 - alpha) * 2 * math.pi * k / len(flat)
            along = (1 - blend) * radius * math.cos(angle) + blend * x
            up = (1 - blend) * radius * math.sin(angle) + blend * y
            points.append([along * u[i] + up * v[i] for i in (2, 1, 0)])  # time is z, rows y, columns x
        if self.offset is not None:
            lift = abs(min(map(min, points))) + float(self.offset)
            points = [[p + lift for p in point] for point in points]
        tokens = [tuple(c + p + f * self.stride for p in point) for f in range(t) for point in points]
        return tokens, max(map(max, tokens)) + 1


class VRoPE(Rule):
    """vrope: the four diagonals of each frame."""

    axes = 4

    def block(self, t, h, w, seconds, c, draw):
        gap = h + w - 1 if self.stride is None else self.stride
        tokens = []
        for f, y, x in cells(t, h, w):
            at = c + f * gap
            reflections = [(y, x), (y, w - 1 - x), (h - 1 - y, x), (h - 1 - y, w - 1 - x)]
            tokens.append(tuple(at + a + b for a, b in reflections))
        return tokens, max(map(max, tokens)) + 1


class V2PE(Rule):
    """v2pe: steps of stride / n, and then the next integer."""

    axes = 1

    def image(self, segment, c, draws):
        stride = Fraction(self.stride) if draws[0] is None else Fraction(draws[0])
        parts = parts_of(segment)
        one_span = sum(h * w for _, h, w, _ in parts) if self.per == "picture" else parts[0][1] * parts[0][2]
        tokens = [(c - 1 + (j + 1) * stride / one_span,) for j in range(length_of(segment))]
        return tokens, math.ceil(tokens[-1][0]) + 1


class Tiles(Rule):
    """rope_dhr: positions in the thumbnail."""

    axes = 1

    def image(self, segment, c, draws):
        if isinstance(segment, Video):
            n = length_of(segment)
            return [(c + i,) for i in range(n)], c + n
        h, w = segment.h, segment.w
        down, across = segment.tiles
        order = [(r, k) for r in range(down) for k in range(across)]
        if self.tile_order == "column_major":
            order = [(r, k) for k in range(across) for r in range(down)]
        tokens, order = [], iter(order)
        for _, _, _, tile in parts_of(segment):
            row, column = (None, None) if tile is None else next(order)
            for _, a, d in cells(1, h, w):
                untiled = tile is None or down * across == 1
                y, x = (a, d) if untiled else (self.cell(row, down, a, h), self.cell(column, across, d, w))
                tokens.append((c + y * w + x,))
        return tokens, c + h * w

    def cell(self, tile, tiles, token, side):
        """Return the row, or column, of the thumbnail that a token of a tile lies on."""
        if self.sampling == "centre":
            return math.floor((tile + (token + Fraction(1, 2)) / side) * side / tiles)
        edge = Fraction(side, tiles) - Fraction(1, 10**6)
        share = Fraction(token, side - 1) if side > 1 else 0
        return math.floor(tile * edge + share * edge)


class Shared(Rule):
    """mousi: one position for an image, or for each row."""

    axes = 1

    def image(self, segment, c, draws):
        if self.share == "row":
            return super().image(segment, c, draws)
        frames = segment.t if isinstance(segment, Video) else 1
        size = length_of(segment) // frames
        return [(c + i // size,) for i in range(length_of(segment))], c + frames

    def block(self, t, h, w, seconds, c, draw):
        return [(c + f * h + y,) for f, y, _ in cells(t, h, w)], c + t * h


class Rings(Rule):
    """pype: peel the frame, one ring after the other."""

    axes = 1

    def block(self, t, h, w, seconds, c, draw):
        tokens = []
        for _ in range(t):
            remaining, ring, result = {(y, x) for _, y, x in cells(1, h, w)}, 0, {}
            while remaining:
                last = self.rings is not None and ring == self.rings - 1
                inner = {
                    (y, x)
                    for y, x in remaining
                    if {(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)} <= remaining and not last
                }
                result |= dict.fromkeys(remaining - inner, ring)
                remaining, ring = inner, ring + 1
            tokens += [(c + result[y, x],) for _, y, x in cells(1, h, w)]
            c += ring
        return tokens, c


class Groups(Line):
    """group_pe: as rope1d, with a start for each group after the first."""

    def first(self, group):
        if group == 0:
            return 0
        return Fraction(self.phi[group - 1] if isinstance(self.phi, tuple) else self.phi)


class Bilevel(Rule):
    """bilevel: segments, and positions inside them; the counter is segment * ROOM + position."""

    ROOM = 2**26

    def text(self, c):
        segment, index = divmod(c, self.ROOM)
        index = min(index, self.train_length - 1)
        return segment, index, index

    def next_segment(self, c):
        """Return the counter at the start of a segment without predecessor."""
        return c if c % self.ROOM == 0 else (c // self.ROOM + 1) * self.ROOM

    def close(self, c):
        return (c // self.ROOM + 1) * self.ROOM

    def block(self, t, h, w, seconds, c, draw):
        c, last = self.next_segment(c), self.train_length - 1
        tokens = [(c // self.ROOM + f, min(y, last), min(x, last)) for f, y, x in cells(t, h, w)]
        return tokens, c + t * self.ROOM


class XDRoPE(Rule):
    """xdrope: the number of the token, column, row, and the number of the image or frame."""

    @property
    def axes(self):
        return 4 if self.sections is None else len(self.sections)

    def begin(self, document):
        """Start a sample (row, number): images are counted from 0 again, or through the batch."""
        if document == (0, 0) or self.image_index == "sample":
            self.images = 0

    def block(self, t, h, w, seconds, c, draw):
        tokens = [(c + i, x, y, self.images + f)[-self.axes :] for i, (f, y, x) in enumerate(cells(t, h, w))]
        self.images += t
        return tokens, c + t * h * w


RULES = {
    "bilevel": Bilevel,
    "circlerope": Circle,
    "group_pe": Groups,
    "hope_vlm": Diagonal,
    "ernie_vl": MRoPE,
    "ilrope": MRoPE,
    "mhrope": MRoPE,
    "mmrope": MRoPE,
    "mousi": Shared,
    "mrope": MRoPE,
    "mrope_i": MRoPE,
    "tmrope": MRoPE,
    "tmrope_i": TMRoPEInterleaved,
    "omnirope": MRoPE,
    "ppe": PPE,
    "pype": Rings,
    "rope1d": Line,
    "rope_dhr": Tiles,
    "tad_rope": Twice,
    "v2pe": V2PE,
    "videorope": Diagonal,
    "vrope": VRoPE,
    "xdrope": XDRoPE,
}


def walk(rule, rows, start=None, draws=None):
    """Return the coordinates of every token of each row, and the counter after each row.

    Args:
        rule: a `Rule`.
        rows: as `Stream.of` takes them.
        start: initial counter of the first sample of each row.
        draws: random values of each block, including text, or None.
    """
    values = None if draws is None else iter(draws)
    tokens, following = [], []
    for number, row in enumerate(rows):
        row_tokens, after = [], 0 if start is None else start[number]
        for document, segments in enumerate(documents_of(row)):
            begin = Fraction(start[number]) if start is not None and document == 0 else 0
            counters = {}
            rule.begin((number, document))
            for segment in segments:
                group = segment.group if isinstance(segment, Text) else 0
                c = counters.get(group, begin + rule.first(group))
                if isinstance(segment, Text):
                    if values is not None:
                        next(values)
                    row_tokens += [rule.text(c + i * rule.step) for i in range(segment.tokens)]
                    counters[group] = c if segment.shared else c + segment.tokens * rule.step
                    if segment.boundary and not segment.shared:
                        counters[group] = rule.close(counters[group])
                else:
                    parts = parts_of(segment)
                    arguments = [None] * len(parts) if values is None else [next(values) for _ in parts]
                    result, counters[group] = rule.image(segment, c, arguments)
                    row_tokens += result
                after = counters[group]
        tokens.append(row_tokens)
        following.append(after)
    return tokens, following


def rule_for(scheme):
    """Return the reference `Rule` of a scheme."""
    return RULES[scheme.name](scheme.options())


def padded(tokens, mask, axes, padding=0):
    """Return the coordinates of all tokens as a tensor (axes, b, s)."""
    blank = (float(padding),) * axes
    table = []
    for row, valid in zip(tokens, mask.tolist(), strict=True):
        remaining = iter(row)
        table.append([tuple(map(float, next(remaining))) if v else blank for v in valid])
        assert next(remaining, None) is None, "there are more tokens than positions"
    return torch.tensor(table, dtype=torch.float64).movedim(-1, 0)


def visible(rows, mask):
    """Return the attention mask (b, 1, s, s), computed pair by pair."""
    out = torch.zeros(mask.shape[0], 1, mask.shape[1], mask.shape[1], dtype=torch.bool)
    for number, row in enumerate(rows):
        owners = []  # for each token its sample, and its shared run
        for document, segments in enumerate(documents_of(row)):
            for index, segment in enumerate(segments):
                run = (document, index) if isinstance(segment, Text) and segment.shared else None
                owners += [(document, run)] * length_of(segment)
        positions = [s for s, valid in enumerate(mask[number].tolist()) if valid]
        for i, (document, run) in enumerate(owners):
            for j in range(i + 1):
                other, hidden = owners[j]
                if other == document and hidden in (None, run):
                    out[number, 0, positions[i], positions[j]] = True
    return out
