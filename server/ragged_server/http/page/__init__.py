"""The page at ``/``: what the server does, and what its samples look like.

HTML, CSS and JavaScript modules are served as they lie here; nothing is built, and nothing comes
from elsewhere.
"""
