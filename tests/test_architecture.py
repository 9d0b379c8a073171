"""Imports of the package point down, never in a circle, never at the face from inside, never at private names.

Floors and reasons: docs/explanation/architecture.md. Imports inside functions count as well: they are for heavy
packages of others.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "vispe"
FLOORS = (  # from the ground up; what shares a floor may import each other, files never in a circle
    ("errors", "options", "version", "_lazy"),
    ("files", "grid"),
    ("symmetry", "report", "images"),
    ("attention",),
    ("encodings",),
    ("multimodal",),
    ("hosts",),
    ("backbones",),
    ("segment",),
    ("evaluate",),
    ("train",),
    ("",),  # vispe/__init__.py
    ("cli", "run", "__main__"),
)
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path):
    """Yield (module, name or None, line) of what a file imports from the package, modules as far as they are files."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((a.name, None, node.lineno) for a in node.names if a.name.split(".")[0] == "vispe")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vispe":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole, None, node.lineno) if whole in FILES else (node.module, alias.name, node.lineno)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            if name.split(".")[0] == "vispe":  # an import in other words
                yield name, None, node.lineno


def room(module):
    return [*module.split("."), ""][1]


ARROWS = {name: sorted(set(imports(path)), key=str) for name, path in FILES.items()}


def test_every_room_has_a_floor():
    assert {room(name) for name in FILES} <= set(FLOOR)


def test_arrows_point_down():
    up = [
        f"{name}:{line} imports {target}"
        for name, arrows in ARROWS.items()
        for target, _, line in arrows
        if FLOOR[room(target)] > FLOOR[room(name)]
    ]
    assert not up, "\n".join(up)


def test_nothing_inside_imports_the_face():
    at = [
        f"{name}:{line}"
        for name, arrows in ARROWS.items()
        for target, _, line in arrows
        if target == "vispe" and FLOOR[room(name)] < FLOOR[""]
    ]
    assert not at, "\n".join(at)


def test_no_private_name_crosses_packages():
    crossing = [
        f"{name}:{line} imports {target}.{what or ''}"
        for name, arrows in ARROWS.items()
        for target, what, line in arrows
        if room(target) not in (room(name), "_lazy")
        and any(
            part.startswith("_") and not part.startswith("__") for part in f"{target}.{what or ''}".split(".")
        )
    ]
    assert not crossing, "\n".join(crossing)


def circles():
    """Return the groups of files that import each other in a circle (strongly connected, Tarjan)."""
    index, low, stack, found, state = {}, {}, [], [], iter(range(10**9))

    def visit(name):
        index[name] = low[name] = next(state)
        stack.append(name)
        for target, _, _ in ARROWS[name]:
            # importing a file runs the faces of its packages as well, which hand names on lazily
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = []
            while not group or group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in FILES:
        if name not in index:
            visit(name)
    return found


def test_no_files_import_each_other_in_a_circle():
    assert not circles(), "\n".join(map(str, circles()))


def test_folders_stay_readable():
    full = {}
    for folder in {path.parent for path in FILES.values()}:
        entries = [e for e in folder.iterdir() if e.suffix == ".py" or (e.is_dir() and any(e.glob("*.py")))]
        entries = [e for e in entries if not e.name.startswith("_")]
        catalogue = folder.parent.name == "encodings" or folder.name in {"schemes", "commands"}
        if len(entries) > (18 if folder == PACKAGE else 15) and not catalogue:
            full[str(folder.relative_to(PACKAGE.parent))] = len(entries)
    assert not full, full
