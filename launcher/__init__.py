"""zerorun.launcher: plans and runs the worker processes of a job. Never imports torch."""
