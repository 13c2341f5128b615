"""What initialize() is given, checked and divided before any engine exists."""
