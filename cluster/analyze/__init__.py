"""`homing analyze`: what a log of requests says about caching. Reads logs, makes prompts of them, tells a person."""
