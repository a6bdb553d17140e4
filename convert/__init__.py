"""Checkpoints: reads Hugging Face directories without torch. Knows tensor names and files; knows nothing of decoding."""
