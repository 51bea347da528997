"""What travels on the event sockets: message types, frames, the dialects of other engines, the sequence cursor.

Pure values. Imported by every other folder of `events`, by `replica` and `router`; imports no other folder.
"""
