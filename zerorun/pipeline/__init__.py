"""Pipeline parallelism: schedules as data, their simulation and their pictures."""
