"""Models and weights in local files: results of vispe, models of transformers, checkpoints of timm and open_clip."""
