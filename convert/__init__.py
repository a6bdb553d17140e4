"""Checkpoints: reads Hugging Face directories without torch. Knows tensor names and files, and nothing of decoding."""
