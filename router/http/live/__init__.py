"""The live page: `view` selects its data, `feed` sends them to viewers, and `page.html` draws them.

The page is one file without a build step or external resources; `homing top` reads the same stream.
"""
