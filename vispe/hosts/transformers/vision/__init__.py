"""An encoding in a vision model or tower of transformers."""
