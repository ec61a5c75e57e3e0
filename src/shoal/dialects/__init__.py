"""The pool in somebody else's words."""
