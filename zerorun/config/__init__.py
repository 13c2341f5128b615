"""The configuration: one JSON file, checked and resolved before anything starts. No torch."""

from .parse import Config, load_config, main, resolve

__all__ = ["Config", "load_config", "main", "resolve"]
