"""Data for deployments. No code."""
