"""What `dinov2.py` measures on students of a retrofit: images, questions, targets, table and figure."""
