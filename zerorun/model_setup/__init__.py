"""Checking and dividing of what initialize() is given, before any engine exists."""
