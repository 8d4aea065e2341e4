"""Trainings: the lab's own workloads as ranks run them, long runs with checkpoints, and trainings of the user's.

Read ``train`` first (the workload that is timed), then ``training_run`` (``ddpm-lab train``) and ``own`` (a training
of the user's). ``setting`` says what the trainer does by itself on a machine.
"""
