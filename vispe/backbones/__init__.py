"""Pretrained vision models: loading by name, weights on disk or from a hub, and access to their features."""
