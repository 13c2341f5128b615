"""Experts: layers of a mixture of experts whose ranks have different experts, and send one another the rows for them."""
