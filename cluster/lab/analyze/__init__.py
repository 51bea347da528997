"""`homing analyze`: what a log of requests says about prefix caching."""
