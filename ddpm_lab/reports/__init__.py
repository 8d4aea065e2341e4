"""What is made to be shared: HTML pages of the notebooks, published figures, benchmark folders, tables of runs.

Read ``report`` first, then ``published``.
"""
