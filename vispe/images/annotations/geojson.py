"""GeoJSON as QuPath reads and writes it: features with a classification, coordinates in pixels."""

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
    """Turn the features of a file into shapes.

    The class is ``properties.classification.name`` (or the ``names`` of a derived class, joined as QuPath shows
    them), the colour ``color`` or ``colorRGB``.  ``geometry.plane`` gives the page.

    A null geometry, which GeoJSON allows, and one without coordinates give a shape that is empty; empty parts of a
    geometry are skipped.

    Raises:
        InputError: no geometry, or one of a kind that marks no pixels; the feature (from 0) is named.
    """
    shapes = []
    for number, feature in enumerate(features):
        where = f"{path}: feature {number}"
        geometry = feature.get("geometry", 0) if isinstance(feature, dict) else 0
        if geometry is None:
            shapes.append(Shape(where))
            continue
        if not isinstance(geometry, dict):
            raise InputError(f"{where} has no geometry; export the annotations again.")
        areas, lines = [], []
        for kind, value in _parts(where, geometry):
            if kind == "LineString":
                lines.append((checked_points(where, value, 1), 1.0))
            elif (rings := _listed(where, value)) and rings[0] != []:
                areas.append(tuple(checked_points(where, ring, 3) for ring in rings if ring != []))
        properties = feature.get("properties")
        name, color = _class(where, properties if isinstance(properties, dict) else {})
        page = _page(where, geometry.get("plane"))
        shapes.append(Shape(where, name, 0, color, page, tuple(areas), tuple(lines)))
    return shapes


def _parts(where: str, geometry: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield ('Polygon', rings) and ('LineString', points) of which a geometry is made, without empty ones."""
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
                f"{where} has a geometry of the type {kind!r}; polygons, lines and points can be read."
            )


def _listed(where: str, value: object) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputError(f"{where} has the coordinates {str(value)[:60]}, which is no list of parts.")
    return value


def _class(where: str, properties: Mapping[str, object]) -> tuple[str | None, Color | None]:
    found = properties.get("classification")
    if isinstance(found, str):
        return found.strip() or None, None
    if found is None:
        return None, None
    names = found.get("names") if isinstance(found, dict) else None
    name = (
        ": ".join(map(str, names))
        if isinstance(names, list)
        else found.get("name")
        if isinstance(found, dict)
        else 0
    )
    if name is not None and not isinstance(name, str):
        raise InputError(f"{where} has the classification {str(found)[:60]}, which has no name.")
    return (name or "").strip() or None, _color(found)


def _color(found: Mapping[str, object]) -> Color | None:
    color, packed = found.get("color"), found.get("colorRGB")
    if isinstance(packed, int):  # QuPath before 0.4: a signed number of 32 bits, alpha first
        color = [packed >> 16 & 255, packed >> 8 & 255, packed & 255]
    good = (
        isinstance(color, list)
        and len(color) >= 3
        and all(isinstance(c, int) and 0 <= c <= 255 for c in color)
    )
    return (color[0], color[1], color[2]) if good else None


def _page(where: str, plane: object) -> int | None:
    if plane is None:
        return None
    z, t = (plane.get(k, 0) for k in "zt") if isinstance(plane, dict) else (None, None)
    if not isinstance(z, int) or not isinstance(t, int) or min(z, t) < 0:
        raise InputError(f"{where} has the plane {str(plane)[:60]}, which gives no z and t.")
    if z and t:
        raise InputError(f"{where} is in slice {z} of time {t}; pages are counted along one axis only.")
    return z or t


def geojson_text(
    polygons: Mapping[int, Sequence[Polygon]],
    class_of: Mapping[int, int],
    names: Sequence[str],
    colors: Sequence[Color],
    stem: str,
) -> str:
    """Write objects as a FeatureCollection that QuPath imports as detections.

    Args:
        polygons: of each object, as `vispe.images.annotations.vectorize.outlines` gives them.
        class_of: the class (1..K) of each object.
        names: of the K classes.
        colors: of the K classes.
        stem: the name of the image, from which the identifiers are made.
    """
    features = []
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
                },
                "properties": {
                    "objectType": "detection",
                    "name": str(number),
                    "classification": {"name": names[k], "color": [int(c) for c in np.asarray(colors[k])]},
                },
            }
        )
    return json.dumps({"type": "FeatureCollection", "features": features}, ensure_ascii=False) + "\n"
