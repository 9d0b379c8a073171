"""What `dinov2.py` measures on students of a retrofit: pictures, questions, targets, table and figure."""
