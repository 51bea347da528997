"""The subscriber SDK: follow a publisher or a whole cluster, print, record and replay its events.

Imported by users, through `homing.events`, and by the command line. Serving code must not import it.
"""
