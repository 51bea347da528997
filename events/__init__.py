"""The stream of cache events: publisher, reader and their recovery. Knows no other room."""
