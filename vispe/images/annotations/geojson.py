"""GeoJSON in the dialect of QuPath: features with a classification, coordinates in pixels."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from vispe.errors import InputError
from vispe.images.annotations.shapes import Color, Shape, checked_points
from vispe.images.annotations.vectorize import Polygon


def features_of(content: object) -> list[object] | None:
    """Return the features of parsed JSON: a FeatureCollection, one Feature, or a list of them; None for other JSON."""
    if isinstance(content, dict) and content.get("type") == "FeatureCollection":
        features = content.get("features")
        return features if isinstance(features, list) else None
    if isinstance(content, dict) and content.get("type") == "Feature":
        return [content]
    if isinstance(content, list) and content and all(isinstance(e, dict) for e in content):
        return content if content[0].get("type") == "Feature" else None
    return None


def read_features(path: Path, features: Sequence[object]) -> list[Shape]:
    """Convert the features of a file to shapes.

    The class is ``properties.classification.name`` (or the ``names`` of a derived class, joined as in QuPath), the
    colour is ``color`` or ``colorRGB``, and slice and time are ``geometry.plane``.

    A null geometry, which GeoJSON allows, and a geometry without coordinates become empty shapes; empty parts
    of a geometry are skipped.

    Raises:
        InputError: a feature has no geometry, or an unsupported type; the message includes its index (from 0).
    """
    shapes = []
    for number, feature in enumerate(features):
        where = f"{path}: feature {number}"
        geometry = feature.get("geometry", 0) if isinstance(feature, dict) else 0
        if geometry is None:
            shapes.append(Shape(where))
            continue
        if not isinstance(geometry, dict):
            raise InputError(f"{where} has no geometry. Export the annotations again.")
        areas, lines = [], []
        for kind, value in _parts(where, geometry):
            if kind == "LineString":
                lines.append((checked_points(where, value, 1), 1.0))
            elif (rings := _listed(where, value)) and rings[0] != []:
                areas.append(tuple(checked_points(where, ring, 3) for ring in rings if ring != []))
        properties = feature.get("properties")
        name, color = _class(where, properties if isinstance(properties, dict) else {})
        plane = _plane(where, geometry.get("plane"))
        shapes.append(Shape(where, name, 0, color, plane=plane, areas=tuple(areas), lines=tuple(lines)))
    return shapes


def _parts(where: str, geometry: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the non-empty parts of a geometry as ('Polygon', rings) or ('LineString', points)."""
    kind, value = geometry.get("type"), geometry.get("coordinates")
    match kind:
        case "Polygon" | "LineString" | "Point":
            if value is not None and value != []:
                yield ("LineString", [value]) if kind == "Point" else (kind, value)
        case "MultiPolygon" | "MultiLineString" | "MultiPoint":
            for part in _listed(where, value):
                yield from _parts(where, {"type": kind.removeprefix("Multi"), "coordinates": part})
        case "GeometryCollection":
            for part in _listed(where, geometry.get("geometries")):
                if part is not None:
                    yield from _parts(where, part if isinstance(part, dict) else {})
        case _:
            raise InputError(
                f"{where}: the geometry must be polygons, lines or points, got the type {kind!r}."
            )


def _listed(where: str, value: object) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputError(f"{where}: coordinates must be a list of parts, got {str(value)[:60]}.")
    return value


def _class(where: str, properties: Mapping[str, object]) -> tuple[str | None, Color | None]:
    classification = properties.get("classification")
    if isinstance(classification, str):
        return classification.strip() or None, None
    if classification is None:
        return None, None
    names = classification.get("names") if isinstance(classification, dict) else None
    name = (
        ": ".join(map(str, names))
        if isinstance(names, list)
        else classification.get("name")
        if isinstance(classification, dict)
        else 0
    )
    if name is not None and not isinstance(name, str):
        raise InputError(f"{where}: the classification has no name, got {str(classification)[:60]}.")
    return (name or "").strip() or None, _color(classification)


def _color(classification: Mapping[str, object]) -> Color | None:
    color, packed = classification.get("color"), classification.get("colorRGB")
    if isinstance(packed, int):  # QuPath before 0.4: signed 32-bit ARGB
        color = [packed >> 16 & 255, packed >> 8 & 255, packed & 255]
    valid = (
        isinstance(color, list)
        and len(color) >= 3
        and all(isinstance(c, int) and 0 <= c <= 255 for c in color)
    )
    return (color[0], color[1], color[2]) if valid else None


def _plane(where: str, plane: object) -> tuple[int, int] | None:
    if plane is None:
        return None
    z, t = (plane.get(k, 0) for k in "zt") if isinstance(plane, dict) else (None, None)
    if not isinstance(z, int) or not isinstance(t, int) or min(z, t) < 0:
        raise InputError(f"{where}: the plane must have integers z and t, got {str(plane)[:60]}.")
    return z, t


def geojson_text(
    polygons: Mapping[int, Sequence[Polygon]],
    class_of: Mapping[int, int],
    names: Sequence[str],
    colors: Sequence[Color],
    stem: str,
    plane: tuple[int, int] | None = None,
) -> str:
    """Return objects as a FeatureCollection that QuPath imports as detections.

    Args:
        polygons: polygons of each object, from `vispe.images.annotations.vectorize.vectorize`.
        class_of: class (1..K) of each object.
        names: names of the K classes.
        colors: colours of the K classes.
        stem: name of the image, from which the identifiers are derived.
        plane: slice and time (z, t) of the objects, from 0; None for an image of one page.
    """
    features = []
    # QuPath counts channels from 0, and -1 means all of them
    where = {} if plane is None else {"plane": {"c": -1, "z": plane[0], "t": plane[1]}}
    for number, parts in polygons.items():
        rings = [[[*ring.tolist(), ring[0].tolist()] for ring in polygon] for polygon in parts]
        single = len(rings) == 1
        k = class_of[number] - 1
        features.append(
            {
                "type": "Feature",
                "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{stem}/{number}")),
                "geometry": {
                    "type": "Polygon" if single else "MultiPolygon",
                    "coordinates": rings[0] if single else rings,
                    **where,
                },
                "properties": {
                    "objectType": "detection",
                    "name": str(number),
                    "classification": {"name": names[k], "color": [int(c) for c in np.asarray(colors[k])]},
                },
            }
        )
    return json.dumps({"type": "FeatureCollection", "features": features}, ensure_ascii=False) + "\n"
