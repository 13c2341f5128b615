"""Pipeline parallelism: schedules as data, their simulation and their pictures."""
"""Pipeline parallelism: what lies on which stage, and which stage does what when."""
