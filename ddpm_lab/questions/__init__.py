"""What can be asked: for each question the configurations that answer it, and how they are measured.

Read ``ask`` first (a function for each question), then ``experiments`` (``run``, the one call of every notebook) and
``planning`` (what is refused before a rank starts).
"""
