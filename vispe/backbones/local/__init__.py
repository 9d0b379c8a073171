"""Models that are kept in folders: of `vispe retrofit`, of transformers."""
