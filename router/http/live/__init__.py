"""The live page: `view` decides what it shows, `feed` sends that to viewers, and `page.html` draws it.

The page is one file without a build step or anything from elsewhere; `homing top` reads the same stream.
"""
