"""What the quickstart trains: a shipped start policy, a task with held-out prompts, and measured settings."""

from pathlib import Path

POLICY_DIR = Path(__file__).parent / "policy"
"""Folder of the shipped start policy (config, float32 weights, tokenizer with its chat template)."""
