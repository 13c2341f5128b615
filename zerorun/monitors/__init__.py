"""What a run tells of its steps."""
