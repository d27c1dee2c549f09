"""Adapters for programs that call Kimi Delta Attention under names of their own."""
