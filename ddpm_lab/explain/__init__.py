"""From records to answers: comparisons with intervals, what they say, and how that is drawn. Never imports torch.

Read ``selection`` first (a study: the records that answer a question), then ``comparisons`` and ``stats``,
``findings``, ``answer`` (all of them together: ``speeds`` gives most questions their figure) and ``charts``. ``show``
is what the notebooks call.
"""
