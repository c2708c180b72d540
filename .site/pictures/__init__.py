"""The pictures of the documentation: one module draws each, and its SVG is committed beside it.

Run `python -m pictures` in `.site` after a change; a test compares the committed files with what is drawn.
"""
