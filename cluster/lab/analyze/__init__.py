"""`homing analyze`: estimates the value of prefix caching from a log of requests."""
