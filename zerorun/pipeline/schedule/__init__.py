"""Pipeline schedules as data: what each stage does in which order, and how long that takes."""
