"""Pipeline parallelism: what lies on which stage, and which stage does what when."""
