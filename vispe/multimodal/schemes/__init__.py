"""Position schemes, one file each. Importing this package registers all schemes in it."""

from importlib import import_module
from pkgutil import iter_modules

for _file in sorted(module.name for module in iter_modules(__path__)):
    import_module(f"{__name__}.{_file}")
