"""How much memory a run needs, before it starts, and what the machine allows."""
