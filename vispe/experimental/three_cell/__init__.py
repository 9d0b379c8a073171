"""Three-cell benchmark of relative positions (LOOPE, arXiv 2504.14386)."""

from vispe._lazy import lazy_exports

__all__ = ["ThreeCellScores", "images", "labels", "majority", "sample_cells", "score"]

__getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "vispe.experimental.three_cell.dataset"))
