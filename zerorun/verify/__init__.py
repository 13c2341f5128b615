"""Verification: whether a model trains as configured as it does in one process, and if not, which value differs first."""
