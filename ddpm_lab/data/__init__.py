"""Images to batches: folders and archives are decoded once into a prepared folder, from which loaders draw.

Read ``packed`` first (what a prepared folder holds), then ``loaders`` (the batches of one rank) and ``draws`` (their
order and the random numbers of a step, which no setting changes).
"""
