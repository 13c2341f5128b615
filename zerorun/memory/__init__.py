"""How much memory a run will need, and how much the machine allows."""
