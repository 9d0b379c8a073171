"""Description of token sequences: blocks of text, images and videos."""
