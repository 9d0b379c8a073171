"""Vision transformers of timm."""
