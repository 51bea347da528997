"""The subscriber SDK: follow a publisher or a whole cluster, print, record and replay its events.

For users and the command line. No serving code may import it.
"""
