"""Optimizers: what was asked for, how it is made, learning rates, loss scaling."""
