"""The wire format of the event sockets: message types, frames and the dialects of other engines.

Pure values. Imported by the other folders of `events` and by all packages but `kvcache`; must not import other folders.
"""
