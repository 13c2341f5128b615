"""Pipeline parallelism: what lies on which stage, which stage does what when, and the stages at work."""
