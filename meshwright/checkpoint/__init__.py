"""Checkpoints: a JSON manifest and one safetensors file a rank, read by intervals into any layout; no pickle."""
