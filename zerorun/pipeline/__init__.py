"""Pipeline parallelism: cuts a model into stages, orders their work by a schedule, and runs them."""
