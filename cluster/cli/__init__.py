"""The command line: one file per command. Nothing imports this package.

Must stay light: torch, transformers and Ray are imported inside the commands that need them.
"""
