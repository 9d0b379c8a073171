"""The encodings: one file each, in a folder for each kind, found there when vispe is imported."""

from importlib import import_module
from pkgutil import iter_modules

from vispe.encodings import additive, bias, mixing, rotary

for _kind in (additive, bias, mixing, rotary):
    for _file in sorted(module.name for module in iter_modules(_kind.__path__)):
        import_module(f"{_kind.__name__}.{_file}")
