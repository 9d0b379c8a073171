"""Models in local folders: results of `vispe retrofit` and `vispe debias`, transformers, checkpoints of open_clip."""
