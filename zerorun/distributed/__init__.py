"""Ranks and the communication between them: topology, process groups, collectives, values, waits."""
