"""What can be asked: for each question the configurations that answer it, and how they are measured.

Read ``ask`` first (a function for each question), then ``planning`` (from settings to a campaign, where all that can be
refused is refused) and ``experiments`` (``run``, the one call of every notebook).
"""
