"""Optimizers: the requested one, how it is built, learning-rate schedules, and loss scaling."""
