"""The wire format of the event sockets: message types, frames and the dialects of other engines.

Pure values. Imported by the other folders of `events`, by `replica` and `router`; imports no other folder.
"""
