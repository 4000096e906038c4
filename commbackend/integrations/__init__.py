"""Adapters for training and serving frameworks, one file each; none is imported unless asked for."""
