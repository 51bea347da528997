"""The live page: `view` selects its data, `feed` sends the data to viewers, and `page.html` draws the page.

Imported by `http`. Must not import anything of `http` but `protocol`. The page is one file without a build step or
external resources; `homing top` reads the same stream.
"""
