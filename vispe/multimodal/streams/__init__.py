"""What a sequence is made of: text, images and videos, in blocks."""
