"""An agent example: a policy that must call a calculator tool (README.md)."""

from pathlib import Path

POLICY_DIR = Path(__file__).parent / "policy"
"""Folder of the shipped start policy (config, float32 weights, tokenizer with its chat template)."""
