"""The command line, a module for each group of commands: from options to an exit code. They load what they need.

Read ``options`` first, which has what several commands have in common.
"""
