"""The command line, a module for each group of commands: from options to an exit code. They load what they need.

Read ``commands`` first; ``options`` declares what several commands have in common.
"""
