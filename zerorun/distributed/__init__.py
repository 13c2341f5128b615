"""Ranks and what goes between them: topology, process groups, collectives, values, waits."""
