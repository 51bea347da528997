"""homing: an LLM serving cluster whose router sends each request to the replica that will answer it soonest."""

__version__ = "0.1.0"
