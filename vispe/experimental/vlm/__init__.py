"""Experimental training of vision-language models: slots of prompts, mirrored pairs and synthetic tasks."""
