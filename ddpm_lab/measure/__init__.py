"""The half that measures: isolated groups of ranks, sets, turns, and what the machine was doing meanwhile."""
