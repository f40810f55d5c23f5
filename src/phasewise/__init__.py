"""The doors: the offline API, options and what is built from them, the catalogue of methods, models by name."""

__version__ = "0.1.0"
