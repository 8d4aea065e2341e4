"""Charts of numbers with intervals, which know nothing of questions or records: read style, then forest.

``style`` holds colours, the sheet and rows; ``forest`` draws ratios beside a reference, ``bars`` plain, stacked and
waterfall bars, ``lines`` values against x. Callers give numbers and plain text; Matplotlib wraps and lays out.
"""
